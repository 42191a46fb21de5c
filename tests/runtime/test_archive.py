"""The single-file form: what is written, that other tools read it, and that it loads without being unpacked."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_core.errors import DflashError

from runtime.archive import Member, layout, open_core
from runtime.inspect import inspect_core
from runtime.pack import pack, unpack
from runtime.sign import sign_core
from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.toy_core import BIG_BYTES, ToyCore, make_toy_core, toy_key, trust_document, write_trust


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def trust(tmp_path: Path) -> TrustPolicy:
    return TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document()))


@pytest.fixture
def archive(toy: ToyCore, tmp_path: Path) -> Path:
    pack(toy.path, tmp_path / "core.zip")
    return tmp_path / "core.zip"


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(DflashError) as caught:
        act()
    return caught.value.code


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def tree(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in root.rglob("*") if path.is_file()}


def test_lays_out_one_member_byte_by_byte() -> None:
    found = layout([Member("a", 3, 0x01020304)])

    assert found.headers == ((0, (
        b"PK\x03\x04" + bytes.fromhex("2d00 0008 0000 0000 2100 04030201 ffffffff ffffffff 0100 e10f") + b"a"
        + bytes.fromhex("0100 1000 0300000000000000 0300000000000000 35d9 c90f") + bytes(4041)
    )),)
    assert len(found.headers[0][1]) == 4096
    assert found.central_offset == 4099
    assert found.tail == (
        b"PK\x01\x02" + bytes.fromhex(
            "2d03 2d00 0008 0000 0000 2100 04030201 ffffffff ffffffff 0100 1c00 0000 0000 0000 0000a481 ffffffff")
        + b"a" + bytes.fromhex("0100 1800 0300000000000000 0300000000000000 0000000000000000")
        + b"PK\x06\x06" + bytes.fromhex("2c00000000000000 2d03 2d00 00000000 00000000 0100000000000000 0100000000000000"
                                        "4b00000000000000 0310000000000000")
        + b"PK\x06\x07" + bytes.fromhex("00000000 4e10000000000000 01000000")
        + b"PK\x05\x06" + bytes.fromhex("0000 0000 ffff ffff ffffffff ffffffff 0000")
    )


def test_loads_without_unpacking(toy: ToyCore, archive: Path, trust: TrustPolicy) -> None:
    with verify(archive, trust) as packed, verify(toy.path, trust) as core:
        memory = bytearray((toy.path / toy.big).stat().st_size)
        packed.read_into(toy.big, memoryview(memory))
        packed.read_full()

        assert memory == (toy.path / toy.big).read_bytes()
        assert (packed.core_digest, packed.names) == (core.core_digest, core.names)
        assert packed.small_file(packed.manifest.target.config) == (toy.path / toy.config).read_bytes()
        assert len({file.fd for file in packed._files.files.values()}) == 1


def test_every_member_starts_at_a_page(archive: Path) -> None:
    with open_core(archive) as files:
        assert {file.offset % 4096 for file in files.files.values()} == {0}


@pytest.mark.parametrize(("change", "code"), [
    pytest.param(lambda path, at: patch(path, at, b"\0\0\0\0"), "CHUNK_MISMATCH", id="overwritten"),
    pytest.param(lambda path, at: os.truncate(path, at + 5), "FILE_SIZE", id="cut off"),
])
def test_rejects_archive_changed_after_it_was_opened(
    toy: ToyCore, archive: Path, trust: TrustPolicy, change: Callable[[Path, int], object], code: str
) -> None:
    with verify(archive, trust) as core:
        change(archive, core._files.file(toy.big).offset)

        assert code_of(lambda: core.read_into(toy.big, memoryview(bytearray(BIG_BYTES)))) == code


def test_loads_the_archive_that_was_opened_not_its_successor(
    toy: ToyCore, archive: Path, trust: TrustPolicy
) -> None:
    memory = bytearray(BIG_BYTES)

    with verify(archive, trust) as core:
        archive.unlink()
        archive.write_bytes(b"another")
        core.read_into(toy.big, memoryview(memory))

    assert memory == (toy.path / toy.big).read_bytes()


def test_inspects_an_archive(archive: Path, trust: TrustPolicy) -> None:
    assert inspect_core(archive, trust).authenticated
    assert inspect_core(archive, None).core_name == "toy"


def test_equal_cores_give_equal_archives(toy: ToyCore, archive: Path, tmp_path: Path) -> None:
    shutil.copytree(toy.path, tmp_path / "copy")

    pack(tmp_path / "copy", tmp_path / "copy.zip")

    assert (tmp_path / "copy.zip").read_bytes() == archive.read_bytes()


def test_python_reads_every_member(toy: ToyCore, archive: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == sorted(tree(toy.path))
        assert {item.compress_type for item in opened.infolist()} == {zipfile.ZIP_STORED}


def test_unzip_and_the_reference_tool_verify_it(toy: ToyCore, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "public.pem").write_text(toy_key().pem)

    subprocess.run(["unzip", "-q", archive, "-d", tmp_path / "out"], check=True)
    subprocess.run([
        sys.executable, "-m", "model_signing", "verify", "key", tmp_path / "out", "--signature",
        tmp_path / "out" / "signatures" / toy.signature().name, "--public_key", tmp_path / "public.pem",
    ], check=True, capture_output=True)

    assert tree(tmp_path / "out") == tree(toy.path)


def test_unpacks_to_the_same_files(toy: ToyCore, archive: Path, trust: TrustPolicy, tmp_path: Path) -> None:
    seen: list[int] = []

    digest = unpack(archive, tmp_path / "again", trust, on_bytes=seen.append)

    assert tree(tmp_path / "again") == tree(toy.path)
    assert digest == hashlib.sha256((toy.path / "manifest.pb").read_bytes()).hexdigest()
    assert sum(seen) == sum(path.stat().st_size for path in toy.path.rglob("*") if path.is_file())


def test_pack_counts_every_byte(toy: ToyCore, tmp_path: Path) -> None:
    seen: list[int] = []

    nbytes = pack(toy.path, tmp_path / "core.zip", on_bytes=seen.append)

    assert nbytes == (tmp_path / "core.zip").stat().st_size
    assert sum(seen) == sum(path.stat().st_size for path in toy.path.rglob("*") if path.is_file())


def test_unpacks_nothing_that_does_not_verify(toy: ToyCore, archive: Path, trust: TrustPolicy, tmp_path: Path) -> None:
    with open_core(archive) as files:
        at = files.file(toy.big).offset
    with archive.open("r+b") as stream:
        stream.seek(at + 5)
        stream.write(b"\0\0\0\0")

    assert code_of(lambda: unpack(archive, tmp_path / "again", trust)) == "DIGEST_MISMATCH"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["core", "core.zip", "trust.json"]


def test_pack_and_unpack_overwrite_nothing(toy: ToyCore, archive: Path, trust: TrustPolicy) -> None:
    assert code_of(lambda: pack(toy.path, archive)) == "OUTPUT_EXISTS"
    assert code_of(lambda: unpack(archive, toy.path, trust)) == "OUTPUT_EXISTS"


@pytest.mark.parametrize(("change", "code"), [
    pytest.param(lambda toy: (toy.path / "signatures" / "Partner.sig").touch(), "MANIFEST_TABLE", id="capital"),
    pytest.param(lambda toy: (toy.path / "empty").mkdir(), "FILE_EXTRA", id="empty directory"),
    pytest.param(lambda toy: (toy.path / "link").symlink_to("manifest.pb"), "FILE_TYPE", id="link"),
    pytest.param(lambda toy: (toy.path / "manifest.pb").unlink(), "FILE_MISSING", id="no manifest"),
])
def test_packs_no_directory_that_is_no_core(
    toy: ToyCore, tmp_path: Path, change: Callable[[ToyCore], object], code: str
) -> None:
    change(toy)

    assert code_of(lambda: pack(toy.path, tmp_path / "core.zip")) == code
    assert not list(tmp_path.glob("core.zip*"))


def test_full_disk_leaves_nothing(toy: ToyCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    assert code_of(lambda: pack(toy.path, tmp_path / "core.zip")) == "ARCHIVE_UNWRITABLE"
    assert not list(tmp_path.glob("core.zip*"))


def test_signs_a_directory_and_not_an_archive(archive: Path) -> None:
    assert code_of(lambda: sign_core(archive, toy_key().private)) == "FILE_TYPE"


def test_closing_an_archive_closes_its_one_descriptor(archive: Path, trust: TrustPolicy) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    verify(archive, trust).close()
    with archive.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    code_of(lambda: verify(archive, trust))

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_holds_a_member_above_4_gib(tmp_path: Path) -> None:
    members = [Member("manifest.pb", 1, 0), Member("weights/x.bin", (1 << 32) + 5, 0)]
    expected = layout(members)
    with (tmp_path / "big.zip").open("wb") as stream:
        os.truncate(stream.fileno(), expected.nbytes)
        for at, data in (*expected.headers, (expected.central_offset, expected.tail)):
            stream.seek(at)
            stream.write(data)

    with open_core(tmp_path / "big.zip") as files:
        assert files.size("weights/x.bin") == 4294967301
        assert files.read("weights/x.bin", 2) == b"\0\0"


def test_rejects_every_flipped_bit_outside_the_data(archive: Path, trust: TrustPolicy) -> None:
    with open_core(archive) as files:
        spans = [(file.offset, file.offset + file.size_bytes) for file in files.files.values()]
    data = bytearray(archive.read_bytes())
    central = max(stop for _, stop in spans)
    headers = [start - 4096 + i for start, _ in spans[:1] for i in range(0, 4096, 97)]
    accepted = []

    for at in [*headers, *range(central, len(data))]:
        for bit in range(8):
            with archive.open("r+b") as stream:
                stream.seek(at)
                stream.write(bytes([data[at] ^ 1 << bit]))
            try:
                open_core(archive).close()
                accepted.append((at, bit))
            except DflashError:
                pass
        with archive.open("r+b") as stream:
            stream.seek(at)
            stream.write(data[at : at + 1])

    assert accepted == []
    verify(archive, trust).close()


def test_a_file_that_is_no_archive_is_named(tmp_path: Path, trust: TrustPolicy) -> None:
    (tmp_path / "x.zip").write_bytes(struct.pack("<I", 0x06054B50) + bytes(18))

    with pytest.raises(DflashError, match="too short for an archive") as caught:
        verify(tmp_path / "x.zip", trust)

    assert (caught.value.code, caught.value.where) == ("BUNDLE_MALFORMED", str(tmp_path / "x.zip"))
