"""Proposals: the selector's walk over candidates, and the plain argmax of a draft without a selector.

The walk is serial, but what it needs is not: how well each candidate follows each candidate of the slot before. A
first launch scores all these pairs at once; the walk then reads one row of scores per slot.

A slot whose best score is not finite proposes -1, and so does every later slot of the group: the verify step that
reads a -1 produces -1 (the CPU op raises SELECTOR_NAN instead).
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.argmax import best_key, lower_best_keys
from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import LOWEST, is_finite, key_id, key_of, key_order, ordered, value_of
from exporter.kernels.philox import PROPOSAL, draw
from exporter.kernels.rows import check_act, power_of_two
from exporter.program.builder import Program
from runtime.ops import DType

LANES = 8        # partial sums that numpy's pairwise sum carries through a run
RUN_TERMS = 128  # terms of a run; longer sums are halved


@triton.jit
def score_pairs(ids_ptr, unary_ptr, projected_ptr, predecessor_ptr, successor_ptr, tokens_ptr, positions_ptr,
                slots_ptr, pairs_ptr, BLOCK_ROWS: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
                RANK: tl.constexpr, VOCAB: tl.constexpr, PARTIALS: tl.constexpr, LANES: tl.constexpr,
                RUN: tl.constexpr, LOG_PARTIALS: tl.constexpr, CHAINED: tl.constexpr):
    """pairs[group, slot, a, c]: the score of candidate c after candidate a of the slot before (a = 0: the anchor).

    Grid: top_k, depth, groups. The products of a score are summed as numpy sums them where the rank is a power of two:
    PARTIALS running sums, LANES for each RUN terms, added as a balanced tree.
    """
    begin(CHAINED)
    a, i, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = group * BLOCK_ROWS + i + 1
    if (tl.load(slots_ptr + group) >= 0) & (tl.load(positions_ptr + row) >= 0) & ((i > 0) | (a == 0)):
        k, p = tl.arange(0, K_PAD), tl.arange(0, PARTIALS)
        if i == 0:
            previous = tl.load(tokens_ptr + row - 1)
        else:
            previous = tl.load(ids_ptr + (row - 1) * TOP_K + a)
        known = (previous >= 0) & (previous < VOCAB)
        ids = tl.load(ids_ptr + row * TOP_K + k, mask=k < TOP_K, other=0).to(tl.int64)
        hidden_ptr = projected_ptr + row * RANK
        before_ptr = predecessor_ptr + previous.to(tl.int64) * RANK
        acc = tl.zeros((K_PAD, PARTIALS), tl.float32)
        for step in tl.static_range(RUN // LANES):
            r = p // LANES * RUN + step * LANES + p % LANES
            before = tl.load(before_ptr + r, mask=known & (r < RANK), other=float("nan")).to(tl.float32)
            hidden = tl.load(hidden_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
            link = tl.where(r < RANK, (before * hidden).to(tl.bfloat16).to(tl.float32), 0.0)
            after = tl.load(successor_ptr + ids[:, None] * RANK + r[None, :],
                            mask=(k < TOP_K)[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
            acc += after * link[None, :]
        for level in tl.static_range(LOG_PARTIALS):
            left, right = tl.split(tl.reshape(acc, (K_PAD, PARTIALS >> (level + 1), 2)))
            acc = left + right
        unary = tl.load(unary_ptr + row * TOP_K + k, mask=k < TOP_K, other=0.0)
        score = unary + tl.reshape(acc, (K_PAD,))
        depth: tl.constexpr = BLOCK_ROWS - 1
        tl.store(pairs_ptr + ((group * depth + i) * TOP_K + a) * TOP_K + k, score, mask=k < TOP_K)


@triton.jit
def _softmax(score, top, temperature):
    """fp32 probabilities; the exponentials are computed in fp64 and rounded once."""
    weight = tl.exp(tl.div_rn(score - top, temperature).to(tl.float64)).to(tl.float32)
    return tl.div_rn(weight, tl.sum(weight, axis=0))


@triton.jit
def _inverse_cdf(q, k, u, K_PAD: tl.constexpr):
    """The first k at which the fp64 running sum of q exceeds u times the total."""
    running = tl.cumsum(q.to(tl.float64), axis=0)
    target = u.to(tl.float64) * tl.max(running, axis=0)
    first = tl.min(tl.where((running > target) & (q > 0), k, K_PAD), axis=0)
    return tl.minimum(first, tl.max(tl.where(q > 0, k, 0), axis=0))


@triton.jit
def walk_slots(pairs_ptr, ids_ptr, positions_ptr, slots_ptr, temperature_ptr, seed_ptr, proposals_ptr, out_ids_ptr,
               probs_ptr, BLOCK_ROWS: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, CHAINED: tl.constexpr):
    """Choose from left to right. Grid: groups."""
    begin(CHAINED)
    group, k = tl.program_id(0), tl.arange(0, K_PAD)
    depth: tl.constexpr = BLOCK_ROWS - 1
    lane = tl.load(slots_ptr + group)
    temperature = tl.load(temperature_ptr + tl.maximum(lane, 0))
    seed = tl.load(seed_ptr + tl.maximum(lane, 0))
    chosen, sound = 0, 1
    for i in range(depth):
        slot = group * depth + i
        position = tl.load(positions_ptr + group * BLOCK_ROWS + i + 1)
        live = (lane >= 0) & (position >= 0)
        held = live & (sound > 0) & (k < TOP_K)
        score = tl.load(pairs_ptr + (slot * TOP_K + chosen) * TOP_K + k, mask=held, other=float("-inf"))
        ids = tl.load(ids_ptr + (group * BLOCK_ROWS + i + 1) * TOP_K + k, mask=held, other=0)
        best = tl.max(tl.where(held, key_of(ordered(score), k), LOWEST), axis=0)
        top = value_of(key_order(best))
        sound = tl.where(live & (sound > 0) & is_finite(top), 1, tl.where(live, 0, sound))
        good = live & (sound > 0)
        chosen = tl.where(good, key_id(best), 0)
        q = tl.where(k == chosen, 1.0, 0.0)
        if good & (temperature > 0):
            q = _softmax(score, top, temperature)
            chosen = _inverse_cdf(q, k, draw(seed, position, PROPOSAL), K_PAD)
        token = tl.sum(tl.where(k == chosen, ids, 0), axis=0)
        tl.store(proposals_ptr + slot, tl.where(good, token, tl.where(live, -1, 0)))
        tl.store(out_ids_ptr + slot * TOP_K + k, tl.where(good, ids, 0), mask=k < TOP_K)
        tl.store(probs_ptr + slot * TOP_K + k, tl.where(good, q, 0.0), mask=k < TOP_K)


def lower_selector_walk(call: OpCall, program: Program) -> list[Launch]:
    """Score all pairs, then walk.

    Greedy choices are the CPU op's, bit for bit where the rank is a power of two (elsewhere scores may differ in the
    last bits of a sum); probabilities within 2e-6 relative.

    Raises:
        CaptureError: GPU_ACT; activations are not bf16.
    """
    check_act(call)
    o, groups, depth = call.operands, call.number("groups"), call.number("depth")
    top_k, rank, block_rows = call.number("top_k"), call.number("rank"), call.number("block_rows")
    pairs = program.scratch("selector_pairs", DType.F32, (groups, depth, top_k, top_k))
    padded = max(LANES, power_of_two(rank))
    run = min(padded, RUN_TERMS)
    partials = padded // run * LANES
    shape = {"BLOCK_ROWS": block_rows, "TOP_K": top_k, "K_PAD": power_of_two(top_k)}
    scored = Kernel(score_pairs, (call.op,),
                    {**shape, "RANK": rank, "VOCAB": call.number("vocab"), "PARTIALS": partials, "LANES": LANES,
                     "RUN": run, "LOG_PARTIALS": partials.bit_length() - 1},
                    num_warps=4 if top_k * partials > 128 else 1)
    walked = Kernel(walk_slots, (call.op,), shape, num_warps=1)
    inputs = {"ids_ptr": o["candidate_ids"], "positions_ptr": o["positions"], "slots_ptr": o["slots"]}
    read = {**inputs, "unary_ptr": o["candidate_scores"], "projected_ptr": o["projected"],
            "predecessor_ptr": o["predecessor"], "successor_ptr": o["successor"], "tokens_ptr": o["tokens"]}
    walk_read = {**inputs, "pairs_ptr": pairs, "temperature_ptr": o["temperature"], "seed_ptr": o["seed"]}
    written = {"proposals_ptr": o["proposals"], "out_ids_ptr": o["proposal_ids"], "probs_ptr": o["proposal_probs"]}
    return [
        Launch(scored, {**read, "pairs_ptr": pairs}, (top_k, depth, groups), tuple(read.values()), (pairs,), (),
               call.label),
        Launch(walked, {**walk_read, **written}, (groups, 1, 1), tuple(walk_read.values()), tuple(written.values()),
               (call.node_id,), call.label),
    ]


@triton.jit
def propose_best(keys_ptr, proposals_ptr, ids_ptr, probs_ptr, BLOCK_ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
                 CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHAINED: tl.constexpr):
    """The argmax of each row but the anchor's, with probability 1. Grid: groups."""
    begin(CHAINED)
    group, i = tl.program_id(0), tl.arange(0, ROWS_PAD)
    depth: tl.constexpr = BLOCK_ROWS - 1
    token = key_id(best_key(keys_ptr, group * BLOCK_ROWS + 1 + i, i < depth, CHUNKS, CHUNKS_PAD))
    at = group * depth + i
    tl.store(proposals_ptr + at, token, mask=i < depth)
    tl.store(ids_ptr + at, token, mask=i < depth)
    tl.store(probs_ptr + at, token * 0.0 + 1.0, mask=i < depth)


def lower_argmax_proposals(call: OpCall, program: Program) -> list[Launch]:
    """The best id of each row 1..depth of a group."""
    o, groups, block_rows = call.operands, call.number("groups"), call.number("block_rows")
    first, keys = lower_best_keys(call, program, rows=groups * block_rows, block_rows=block_rows)
    kernel = Kernel(propose_best, (call.op,),
                    {"BLOCK_ROWS": block_rows, "ROWS_PAD": power_of_two(block_rows), **keys.constants()}, num_warps=4)
    written = {"proposals_ptr": o["proposals"], "ids_ptr": o["proposal_ids"], "probs_ptr": o["proposal_probs"]}
    return [first, Launch(kernel, {"keys_ptr": keys.tensor, **written}, (groups, 1, 1), (keys.tensor,),
                          tuple(written.values()), (call.node_id,), call.label)]
