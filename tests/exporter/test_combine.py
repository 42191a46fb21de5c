"""Combining toy cores: what merges and how, what `--explain` says, and what is never touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import IdMap, RebuildManifest

from exporter.combine_batch import PER_LANE, PER_SLOT
from exporter.program.serving import ServingBuffers
from runtime.pack import pack
from runtime.verify import verify
from tests.edit_core import add_file, edit_graphs
from tests.exporter.combining import Bench, Edit, digests, precision, refusal
from tests.toy_core import toy_key


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "bench")


def graphs_of(folder: Path) -> GraphSet:
    (path,) = (folder / "graphs").iterdir()
    return GraphSet.FromString(path.read_bytes())


def test_equal_tables_are_stored_once(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")

    manifest = bench.combine("a", "b").manifest

    counts = {name: len(getattr(manifest, name)) for name in (
        "weight_blobs", "tensor_views", "buffers", "modules", "kernels", "device_targets", "graph_files")}
    assert counts == {"weight_blobs": 2, "tensor_views": 2, "buffers": 4, "modules": 1, "kernels": 1,
                      "device_targets": 1, "graph_files": 1}
    assert [f.role for f in manifest.files] == ["component"] * 4 + ["config", "graph", "state", "weights", "weights"]


def test_the_result_is_verified_like_any_core(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")

    combined = bench.combine("a", "b")

    with verify(combined.path, bench.trust) as core:
        core.read_full()
        assert core.core_digest == combined.digest
        assert (core.manifest.core_name, core.manifest.release) == ("out", 1)


def test_name_and_release_are_those_asked_for(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")

    result = bench.run("a", "b", options=("--name", "pair", "--release", "12", "--json"))

    manifest = RebuildManifest.FromString((bench.folder / "out" / "manifest.pb").read_bytes())
    assert result.exit_code == 0
    assert (manifest.core_name, manifest.release) == ("pair", 12)
    assert json.loads(result.stdout)["core_digest"] == digests(bench.folder / "out")["manifest.pb"]


def test_the_same_inputs_in_the_same_order_give_the_same_bytes(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")
    bench.combine("a", "b")
    first = digests(bench.folder / "out")
    bench.combine("a", "b", force=True)
    again = digests(bench.folder / "out")

    assert {k: v for k, v in first.items() if "signatures/" not in k} == {
        k: v for k, v in again.items() if "signatures/" not in k}


def test_manifests_and_signatures_of_the_inputs_are_kept_byte_for_byte(bench: Bench) -> None:
    a, b = bench.toy("a"), bench.toy("b")

    combined = bench.combine("a", "b")

    held = combined.path / "components"
    for toy, component in zip((a, b), combined.manifest.components, strict=True):
        name = hashlib.sha256((toy.path / "manifest.pb").read_bytes()).hexdigest()
        assert component.manifest.digest.hex() == name
        assert (held / f"{name}.pb").read_bytes() == (toy.path / "manifest.pb").read_bytes()
        signature = (held / f"{name}.{toy_key().keyid}.sig").read_bytes()
        assert signature == toy.signature().read_bytes()
        assert component.signatures[0].digest == hashlib.sha256(signature).digest()


def test_only_signatures_that_count_are_kept(bench: Bench) -> None:
    a = bench.toy("a")
    a.sign(toy_key("stranger"))
    bench.toy("b")

    combined = bench.combine("a", "b")

    assert len(list((combined.path / "components").glob("*.sig"))) == 2


def test_inputs_are_untouched(bench: Bench) -> None:
    a, b = bench.toy("a"), bench.toy("b")
    before = digests(a.path), digests(b.path)

    bench.combine("a", "b")

    assert (digests(a.path), digests(b.path)) == before


def test_files_are_copies_and_no_links(bench: Bench) -> None:
    a = bench.toy("a")
    bench.toy("b")

    combined = bench.combine("a", "b")

    assert (combined.path / a.small).stat().st_ino != (a.path / a.small).stat().st_ino
    assert (combined.path / a.small).stat().st_nlink == 1


def shift_ids(manifest: RebuildManifest) -> None:
    """Other numbers for the same things."""
    for buffer in manifest.buffers:
        buffer.buffer_id += 10
        if buffer.HasField("blob_id"):
            buffer.blob_id += 5
    for blob in manifest.weight_blobs:
        blob.blob_id += 5
    for view in manifest.tensor_views:
        view.blob_id += 5
    manifest.kernels[0].kernel_id = manifest.kernels[0].variants[0].module_id = manifest.modules[0].module_id = 9
    manifest.device_targets[0].target_id, manifest.device_targets[0].module_ids[:] = 3, [9]
    manifest.graph_files[0].target_id = 3
    manifest.contract.io[0].buffer_id = 13


def follow_ids(graphs: GraphSet) -> None:
    graph = graphs.graphs[0]
    graph.input_buffers[:], graph.output_buffers[:] = [12], [13]
    for node in graph.nodes:
        node.kernel_id = 9
        for place in (*node.relocations, *node.accesses):
            place.buffer_id += 10


def shifted(bench: Bench, name: str) -> None:
    toy = bench.toy(name)
    toy.edit_manifest(shift_ids, sign=False)
    edit_graphs(toy, follow_ids)


def test_graphs_merge_whatever_ids_they_were_written_with(bench: Bench) -> None:
    bench.toy("a")
    shifted(bench, "b")

    combined = bench.combine("a", "b")

    assert [graph.name for graph in graphs_of(combined.path).graphs] == ["decode_1"]
    second = combined.manifest.components[1]
    assert list(second.buffer_ids) == [IdMap(component=10 + i, combined=i) for i in range(4)]
    assert list(second.kernel_ids) == list(second.module_ids) == [IdMap(component=9, combined=0)]
    assert list(second.blob_ids) == [IdMap(component=5, combined=1), IdMap(component=6, combined=2)]


def rename_graph(name: str) -> Callable[[GraphSet], object]:
    return lambda graphs: setattr(graphs.graphs[0], "name", name)


def with_graph(bench: Bench, core: str, graph: str, *edits: Callable[[GraphSet], object]) -> None:
    """A toy core whose one graph has another name."""
    toy = bench.toy(core, lambda m: m.graph_files[0].graph_names.__setitem__(0, graph))
    edit_graphs(toy, lambda graphs: [edit(graphs) for edit in (rename_graph(graph), *edits)])


def test_every_graph_says_which_component_it_came_from(bench: Bench) -> None:
    bench.toy("a")
    with_graph(bench, "b", "decode_2")

    combined = bench.combine("a", "b")

    assert [(graph.name, graph.component_id) for graph in graphs_of(combined.path).graphs] == [
        ("decode_1", 1), ("decode_2", 2)]
    assert list(combined.manifest.graph_files[0].graph_names) == ["decode_1", "decode_2"]
    assert [list(c.graph_names) for c in combined.manifest.components] == [["decode_1"], ["decode_2"]]


def test_components_of_a_combined_core_are_listed_flat_with_their_own_ids(bench: Bench) -> None:
    bench.toy("a")
    with_graph(bench, "b", "decode_2")
    inner = bench.combine("a", "b", out="both")
    shifted(bench, "c")

    combined = bench.combine("c", "both")

    manifest = combined.manifest
    assert [(c.component_id, c.core_name) for c in manifest.components] == [(1, "c"), (2, "a"), (3, "b")]
    assert [(graph.name, graph.component_id) for graph in graphs_of(combined.path).graphs] == [
        ("decode_1", 1), ("decode_2", 3)]
    assert [ref.digest.hex() for ref in manifest.provenance.parents] == [inner.digest]
    assert (combined.path / "components" / f"{inner.digest}.pb").read_bytes() == (
        inner.path / "manifest.pb").read_bytes()
    names = {buffer.buffer_id: buffer.name for buffer in manifest.buffers}
    for component in manifest.components:
        data = (combined.path / "components" / f"{component.manifest.digest.hex()}.pb").read_bytes()
        own = {buffer.buffer_id: buffer.name for buffer in RebuildManifest.FromString(data).buffers}
        assert {m.component: names[m.combined] for m in component.buffer_ids} == own


def test_ids_of_a_component_lead_through_both_numberings(bench: Bench) -> None:
    bench.toy("a", lambda m: m.buffers.add(buffer_id=8, name="own", buffer_class=g.SCRATCH, alignment=256))
    shifted(bench, "b")
    bench.combine("a", "b", out="both")
    shifted(bench, "c")

    manifest = bench.combine("c", "both").manifest

    assert [[(m.component, m.combined) for m in c.buffer_ids] for c in manifest.components] == [
        [(10, 0), (11, 1), (12, 2), (13, 3)], [(0, 0), (1, 1), (2, 2), (3, 3), (8, 4)],
        [(10, 0), (11, 1), (12, 2), (13, 3)]]


def test_templates_are_shared_by_content(bench: Bench) -> None:
    def templated(graphs: GraphSet) -> None:
        graph = graphs.graphs[0]
        graphs.templates.add(template_id=7, nodes=graph.nodes, edges=graph.edges)
        graphs.templates.add(template_id=3, nodes=[g.GraphNode(kind=g.CHILD, child_template=7)])
        del graph.nodes[:], graph.edges[:]
        graph.template_id = 3
    edit_graphs(bench.toy("a"), templated)
    with_graph(bench, "b", "decode_2", templated)

    graphs = graphs_of(bench.combine("a", "b").path)

    assert [t.template_id for t in graphs.templates] == [0, 1]
    assert graphs.templates[1].nodes[0].child_template == 0
    assert [graph.template_id for graph in graphs.graphs] == [1, 1]


def merged(bench: Bench, left: Edit, right: Edit) -> RebuildManifest:
    bench.toy("a", left)
    bench.toy("b", right)
    return bench.combine("a", "b").manifest


def test_the_contract_takes_maxima_and_every_sampling_mode(bench: Bench) -> None:
    def contract(queries: int, context: int, *modes: str) -> Edit:
        def edit(manifest: RebuildManifest) -> None:
            manifest.contract.max_query_tokens, manifest.contract.max_context = queries, context
            manifest.contract.sampling_modes.extend(modes)
        return edit

    found = merged(bench, contract(8, 16, "greedy", "top_k"), contract(1, 64, "greedy", "top_p")).contract

    assert (found.max_batch, found.max_query_tokens, found.max_context) == (1, 8, 64)
    assert list(found.sampling_modes) == ["greedy", "top_k", "top_p"]


def test_scratch_takes_the_largest_size_and_shares_no_memory(bench: Bench) -> None:
    def scratch(nbytes: int) -> Edit:
        return lambda m: m.buffers.add(buffer_id=7, name="scratch", buffer_class=g.SCRATCH, alignment=256,
                                       fixed_bytes=nbytes, alias_group=1)

    buffer = merged(bench, scratch(512), scratch(4096)).buffers[4]

    assert (buffer.name, buffer.fixed_bytes, buffer.HasField("alias_group")) == ("scratch", 4096, False)


def test_two_buffers_of_one_name_in_one_core_stay_two(bench: Bench) -> None:
    def twice(manifest: RebuildManifest) -> None:
        for buffer_id in (7, 8):
            manifest.buffers.add(buffer_id=buffer_id, name="scratch", buffer_class=g.SCRATCH, alignment=256,
                                 fixed_bytes=64)

    assert [b.name for b in merged(bench, twice, twice).buffers[4:]] == ["scratch", "scratch"]


def test_a_symbol_takes_the_range_that_suits_both(bench: Bench) -> None:
    def symbol(minimum: int, maximum: int, default: int) -> Edit:
        return lambda m: m.symbols.add(symbol_id=1, name="kv_pages", width=4, minimum=minimum, maximum=maximum,
                                       default_value=default)

    (found,) = merged(bench, symbol(2, 100, 8), symbol(4, 50, 32)).symbols

    assert (found.minimum, found.maximum, found.default_value) == (4, 50, 32)


def test_device_targets_take_the_stricter_value(bench: Bench) -> None:
    def device(features: tuple[str, ...], **values: int) -> Edit:
        def edit(manifest: RebuildManifest) -> None:
            manifest.device_targets.add(target_id=4, name="sm_90a", device_features=features, **values)
        return edit

    target = merged(bench, device(("tma",), min_sm_count=80), device(("pdl",), exact_sm_count=132)).device_targets[1]

    assert (target.min_sm_count, target.exact_sm_count, list(target.device_features)) == (80, 132, ["pdl", "tma"])


def test_a_tuning_identity_that_one_side_lacks_is_not_compared_and_not_recorded(bench: Bench) -> None:
    manifest = merged(bench, lambda m: setattr(m, "tuning_identity", b"\1" * 32), lambda m: None)

    assert not manifest.HasField("tuning_identity")


def test_one_rank_spelled_out_equals_one_rank_absent(bench: Bench) -> None:
    def one_rank(manifest: RebuildManifest) -> None:
        manifest.parallelism.world_size = manifest.parallelism.tensor_parallel = 1
        manifest.parallelism.kv_interleave = 1

    assert len(merged(bench, one_rank, lambda m: None).components) == 2


def test_explains_cores_that_combine_and_writes_nothing_without_an_output(bench: Bench) -> None:
    bench.toy("a", precision(online="mxfp8"))
    bench.toy("b", precision(online="mxfp8", body="mxfp8"))

    result = bench.run("a", "b", out=None, options=("--explain",))

    assert result.exit_code == 0
    assert "these cores combine" in result.stdout
    assert f"core 1  {bench.folder / 'a'}" in result.stdout.replace("\n", "")
    assert "1: mxfp8 (implied" in " ".join(result.stdout.split())
    assert bench.left_over == ["a", "b"]


def test_explains_and_then_combines(bench: Bench) -> None:
    bench.toy("a")
    bench.toy("b")

    result = bench.run("a", "b", options=("--explain", "--json"))

    document = json.loads(result.stdout)
    assert document["combines"] is True
    assert {rule["verdict"] for rule in document["rules"]} == {"holds", "not compared"}
    assert (bench.folder / "out" / "manifest.pb").exists()


def test_explains_every_rule_also_after_the_first_that_fails(bench: Bench) -> None:
    bench.toy("a")

    def disagree(manifest: RebuildManifest) -> None:
        manifest.target.revision, manifest.contract.page_tokens = "1" * 40, 32
        manifest.tensor_views[1].sha256 = b"\1" * 32
    bench.toy("b", disagree)

    result = bench.run("a", "b", options=("--explain", "--json"))

    document = json.loads(result.stdout)
    assert result.exit_code == 5
    assert [r["name"] for r in document["rules"] if r["verdict"] == "fails"] == [
        "target revision", "page tokens", "views"]
    assert all(r["change"] for r in document["rules"] if r["verdict"] == "fails")
    assert [r["name"] for r in document["rules"]][-8:] == [
        "symbols", "blobs", "views", "modules", "targets", "kernels", "buffers", "graphs"]
    assert bench.left_over == ["a", "b"]


def test_heads_may_differ_where_no_draft_graph_is_shared(bench: Bench) -> None:
    def head(manifest: RebuildManifest) -> None:
        manifest.speculation.draft_head_quantization = "nvfp4"
    bench.toy("a", precision())
    bench.toy("b", precision(), head)

    assert bench.explained("a", "b")["proposal head"]["verdict"] == "not compared"


def test_heads_differ_where_a_draft_graph_is_shared(bench: Bench) -> None:
    def draft_role(graphs: GraphSet) -> None:
        graphs.graphs[0].role = "draft"

    def head(manifest: RebuildManifest) -> None:
        manifest.speculation.draft_head_quantization = "nvfp4"
    edit_graphs(bench.toy("a", precision()), draft_role)
    edit_graphs(bench.toy("b", precision(), head), draft_role)

    error = refusal(bench, "a", "b")

    assert (error.code, error.expected, error.got) == (
        "COMBINE_DRAFT_HEAD", "checkpoint (recorded -; checkpoint)", "nvfp4")
    assert error.where.endswith(": graph decode_1")


def test_a_core_in_an_archive_combines_like_its_directory(bench: Bench) -> None:
    a = bench.toy("a")
    bench.toy("b")
    pack(a.path, bench.folder / "a.zip")
    from_directories = digests(bench.combine("a", "b", out="out").path)
    shutil.rmtree(bench.folder / "out")

    from_archive = digests(bench.combine("a.zip", "b", out="out").path)

    assert {k: v for k, v in from_archive.items() if "signatures/" not in k} == {
        k: v for k, v in from_directories.items() if "signatures/" not in k}


def test_golden_files_of_every_input_are_kept(bench: Bench) -> None:
    a = bench.toy("a")
    a.edit_manifest(lambda m: add_file(a, m, "golden", f"golden/{hashlib.sha256(b'seen').hexdigest()}.pb", b"seen"))
    bench.toy("b")

    combined = bench.combine("a", "b")

    assert [p.read_bytes() for p in (combined.path / "golden").iterdir()] == [b"seen"]


def test_every_serving_buffer_is_known_to_follow_the_batch_or_not() -> None:
    fixed = {"chunk_tokens", "chunk_count", "snapshot"}

    assert PER_SLOT | PER_LANE | fixed == {field.name for field in fields(ServingBuffers)}
