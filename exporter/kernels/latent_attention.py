"""Latent attention of a step over the paged cache: a tile of (row, head) pairs of one sequence, split at absolute
positions.

All heads share the one cached head, and a cached row is key and value both: its first RANK values meet the query as
part of the key and the probabilities as the value. So pairs of rows and heads fill a tile in the order in which their
queries lie in memory. Splits, their merge and the two bf16 halves of the probabilities are as in
exporter.kernels.attention: a pair's result depends on its own query and its own visible keys alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.latent import pages_of
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.kernels.tuning import (
    LATENT_KEYS,
    LATENT_PAIRS,
    LATENT_STAGES,
    LATENT_WARPS,
    MAX_LANES,
    latent_split_tokens,
)
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

MERGED_COLUMNS = 128  # of the mix, of four splits at once


@triton.jit
def accumulate(q, q_shared, latent, shared, seen, top, total, mixed, scale):
    """Some keys: online softmax in fp32. q [M, D], q_shared [M, P], latent [T, D], shared [T, P] bf16, seen [M, T]."""
    scores = tl.dot(q_shared, tl.trans(shared), tl.dot(q, tl.trans(latent))) * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(scores - safe[:, None])
    alpha = tl.exp(tl.where(top == float("-inf"), safe, top) - safe)
    high = p.to(tl.bfloat16)
    low = (p - high.to(tl.float32)).to(tl.bfloat16)
    mixed = mixed * alpha[:, None]
    mixed = tl.dot(high, latent, mixed)
    mixed = tl.dot(low, latent, mixed)
    return new_top, total * alpha + tl.sum(p, axis=1), mixed


@triton.jit
def _seen(key, present, position, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys [T] each query [M] sees."""
    seen = present[None, :] & (position >= 0)[:, None]
    if CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (tl.abs(position[:, None] - key[None, :]) < WINDOW)
    return seen


@triton.jit
def row_parts(ptr, i, present, RANK: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, P: tl.constexpr):
    """Rows i of RANK + ROPE values each from ptr on, as [., D] and [., P]; zeros where there is none."""
    d, e = tl.arange(0, D), tl.arange(0, P)
    here = ptr + (i * (RANK + ROPE))[:, None]
    latent = tl.load(here + d[None, :], mask=present[:, None] & (d < RANK)[None, :], other=0.0)
    shared = tl.load(here + RANK + e[None, :], mask=present[:, None] & (e < ROPE)[None, :], other=0.0)
    return latent, shared


@triton.jit
def store_pairs(out_ptr, c, inside, total, mixed, RANK: tl.constexpr, M: tl.constexpr):
    """Columns c of the results of M pairs, the first of which lies at out_ptr; of those without a key, zeros."""
    result = tl.div_rn(mixed, tl.where(total > 0, total, 1.0)[:, None] + tl.zeros_like(mixed))
    tl.store(out_ptr + tl.arange(0, M)[:, None] * RANK + c[None, :], result.to(tl.bfloat16),
             mask=inside[:, None] & (c < RANK)[None, :])


@triton.jit
def _part(parts_ptr, split, live_splits, c, M: tl.constexpr, D: tl.constexpr):
    """Maximum [M] and columns c of the mix of a split; minus infinity and zeros for one that is not live."""
    here = parts_ptr + split * (M * (D + 2))
    m = tl.arange(0, M)
    top = tl.load(here + m, mask=split < live_splits, other=float("-inf"), cache_modifier=".cg")
    mixed = tl.load(here + 2 * M + m[:, None] * D + c[None, :], mask=split < live_splits, other=0.0,
                    cache_modifier=".cg")
    return top, mixed


