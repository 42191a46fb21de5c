"""Every buffer of a core gets aligned memory with verified first contents."""

import struct

import numpy as np
import pytest
from dflash_core.errors import VerificationError
from dflash_core.v1 import graph_pb2 as pb

from runtime.check import CheckedCore, check, query_device
from runtime.mapping import map_sections
from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.toy_core import BIG_BYTES, CHUNK, SMALL_BYTES, make_toy_core, trust_document, write_trust


@pytest.fixture
def toy(tmp_path):
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def load_checked(toy, tmp_path):
    """Verify and check the toy core as it is now; closed with the test."""
    opened = []

    def run() -> CheckedCore:
        verified = verify(toy.path, TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document())))
        opened.append(verified)
        return check(verified, query_device())

    yield run
    for verified in opened:
        verified.close()


def test_buffers_hold_the_bytes_of_their_files_and_zeros_elsewhere(toy, load_checked):
    mapped = map_sections(load_checked())

    assert mapped.memory[0].tobytes() == (toy.path / toy.big).read_bytes()
    assert mapped.memory[1].tobytes() == (toy.path / toy.small).read_bytes()
    assert mapped.memory[2].tobytes() == (toy.path / toy.state).read_bytes()
    assert mapped.memory[3].tobytes() == bytes(256)


def test_buffers_start_at_multiples_of_256(load_checked):
    mapped = map_sections(load_checked())

    assert [m.__array_interface__["data"][0] % 256 for m in mapped.memory.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_progress_is_told_every_byte_of_the_weights(load_checked, threads):
    told = []

    map_sections(load_checked(), threads=threads, on_bytes=told.append)

    assert sorted(told) == [SMALL_BYTES, BIG_BYTES - CHUNK, CHUNK]


@pytest.mark.parametrize(
    ("name", "offset", "code"),
    [("big", 17, "CHUNK_MISMATCH"), ("big", CHUNK + 1, "CHUNK_MISMATCH"), ("small", 0, "DIGEST_MISMATCH")],
)
def test_bytes_that_changed_after_verification_are_refused(toy, load_checked, name, offset, code):
    checked = load_checked()
    path = toy.path / getattr(toy, name)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))

    with pytest.raises(VerificationError) as refused:
        map_sections(checked)

    assert refused.value.code == code
    assert getattr(toy, name) in refused.value.where


def test_state_shorter_than_its_buffer_is_followed_by_zeros(toy, load_checked):
    toy.edit_manifest(lambda m: setattr(m.buffers[2], "fixed_bytes", 1000))

    state = map_sections(load_checked()).memory[2]

    assert state.tobytes() == (toy.path / toy.state).read_bytes() + bytes(744)


def test_size_follows_the_symbols(toy, load_checked):
    def grow(manifest):
        manifest.symbols.add(symbol_id=4, name="kv_pages", width=4, minimum=2, maximum=9, default_value=3)
        manifest.symbols.add(symbol_id=5, name="slots", width=4, minimum=2, maximum=9)
        arena = manifest.buffers.add(buffer_id=9, name="kv", buffer_class=pb.KV_ARENA, fixed_bytes=10, alignment=256)
        arena.size_terms.add(symbol_id=4, bytes=1000)
        arena.size_terms.add(symbol_id=5, bytes=100)
    toy.edit_manifest(grow)

    checked = load_checked()

    assert checked.symbols == {4: 3, 5: 2}
    assert map_sections(checked).memory[9].nbytes == 10 + 3 * 1000 + 2 * 100


def test_pointer_table_holds_the_addresses_of_this_process(toy, load_checked):
    def add(manifest):
        table = manifest.buffers.add(buffer_id=9, name="table", buffer_class=pb.POINTER_TABLE, fixed_bytes=24,
                                     alignment=256)
        table.data_relocations.add(offset=0, buffer_id=3, addend=0)
        table.data_relocations.add(offset=16, buffer_id=0, addend=512)
    toy.edit_manifest(add)

    memory = map_sections(load_checked()).memory

    first, between, second = struct.unpack("<3Q", memory[9].tobytes())
    address = {b: m.__array_interface__["data"][0] for b, m in memory.items()}
    assert (first, between, second) == (address[3], 0, address[0] + 512)


def test_buffer_of_another_device_target_takes_no_memory(toy, load_checked):
    def add(manifest):
        manifest.modules.add(module_id=1, kind=pb.CPU_REGISTRY, target="cpu", registry="dflash.cpu", registry_version=1)
        manifest.device_targets.add(target_id=1, name="other", module_ids=[1])
        manifest.buffers.add(buffer_id=9, name="theirs", buffer_class=pb.SCRATCH, fixed_bytes=64, alignment=256,
                             device_target=1)
        manifest.buffers.add(buffer_id=10, name="ours", buffer_class=pb.SCRATCH, fixed_bytes=64, alignment=256,
                             device_target=0)
    toy.edit_manifest(add)

    assert sorted(map_sections(load_checked()).memory) == [0, 1, 2, 3, 10]


def test_weights_are_memory_of_their_own_and_no_view_of_the_file(toy, load_checked):
    mapped = map_sections(load_checked())
    before = mapped.memory[1].copy()

    (toy.path / toy.small).write_bytes(bytes(SMALL_BYTES))

    assert np.array_equal(mapped.memory[1], before)
