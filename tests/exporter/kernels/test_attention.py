"""Attention kernels against the CPU ops: rotation and cache write fused or apart, splits, windows, dead lanes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from exporter.kernels.attention import paged_attention
from exporter.kernels.attention_many import prefill_attention
from exporter.kernels.rope import rope_heads
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits

BF16 = ml_dtypes.bfloat16
PAGE_TOKENS, MAX_PAGES, HEAD_DIM = 16, 40, 16


def attention_case(lengths, lives, block_rows, *, heads=6, kv_heads=2, norm=False, block=None):
    """Groups of rows over paged caches; `block` (causal, window) asks for a draft block's attention."""
    rng = np.random.default_rng(block_rows)
    groups, rows = len(lengths), len(lengths) * block_rows
    positions = np.full(rows, -1, np.int32)
    for g, (length, live) in enumerate(zip(lengths, lives, strict=True)):
        positions[g * block_rows:g * block_rows + live] = length + np.arange(live)
    page_bytes = 2 * kv_heads * PAGE_TOKENS * HEAD_DIM * 2
    angles = np.arange(PAGE_TOKENS * MAX_PAGES)[:, None] / 100 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    arrays = {
        "qkv": rng.standard_normal((rows, (heads + 2 * kv_heads) * HEAD_DIM)).astype(BF16),
        "rope_table": np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32), "positions": positions,
        "slots": np.array([g if live else -1 for g, live in enumerate(lives)], np.int32),
        "page_table": rng.permutation(groups * MAX_PAGES).astype(np.int32).reshape(groups, MAX_PAGES),
        "q": np.zeros((rows, heads * HEAD_DIM), BF16),
        "kv": rng.standard_normal(groups * MAX_PAGES * page_bytes // 2).astype(BF16).view(np.uint8),
        "out": np.zeros((rows, heads * HEAD_DIM), BF16)}
    pages = {"page_tokens": PAGE_TOKENS, "page_bytes": page_bytes, "kv_pages": groups * MAX_PAGES, "max_slots": groups,
             "max_pages": MAX_PAGES}
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM, "act": DType.BF16}
    turn = {"rows": rows, "rotary_dims": HEAD_DIM, "interleaved": 0, "context": PAGE_TOKENS * MAX_PAGES, **shape}
    attend = {"groups": groups, "block_rows": block_rows, "scale": HEAD_DIM**-0.5, **shape, **pages}
    if norm or block:
        for name in ("q_weight", "k_weight"):
            arrays[name] = (1 + 0.1 * rng.standard_normal(HEAD_DIM)).astype(BF16)
        turn |= {"eps": 1e-6, "w": DType.BF16}
    if block:
        arrays["k"] = np.zeros((rows, kv_heads * HEAD_DIM), BF16)
        causal, window = block
        return Case(arrays, [("dflash.norm_rope/1", turn),
                             ("dflash.block_attention/1", {**attend, "causal": causal, "window": window})])
    rope = "dflash.norm_rope_cache/1" if norm else "dflash.rope_cache/1"
    return Case(arrays, [(rope, {**turn, "block_rows": block_rows, **pages}), ("dflash.attention/1", attend)])


CASES = [
    pytest.param([100], [1], 1, {}, id="decode"),
    pytest.param([5, 270], [8, 3], 8, {}, id="verify, two sequences, one shortened"),
    pytest.param([508, 40], [8, 0], 8, {}, id="a block across two splits beside an empty lane"),
    pytest.param([520], [8], 8, {"norm": True}, id="two splits, normalized heads"),
    pytest.param([0], [8], 8, {"heads": 4, "kv_heads": 4}, id="the first tokens, one head each"),
    pytest.param([1], [16], 16, {"heads": 2, "kv_heads": 1}, id="a block of sixteen"),
    pytest.param([30], [33], 72, {}, id="a prefill chunk"),
    pytest.param([0], [70], 70, {"norm": True}, id="a first chunk of two tiles"),
    pytest.param([17], [1], 100, {}, id="a chunk of which one row is live"),
]


