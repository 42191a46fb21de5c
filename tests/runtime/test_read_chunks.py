"""A file is read in chunks into memory of the caller's, and only what has verified is handed on."""

from __future__ import annotations

import threading

import pytest
from dflash_core.errors import FormatError, VerificationError
from dflash_core.v1 import graph_pb2 as g

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.toy_core import CHUNK, make_toy_core, trust_document, write_trust


@pytest.fixture
def toy(tmp_path):
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def trust(tmp_path):
    return TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document()))


def read(toy, trust, path, threads=1):
    """The chunks handed on, as offset and bytes in order of offset, and the sizes that were asked for."""
    asked, found = [], []

    def place(offset, nbytes):
        asked.append((offset, nbytes))
        return memoryview(bytearray(nbytes))

    with verify(toy.path, trust) as core:
        core.read_chunks(path, place, lambda offset, part: found.append((offset, bytes(part))), threads=threads)
    return sorted(found), sorted(asked)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_chunks_are_the_file(toy, trust, threads):
    found, asked = read(toy, trust, toy.big, threads)

    assert asked == [(0, 4_194_304), (4_194_304, 5120)]
    assert b"".join(part for _, part in found) == (toy.path / toy.big).read_bytes()


def test_small_file_is_one_chunk(toy, trust):
    found, asked = read(toy, trust, toy.small)

    assert asked == [(0, 1024)]
    assert found == [(0, (toy.path / toy.small).read_bytes())]


@pytest.mark.parametrize(("at", "code"), [(0, "CHUNK_MISMATCH"), (CHUNK, "CHUNK_MISMATCH")])
def test_chunk_that_was_not_signed_is_never_handed_on(toy, trust, at, code):
    handed = []
    with verify(toy.path, trust) as core:
        data = bytearray((toy.path / toy.big).read_bytes())
        data[at] ^= 1
        (toy.path / toy.big).write_bytes(data)

        with pytest.raises(VerificationError) as refused:
            core.read_chunks(toy.big, lambda _, n: memoryview(bytearray(n)), lambda offset, _: handed.append(offset))

    assert refused.value.code == code
    assert at not in handed


def test_failure_of_the_receiver_ends_the_read_and_its_threads(toy, trust):
    before = threading.active_count()

    def fail(offset, part):
        raise OSError(28, "full")

    with verify(toy.path, trust) as core, pytest.raises(OSError, match="full"):
        core.read_chunks(toy.big, lambda _, n: memoryview(bytearray(n)), fail, threads=4)

    assert threading.active_count() == before


def test_refuses_a_file_that_is_not_listed(toy, trust):
    with verify(toy.path, trust) as core, pytest.raises(FormatError) as refused:
        core.read_chunks("weights/other.bin", lambda _, n: memoryview(bytearray(n)), lambda *_: None)

    assert (refused.value.code, refused.value.where) == ("MANIFEST_TABLE", "weights/other.bin")


def test_graphs_are_checked_against_the_kernels_of_their_own_target(toy, trust):
    """The other target's variant of the kernel takes one more parameter; the graph of this one does not pass it."""
    def other_target(manifest):
        other = manifest.kernels[0].variants.add()
        other.CopyFrom(manifest.kernels[0].variants[0])
        other.module_id = 1
        other.params.add(size=4, type=g.SCALAR)
        manifest.modules.add(module_id=1, kind=g.CPU_REGISTRY, target="other", registry="r", registry_version=1)
        manifest.device_targets.add(target_id=1, name="other", module_ids=[1])
    toy.edit_manifest(other_target)

    with verify(toy.path, trust) as core:
        assert [t.name for t in core.manifest.device_targets] == ["cpu", "other"]
