"""Attention over the paged cache, for a tile of rows of one sequence and one K/V head, split at absolute positions.

A split covers SPLIT_TOKENS positions. Each block handles one split and writes its running maximum, sum and mix; the
last block to arrive merges the splits in an order that their places alone decide. A split of which a row sees nothing
adds zero, so a row's result depends on its own visible keys alone. Where only one split is live, its block finishes
alone.

The probabilities meet V as two bf16 halves (high and remainder), so that they are not rounded to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin


@triton.jit
def _accumulate(q, keys, values, visible, top, total, mixed, scale):
    """One page: online softmax in fp32. q [M, D], keys and values [T, D] bf16, visible [M, T]."""
    scores = tl.where(visible, tl.dot(q, tl.trans(keys)) * scale, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - safe[:, None])
    alpha = tl.exp(tl.where(top == float("-inf"), safe, top) - safe)
    high = p.to(tl.bfloat16)
    low = (p - high.to(tl.float32)).to(tl.bfloat16)
    mixed = mixed * alpha[:, None]
    mixed = tl.dot(high, values, mixed)
    mixed = tl.dot(low, values, mixed)
    return new_top, total * alpha + tl.sum(p, axis=1), mixed


@triton.jit
def _rotated(x_ptr, at, d, weight_ptr, table_ptr, position, inside, ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr,
             EPS: tl.constexpr):
    """Rows of heads at `x_ptr + at[:, None]`, normalized when there is a weight, rotated by position: [rows, D] bf16.
    Rounded as exporter.kernels.rope rounds."""
    half: tl.constexpr = ROTARY // 2
    pair = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + at[:, None] + pair[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = tl.sum(x * x, axis=1) / HEAD_DIM
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))[:, None]
        w = tl.load(weight_ptr + d).to(tl.float32)[None, :]
        w_pair = tl.load(weight_ptr + pair).to(tl.float32)[None, :]
        x = ((x * inverse).to(tl.bfloat16).to(tl.float32) * w).to(tl.bfloat16).to(tl.float32)
        partner = ((partner * inverse).to(tl.bfloat16).to(tl.float32) * w_pair).to(tl.bfloat16).to(tl.float32)
    angle = tl.where(d < half, d, d - half)
    base = table_ptr + tl.maximum(position, 0).to(tl.int64)[:, None] * (2 * half) + angle[None, :]
    turning = (d < ROTARY)[None, :] & inside[:, None]
    cos = tl.load(base, mask=turning, other=1.0)
    sin = tl.load(base + half, mask=turning, other=0.0)
    signed = tl.where((d < half)[None, :], -partner, partner)
    return tl.where((d < ROTARY)[None, :], x * cos + signed * sin, x).to(tl.bfloat16)


@triton.jit
def _part(parts_ptr, split, live_splits, M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Maximum [M] and mix [M, D] of a split; minus infinity and zeros for one that is not live."""
    here = parts_ptr + split * (M * (HEAD_DIM + 2))
    m, d = tl.arange(0, M), tl.arange(0, HEAD_DIM)
    top = tl.load(here + m, mask=split < live_splits, other=float("-inf"), cache_modifier=".cg")
    mixed = tl.load(here + 2 * M + m[:, None] * HEAD_DIM + d[None, :], mask=split < live_splits, other=0.0,
                    cache_modifier=".cg")
    return top, mixed