@triton.jit
def _store_merged(parts_ptr, live_splits, out_ptr, inside, RANK: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
                  C: tl.constexpr, SPLITS: tl.constexpr):
    """The pairs' results from all live splits' maxima, sums and mixes, C columns at a time."""
    stride: tl.constexpr = M * (D + 2)
    m, s = tl.arange(0, M), tl.arange(0, triton.next_power_of_2(SPLITS))
    live = (s < live_splits)[:, None]
    at = parts_ptr + s[:, None] * stride + m[None, :]
    tops = tl.load(at, mask=live, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + M, mask=live, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - safe[None, :]), axis=0)
    for first_column in range(0, D, C):
        c = first_column + tl.arange(0, C)
        mixed = tl.zeros([M, C], tl.float32)
        for first in range(0, live_splits, 4):
            top_0, part_0 = _part(parts_ptr, first, live_splits, c, M, D)
            top_1, part_1 = _part(parts_ptr, first + 1, live_splits, c, M, D)
            top_2, part_2 = _part(parts_ptr, first + 2, live_splits, c, M, D)
            top_3, part_3 = _part(parts_ptr, first + 3, live_splits, c, M, D)
            mixed += part_0 * tl.exp(top_0 - safe)[:, None]
            mixed += part_1 * tl.exp(top_1 - safe)[:, None]
            mixed += part_2 * tl.exp(top_2 - safe)[:, None]
            mixed += part_3 * tl.exp(top_3 - safe)[:, None]
        store_pairs(out_ptr, c, inside, total, mixed, RANK, M)


