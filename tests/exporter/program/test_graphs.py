"""The graphs of a tiny pair: roles, buckets, ops in order, what each reads and writes, and the serving contract."""

import pytest
from dflash_core.v1 import graph_pb2 as pb

from runtime.ops import OPS, DType
from runtime.structure_graph import check_graph_set
from tests.tiny_pair import TinyProgram

ATTENTION = ["linear", "rope_cache", "attention", "linear", "add_rms_norm"]
MLP = ["linear", "silu_mul", "linear"]
LAYER = [*ATTENTION, *MLP]
TAPPED = ["rms_norm", *LAYER, "add_rms_norm", "tap", *LAYER, "add_rms_norm", *LAYER, "add", "tap"]
UNTAPPED = ["rms_norm", *LAYER, "add_rms_norm", *LAYER, "add_rms_norm", *LAYER, "add"]
CONTEXT = ["linear", "rms_norm", "linear", "norm_rope_context", "linear", "norm_rope_context"]
CONV_IN, CONV_OUT = ["linear", "grouped_conv"], ["grouped_conv"]
DRAFT_LAYER = [*CONV_IN, "linear", "norm_rope", "block_attention", "linear", *CONV_OUT, "add_rms_norm",
               *CONV_IN, *MLP, *CONV_OUT, "add_rms_norm"]
