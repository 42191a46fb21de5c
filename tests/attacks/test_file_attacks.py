"""Attackers without a key: they change, resize, remove, add and replace the files of a signed core."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_core.errors import VerificationError
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.edit_core import add_file
from tests.toy_core import ToyCore, toy_key

Part = Callable[[ToyCore], str]

PARTS: dict[str, Part] = {
    "manifest": lambda toy: "manifest.pb",
    "large weights": lambda toy: toy.big,
    "small weights": lambda toy: toy.small,
    "config": lambda toy: toy.config,
    "graph": lambda toy: toy.graph,
    "state": lambda toy: toy.state,
}


def use_everything(path: Path, trust: TrustPolicy) -> None:
    """Read every file as a loader does: weights into memory, the others whole."""
    with verify(path, trust) as core:
        for entry in core.manifest.files:
            if entry.role == "weights":
                core.read_into(entry.path, memoryview(bytearray(entry.ref.size_bytes)))
            else:
                core.small_file(entry.ref)


def verify_full(path: Path, trust: TrustPolicy) -> None:
    with verify(path, trust) as core:
        core.read_full()


@pytest.mark.parametrize("read", [use_everything, verify_full])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("part", PARTS)
def test_rejects_one_changed_byte(
    toy: ToyCore, trust: TrustPolicy, part: str, position: str, read: Callable[[Path, TrustPolicy], None]
) -> None:
    path = toy.path / PARTS[part](toy)
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek({"first": 0, "middle": size // 2, "last": size - 1}[position])
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))

    with refused("CHUNK_MISMATCH" if part == "large weights" else "DIGEST_MISMATCH"):
        read(toy.path, trust)


@pytest.mark.parametrize("read", [use_everything, verify_full])
def test_rejects_two_files_exchanged(
    toy: ToyCore, trust: TrustPolicy, read: Callable[[Path, TrustPolicy], None]
) -> None:
    other = "weights/other.bin"

    def add(manifest: RebuildManifest) -> None:
        ref = add_file(toy, manifest, "weights", other, bytes(1024))
        manifest.weight_blobs.add(blob_id=2, file=ref, alignment=256)
        manifest.tensor_views.add(name="other", blob_id=2, size_bytes=1024, dtype="u8", shape=[1024])

    toy.edit_manifest(add)
    read(toy.path, trust)
    (toy.path / other).rename(toy.path / "kept")
    (toy.path / toy.small).rename(toy.path / other)
    (toy.path / "kept").rename(toy.path / toy.small)

    with refused("DIGEST_MISMATCH"):
        read(toy.path, trust)


@pytest.mark.parametrize("resize", [
    pytest.param(lambda size: size - 1, id="one byte shorter"),
    pytest.param(lambda size: size + 1, id="one byte longer"),
    pytest.param(lambda size: 1 << 40, id="sparse 1 TiB"),
    pytest.param(lambda size: 0, id="empty"),
])
@pytest.mark.parametrize("part", ["large weights", "small weights", "state", "config", "graph"])
def test_rejects_file_of_another_size(
    toy: ToyCore, trust: TrustPolicy, part: str, resize: Callable[[int], int]
) -> None:
    path = toy.path / PARTS[part](toy)
    os.truncate(path, resize(path.stat().st_size))

    with refused("FILE_SIZE"):
        verify(toy.path, trust)


@pytest.mark.parametrize("part", PARTS)
def test_rejects_core_without_a_listed_file(toy: ToyCore, trust: TrustPolicy, part: str) -> None:
    (toy.path / PARTS[part](toy)).unlink()

    with refused("FILE_MISSING"):
        verify(toy.path, trust)


def test_rejects_core_without_a_listed_directory(toy: ToyCore, trust: TrustPolicy) -> None:
    shutil.rmtree(toy.path / "weights")

    with refused("FILE_MISSING"):
        verify(toy.path, trust)


@pytest.mark.parametrize("name", [
    "x", ".git/x", ".git/objects/ab/cdef", ".gitattributes", ".gitignore", ".github/x", ".DS_Store", "weights/x.bin",
    "signatures/x", "signatures/x.sig.part", "a/b/c/d", "manifest.pb.bak", "\x1b[2J", "\udcff",
], ids=ascii)
def test_rejects_added_file(toy: ToyCore, trust: TrustPolicy, name: str) -> None:
    path = toy.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")

    with refused("FILE_EXTRA"):
        verify(toy.path, trust)


@pytest.mark.parametrize("name", ["empty", "weights/empty", ".git"])
def test_rejects_added_empty_directory(toy: ToyCore, trust: TrustPolicy, name: str) -> None:
    (toy.path / name).mkdir()

    with refused("FILE_EXTRA"):
        verify(toy.path, trust)


def test_rejects_more_files_than_a_core_may_hold(toy: ToyCore, trust: TrustPolicy) -> None:
    for index in range(4120):
        (toy.path / "weights" / f"{index}.bin").touch()

    with refused("FILE_EXTRA"):
        verify(toy.path, trust)


def test_goes_no_deeper_than_a_core_may(toy: ToyCore, trust: TrustPolicy) -> None:
    (toy.path / "a" / "b" / "c" / "d").mkdir(parents=True)

    with pytest.raises(VerificationError, match="lies too deep") as caught:
        verify(toy.path, trust)

    assert (caught.value.code, caught.value.where) == ("FILE_EXTRA", "a/b/c")


def link_to_its_equal(path: Path) -> None:
    kept = Path.cwd() / "kept"
    path.rename(kept)
    path.symlink_to(kept)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")  # bound in the working directory, because a socket's path holds at most 107 bytes
    Path("s").rename(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_directory(path: Path) -> None:
    directory(path)
    (path / "x").touch()


@pytest.mark.parametrize("replace", [link_to_its_equal, pipe, bound_socket, directory, full_directory])
@pytest.mark.parametrize("part", ["large weights", "small weights", "config", "manifest", "signature"])
def test_rejects_what_is_not_a_regular_file(
    toy: ToyCore, trust: TrustPolicy, part: str, replace: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    signature = f"signatures/{toy_key().keyid}.sig"
    path = toy.path / (signature if part == "signature" else PARTS[part](toy))
    replace(path)

    with refused("FILE_TYPE"):
        verify(toy.path, trust)


@pytest.mark.parametrize("name", ["weights", "signatures"])
def test_rejects_link_to_an_equal_directory(toy: ToyCore, trust: TrustPolicy, tmp_path: Path, name: str) -> None:
    (toy.path / name).rename(tmp_path / "kept")
    (toy.path / name).symlink_to(tmp_path / "kept")

    with refused("FILE_TYPE"):
        verify(toy.path, trust)
