"""`dflash-run diff` as a person or a script runs it, on toy cores that differ in one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest, RebuildSpeculation, SourceFile
from typer.testing import CliRunner, Result

from runtime.cli import app
from runtime.diff import CoreDiff, Part, diff_cores
from runtime.pack import pack
from tests.edit_core import edit_graphs
from tests.toy_core import make_toy_core, trust_document, write_trust

Edit = Callable[[RebuildManifest], object]


def with_draft(manifest: RebuildManifest) -> None:
    manifest.target.files.append(SourceFile(path="model.safetensors", size_bytes=9, sha256=bytes(32)))
    manifest.speculation.CopyFrom(RebuildSpeculation(
        method="dflash2", draft_depth=7, block_size=8,
        draft=ModelIdentity(repository="toy/draft", revision="1" * 40, architecture="DFlash2DraftModel")))
    manifest.tensor_views[1].owner = "draft"


def pair(folder: Path, edit: Edit, base: Edit = with_draft) -> tuple[Path, Path]:
    """Two toy cores; `edit` is what the second has that the first has not."""
    for name in ("a", "b"):
        toy = make_toy_core(folder / name)
        toy.edit_manifest(base)
        if name == "b":
            toy.edit_manifest(edit)
    return folder / "a", folder / "b"


def compared(folder: Path, edit: Edit) -> CoreDiff:
    return diff_cores(*pair(folder, edit), None)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *(str(argument) for argument in arguments)])


def _set(name: str, value: Any) -> Edit:
    return lambda m: setattr(m, name, value)


def _speculation(name: str, value: Any) -> Edit:
    return lambda m: setattr(m.speculation, name, value)


def _scope_all(manifest: RebuildManifest) -> None:
    manifest.online_quantization, manifest.online_mxfp8_scope = "mxfp8", "all"


def _other_shard(manifest: RebuildManifest) -> None:
    manifest.target.files[0].sha256 = b"\1" * 32


def _draft_tensor(manifest: RebuildManifest) -> None:
    manifest.tensor_views[1].sha256 = b"\2" * 32


def _target_tensor(manifest: RebuildManifest) -> None:
    manifest.tensor_views[0].sha256 = b"\2" * 32


NOTHING: set[Part] = set()


@pytest.mark.parametrize(("edit", "parts"), [
    pytest.param(lambda m: None, NOTHING, id="nothing"),
    pytest.param(_set("release", 2), NOTHING, id="release"),
    pytest.param(_set("core_name", "other"), NOTHING, id="name"),
    pytest.param(_scope_all, {Part.TARGET, Part.DRAFT}, id="scope-all-reaches-the-draft"),
    pytest.param(_set("online_mxfp8_scope", "all"), NOTHING, id="a-scope-without-conversion-is-inert"),
    pytest.param(_speculation("verify_head_precision", "mxfp8"), {Part.TARGET}, id="verification-head"),
    pytest.param(_speculation("draft_body_quantization", "mxfp8"), {Part.DRAFT}, id="body"),
    pytest.param(_speculation("draft_head_quantization", "nvfp4"), {Part.DRAFT}, id="proposal-head"),
    pytest.param(_speculation("block_size", 16), {Part.DRAFT}, id="block"),
    pytest.param(_other_shard, {Part.TARGET}, id="target-file"),
    pytest.param(_draft_tensor, {Part.DRAFT}, id="draft-tensor"),
    pytest.param(_target_tensor, {Part.TARGET}, id="target-tensor"),
])
def test_names_the_parts_that_differ(tmp_path: Path, edit: Edit, parts: set[Part]) -> None:
    report = compared(tmp_path, edit)

    assert {part for part in Part if report.differs(part)} == parts


def test_shows_recorded_and_effective_values_with_their_origin(tmp_path: Path) -> None:
    def inherits(manifest: RebuildManifest) -> None:
        with_draft(manifest)
        _scope_all(manifest)
    left, right = pair(tmp_path, _speculation("draft_body_quantization", "mxfp8"), inherits)

    body = diff_cores(left, right, None).precision[1]

    assert (body.role, body.same) == ("draft body", True)
    assert (body.left.recorded, body.left.effective, body.left.origin) == (None, "mxfp8", "implied by scope")
    assert (body.right.recorded, body.right.effective, body.right.origin) == ("mxfp8", "mxfp8", "flag")


def test_counts_tensors_and_bytes_by_owner_and_format(tmp_path: Path) -> None:
    def shrink(manifest: RebuildManifest) -> None:
        manifest.tensor_views[1].dtype, manifest.tensor_views[1].shape[:] = "u8", [1024]

    rows = compared(tmp_path, shrink).formats

    assert [(r.owner, r.format, r.left_tensors, r.left_nbytes, r.right_tensors, r.right_nbytes) for r in rows] == [
        ("draft", "bf16", 1, 1024, 0, 0), ("draft", "u8", 0, 0, 1, 1024), ("target", "bf16", 1, 4199424, 1, 4199424)]


def test_names_every_field_of_a_tensor_that_differs(tmp_path: Path) -> None:
    (tensor,) = compared(tmp_path, _draft_tensor).tensors

    assert tensor.name == "small.weight"
    assert dict(tensor.fields) == {"sha256": ("00" * 32, "02" * 32)}


def _widen(graphs: GraphSet) -> None:
    graphs.graphs[0].bucket.batch = 2


def _aim_elsewhere(graphs: GraphSet) -> None:
    graphs.graphs[0].nodes[1].relocations[1].addend = 64


def _read_less(graphs: GraphSet) -> None:
    graphs.graphs[0].nodes[1].accesses[0].bytes = 16


def _drop_edge(graphs: GraphSet) -> None:
    del graphs.graphs[0].edges[:]


def _drop_node(graphs: GraphSet) -> None:
    del graphs.graphs[0].nodes[1]
    del graphs.graphs[0].edges[:]


@pytest.mark.parametrize(("edit", "where", "left", "right"), [
    pytest.param(_widen, "graph, batch", "1", "2", id="batch"),
    pytest.param(_aim_elsewhere, "node 1, out", "@logits+0", "@logits+64", id="relocation"),
    pytest.param(_read_less, "node 1, accesses", "read state+0:32 write logits+0:32",
                 "read state+0:16 write logits+0:32", id="access"),
    pytest.param(_drop_edge, "graph, edges", "0>1:0:0", "", id="edge"),
    pytest.param(_drop_node, "graph, nodes", "2", "1", id="node"),
])
def test_names_the_first_difference_of_a_graph(
    tmp_path: Path, edit: Callable[[GraphSet], object], where: str, left: str, right: str,
) -> None:
    make_toy_core(tmp_path / "a")
    edit_graphs(make_toy_core(tmp_path / "b"), edit)

    report = diff_cores(tmp_path / "a", tmp_path / "b", None)

    (graph,) = report.graphs
    assert {part for part in Part if report.differs(part)} == {Part.GRAPHS}
    assert (graph.target, graph.name, graph.change.value) == ("cpu", "decode_1", "changed")
    assert (graph.where, graph.left, graph.right) == (where, left, right)


def test_a_graph_with_other_ids_is_the_same_graph(tmp_path: Path) -> None:
    make_toy_core(tmp_path / "a")
    toy = make_toy_core(tmp_path / "b")

    def renumber(manifest: RebuildManifest) -> None:
        for buffer in manifest.buffers:
            buffer.buffer_id += 10
        manifest.kernels[0].kernel_id = 5
        manifest.contract.io[0].buffer_id = 13

    def follow(graphs: GraphSet) -> None:
        graph = graphs.graphs[0]
        graph.input_buffers[:], graph.output_buffers[:] = [12], [13]
        for node in graph.nodes:
            node.kernel_id = 5
            for place in (*node.relocations, *node.accesses):
                place.buffer_id += 10
    toy.edit_manifest(renumber, sign=False)
    edit_graphs(toy, follow)

    assert diff_cores(tmp_path / "a", tmp_path / "b", None).graphs == ()


def test_names_graphs_that_one_side_lacks(tmp_path: Path) -> None:
    make_toy_core(tmp_path / "a")
    toy = make_toy_core(tmp_path / "b")
    toy.edit_manifest(lambda m: m.graph_files[0].graph_names.append("decode_2"), sign=False)

    def add(graphs: GraphSet) -> None:
        graphs.graphs.add().CopyFrom(graphs.graphs[0])
        graphs.graphs[1].name = "decode_2"
    edit_graphs(toy, add)

    forth = diff_cores(tmp_path / "a", tmp_path / "b", None).graphs
    back = diff_cores(tmp_path / "b", tmp_path / "a", None).graphs

    assert [(row.name, row.change.value) for row in forth] == [("decode_2", "added")]
    assert [(row.name, row.change.value) for row in back] == [("decode_2", "removed")]


def test_a_kernel_of_one_name_and_other_content_differs(tmp_path: Path) -> None:
    def other(manifest: RebuildManifest) -> None:
        manifest.kernels[0].variants[0].symbol = "toy.add/2"

    (graph,) = compared(tmp_path, other).graphs

    assert graph.where == "node 0, kernel"
    assert graph.left.startswith("add ") and graph.right.startswith("add ")


def test_overrides_of_a_bucket_are_compared_in_place(tmp_path: Path) -> None:
    def templated(addend: int) -> Callable[[GraphSet], object]:
        def edit(graphs: GraphSet) -> None:
            graph = graphs.graphs[0]
            graphs.templates.add(template_id=4, nodes=graph.nodes, edges=graph.edges)
            del graph.nodes[:], graph.edges[:]
            graph.template_id = 4
            place = g.Relocation(kind=g.BUFFER_ADDRESS, param_index=1, buffer_id=3, addend=addend)
            graph.overrides.add(node_id=1, relocations=[place])
        return edit
    edit_graphs(make_toy_core(tmp_path / "a"), templated(0))
    edit_graphs(make_toy_core(tmp_path / "b"), templated(128))

    (graph,) = diff_cores(tmp_path / "a", tmp_path / "b", None).graphs

    assert (graph.where, graph.left, graph.right) == ("node 1, out", "@logits+0", "@logits+128")


@pytest.mark.parametrize(("fail_on", "code"), [
    pytest.param((), 0, id="nothing-asked"),
    pytest.param(("target",), 0, id="part-that-is-equal"),
    pytest.param(("graphs",), 0, id="graphs-are-equal"),
    pytest.param(("draft",), 7, id="part-that-differs"),
    pytest.param(("target", "draft"), 7, id="one-of-two"),
    pytest.param(("weights",), 2, id="unknown-part"),
])
def test_exit_code_says_whether_a_part_differs(tmp_path: Path, fail_on: tuple[str, ...], code: int) -> None:
    left, right = pair(tmp_path, _draft_tensor)

    result = run(left, right, *(word for part in fail_on for word in ("--fail-on", part)))

    assert result.exit_code == code


def test_json_is_one_document_also_when_the_gate_fails(tmp_path: Path) -> None:
    left, right = pair(tmp_path, _draft_tensor)
    trust = write_trust(tmp_path / "trust.json", trust_document())

    result = run(left, right, "--trust", trust, "--fail-on", "draft", "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 7
    assert document["authenticated"] is True
    assert document["differs"] == {"target": False, "draft": True, "graphs": False}
    assert document["tensors"][0]["change"] == "changed"


def test_says_so_when_nothing_was_authenticated(tmp_path: Path) -> None:
    left, right = pair(tmp_path, _draft_tensor)

    result = run(left, right)

    assert result.stdout.startswith("NOT AUTHENTICATED")
    assert "differs: draft" in result.stdout


def test_compares_a_core_with_its_archive(tmp_path: Path) -> None:
    toy = make_toy_core(tmp_path / "a")
    pack(toy.path, tmp_path / "a.zip")

    report = diff_cores(toy.path, tmp_path / "a.zip", None)

    assert report.left.core_digest == report.right.core_digest
    assert not any(report.differs(part) for part in Part)


def test_refuses_a_core_that_the_trust_file_does_not_accept(tmp_path: Path) -> None:
    left, right = pair(tmp_path, _draft_tensor)
    make_toy_core(tmp_path / "c", signed=False)
    trust = write_trust(tmp_path / "trust.json", trust_document())

    result = run(left, tmp_path / "c", "--trust", trust)

    assert result.exit_code == 4
    assert "the core is not signed" in result.stderr
    assert right.exists()
