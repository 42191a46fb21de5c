"""Rotary embedding with the per-head norm before it and the paged K/V write after it; one block per row and head.

One kernel serves dflash.rope_cache, norm_rope_cache, norm_rope and norm_rope_context: which heads it handles, whether
it normalizes them, and where k and v go are constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin


@triton.jit
def rope_heads(x_ptr, q_weight_ptr, k_weight_ptr, table_ptr, positions_ptr, slots_ptr, page_table_ptr, q_ptr, k_ptr,
               kv_ptr, block_rows,
               HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
               EPS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_PAGES: tl.constexpr,
               CHAINED: tl.constexpr):
    """x: [rows, (HEADS + 2 KV_HEADS) * HEAD_DIM]; HEADS is 0 for context rows. Grid: rows, HEADS + 2 KV_HEADS.

    Head h < HEADS is a query, then come keys, then values. Keys and values go to the cache when kv_ptr is given (dead
    rows do not), keys to k_ptr otherwise. HEAD_DIM is a power of two, and ROTARY an even share of it.
    """
    begin(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    d = tl.arange(0, HEAD_DIM)
    half: tl.constexpr = ROTARY // 2
    source = x_ptr + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    x = tl.load(source + d).to(tl.float32)
    if head < HEADS + KV_HEADS:
        pair = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
        partner = tl.load(source + pair).to(tl.float32)
        if k_weight_ptr is not None:
            mean = tl.sum(x * x, axis=0) / HEAD_DIM
            inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))
            w = tl.load(k_weight_ptr + d).to(tl.float32)
            w_pair = tl.load(k_weight_ptr + pair).to(tl.float32)
            if HEADS > 0:
                w = tl.where(head < HEADS, tl.load(q_weight_ptr + d).to(tl.float32), w)
                w_pair = tl.where(head < HEADS, tl.load(q_weight_ptr + pair).to(tl.float32), w_pair)
            x = ((x * inverse).to(tl.bfloat16).to(tl.float32) * w).to(tl.bfloat16).to(tl.float32)
            partner = ((partner * inverse).to(tl.bfloat16).to(tl.float32) * w_pair).to(tl.bfloat16).to(tl.float32)
        angle = tl.where(d < half, d, d - half)
        turning = d < ROTARY
        base = table_ptr + tl.maximum(position, 0).to(tl.int64) * (2 * half)
        cos = tl.load(base + angle, mask=turning, other=1.0)
        sin = tl.load(base + half + angle, mask=turning, other=0.0)
        signed = tl.where(d < half, -partner, partner)
        x = tl.where(turning, x * cos + signed * sin, x)
    y = x.to(tl.bfloat16)
    is_query = head < HEADS
    if HEADS > 0:
        tl.store(q_ptr + row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, y, mask=is_query & (d >= 0))
    if kv_ptr is not None:
        # K heads and V heads lie one after the other in a page, so one index serves both.
        stored = (position >= 0) & (head >= HEADS)
        slot = tl.load(slots_ptr + row // block_rows)
        page = tl.load(page_table_ptr + slot * MAX_PAGES + position // PAGE_TOKENS, mask=stored, other=0)
        at = page.to(tl.int64) * (PAGE_BYTES // 2)
        at += ((head - HEADS) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM
        tl.store(kv_ptr + at + d, y, mask=stored & (d >= 0))
    else:
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        tl.store(k_ptr + row.to(tl.int64) * (KV_HEADS * HEAD_DIM) + (head - HEADS) * HEAD_DIM + d, y,
                 mask=is_key & (d >= 0))
