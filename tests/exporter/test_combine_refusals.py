"""What combine refuses, and by which name: cores that disagree, and selections that make no sense. Nothing is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import DflashError, ResourceError
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest, SourceFile

from tests.edit_core import edit_graphs
from tests.exporter.combining import Bench, Edit, digests, precision, refusal
from tests.toy_core import make_toy_core, toy_key


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "bench")


def _target(field: str, value: str) -> Edit:
    return lambda m: setattr(m.target, field, value)


def _contract(field: str, value: int) -> Edit:
    return lambda m: setattr(m.contract, field, value)


def _manifest(field: str, value: Any) -> Edit:
    return lambda m: setattr(m, field, value)


def _nothing(manifest: RebuildManifest) -> None:
    """The left side of most rows."""


def _shard(digest: bytes) -> Edit:
    return lambda m: m.target.files.append(SourceFile(path="model.safetensors", size_bytes=9, sha256=digest * 32))


def _verify_head(manifest: RebuildManifest) -> None:
    manifest.speculation.verify_head_precision = "mxfp8"


def _two_ranks(manifest: RebuildManifest) -> None:
    manifest.parallelism.world_size = 2


def _vision(manifest: RebuildManifest) -> None:
    manifest.vision.max_image_tokens = 64


@pytest.mark.parametrize(("left", "right", "code", "expected", "got"), [
    pytest.param(_nothing, _target("repository", "toy/other"), "TARGET_REPOSITORY", "toy/toy", "toy/other",
                 id="repository"),
    pytest.param(_nothing, _target("revision", "1" * 40), "TARGET_REVISION", "0" * 40, "1" * 40, id="revision"),
    pytest.param(_nothing, _target("architecture", "Other"), "TARGET_ARCHITECTURE", "Toy", "Other", id="architecture"),
    pytest.param(_shard(b"\1"), _shard(b"\2"), "TARGET_FILES", "1 files 3ce427f39bfc3581", "1 files b63cd1443f58a05f",
                 id="checkpoint-file"),
    pytest.param(_nothing, _manifest("online_quantization", "mxfp8"), "ONLINE_QUANTIZATION",
                 "none (recorded -; default)", "mxfp8", id="online"),
    pytest.param(precision(None, online="mxfp8", scope="kda-input"), precision(None, online="mxfp8"), "TARGET_SCOPE",
                 "kda-input", "all (recorded -; default)", id="scope"),
    pytest.param(_nothing, _verify_head, "VERIFY_HEAD", "checkpoint (recorded -; checkpoint)", "mxfp8",
                 id="verification-head"),
    pytest.param(_manifest("tuning_identity", b"\1" * 32), _manifest("tuning_identity", b"\2" * 32), "TUNING",
                 "01" * 8, "02" * 8, id="tuning"),
    pytest.param(_nothing, _two_ranks, "PARALLELISM", "1 × 1 × 1, 1 tokens a stripe (recorded -; default)",
                 "2 × 1 × 1, 1 tokens a stripe", id="ranks"),
    pytest.param(_nothing, _vision, "VISION", "none (recorded -; default)", "f102a87d0826f844", id="vision"),
    pytest.param(_nothing, _contract("page_tokens", 32), "PAGE_TOKENS", "16", "32", id="page"),
    pytest.param(_nothing, _contract("vocab_size", 9), "VOCAB_SIZE", "8", "9", id="vocabulary"),
    pytest.param(_nothing, _contract("kv_bytes_per_page", 64), "KV_BYTES_PER_PAGE", "0", "64", id="kv-bytes"),
    pytest.param(_nothing, _contract("state_bytes_per_slot", 64), "STATE_BYTES_PER_SLOT", "0", "64", id="state-bytes"),
])
def test_refuses_manifests_that_disagree(
    bench: Bench, left: Edit, right: Edit, code: str, expected: str, got: str,
) -> None:
    bench.toy("a", left)
    bench.toy("b", right)

    error = refusal(bench, "a", "b")

    assert (error.code, error.expected, error.got) == (f"COMBINE_{code}", expected, got)
    assert int(error.exit_code) == 5
    assert bench.left_over == ["a", "b"]


@pytest.mark.parametrize(("left", "right", "hint"), [
    pytest.param(None, "mxfp8", "export b without --online-mxfp8-scope", id="only-the-second"),
    pytest.param("mxfp8", None, "export b with --online-mxfp8-scope, as a was", id="only-the-first"),
    pytest.param("mxfp5", "mxfp8",
                 "export both with one release of dflash: a has mxfp5, which this one does not make", id="unknown"),
])
def test_a_refusal_of_online_quantization_names_the_option(
    bench: Bench, left: str | None, right: str | None, hint: str
) -> None:
    for name, online in (("a", left), ("b", right)):
        bench.toy(name, _nothing if online is None else _manifest("online_quantization", online))

    assert refusal(bench, "a", "b").hint.replace(f"{bench.folder}/", "") == hint


def test_a_refusal_names_the_checkpoint_file_that_differs(bench: Bench) -> None:
    bench.toy("a", _shard(b"\1"))
    bench.toy("b", _shard(b"\2"))

    assert refusal(bench, "a", "b").where.endswith(": model.safetensors")


def _view(field: str, value: Any) -> Edit:
    return lambda m: setattr(m.tensor_views[1], field, value)


def _buffer(index: int, field: str, value: Any) -> Edit:
    return lambda m: setattr(m.buffers[index], field, value)


def _half_view(manifest: RebuildManifest) -> None:
    manifest.tensor_views[1].dtype, manifest.tensor_views[1].shape[:] = "f32", [256]


def _symbol(width: int, minimum: int, maximum: int) -> Edit:
    return lambda m: m.symbols.add(symbol_id=0, name="pages", width=width, minimum=minimum, maximum=maximum)


def _device(count: int) -> Edit:
    return lambda m: m.device_targets.add(target_id=4, name="sm_90a", exact_sm_count=count)


def _few(count: int) -> Edit:
    return lambda m: m.device_targets.add(target_id=4, name="sm_90a", min_sm_count=count)


def _unbound(manifest: RebuildManifest) -> None:
    del manifest.contract.io[:]


def _binding_shape(manifest: RebuildManifest) -> None:
    manifest.contract.io[0].shape[:] = [16]


def _larger_batch(manifest: RebuildManifest) -> None:
    """Another largest batch, and a binding that follows it beside one that does not."""
    manifest.contract.max_batch = 2
    manifest.contract.io[0].shape[:] = [16]


def _elsewhere(manifest: RebuildManifest) -> None:
    manifest.contract.io[0].buffer_id = 2


def _pointers(addend: int) -> Edit:
    return lambda m: m.buffers.add(buffer_id=7, name="table", buffer_class=g.POINTER_TABLE, alignment=256,
                                   fixed_bytes=64, data_relocations=[g.DataRelocation(buffer_id=2, addend=addend)])


@pytest.mark.parametrize(("left", "right", "code", "where"), [
    pytest.param(_nothing, _view("sha256", b"\1" * 32), "TENSOR", "small.weight, sha256", id="tensor-content"),
    pytest.param(_nothing, _half_view, "TENSOR", "small.weight, dtype", id="tensor-type"),
    pytest.param(_nothing, _view("recipe", "concat-rows/1"), "TENSOR", "small.weight, recipe", id="tensor-recipe"),
    pytest.param(_nothing, _view("owner", "draft"), "TENSOR", "small.weight, owner", id="tensor-owner"),
    pytest.param(_nothing, _buffer(2, "fixed_bytes", 512), "BUFFER", "state, fixed_bytes", id="state-size"),
    pytest.param(_nothing, _buffer(3, "alignment", 512), "BUFFER", "logits, alignment", id="alignment"),
    pytest.param(_nothing, _buffer(3, "host_mapped", True), "BUFFER", "logits, host_mapped", id="host-mapped"),
    pytest.param(_nothing, lambda m: m.buffers[2].ClearField("initial"), "BUFFER", "state, initial",
                 id="first-contents"),
    pytest.param(_pointers(0), _pointers(8), "BUFFER", "table", id="pointer-table"),
    pytest.param(_symbol(4, 1, 9), _symbol(8, 1, 9), "SYMBOL", "pages", id="symbol-width"),
    pytest.param(_symbol(4, 1, 3), _symbol(4, 5, 9), "SYMBOL", "pages", id="symbol-range"),
    pytest.param(_device(80), _device(132), "DEVICE", "target sm_90a", id="two-exact-devices"),
    pytest.param(_device(80), _few(100), "DEVICE", "target sm_90a", id="exact-device-too-small"),
    pytest.param(_nothing, lambda m: setattr(m.modules[0], "registry_version", 2), "REGISTRY",
                 "registry dflash.cpu, registry_version", id="two-op-registries"),
    pytest.param(_nothing, _unbound, "BINDING", "logits", id="binding-absent"),
    pytest.param(_nothing, _binding_shape, "BINDING", "logits", id="binding-shape"),
    pytest.param(_nothing, _elsewhere, "BINDING", "logits", id="binding-of-another-buffer"),
    pytest.param(_nothing, _larger_batch, "BATCH", "buffer logits", id="rows-in-a-larger-buffer"),
])
def test_refuses_tables_that_disagree(bench: Bench, left: Edit, right: Edit, code: str, where: str) -> None:
    bench.toy("a", left)
    bench.toy("b", right)

    error = refusal(bench, "a", "b")

    cores = f"{bench.folder / 'a'} and {bench.folder / 'b'}" if code != "BATCH" else str(bench.folder / "a")
    assert (error.code, error.where) == (f"COMBINE_{code}", f"{cores}: {where}")
    assert int(error.exit_code) == 5
    assert bench.left_over == ["a", "b"]


def _on_gpu(batch: int) -> Edit:
    def edit(manifest: RebuildManifest) -> None:
        manifest.device_targets[0].name, manifest.contract.max_batch = "sm_90a", batch
    return edit


def test_graphs_of_a_gpu_keep_their_largest_batch(bench: Bench) -> None:
    bench.toy("a", _on_gpu(4))
    bench.toy("b", _on_gpu(1))

    error = refusal(bench, "a", "b")

    assert (error.code, error.where, error.expected, error.got) == (
        "COMBINE_BATCH", str(bench.folder / "b"), "4", "1")


def _addend(graphs: GraphSet) -> None:
    graphs.graphs[0].nodes[1].relocations[1].addend = 64


def _batch(graphs: GraphSet) -> None:
    graphs.graphs[0].bucket.batch = 2


def _no_edge(graphs: GraphSet) -> None:
    del graphs.graphs[0].edges[:]


def _one_node(graphs: GraphSet) -> None:
    del graphs.graphs[0].nodes[1], graphs.graphs[0].edges[:]


@pytest.mark.parametrize(("edit", "where"), [
    pytest.param(_addend, "node 1, relocations", id="relocation"),
    pytest.param(_batch, "bucket", id="bucket"),
    pytest.param(_no_edge, "edges", id="edges"),
    pytest.param(_one_node, "number of nodes", id="nodes"),
])
def test_refuses_one_graph_name_with_two_contents(
    bench: Bench, edit: Callable[[GraphSet], object], where: str,
) -> None:
    bench.toy("a")
    edit_graphs(bench.toy("b"), edit)

    error = refusal(bench, "a", "b")

    assert error.code == "COMBINE_GRAPH"
    assert error.where.endswith(f": graph decode_1, {where}")


def test_refuses_a_kernel_of_one_name_with_another_op(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b", lambda m: setattr(m.kernels[0].variants[0], "symbol", "toy.add/2"))

    assert refusal(bench, "a", "b").where.endswith(": graph decode_1, node 0, kernel")


@pytest.mark.parametrize(("names", "code"), [
    pytest.param(["a"], "COMBINE_COUNT", id="one"),
    pytest.param(["a"] * 17, "COMBINE_COUNT", id="seventeen"),
    pytest.param(["a", "a"], "COMBINE_TWICE", id="itself"),
    pytest.param(["a", "b", "a"], "COMBINE_TWICE", id="itself-later"),
    pytest.param(["a", "copy"], "COMBINE_TWICE", id="a-copy-of-itself"),
    pytest.param(["both", "a"], "COMBINE_TWICE", id="a-component"),
    pytest.param(["b", "both"], "COMBINE_TWICE", id="a-component-first"),
    pytest.param(["both", "other"], "COMBINE_TWICE", id="a-shared-component"),
    pytest.param(["three", "both"], "COMBINE_TWICE", id="a-parent"),
])
def test_refuses_a_selection_of_cores_that_makes_no_sense(bench: Bench, names: list[str], code: str) -> None:
    for name in ("a", "b", "c"):
        bench.toy(name)
    shutil.copytree(bench.folder / "a", bench.folder / "copy")
    bench.combine("a", "b", out="both")
    bench.combine("c", "b", out="other")
    bench.combine("c", "both", out="three")

    result = bench.run(*names, options=("--json",))

    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == code
    assert not (bench.folder / "out").exists()


def test_components_count_towards_the_limit(bench: Bench) -> None:
    names = [f"core{index}" for index in range(17)]
    for name in names:
        bench.toy(name)
    bench.combine(*names[:15], out="many")

    assert refusal(bench, "many", *names[15:]).code == "COMBINE_COUNT"
    assert len(bench.combine("many", names[15], out="most").manifest.components) == 16


def test_refuses_an_unsigned_input(bench: Bench) -> None:
    bench.toy("a")
    make_toy_core(bench.folder / "b", signed=False)

    assert refusal(bench, "a", "b").code == "SIG_MISSING"


def test_refuses_an_input_by_an_unknown_signer(bench: Bench) -> None:
    bench.toy("a")
    b = bench.toy("b")
    b.signature().unlink()
    b.sign(toy_key("stranger"))

    assert int(refusal(bench, "a", "b").exit_code) == 4


def test_a_flipped_byte_of_a_weight_is_found_while_it_is_copied(bench: Bench) -> None:
    a = bench.toy("a")
    bench.toy("b")
    data = bytearray((a.path / a.big).read_bytes())
    data[5_000] ^= 1
    (a.path / a.big).write_bytes(data)

    error = refusal(bench, "a", "b")

    assert error.code == "DIGEST_MISMATCH"
    assert a.big in error.where
    assert bench.left_over == ["a", "b"]


def test_refuses_to_write_over_an_input(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")
    before = digests(bench.folder / "a")

    with pytest.raises(DflashError) as caught:
        bench.combine("a", "b", out="a", force=True)

    assert caught.value.code == "COMBINE_OUTPUT"
    assert digests(bench.folder / "a") == before


def test_refuses_an_output_that_exists_unless_forced(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.toy(name)
    bench.combine("a", "b")

    assert bench.run("a", "c").exit_code == 2
    assert [c.core_name for c in bench.combine("a", "c", force=True).manifest.components] == ["a", "c"]


@pytest.mark.parametrize(("number", "code"), [
    pytest.param(errno.ENOSPC, "NO_SPACE", id="full"), pytest.param(errno.EROFS, "NOT_WRITABLE", id="read-only"),
])
@pytest.mark.parametrize("written", [0, 1, 5])
def test_a_disk_that_takes_no_more_leaves_nothing_and_the_inputs_as_they_were(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, code: str, written: int,
) -> None:
    bench.toy("a")
    bench.toy("b")
    before = digests(bench.folder)
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        if len(synced) == written:
            raise OSError(number, os.strerror(number))
        synced.append(descriptor)
    monkeypatch.setattr("exporter.combine.os.fsync", fsync)

    with pytest.raises(ResourceError) as caught:
        bench.combine("a", "b")

    assert (caught.value.code, int(caught.value.exit_code)) == (code, 6)
    assert digests(bench.folder) == before


@pytest.mark.parametrize("missing", ["--out", "--key"])
def test_writing_needs_an_output_and_a_key(bench: Bench, missing: str) -> None:
    bench.toy("a")
    bench.toy("b")
    given = {"--out": str(bench.folder / "out"), "--key": str(bench.key_path)}
    given.pop(missing)

    result = bench.run("a", "b", out=None, options=tuple(word for pair in given.items() for word in pair))

    assert result.exit_code == 2
    assert f"{missing} is needed to write a core" in result.stderr
