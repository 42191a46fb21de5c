"""Mixtures of experts in a prefill: choices are grouped by expert, and each expert's rows are multiplied in tiles.

One block per expert finds its choices, in order, and where they go; the blocks of an expert then take its rows a tile
at a time. Which tile and which column a row falls into does not change its bits.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.experts_product import (
    BF16_WEIGHTS,
    ExpertWeight,
    expert_weight,
    hidden_tile,
    output_tile,
    product_launch,
)
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import power_of_two
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

SCANNED = 1024  # choices looked at together
TILE_ROWS = 64  # rows of an expert that a block multiplies together


@triton.jit
def group_choices(ids_ptr, positions_ptr, starts_ptr, grouped_ptr, count, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
                  SCANNED: tl.constexpr, CHAINED: tl.constexpr):
    """grouped[starts[e] : starts[e + 1]] = the choices (row * TOP_K + rank) of expert e by live rows, ascending.

    starts: i32 [EXPERTS + 1]. Grid: experts.
    """
    begin(CHAINED)
    expert = tl.program_id(0)
    start, own = 0, 0
    for first in range(0, count, SCANNED):
        q = first + tl.arange(0, SCANNED)
        live = tl.load(positions_ptr + q // TOP_K, mask=q < count, other=-1) >= 0
        ids = tl.load(ids_ptr + q, mask=live, other=EXPERTS)
        start += tl.sum((ids < expert).to(tl.int32), axis=0)
        own += tl.sum((ids == expert).to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, start + own)
    if own > 0:
        for first in range(0, count, SCANNED):
            q = first + tl.arange(0, SCANNED)
            live = tl.load(positions_ptr + q // TOP_K, mask=q < count, other=-1) >= 0
            same = tl.load(ids_ptr + q, mask=live, other=EXPERTS) == expert
            place = start + tl.cumsum(same.to(tl.int32), axis=0) - 1
            tl.store(grouped_ptr + place, q, mask=same)
            start += tl.sum(same.to(tl.int32), axis=0)


@triton.jit
def many_hidden(x_ptr, starts_ptr, grouped_ptr, w_ptr, scale_ptr, global_ptr, hidden_ptr, IN: tl.constexpr,
                OUT: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, BETA: tl.constexpr,
                LINEAR_BETA: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr,
                CHAINED: tl.constexpr):
    """`hidden_tile` for every R choices of an expert. Grid: tiles of BN / 2 hidden columns, experts."""
    begin(CHAINED)
    expert = tl.program_id(1)
    last = tl.load(starts_ptr + expert + 1)
    for first in range(tl.load(starts_ptr + expert), last, R):
        at = first + tl.arange(0, R)
        choice = tl.load(grouped_ptr + at, mask=at < last, other=-1)
        hidden_tile(x_ptr, w_ptr, scale_ptr, global_ptr, hidden_ptr, expert, choice, tl.program_id(0), IN, OUT, TOP_K,
                    FORMAT, BETA, LINEAR_BETA, BN, BK, STAGES)


@triton.jit
def many_output(hidden_ptr, starts_ptr, grouped_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, global_ptr, y_ptr,
                IN: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, FORMAT: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, CHAINED: tl.constexpr):
    """`output_tile` for every R choices of an expert. Grid: tiles of BN columns, experts."""
    begin(CHAINED)
    expert = tl.program_id(1)
    last = tl.load(starts_ptr + expert + 1)
    for first in range(tl.load(starts_ptr + expert), last, R):
        at = first + tl.arange(0, R)
        choice = tl.load(grouped_ptr + at, mask=at < last, other=-1)
        output_tile(hidden_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, global_ptr, y_ptr, expert, choice,
                    tl.program_id(0), IN, OUT, TOP_K, K_PAD, FORMAT, BN, BK, STAGES)


def many_launches(call: OpCall, program: Program, hidden: Tensor, y: Tensor) -> list[Launch]:
    """Grouped choices, hidden rows and weighted outputs."""
    o, top_k, experts = call.operands, call.number("top_k"), call.number("experts")
    count = call.number("rows") * top_k
    starts = program.scratch("expert_starts", DType.I32, (experts + 1,))
    grouped = program.scratch("expert_choices", DType.I32, (count,))
    chosen = {"starts_ptr": starts, "grouped_ptr": grouped}
    group = Kernel(group_choices, (call.op,), {"EXPERTS": experts, "TOP_K": top_k,
                                               "SCANNED": min(SCANNED, power_of_two(count))}, num_warps=4)
    gate_up, down = (_tile(expert_weight(call, name)) for name in ("gate_up", "down"))
    return [
        Launch(group, {"ids_ptr": o["ids"], "positions_ptr": o["positions"], **chosen, "count": count},
               (experts, 1, 1), (o["ids"], o["positions"]), (starts, grouped), (), call.label),
        product_launch(call, many_hidden, gate_up, {"R": TILE_ROWS}, chosen, hidden, experts),
        product_launch(call, many_output, down, {"R": TILE_ROWS}, {**chosen, "hidden_ptr": hidden}, y, experts),
    ]


def _tile(weight: ExpertWeight) -> ExpertWeight:
    """The weight as the blocks of a prefill take it: two blocks share a processor."""
    if weight.packs:
        return weight.packed(stages=2)
    return replace(weight, tile=128, depth=64, num_warps=8, stages=4 if weight.format == BF16_WEIGHTS else 3)