@pytest.mark.parametrize(("lengths", "lives", "block_rows", "options"), CASES)
def test_attention_computes_what_the_ops_say(interpreter, lengths, lives, block_rows, options):
    case = attention_case(lengths, lives, block_rows, **options)

    got, want = interpreter.run("lower.lower_graph", case), case.expected()

    assert same_bits(got["kv"], want["kv"])
    difference = np.abs(got["out"].astype(np.float32) - want["out"].astype(np.float32))
    assert difference.max() <= 2.0**-7 * np.abs(want["out"].astype(np.float32)).max()
    assert (got["out"] == want["out"]).mean() > 0.97  # sums in another order round apart once in a while


@pytest.mark.parametrize(("causal", "window"), [(0, 0), (1, 0), (0, 6), (1, 50)])
def test_a_draft_block_sees_its_context_and_itself(interpreter, causal, window):
    case = attention_case([7, 100, 530], [8, 5, 0], 8, block=(causal, window))

    got, want = interpreter.run("lower.lower_graph", case), case.expected()

    assert same_bits(got["q"], want["q"]) and same_bits(got["k"], want["k"])
    difference = np.abs(got["out"].astype(np.float32) - want["out"].astype(np.float32))
    assert difference.max() <= 2.0**-7 * np.abs(want["out"].astype(np.float32)).max()


@pytest.mark.parametrize("block_rows", [8, 16])
def test_a_row_has_the_same_bits_in_verify_and_in_decode(interpreter, block_rows):
    verify = attention_case([508], [block_rows], block_rows)
    done = interpreter.run("lower.lower_graph", verify)
    for row in range(0, block_rows, 3):
        decode = attention_case([508 + row], [1], 1)
        arrays = {**decode.arrays, "kv": done["kv"], "page_table": verify.arrays["page_table"],
                  "qkv": verify.arrays["qkv"][row:row + 1]}

        alone = interpreter.run("lower.lower_graph", Case(arrays, decode.ops))

        assert alone["out"][0].tobytes() == done["out"][row].tobytes(), row


def functions(case):
    program, _, calls = case.recorded()
    return [launch.kernel.function for launch in lower("lower.lower_graph", calls, program)]


def test_rotation_and_cache_write_join_attention_where_a_block_fits_one_tile():
    assert functions(attention_case([5], [8], 8)) == [paged_attention]
    assert functions(attention_case([5], [16], 16)) == [rope_heads, paged_attention]
    assert functions(attention_case([5], [33], 72)) == [rope_heads, prefill_attention]


CONTEXT = [pytest.param(3, id="three accepted rows"), pytest.param(0, id="none accepted")]


@pytest.mark.parametrize("live", CONTEXT)
def test_context_rows_are_stored_where_they_were_accepted(interpreter, live):
    case = attention_case([20], [live], 8)
    a, rng = case.arrays, np.random.default_rng(1)
    pages = {k: v for k, v in case.ops[1][1].items() if k in ("page_tokens", "page_bytes", "kv_pages", "max_slots",
                                                              "max_pages")}
    arrays = {"kv_rows": rng.standard_normal((8, 4 * HEAD_DIM)).astype(BF16),
              "k_weight": (1 + 0.1 * rng.standard_normal(HEAD_DIM)).astype(BF16),
              **{n: a[n] for n in ("rope_table", "positions", "slots", "page_table", "kv")}}
    scalars = {"rows": 8, "kv_heads": 2, "head_dim": HEAD_DIM, "rotary_dims": HEAD_DIM, "interleaved": 0,
               "context": PAGE_TOKENS * MAX_PAGES, "act": DType.BF16, "block_rows": 8, "eps": 1e-6, "w": DType.BF16}
    context = Case(arrays, [("dflash.norm_rope_context/1", {**scalars, **pages})])

    got = interpreter.run("lower.lower_graph", context)

    assert same_bits(got["kv"], context.expected()["kv"])
