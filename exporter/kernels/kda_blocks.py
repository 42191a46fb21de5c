"""Kimi delta attention over a prefill chunk, in blocks of rows: products of matrices in place of a walk row by row.

Within a block, the changes solve a triangular system: with gc the sum of a block's log-decays up to a row, L[i, j] =
sum of k_i k_j exp(gc_i - gc_j) below the diagonal, and S the state before the block,

    change = (I + diag(strength) L)^-1 diag(strength) (v - (k exp(gc)) S) = U - W S
    out    = (q exp(gc)) S + P change,   P as L with q_i for k_i, and with its diagonal
    S      = exp(gc_last) S + (k exp(gc_last - gc)).T change

`kda_blocks` makes U, W, P and the scaled keys and queries of all blocks at once, and `kda_blocks_scan` walks them.
Exponents are of differences, never positive, so that no decay overflows, whatever the model's. Blocks begin at
multiples of C rows of a chunk, and chunks at borders of pages, so a state does not depend on how a prompt was cut.
Products are of three TF32 terms, which is fp32's precision; sums differ from the recurrence's in their order alone.

Source of the form: S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", with
a decay for every channel, as flash-linear-attention's `chunk_kda` computes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.kda import live_count

PRECISION = tl.constexpr("tf32x3")


@triton.jit
def kda_blocks(queries_ptr, keys_ptr, qkv_ptr, log_decay_ptr, strength_ptr, positions_ptr, sums_ptr, u_ptr, w_ptr,
               p_ptr, q_ptr, k_ptr, BLOCK_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
               K: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: blocks of C rows, HEADS. All results are fp32: sums, u, w, q and k [rows, HEADS * HEAD_DIM] (sums: gc), p
    [rows, HEADS * C]. Dead rows give zeros, and a dead row's gc is that of the last live one."""
    begin(CHAINED)
    head = tl.program_id(1)
    first = tl.program_id(0) * C
    i, c = tl.arange(0, C), tl.arange(0, K)
    row = first + i
    inside = c < HEAD_DIM
    live = tl.load(positions_ptr + row, mask=row < BLOCK_ROWS, other=-1) >= 0
    width: tl.constexpr = HEADS * HEAD_DIM
    at = row.to(tl.int64)[:, None] * width + head * HEAD_DIM + c[None, :]
    mask = live[:, None] & inside[None, :]
    kept = (row < BLOCK_ROWS)[:, None] & inside[None, :]
    sums = tl.cumsum(tl.load(log_decay_ptr + at, mask=mask, other=0.0), axis=0)
    tl.store(sums_ptr + at, sums, mask=kept)
    key = tl.load(keys_ptr + at, mask=mask, other=0.0)
    query = tl.load(queries_ptr + at, mask=mask, other=0.0)
    strength = tl.load(strength_ptr + row * HEADS + head, mask=live, other=0.0)
    tl.debug_barrier()  # the sums are read back a row at a time
    lower = tl.zeros([C, C], tl.float32)
    upper = tl.zeros([C, C], tl.float32)
    for j in range(C):
        one = (first + j).to(tl.int64) * width + head * HEAD_DIM + c
        there = inside & (first + j < BLOCK_ROWS)
        sums_j = tl.load(sums_ptr + one, mask=there, other=0.0)
        key_j = tl.load(keys_ptr + one, mask=there, other=0.0)
        decayed = tl.exp(tl.minimum(sums - sums_j[None, :], 0.0)) * key_j[None, :]
        lower = tl.where((i[None, :] == j) & (i > j)[:, None], tl.sum(key * decayed, axis=1)[:, None], lower)
        upper = tl.where((i[None, :] == j) & (i >= j)[:, None], tl.sum(query * decayed, axis=1)[:, None], upper)
    # (I + diag(strength) lower)^-1 by forward substitution, a row at a time
    inverse = -strength[:, None] * lower
    for n in range(1, C):
        this = tl.sum(tl.where((i == n)[:, None], inverse, 0.0), axis=0)
        this += tl.sum(this[:, None] * inverse, axis=0)
        inverse = tl.where((i == n)[:, None], this[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    last = tl.sum(tl.where((i == C - 1)[:, None], sums, 0.0), axis=0)
    tl.store(k_ptr + at, key * tl.exp(last[None, :] - sums), mask=kept)
    grown = tl.exp(sums)
    tl.store(q_ptr + at, query * grown, mask=kept)
    tl.store(w_ptr + at, tl.dot(inverse, strength[:, None] * key * grown, input_precision=PRECISION), mask=kept)
    value = tl.load(qkv_ptr + row.to(tl.int64)[:, None] * (3 * width) + 2 * width + head * HEAD_DIM + c[None, :],
                    mask=mask, other=0.0).to(tl.float32)
    tl.store(u_ptr + at, tl.dot(inverse, strength[:, None] * value, input_precision=PRECISION), mask=kept)
    tl.store(p_ptr + row.to(tl.int64)[:, None] * (HEADS * C) + head * C + i[None, :], upper,
             mask=(row < BLOCK_ROWS)[:, None])


@triton.jit
def kda_blocks_scan(u_ptr, w_ptr, p_ptr, q_ptr, k_ptr, sums_ptr, positions_ptr, slots_ptr, state_ptr, out_ptr,
                    BLOCK_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, K: tl.constexpr,
                    V: tl.constexpr, C: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
                    CHAINED: tl.constexpr):
    """The recurrence over blocks, committed to the slot's state. Grid: tiles of V columns, HEADS.

    Key channels are cut into SLICES, one per warp, whose parts of a product are summed in order.
    """
    begin(CHAINED)
    head = tl.program_id(1)
    count = live_count(positions_ptr, 0, BLOCK_ROWS)
    started = tl.load(positions_ptr) > 0
    slot = tl.maximum(tl.load(slots_ptr), 0)
    part: tl.constexpr = K // SLICES
    i, j = tl.arange(0, C)[None, :, None], tl.arange(0, part)
    s, v = tl.arange(0, SLICES)[:, None, None], tl.program_id(0) * V + tl.arange(0, V)
    by_row, by_column = s * part + j[None, None, :], s * part + j[None, :, None]  # key channels of [S, C, P], [S, P, V]
    width: tl.constexpr = HEADS * HEAD_DIM
    held = state_ptr + ((slot * HEADS + head).to(tl.int64) * HEAD_DIM + by_column) * HEAD_DIM + v[None, None, :]
    inside = (by_column < HEAD_DIM) & (v < HEAD_DIM)[None, None, :]
    state = tl.load(held, mask=inside & started & (count > 0), other=0.0)
    rows = tl.arange(0, C)
    for first in tl.range(0, count, C, num_stages=STAGES):
        at = (first + i).to(tl.int64) * width + head * HEAD_DIM + by_row
        there = (first + i < BLOCK_ROWS) & (by_row < HEAD_DIM)
        row = first + rows
        kept = row < BLOCK_ROWS
        value_at = row.to(tl.int64)[:, None] * width + head * HEAD_DIM + v[None, :]
        value_mask = kept[:, None] & (v < HEAD_DIM)[None, :]
        w = tl.load(w_ptr + at, mask=there, other=0.0)
        q = tl.load(q_ptr + at, mask=there, other=0.0)
        key = tl.load(k_ptr + at, mask=there, other=0.0)
        u = tl.load(u_ptr + value_at, mask=value_mask, other=0.0)
        p = tl.load(p_ptr + row.to(tl.int64)[:, None] * (HEADS * C) + head * C + rows[None, :], mask=kept[:, None],
                    other=0.0)
        final = tl.max(tl.where(kept, row, 0), axis=0).to(tl.int64)
        last = tl.load(sums_ptr + final * width + head * HEAD_DIM + by_column, mask=by_column < HEAD_DIM, other=0.0)
        change = u - tl.sum(tl.dot(w, state, input_precision=PRECISION), axis=0)
        out = tl.sum(tl.dot(q, state, input_precision=PRECISION), axis=0)
        out += tl.dot(p, change, input_precision=PRECISION)
        each = tl.broadcast_to(change[None, :, :], [SLICES, C, V])
        state = tl.dot(tl.permute(key, (0, 2, 1)), each, state * tl.exp(last), input_precision=PRECISION)
        tl.store(out_ptr + value_at, out, mask=value_mask)
    for first in range(tl.cdiv(count, C) * C, BLOCK_ROWS, C):
        row = first + rows
        tl.store(out_ptr + row.to(tl.int64)[:, None] * width + head * HEAD_DIM + v[None, :],
                 tl.zeros([C, V], tl.float32), mask=(row < BLOCK_ROWS)[:, None] & (v < HEAD_DIM)[None, :])
    tl.store(held, state, mask=inside & (count > 0))
