"""Which device runs a core, how large its buffers are, and what is unmet."""

import pytest
from dflash_core.compat import Device, buffer_bytes, fit_symbols, memory_bytes, requirements, select_target, unmet
from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as pb
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileRef, WeightBlob


def core(*targets):
    """Weights of 1000, state of 20, scratch of 300, an arena of 5 + 2 pages of 64 (default 10), two I/O buffers."""
    manifest = RebuildManifest(core_name="demo")
    manifest.weight_blobs.append(WeightBlob(blob_id=3, file=FileRef(size_bytes=1000)))
    manifest.symbols.add(symbol_id=1, name="kv_pages", minimum=2, maximum=99, default_value=10)
    add = manifest.buffers.add
    add(buffer_id=0, buffer_class=pb.WEIGHTS, fixed_bytes=7, blob_id=3)
    add(buffer_id=1, buffer_class=pb.STATE, fixed_bytes=20)
    add(buffer_id=2, buffer_class=pb.SCRATCH, fixed_bytes=300)
    add(buffer_id=3, buffer_class=pb.KV_ARENA, fixed_bytes=5).size_terms.add(symbol_id=1, bytes=64)
    add(buffer_id=4, buffer_class=pb.IO, fixed_bytes=40)
    add(buffer_id=5, buffer_class=pb.IO, fixed_bytes=2)
    for target_id, name in enumerate(targets):
        manifest.device_targets.add(target_id=target_id, name=name)
    return manifest


@pytest.mark.parametrize(
    ("buffer_id", "pages", "nbytes"),
    [(0, 10, 1000), (1, 10, 20), (3, 10, 645), (3, 0, 5), (3, 2, 133)],
)
def test_buffer_takes_its_blob_or_its_fixed_bytes_and_terms(buffer_id, pages, nbytes):
    assert buffer_bytes(core().buffers[buffer_id], {3: 1000}, {1: pages}) == nbytes


def test_memory_is_added_up_by_class():
    assert memory_bytes(core(), {1: 10}) == {"WEIGHTS": 1000, "STATE": 20, "SCRATCH": 300, "KV_ARENA": 645, "IO": 42}


@pytest.mark.parametrize(("targets", "device", "target_id"),
                         [(("cpu",), "cpu", 0), (("sm_90a", "cpu"), "cpu", 1), (("cpu", "cpu"), "cpu", 0)])
def test_first_target_of_the_device_is_chosen(targets, device, target_id):
    assert select_target(core(*targets), Device(device, None, 0)).target_id == target_id


@pytest.mark.parametrize(("targets", "offered"), [((), "none"), (("sm_90a", "sm_100a"), "sm_90a, sm_100a")])
def test_refuses_a_device_without_a_target(targets, offered):
    with pytest.raises(CompatibilityError) as refused:
        select_target(core(*targets), Device("cpu", None, 0))

    error = refused.value
    assert (error.code, error.where, error.expected, error.got) == ("DEVICE_TARGET", "demo", offered, "cpu")
    assert error.hint == "export it with `--device cpu`"


@pytest.mark.parametrize(("free", "names"), [(1495, []), (1494, ["memory"]), (0, ["memory"])])
def test_needs_the_memory_of_the_smallest_cache(free, names):
    found = requirements(core("cpu"), Device("cpu", None, free))

    assert [r.name for r in unmet(found)] == names
    assert [(r.name, r.expected, r.found) for r in found] == [
        ("ranks", "1", "1"), ("memory", "at least 1495 bytes free", f"{free} bytes")]


@pytest.mark.parametrize(("world", "names"), [(None, []), (0, []), (1, []), (2, ["ranks"])])
def test_needs_one_rank(world, names):
    manifest = core("cpu")
    if world is not None:
        manifest.parallelism.world_size = world

    assert [r.name for r in unmet(requirements(manifest, Device("cpu", None, 1 << 40)))] == names


def hybrid():
    """The core above with a snapshot arena of 100 bytes a place, at least 1 and at most 50 of them."""
    manifest = core("cpu", "sm_90a")
    manifest.symbols.add(symbol_id=2, name="snapshots", minimum=1, maximum=50, default_value=4)
    manifest.buffers.add(buffer_id=6, buffer_class=pb.STATE).size_terms.add(symbol_id=2, bytes=100)
    manifest.buffers.add(buffer_id=7, buffer_class=pb.SCRATCH, device_target=1, fixed_bytes=1_000_000)
    return manifest


# The least is 1,495 + 100 bytes, of 95 % of what is free; eight more pages are 512.
@pytest.mark.parametrize(("free", "pages", "snapshots"), [
    (0, 2, 1), (1679, 2, 1), (1747, 3, 1), (2217, 9, 1), (2218, 10, 1), (2428, 10, 1), (2429, 10, 2),
    (2850, 10, 4), (4112, 10, 9), (4113, 10, 10), (1 << 40, 10, 10)])
def test_pages_fill_what_is_free_and_snapshots_half_of_the_rest(free, pages, snapshots):
    assert fit_symbols(hybrid(), 0, free) == {1: pages, 2: snapshots}


def test_snapshots_are_no_more_than_the_core_allows():
    manifest = hybrid()
    manifest.symbols[1].maximum = 3

    assert fit_symbols(manifest, 0, 1 << 40) == {1: 10, 2: 3}


def test_a_core_without_states_takes_the_pages_it_was_exported_for():
    assert fit_symbols(core("cpu"), 0, 1 << 40) == {1: 10}
    assert fit_symbols(core("cpu"), 0, 1495) == {1: 2}