OPS_BY_ROLE = {
    "prefill": ["chunk_positions", "embedding", *TAPPED, *CONTEXT, "last_row", "rms_norm", "linear", "sample",
                "commit_chunk"],
    "draft": ["block_positions", "block_tokens", "embedding", "rms_norm", *DRAFT_LAYER, *DRAFT_LAYER, "linear",
              "top_candidates", "linear", "selector_walk"],
    "verify": ["block_positions", "verify_tokens", "embedding", *TAPPED, "rms_norm", "linear", "accept",
               "accepted_positions", *CONTEXT, "commit"],
    "decode": ["block_positions", "block_tokens", "embedding", *UNTAPPED, "rms_norm", "linear", "sample", "commit"],
}  # fmt: skip
SAMPLING = ["temperature", "top_p", "top_k", "seed"]
INPUTS = {
    "prefill": ["slots", "page_table", *SAMPLING, "chunk_tokens", "chunk_count", "length", "anchor"],
    "draft": ["slots", "limit", "page_table", "temperature", "seed", "length", "anchor"],
    "verify": ["slots", "limit", "page_table", *SAMPLING, "length", "anchor", "proposals", "proposal_ids",
               "proposal_probs"],
    "decode": ["slots", "limit", "page_table", *SAMPLING, "length", "anchor"],
}  # fmt: skip
OUTPUTS = {
    "prefill": ["length", "anchor", "sampled", "produced", "logits"],
    "draft": ["proposals", "proposal_ids", "proposal_probs"],
    "verify": ["length", "anchor", "emitted", "produced", "accepted", "logits"],
    "decode": ["length", "anchor", "sampled", "produced", "logits"],
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    return TinyProgram.record(batches=(1, 2))


@pytest.fixture(scope="module")
def target_alone():
    return TinyProgram.record(batches=(1, 2), drafted=False)


def ops_of(program, graph):
    names = {k.kernel_id: k.variants[0].symbol for k in program.manifest.kernels}
    return [names[n.kernel_id].removeprefix("dflash.").removesuffix("/1") for n in graph.nodes]


def test_pair_has_one_prefill_and_three_graphs_per_bucket(pair):
    assert [(g.name, g.role, g.bucket.batch, g.bucket.query_tokens, g.load_priority) for g in pair.recorded.graphs] == [
        ("prefill.c16", "prefill", 1, 16, 0),
        ("draft.b1", "draft", 1, 4, 1), ("verify.b1", "verify", 1, 4, 2), ("decode.b1", "decode", 1, 1, 3),
        ("draft.b2", "draft", 2, 4, 1), ("verify.b2", "verify", 2, 4, 2), ("decode.b2", "decode", 2, 1, 3),
    ]  # fmt: skip


def test_target_alone_has_prefill_and_decode(target_alone):
    assert [g.name for g in target_alone.recorded.graphs] == ["prefill.c16", "decode.b1", "decode.b2"]
    assert [len(g.nodes) for g in target_alone.recorded.graphs] == [35, 35, 35]


def test_graphs_hold_these_ops_in_this_order(pair):
    for graph in pair.recorded.graphs:
        assert ops_of(pair, graph) == OPS_BY_ROLE[graph.role], graph.name
    assert [len(OPS_BY_ROLE[role]) for role in ("prefill", "draft", "verify", "decode")] == [43, 38, 44, 35]


def test_every_node_names_an_op_of_the_registry(pair):
    kernels = {k.kernel_id: k for k in pair.manifest.kernels}

    for graph in pair.recorded.graphs:
        for node in graph.nodes:
            kernel = kernels[node.kernel_id]
            assert kernel.op == kernel.variants[0].symbol
            assert kernel.op in OPS


def test_graphs_declare_what_they_read_and_write(pair):
    names = {b.buffer_id: b.name for b in pair.manifest.buffers}

    for graph in pair.recorded.graphs:
        assert [names[b] for b in graph.input_buffers] == INPUTS[graph.role], graph.name
        assert [names[b] for b in graph.output_buffers] == OUTPUTS[graph.role], graph.name


def test_graphs_obey_every_structure_rule(pair):
    graph_set = pb.GraphSet(format_version=1, graphs=pair.recorded.graphs)

    check_graph_set(graph_set, pair.manifest)

    assert not any(g.HasField("template_id") for g in pair.recorded.graphs)


def test_every_graph_uses_the_same_gemm_tile(pair):
    """Rows of prefill, verify and decode agree bit for bit only because they meet weights in one shape."""
    kernels = {k.kernel_id: k.variants[0] for k in pair.manifest.kernels}
    tiles = set()
    for graph in pair.recorded.graphs:
        for node in graph.nodes:
            names = [p.name for p in kernels[node.kernel_id].params]
            if "tile_rows" in names:
                at = 4 * names.index("tile_rows")
                tiles.add(int.from_bytes(node.param_block[at : at + 4], "little"))

    assert tiles == {8}


def test_taps_are_copied_after_their_layer_into_their_columns(pair):
    verify = next(g for g in pair.recorded.graphs if g.name == "verify.b1")
    taps = [n for n in verify.nodes if pair.manifest.kernels[n.kernel_id].op == "dflash.tap/1"]

    assert [n.debug_name for n in taps] == ["target.layers.0", "target.layers.2"]
    assert [int.from_bytes(n.param_block[12:16], "little") for n in taps] == [0, 1]


def test_contract_binds_every_serving_buffer(pair):
    assert [(b.name, b.dtype, list(b.shape), b.output) for b in pair.manifest.contract.io] == [
        ("slots", "i32", [2], False), ("limit", "i32", [2], False), ("page_table", "i32", [2, 8], False),
        ("temperature", "f32", [2], False), ("top_p", "f32", [2], False), ("top_k", "i32", [2], False),
        ("seed", "u64", [2], False), ("chunk_tokens", "i32", [16], False), ("chunk_count", "i32", [1], False),
        ("length", "i32", [2], True), ("anchor", "i32", [2], True), ("sampled", "i32", [2], True),
        ("emitted", "i32", [2, 4], True), ("produced", "i32", [2], True), ("accepted", "i32", [2], True),
        ("logits", "f32", [8, 128], True), ("proposals", "i32", [2, 3], True), ("proposal_ids", "i32", [2, 3, 4], True),
        ("proposal_probs", "f32", [2, 3, 4], True),
    ]  # fmt: skip


def test_target_alone_binds_no_proposals(target_alone):
    bound = {b.name: list(b.shape) for b in target_alone.manifest.contract.io}

    assert not [name for name in bound if name.startswith("proposal")]
    assert (bound["emitted"], bound["logits"]) == ([2, 1], [2, 128])


@pytest.mark.parametrize(
    ("act", "target_page", "draft_page"),
    [
        pytest.param(DType.BF16, 3072, 3072, id="bf16: 3 x 2 x 2 x 8 x 16 and 2 x 2 x 2 x 8 x 24 elements"),
        pytest.param(DType.F32, 6144, 6144, id="f32"),
    ],
)
def test_arenas_grow_by_page_bytes_with_one_symbol(act, target_page, draft_page):
    pair = TinyProgram.record(batches=(2,), act=act)

    arenas = {b.name: [(t.symbol_id, t.bytes) for t in b.size_terms] for b in pair.manifest.buffers
              if b.buffer_class == pb.KV_ARENA}

    assert arenas == {"target_kv": [(0, target_page)], "draft_kv": [(0, draft_page)]}
    assert pair.recorded.kv_bytes_per_page == target_page + draft_page
    symbol = pair.manifest.symbols[0]
    assert (symbol.name, symbol.minimum, symbol.default_value) == ("kv_pages", 8, 16)


def test_buffers_of_every_class_are_named_once(pair):
    by_class: dict[int, list[str]] = {}
    for buffer in pair.manifest.buffers:
        by_class.setdefault(buffer.buffer_class, []).append(buffer.name)

    assert by_class[pb.WEIGHTS] == ["weights.target", "weights.draft"]
    assert by_class[pb.STATE] == ["length", "anchor"]
    assert len(by_class[pb.IO]) == 17
    assert len({b.name for b in pair.manifest.buffers}) == len(pair.manifest.buffers)