@triton.jit
def _merged(parts_ptr, live_splits, M: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Sum [M] and mix [M, D] of all live splits, from their maxima, sums and mixes; no load waits for another."""
    stride: tl.constexpr = M * (HEAD_DIM + 2)
    m = tl.arange(0, M)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    live = (s < live_splits)[:, None]
    at = parts_ptr + s[:, None] * stride + m[None, :]
    tops = tl.load(at, mask=live, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + M, mask=live, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - safe[None, :]), axis=0)
    mixed = tl.zeros([M, HEAD_DIM], tl.float32)
    for first in range(0, live_splits, 4):
        top_0, part_0 = _part(parts_ptr, first, live_splits, M, HEAD_DIM)
        top_1, part_1 = _part(parts_ptr, first + 1, live_splits, M, HEAD_DIM)
        top_2, part_2 = _part(parts_ptr, first + 2, live_splits, M, HEAD_DIM)
        top_3, part_3 = _part(parts_ptr, first + 3, live_splits, M, HEAD_DIM)
        mixed += part_0 * tl.exp(top_0 - safe)[:, None]
        mixed += part_1 * tl.exp(top_1 - safe)[:, None]
        mixed += part_2 * tl.exp(top_2 - safe)[:, None]
        mixed += part_3 * tl.exp(top_3 - safe)[:, None]
    return total, mixed


@triton.jit
def paged_attention(q_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, table_ptr, k_ptr, v_ptr, positions_ptr, slots_ptr,
                    page_table_ptr, kv_ptr, out_ptr, partial_ptr, counter_ptr, block_rows, v_stride, scale,
                    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, R: tl.constexpr,
                    M: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_PAGES: tl.constexpr,
                    SPLIT_TOKENS: tl.constexpr, SPLITS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                    ROTARY: tl.constexpr, EPS: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: groups * tiles, KV_HEADS, SPLITS. M >= R * (HEADS / KV_HEADS), a power of two.

    With k_ptr (a draft block): context keys lie before the group's first position, and the block's own K and V come
    from k_ptr [rows, KV_HEADS * HEAD_DIM] and v_ptr (row stride v_stride); the block is handled by the last live split.
    Without: keys lie at positions up to each row's own. With qkv_ptr, all rows of a group fit one tile: q is made from
    its columns, and the keys and values of rows whose positions lie in this block's split are written to the cache
    first and read back from there with the others, so that a page is summed alike whichever step wrote it.
    """
    begin(CHAINED)
    tiles = tl.cdiv(block_rows, R)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    repeat: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, M)
    row_in_tile, head = m % R, m // R
    row = group * block_rows + tile * R + row_in_tile
    inside = (head < repeat) & (tile * R + row_in_tile < block_rows)
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    start = tl.load(positions_ptr + group * block_rows)
    if k_ptr is not None:
        keys_end = start
    else:
        keys_end = tl.max(position, axis=0) + 1
    live_splits = tl.maximum(tl.cdiv(keys_end, SPLIT_TOKENS), 1)
    if split >= live_splits:
        return
    d = tl.arange(0, HEAD_DIM)
    at = row.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + ((kv_head * repeat + head) * HEAD_DIM)[:, None] + d[None, :]
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    side: tl.constexpr = KV_HEADS * PAGE_TOKENS * HEAD_DIM
    if qkv_ptr is not None:
        width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        q_at = row.to(tl.int64) * width + (kv_head * repeat + head) * HEAD_DIM
        q = _rotated(qkv_ptr, q_at, d, q_weight_ptr, table_ptr, position, inside, ROTARY, HEAD_DIM, EPS)
        i = tl.arange(0, R)
        new_row = (group * block_rows + i).to(tl.int64)
        valid = i < block_rows
        new_position = tl.load(positions_ptr + new_row, mask=valid, other=-1)
        new_at = new_row * width + (HEADS + kv_head) * HEAD_DIM
        new_keys = _rotated(qkv_ptr, new_at, d, k_weight_ptr, table_ptr, new_position, valid, ROTARY, HEAD_DIM, EPS)
        new_values = tl.load(qkv_ptr + (new_at + KV_HEADS * HEAD_DIM)[:, None] + d[None, :], mask=valid[:, None],
                             other=0.0)
        mine = (new_position >= split * SPLIT_TOKENS) & (new_position < (split + 1) * SPLIT_TOKENS)
        new_page = tl.load(page_table_ptr + slot * MAX_PAGES + new_position // PAGE_TOKENS, mask=mine, other=0)
        into = new_page.to(tl.int64) * (PAGE_BYTES // 2) + (
            kv_head * PAGE_TOKENS + new_position % PAGE_TOKENS) * HEAD_DIM
        tl.store(kv_ptr + into[:, None] + d[None, :], new_keys, mask=mine[:, None])
        tl.store(kv_ptr + side + into[:, None] + d[None, :], new_values, mask=mine[:, None])
        tl.debug_barrier()
    else:
        q = tl.load(q_ptr + at, mask=inside[:, None], other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, HEAD_DIM], tl.float32)
    t = tl.arange(0, PAGE_TOKENS)
    first = split * SPLIT_TOKENS
    last = tl.minimum(first + SPLIT_TOKENS, keys_end)
    for key0 in range(first, last, PAGE_TOKENS):
        page = tl.load(page_table_ptr + slot * MAX_PAGES + key0 // PAGE_TOKENS).to(tl.int64)
        base = kv_ptr + page * (PAGE_BYTES // 2) + kv_head * (PAGE_TOKENS * HEAD_DIM)
        key = key0 + t
        present = key < keys_end
        keys = tl.load(base + t[:, None] * HEAD_DIM + d[None, :], mask=present[:, None], other=0.0)
        values = tl.load(base + side + t[:, None] * HEAD_DIM + d[None, :], mask=present[:, None], other=0.0)
        seen = present[None, :] & (position >= 0)[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (tl.abs(position[:, None] - key[None, :]) < WINDOW)
        top, total, mixed = _accumulate(q, keys, values, seen, top, total, mixed, scale)
    if k_ptr is not None:  # noqa: SIM102 (a compile-time branch stays apart from a run-time one)
        if split == live_splits - 1:
            for first_row in range(0, block_rows, 16):
                i = first_row + tl.arange(0, 16)
                block_row = group * block_rows + i
                key = tl.load(positions_ptr + block_row, mask=i < block_rows, other=-1)
                present = key >= 0
                offset = block_row.to(tl.int64)[:, None]
                keys = tl.load(k_ptr + offset * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + d[None, :],
                               mask=present[:, None], other=0.0)
                values = tl.load(v_ptr + offset * v_stride + kv_head * HEAD_DIM + d[None, :], mask=present[:, None],
                                 other=0.0)
                seen = present[None, :] & (position >= 0)[:, None]
                if CAUSAL:
                    seen = seen & (key[None, :] <= position[:, None])
                if WINDOW > 0:
                    seen = seen & (tl.abs(position[:, None] - key[None, :]) < WINDOW)
                top, total, mixed = _accumulate(q, keys, values, seen, top, total, mixed, scale)
    if live_splits > 1:
        lane = (tl.program_id(0) * KV_HEADS + kv_head).to(tl.int64)
        stride: tl.constexpr = M * (HEAD_DIM + 2)
        own = partial_ptr + (lane * SPLITS + split) * stride
        tl.store(own + m, top)
        tl.store(own + M + m, total)
        tl.store(own + 2 * M + m[:, None] * HEAD_DIM + d[None, :], mixed)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + lane, 1, sem="acq_rel", scope="gpu")
        if arrived != live_splits - 1:
            return
        tl.store(counter_ptr + lane, 0)
        tl.debug_barrier()
        total, mixed = _merged(partial_ptr + lane * SPLITS * stride, live_splits, M, HEAD_DIM, SPLITS)
    result = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None] + tl.zeros([M, HEAD_DIM], tl.float32))
    tl.store(out_ptr + at, result.to(tl.bfloat16), mask=inside[:, None])
