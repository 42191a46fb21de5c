"""Causal attention of a prefill chunk over the paged cache: a tile of rows of one head walks the keys page by page.

Nothing is split or merged, so a row's result depends on its own visible keys alone, in pages at absolute positions: a
prompt cut into other chunks gives the same bits. As in exporter.kernels.attention the probabilities meet V as two bf16
halves, so that they are not rounded to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _page(q, base, key, seen, top, total, mixed, factor, SIDE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One page: online softmax to the base 2, in fp32. seen: [rows, keys], or None where every row sees every key."""
    d = tl.arange(0, HEAD_DIM)
    keys = tl.load(base + key[:, None] * HEAD_DIM + d[None, :])
    values = tl.load(base + SIDE + key[:, None] * HEAD_DIM + d[None, :])
    scores = tl.dot(q, tl.trans(keys)) * factor
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.where((tl.max(seen.to(tl.int32), axis=0) > 0)[:, None], values, 0.0)  # unwritten rows may be NaN
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - safe[:, None])
    alpha = tl.exp2(tl.where(top == float("-inf"), safe, top) - safe)
    high = p.to(tl.bfloat16)
    low = (p - high.to(tl.float32)).to(tl.bfloat16)
    mixed = mixed * alpha[:, None]
    mixed = tl.dot(high, values, mixed)
    mixed = tl.dot(low, values, mixed)
    return new_top, total * alpha + tl.sum(p, axis=1), mixed


@triton.jit
def prefill_attention(q_ptr, positions_ptr, slots_ptr, page_table_ptr, kv_ptr, out_ptr, rows, scale,
                      HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BM: tl.constexpr,
                      PAGE_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_PAGES: tl.constexpr,
                      STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: tiles of BM rows, HEADS. Rows of one sequence at consecutive positions; those without one come last and
    give zeros. The longest tiles start first."""
    begin(CHAINED)
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    r, d, t = tile * BM + tl.arange(0, BM), tl.arange(0, HEAD_DIM), tl.arange(0, PAGE_TOKENS)
    inside = r < rows
    position = tl.load(positions_ptr + r, mask=inside, other=-1)
    at = r.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
    slot = tl.maximum(tl.load(slots_ptr), 0)
    side: tl.constexpr = KV_HEADS * PAGE_TOKENS * HEAD_DIM
    factor = scale * LOG2_E
    first = tl.load(positions_ptr + tile * BM)
    keys_end = tl.max(position, axis=0) + 1
    whole = tl.maximum(first + 1, 0) // PAGE_TOKENS * PAGE_TOKENS  # pages that every row of the tile sees whole
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, HEAD_DIM], tl.float32)
    for key0 in tl.range(0, whole, PAGE_TOKENS, num_stages=STAGES):
        page = tl.load(page_table_ptr + slot * MAX_PAGES + key0 // PAGE_TOKENS).to(tl.int64)
        base = kv_ptr + page * (PAGE_BYTES // 2) + kv_head * (PAGE_TOKENS * HEAD_DIM)
        top, total, mixed = _page(q, base, t, None, top, total, mixed, factor, side, HEAD_DIM)
    for key0 in tl.range(whole, keys_end, PAGE_TOKENS):
        page = tl.load(page_table_ptr + slot * MAX_PAGES + key0 // PAGE_TOKENS).to(tl.int64)
        base = kv_ptr + page * (PAGE_BYTES // 2) + kv_head * (PAGE_TOKENS * HEAD_DIM)
        seen = (key0 + t)[None, :] <= position[:, None]
        top, total, mixed = _page(q, base, t, seen, top, total, mixed, factor, side, HEAD_DIM)
    result = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None] + tl.zeros([BM, HEAD_DIM], tl.float32))
    result = tl.where((position >= 0)[:, None], result, 0.0)
    tl.store(out_ptr + at, result.to(tl.bfloat16), mask=inside[:, None])
