"""Sampling from the target: one token per lane, and what every row of a block decides above temperature 0.

Three launches, of which the second ends at once in a lane at temperature 0: best keys per chunk, the sampled rows (one
block each), and the decision per lane. A lane whose highest logit is not finite produces -1 and emits nothing, so that
the host can tell (the CPU op raises LOGITS_NOT_FINITE).
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.argmax import BestKeys, best_key, lower_best_keys
from exporter.kernels.dependency import begin
from exporter.kernels.distribution import draw_id, find_cut, probability
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import is_finite, key_id, key_order, value_of
from exporter.kernels.philox import ACCEPT, RESIDUAL, TARGET, draw
from exporter.kernels.rows import cdiv, power_of_two
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

KEPT = tl.constexpr(-1)  # decision of a row that accepts its proposal
ROW_BLOCK = 4096
ROW_WARPS = 16


@triton.jit
def sample_rows(keys_ptr, logits_ptr, tokens_ptr, positions_ptr, slots_ptr, temperature_ptr, top_p_ptr, top_k_ptr,
                seed_ptr, ids_ptr, probs_ptr, decisions_ptr, BLOCK_ROWS: tl.constexpr, CANDIDATES: tl.constexpr,
                VOCAB: tl.constexpr, LIVE: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
                BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr, CHAINED: tl.constexpr):
    """decisions[row] above temperature 0: KEPT, or the token that the row would end the block with. Grid: rows.

    A row decides as if every row before it had kept its proposal. Dead rows, rows at temperature 0 and rows without a
    finite best logit decide nothing: their decision is left as it is, and not read.
    """
    begin(CHAINED)
    row = tl.program_id(0)
    group, i = row // BLOCK_ROWS, row % BLOCK_ROWS
    lane, position = tl.load(slots_ptr + group), tl.load(positions_ptr + row)
    slot = tl.maximum(lane, 0)
    temperature = tl.load(temperature_ptr + slot)
    if (lane >= 0) & (position >= 0) & (temperature > 0):
        top = value_of(key_order(best_key(keys_ptr, row, lane >= 0, CHUNKS, CHUNKS_PAD)))
        if is_finite(top):
            logits_ptr += row.to(tl.int64) * VOCAB
            seed = tl.load(seed_ptr + slot)
            at, last, total = find_cut(logits_ptr, top, temperature, tl.load(top_k_ptr + slot),
                                       tl.load(top_p_ptr + slot), LIVE, BLOCK)
            decision = tl.full((), KEPT, tl.int32)
            u = draw(seed, position + 1, TARGET)
            kept, subtracted = lane < 0, tl.full((), 0, tl.int32)
            if CANDIDATES > 0:
                ids_ptr += (group * (BLOCK_ROWS - 1) + i) * CANDIDATES
                probs_ptr += (group * (BLOCK_ROWS - 1) + i) * CANDIDATES
                following = tl.load(positions_ptr + row + 1, mask=i + 1 < BLOCK_ROWS, other=-1)
                if following >= 0:
                    proposed = tl.load(tokens_ptr + row + 1)
                    known = (proposed >= 0) & (proposed < LIVE)
                    x = tl.load(logits_ptr + proposed, mask=known, other=float("-inf"))
                    p = tl.where(known, probability(x, proposed, top, temperature, at, last, total), 0.0)
                    q = p * 0.0
                    for k in range(CANDIDATES):
                        q += tl.where(tl.load(ids_ptr + k) == proposed, tl.load(probs_ptr + k), 0.0)
                    kept = draw(seed, position + 1, ACCEPT) * q < p
                    u = draw(seed, position + 1, RESIDUAL)
                    subtracted += CANDIDATES
            if kept == 0:
                decision = draw_id(logits_ptr, u, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted,
                                   CANDIDATES, LIVE, BLOCK, BLOCKS_PAD)
            tl.store(decisions_ptr + row, decision)


@triton.jit
def decide_lane(keys_ptr, decisions_ptr, positions_ptr, slots_ptr, temperature_ptr, emitted_ptr, produced_ptr,
                CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.sample from the row's keys and decision. Grid: lanes."""
    begin(CHAINED)
    row = tl.program_id(0)
    lane = tl.load(slots_ptr + row)
    live = (lane >= 0) & (tl.load(positions_ptr + row) >= 0)
    best = best_key(keys_ptr, row, live, CHUNKS, CHUNKS_PAD)
    sound = live & is_finite(value_of(key_order(best)))
    sampled = sound & (tl.load(temperature_ptr + tl.maximum(lane, 0)) > 0)
    token = tl.where(sampled, tl.load(decisions_ptr + row, mask=sampled, other=0), key_id(best))
    tl.store(emitted_ptr + row, tl.where(sound, token, 0))
    tl.store(produced_ptr + row, tl.where(sound, 1, tl.where(live, -1, 0)))


def lower_sampled_rows(call: OpCall, program: Program, keys: BestKeys, *, rows: int, block_rows: int,
                       candidates: int) -> tuple[Launch, Tensor]:
    """The launch of `sample_rows` for dflash.sample (no candidates) or dflash.accept, and the decisions, i32 [rows]."""
    o = call.operands
    decisions = program.scratch("row_decisions", DType.I32, (rows,))
    names = ["logits", "positions", "slots", "temperature", "top_p", "top_k", "seed"]
    read = {"keys_ptr": keys.tensor, **{f"{name}_ptr": o[name] for name in names}}
    live_vocab = call.number("live_vocab")
    block = min(ROW_BLOCK, max(32 * ROW_WARPS, power_of_two(live_vocab)))
    constants: dict[str, int | None] = {
        "BLOCK_ROWS": block_rows, "CANDIDATES": candidates, "VOCAB": call.number("vocab"), "LIVE": live_vocab,
        "BLOCK": block, "BLOCKS_PAD": power_of_two(cdiv(live_vocab, block)), **keys.constants()}
    if candidates:
        read |= {"tokens_ptr": o["tokens"], "ids_ptr": o["proposal_ids"], "probs_ptr": o["proposal_probs"]}
    else:
        constants |= {"tokens_ptr": None, "ids_ptr": None, "probs_ptr": None}
    kernel = Kernel(sample_rows, (call.op,), constants, num_warps=ROW_WARPS)
    return Launch(kernel, {**read, "decisions_ptr": decisions}, (rows, 1, 1), tuple(read.values()), (decisions,), (),
                  call.label), decisions


def lower_sample(call: OpCall, program: Program) -> list[Launch]:
    """One token per live lane.

    Temperature 0: the CPU op's token. Above: drawn with the CPU op's random number from a distribution that agrees
    with it to about 1e-6 relative, so a draw differs only where it falls that close to a boundary between two ids.
    """
    o, groups = call.operands, call.number("groups")
    first, keys = lower_best_keys(call, program, rows=groups, block_rows=1)
    sampled, decisions = lower_sampled_rows(call, program, keys, rows=groups, block_rows=1, candidates=0)
    read = {"keys_ptr": keys.tensor, "decisions_ptr": decisions, "positions_ptr": o["positions"],
            "slots_ptr": o["slots"], "temperature_ptr": o["temperature"]}
    written = {"emitted_ptr": o["emitted"], "produced_ptr": o["produced"]}
    kernel = Kernel(decide_lane, (call.op,), keys.constants(), num_warps=1)
    return [first, sampled, Launch(kernel, {**read, **written}, (groups, 1, 1), tuple(read.values()),
                                   tuple(written.values()), (call.node_id,), call.label)]
