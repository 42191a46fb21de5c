"""Acceptance: the longest run of proposals that the target agrees with, one token of its own, and what follows.

The rows of a block decide in parallel (best keys, and `sample_rows` above temperature 0); one warp per group then
finds where the run ends. Where a row that is read has no finite best logit, or a proposal is -1, the group produces -1
and emits nothing; the CPU ops raise a QualityError there.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from dflash_core.errors import CaptureError

from exporter.kernels.argmax import best_key, lower_best_keys
from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import is_finite, key_id, key_order, value_of
from exporter.kernels.rows import power_of_two
from exporter.kernels.sampling import KEPT, lower_sampled_rows
from exporter.program.builder import Program


@triton.jit
def decide_block(keys_ptr, decisions_ptr, tokens_ptr, positions_ptr, slots_ptr, limit_ptr, temperature_ptr,
                 emitted_ptr, produced_ptr, accepted_ptr, context_positions_ptr, BLOCK_ROWS: tl.constexpr,
                 ROWS_PAD: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.accept from the rows' keys and decisions; with context_positions_ptr, dflash.accepted_positions too.
    Grid: groups."""
    begin(CHAINED)
    group, i = tl.program_id(0), tl.arange(0, ROWS_PAD)
    row, inside = group * BLOCK_ROWS + i, i < BLOCK_ROWS
    lane = tl.load(slots_ptr + group)
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    live = (position >= 0) & (lane >= 0)
    rows = tl.sum(live.to(tl.int32), axis=0)
    start = tl.load(positions_ptr + group * BLOCK_ROWS)
    slot = tl.maximum(lane, 0)
    limit, temperature = tl.load(limit_ptr + slot), tl.load(temperature_ptr + slot)

    best = best_key(keys_ptr, row, live, CHUNKS, CHUNKS_PAD)
    finite = live & is_finite(value_of(key_order(best)))
    sampled = finite & (temperature > 0)
    decision = tl.load(decisions_ptr + row, mask=sampled, other=KEPT)
    proposed = tl.load(tokens_ptr + row + 1, mask=i + 1 < rows, other=0)
    own = tl.where(sampled, decision, key_id(best))
    kept = (i + 1 < rows) & finite & tl.where(sampled, decision == KEPT, own == proposed)
    run = tl.min(tl.where(kept, ROWS_PAD, i), axis=0)

    broken = tl.sum(((i <= run) & live & (finite == 0) | (i + 1 < rows) & (proposed < 0)).to(tl.int32), axis=0) > 0
    taking_part = (rows > 0) & (start >= 0)
    count = tl.maximum(tl.minimum(run + 1, limit - start - 1), 0)
    count = tl.where(taking_part, tl.where(broken, -1, count), 0)
    token = tl.where(i < run, proposed, own)
    tl.store(emitted_ptr + row, tl.where(i < count, token, 0), mask=inside)
    tl.store(produced_ptr + group, count)
    tl.store(accepted_ptr + group, tl.where(taking_part & (broken == 0), run, 0))
    if context_positions_ptr is not None:
        tl.store(context_positions_ptr + row, tl.where(i < count, position, -1), mask=inside)


def lower_accept(calls: Sequence[OpCall], program: Program) -> list[Launch]:
    """dflash.accept, or it and the dflash.accepted_positions that follows.

    Temperature 0: the CPU op's decisions. Above: as `lower_sample` says, for acceptance and residual draws too.

    Raises:
        CaptureError: GPU_ACCEPT; other calls.
    """
    call, *follow = calls
    if call.op != "dflash.accept/1" or [c.op for c in follow] not in ([], ["dflash.accepted_positions/1"]):
        raise CaptureError("GPU_ACCEPT", "acceptance is fused with the context positions alone", where=call.label,
                           got=", ".join(c.op for c in calls))
    o, groups, block_rows = call.operands, call.number("groups"), call.number("block_rows")
    rows = groups * block_rows
    first, keys = lower_best_keys(call, program, rows=rows, block_rows=block_rows)
    sampled, decisions = lower_sampled_rows(call, program, keys, rows=rows, block_rows=block_rows,
                                            candidates=call.number("candidates"))
    read = {"keys_ptr": keys.tensor, "decisions_ptr": decisions,
            **{f"{name}_ptr": o[name] for name in ("tokens", "positions", "slots", "limit", "temperature")}}
    written = {f"{name}_ptr": o[name] for name in ("emitted", "produced", "accepted")}
    constants: dict[str, int | None] = {"BLOCK_ROWS": block_rows, "ROWS_PAD": power_of_two(block_rows),
                                        **keys.constants()}
    if follow:
        written["context_positions_ptr"] = follow[0].operands["context_positions"]
    else:
        constants["context_positions_ptr"] = None
    kernel = Kernel(decide_block, tuple(c.op for c in calls), constants, num_warps=4)
    return [first, sampled, Launch(kernel, {**read, **written}, (groups, 1, 1), tuple(read.values()),
                                   tuple(written.values()), tuple(c.node_id for c in calls), call.label)]
