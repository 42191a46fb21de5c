"""A core fits a device or is refused by name, before anything is allocated."""

import os

import pytest
from dflash_core.compat import Device
from dflash_core.errors import CompatibilityError, DflashError, ExitCode, FormatError, ResourceError
from dflash_core.v1 import graph_pb2 as pb

from runtime.check import check, query_device
from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.toy_core import BIG_BYTES, SMALL_BYTES, make_toy_core, trust_document, write_trust

NEEDED = BIG_BYTES + SMALL_BYTES + 512


@pytest.fixture
def toy(tmp_path):
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def check_on(toy, tmp_path):
    """Check the toy core as it is now against a device of this name and size."""
    opened = []

    def run(name="cpu", free_bytes=1 << 40):
        verified = verify(toy.path, TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document())))
        opened.append(verified)
        return check(verified, Device(name, None, free_bytes))

    yield run
    for verified in opened:
        verified.close()


def test_fitting_core_gives_its_target_graphs_and_symbols(check_on):
    checked = check_on()

    assert checked.target.name == "cpu"
    assert [g.name for g in checked.graphs] == ["decode_1"]
    assert checked.templates == {}
    assert checked.symbols == {}


def test_symbol_takes_its_default_or_else_its_minimum(toy, check_on):
    def add(manifest):
        manifest.symbols.add(symbol_id=1, name="a", width=4, minimum=2, maximum=9, default_value=7)
        manifest.symbols.add(symbol_id=2, name="b", width=4, minimum=3, maximum=9)
    toy.edit_manifest(add)

    assert check_on().symbols == {1: 7, 2: 3}


def refused_by(run, *arguments) -> DflashError:
    with pytest.raises(DflashError) as refused:
        run(*arguments)
    return refused.value


def test_refuses_a_device_that_the_core_was_not_exported_for(check_on):
    error = refused_by(check_on, "sm_90")

    assert isinstance(error, CompatibilityError)
    assert (error.code, error.where, error.expected, error.got) == ("DEVICE_TARGET", "toy", "cpu", "sm_90")
    assert error.hint == "export it with `--device sm_90`"


def test_memory_is_needed_to_the_last_byte(check_on):
    check_on("cpu", NEEDED)
    error = refused_by(check_on, "cpu", NEEDED - 1)

    assert isinstance(error, ResourceError)
    assert error.exit_code is ExitCode.RESOURCES
    assert (error.code, error.where) == ("MEMORY", "toy")
    assert (error.expected, error.got) == (f"at least {NEEDED} bytes free", f"{NEEDED - 1} bytes")


def test_memory_is_asked_for_the_smallest_cache(toy, check_on):
    def grow(manifest):
        manifest.symbols.add(symbol_id=1, name="kv_pages", width=4, minimum=2, maximum=99, default_value=50)
        manifest.buffers.add(buffer_id=9, name="kv", buffer_class=pb.KV_ARENA,
                             alignment=256).size_terms.add(symbol_id=1, bytes=1000)
    toy.edit_manifest(grow)

    check_on("cpu", NEEDED + 2000)

    assert refused_by(check_on, "cpu", NEEDED + 1999).code == "MEMORY"


@pytest.mark.parametrize(("world", "code"), [(1, None), (2, "RANKS"), (8, "RANKS")])
def test_refuses_a_core_of_several_ranks(toy, check_on, world, code):
    toy.edit_manifest(lambda m: setattr(m.parallelism, "world_size", world))

    if code is None:
        check_on()
        return
    error = refused_by(check_on)

    assert isinstance(error, CompatibilityError)
    assert (error.code, error.where, error.expected, error.got) == (code, "toy", "1", str(world))


def test_refuses_a_target_without_graphs(toy, check_on):
    def other_target(manifest):
        manifest.device_targets.add(target_id=1, name="other", module_ids=[0])
        manifest.graph_files[0].target_id = 1
    toy.edit_manifest(other_target)

    error = refused_by(check_on)

    assert isinstance(error, FormatError)
    assert (error.code, error.where, error.expected, error.got) == ("GRAPH_REF", "cpu", "1", "0")


def test_this_machine_is_a_cpu_with_its_free_memory():
    device = query_device()

    assert (device.name, device.driver) == ("cpu", None)
    assert 0 < device.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_refuses_a_device_that_this_runtime_does_not_drive():
    error = refused_by(query_device, "sm_90")

    assert isinstance(error, CompatibilityError)
    assert (error.code, error.expected, error.got) == ("DEVICE_UNKNOWN", "cpu", "sm_90")