@triton.jit
def latent_step(q_ptr, rows_ptr, positions_ptr, slots_ptr, page_table_ptr, kv_ptr, out_ptr, partial_ptr, counter_ptr,
                block_rows, scale, HEADS: tl.constexpr, RANK: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
                P: tl.constexpr, M: tl.constexpr, T: tl.constexpr, C: tl.constexpr, PAGE_TOKENS: tl.constexpr,
                PAGE_BYTES: tl.constexpr, MAX_PAGES: tl.constexpr, SPLIT_TOKENS: tl.constexpr, SPLITS: tl.constexpr,
                CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: groups * tiles of M pairs, SPLITS. D and P are the powers of two at or above RANK and ROPE, 16 at least; T
    keys, which divide a page, are taken at a time.

    With rows_ptr (a draft block): context keys lie before the group's first position, and the block's own keys are
    rows_ptr [rows, RANK + ROPE], handled by the last live split. Without: keys lie at positions up to each row's own.
    """
    begin(CHAINED)
    width: tl.constexpr = RANK + ROPE
    tiles = tl.cdiv(block_rows * HEADS, M)
    lane, split = tl.program_id(0), tl.program_id(1)
    group = lane // tiles
    m, t, d = tl.arange(0, M), tl.arange(0, T), tl.arange(0, D)
    first_pair = lane % tiles * M
    inside = first_pair + m < block_rows * HEADS
    first_row = group * block_rows
    position = tl.load(positions_ptr + first_row + (first_pair + m) // HEADS, mask=inside, other=-1)
    if rows_ptr is not None:
        keys_end = tl.load(positions_ptr + first_row)
        position = tl.where(keys_end >= 0, position, -1)
    else:
        keys_end = tl.max(position, axis=0) + 1
    live_splits = tl.maximum(tl.cdiv(keys_end, SPLIT_TOKENS), 1)
    if split >= live_splits:
        return
    pair = first_row.to(tl.int64) * HEADS + first_pair
    out_ptr += pair * RANK
    q, q_shared = row_parts(q_ptr + pair * width, m, inside, RANK, D, ROPE, P)
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    first = split * SPLIT_TOKENS
    last = tl.minimum(first + SPLIT_TOKENS, keys_end)
    for key0 in tl.range(first, last, T, num_stages=STAGES):
        page = tl.load(page_table_ptr + slot * MAX_PAGES + key0 // PAGE_TOKENS).to(tl.int64)
        key = key0 + t
        present = key < keys_end
        base = kv_ptr + page * (PAGE_BYTES // 2) + key0 % PAGE_TOKENS * width
        latent, shared = row_parts(base, t, present, RANK, D, ROPE, P)
        seen = _seen(key, present, position, CAUSAL, WINDOW)
        top, total, mixed = accumulate(q, q_shared, latent, shared, seen, top, total, mixed, scale)
    if rows_ptr is not None:  # noqa: SIM102 (a compile-time branch stays apart from a run-time one)
        if split == live_splits - 1:
            rows_ptr += first_row.to(tl.int64) * width
            for first_own in tl.range(0, block_rows, T, num_stages=2):
                own = first_own + t
                key = tl.load(positions_ptr + first_row + own, mask=own < block_rows, other=-1)
                latent, shared = row_parts(rows_ptr, own, key >= 0, RANK, D, ROPE, P)
                seen = _seen(key, key >= 0, position, CAUSAL, WINDOW)
                top, total, mixed = accumulate(q, q_shared, latent, shared, seen, top, total, mixed, scale)
    if live_splits == 1:
        store_pairs(out_ptr, d, inside, total, mixed, RANK, M)
    else:
        stride: tl.constexpr = M * (D + 2)
        parts = partial_ptr + lane.to(tl.int64) * (SPLITS * stride)
        own_part = parts + split * stride
        tl.store(own_part + m, top)
        tl.store(own_part + M + m, total)
        tl.store(own_part + 2 * M + m[:, None] * D + d[None, :], mixed)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + lane, 1, sem="acq_rel", scope="gpu")
        if arrived == live_splits - 1:
            tl.store(counter_ptr + lane, 0)
            tl.debug_barrier()
            _store_merged(parts, live_splits, out_ptr, inside, RANK, M, D, C, SPLITS)


def lower_latent_block_attention(call: OpCall, program: Program) -> list[Launch]:
    """A draft block over its context and itself.

    Raises:
        CaptureError: GPU_ACT; activations are not bf16.
    """
    check_act(call)
    return [step_launch(call, program)]


def step_launch(call: OpCall, program: Program) -> Launch:
    """The blocks of a step: of a target over the cache, of a draft over the cache and themselves."""
    o, rows = call.operands, call.operands.get("rows")
    heads, rank, rope = call.number("heads"), call.number("rank"), call.number("rope_dim")
    groups, block_rows = call.number("groups"), call.number("block_rows")
    page_tokens, max_pages = call.number("page_tokens"), call.number("max_pages")
    depth = max(16, power_of_two(rank))
    split = latent_split_tokens(page_tokens * max_pages)
    splits = cdiv(page_tokens * max_pages, split)
    lanes = groups * cdiv(block_rows * heads, LATENT_PAIRS)
    assert lanes <= MAX_LANES, lanes
    partial = program.scratch("attention_partial", DType.F32, (lanes * splits, LATENT_PAIRS * (depth + 2)))
    counters = program.once("attention_counters", DType.I32, (MAX_LANES,))
    kv = pages_of(o["kv"])
    kernel = Kernel(
        latent_step, (call.op,),
        {"HEADS": heads, "RANK": rank, "D": depth, "ROPE": rope, "P": max(16, power_of_two(rope)), "M": LATENT_PAIRS,
         "T": min(page_tokens, LATENT_KEYS), "C": min(depth, MERGED_COLUMNS), "PAGE_TOKENS": page_tokens,
         "PAGE_BYTES": call.number("page_bytes"), "MAX_PAGES": max_pages, "SPLIT_TOKENS": split, "SPLITS": splits,
         "CAUSAL": rows is None or bool(call.number("causal")), "WINDOW": 0 if rows is None else call.number("window"),
         "STAGES": LATENT_STAGES, **({"rows_ptr": None} if rows is None else {})},
        num_warps=LATENT_WARPS)
    arguments: dict[str, Tensor | int | float] = {
        "q_ptr": o["q"], "positions_ptr": o["positions"], "slots_ptr": o["slots"], "page_table_ptr": o["page_table"],
        "kv_ptr": kv, "out_ptr": o["out"], "partial_ptr": partial, "counter_ptr": counters, "block_rows": block_rows,
        "scale": call.real("scale"), **({} if rows is None else {"rows_ptr": rows})}
    reads = (o["q"], o["positions"], o["slots"], o["page_table"], kv, partial, counters)
    return Launch(kernel, arguments, (lanes, splits, 1), reads if rows is None else (*reads, rows),
                  (o["out"], partial, counters), (call.node_id,), call.label)
