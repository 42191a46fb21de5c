"""Mixtures of experts in step graphs: an expert that some row chose is read once, for up to eight rows at a time.

A block belongs to one choice of one row, and to a tile of an expert's weight rows. The first of each eight choices of
an expert computes all eight, the blocks of the others end at once; so rows share the reading of weights, while each
keeps its own column of the matrix instruction, and the bits that it has alone.

Three launches: the activated hidden rows; weighted outputs, per row in ascending order of the experts; their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.experts_many import many_launches
from exporter.kernels.experts_product import (
    expert_weight,
    hidden_tile,
    output_tile,
    product_launch,
    step_tile,
)
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.kernels.tuning import MAX_STEP_ROWS
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

CHOICES = tl.constexpr(8)  # of one expert that a block computes: the narrow side of the matrix instruction
SCANNED = 128  # choices looked at together
SUM_COLS = 256


@triton.jit
def _same_expert(ids_ptr, positions_ptr, expert, q, count, TOP_K: tl.constexpr):
    """Which choices q (row * TOP_K + rank) are of this expert, by live rows."""
    live = tl.load(positions_ptr + q // TOP_K, mask=q < count, other=-1) >= 0
    return live & (tl.load(ids_ptr + q, mask=live, other=-1) == expert)


@triton.jit
def computes(ids_ptr, positions_ptr, expert, choice, TOP_K: tl.constexpr, SCANNED: tl.constexpr):
    """Whether a choice is of a live row, and the first of the CHOICES of its expert that are computed together."""
    earlier = 0
    for first in range(0, choice, SCANNED):
        same = _same_expert(ids_ptr, positions_ptr, expert, first + tl.arange(0, SCANNED), choice, TOP_K)
        earlier += tl.sum(same.to(tl.int32), axis=0)
    return (tl.load(positions_ptr + choice // TOP_K) >= 0) & (earlier % CHOICES == 0)


@triton.jit
def choices_from(ids_ptr, positions_ptr, expert, choice, count, TOP_K: tl.constexpr, SCANNED: tl.constexpr):
    """This choice and the next of its expert, [CHOICES], -1 where there is none."""
    r, found = tl.arange(0, CHOICES), 0
    together = tl.full((CHOICES,), -1, tl.int32)
    for first in range(choice, count, SCANNED):
        q = first + tl.arange(0, SCANNED)
        same = _same_expert(ids_ptr, positions_ptr, expert, q, count, TOP_K).to(tl.int32)
        place = tl.where(same > 0, found + tl.cumsum(same, axis=0) - 1, -1)
        together = tl.maximum(together, tl.max(tl.where(place[:, None] == r[None, :], q[:, None], -1), axis=0))
        found += tl.sum(same, axis=0)
    return together


@triton.jit
def expert_hidden(x_ptr, positions_ptr, ids_ptr, w_ptr, scale_ptr, global_ptr, hidden_ptr, count, IN: tl.constexpr,
                  OUT: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, BETA: tl.constexpr,
                  LINEAR_BETA: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                  SCANNED: tl.constexpr, CHAINED: tl.constexpr):
    """`hidden_tile`. Grid: tiles of BN / 2 hidden columns, choices."""
    begin(CHAINED)
    choice = tl.program_id(1)
    expert = tl.load(ids_ptr + choice)
    if computes(ids_ptr, positions_ptr, expert, choice, TOP_K, SCANNED):
        together = choices_from(ids_ptr, positions_ptr, expert, choice, count, TOP_K, SCANNED)
        hidden_tile(x_ptr, w_ptr, scale_ptr, global_ptr, hidden_ptr, expert, together, tl.program_id(0), IN, OUT,
                    TOP_K, FORMAT, BETA, LINEAR_BETA, BN, BK, STAGES)


@triton.jit
def expert_output(hidden_ptr, positions_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, global_ptr, y_ptr, count,
                  IN: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, FORMAT: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SCANNED: tl.constexpr,
                  CHAINED: tl.constexpr):
    """`output_tile`. Grid: tiles of BN columns, choices."""
    begin(CHAINED)
    choice = tl.program_id(1)
    expert = tl.load(ids_ptr + choice)
    if computes(ids_ptr, positions_ptr, expert, choice, TOP_K, SCANNED):
        together = choices_from(ids_ptr, positions_ptr, expert, choice, count, TOP_K, SCANNED)
        output_tile(hidden_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, global_ptr, y_ptr, expert, together,
                    tl.program_id(0), IN, OUT, TOP_K, K_PAD, FORMAT, BN, BK, STAGES)


@triton.jit
def sum_experts(y_ptr, positions_ptr, out_ptr, TOP_K: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
                CHAINED: tl.constexpr):
    """out[row] = r(the sum of y[row], in order); zeros for a dead row. Grid: rows, column tiles."""
    begin(CHAINED)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (c < COLS) & (tl.load(positions_ptr + row) >= 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(y_ptr + (row * TOP_K + k) * COLS + c, mask=mask, other=0.0)
    tl.store(out_ptr + row * COLS + c, total.to(tl.bfloat16), mask=c < COLS)


def lower_experts(call: OpCall, program: Program) -> list[Launch]:
    """Hidden rows, weighted outputs, and their sum; in a prefill the choices are grouped first.

    Raises:
        CaptureError: GPU_ACT or GPU_WEIGHT; activations or weights are fp32.
    """
    check_act(call)
    o, rows, top_k = call.operands, call.number("rows"), call.number("top_k")
    hidden = program.scratch("expert_hidden", DType.BF16, (rows * top_k, call.number("inner")))
    y = program.scratch("expert_outputs", DType.F32, (rows * top_k, call.number("width")))
    if rows > MAX_STEP_ROWS:
        return [*many_launches(call, program, hidden, y), _sum_launch(call, y)]
    count = rows * top_k
    scanned = min(SCANNED, max(16, power_of_two(count)))
    chosen: dict[str, Tensor | int] = {"positions_ptr": o["positions"], "ids_ptr": o["ids"], "count": count}
    gate_up, down = (step_tile(expert_weight(call, name)) for name in ("gate_up", "down"))
    return [product_launch(call, expert_hidden, gate_up, {"SCANNED": scanned}, chosen, hidden, count),
            product_launch(call, expert_output, down, {"SCANNED": scanned}, {**chosen, "hidden_ptr": hidden}, y, count),
            _sum_launch(call, y)]


def _sum_launch(call: OpCall, y: Tensor) -> Launch:
    o, cols, top_k = call.operands, call.number("width"), call.number("top_k")
    block = min(SUM_COLS, max(32, power_of_two(cols)))
    kernel = Kernel(sum_experts, (call.op,), {"TOP_K": top_k, "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 128))
    return Launch(kernel, {"y_ptr": y, "positions_ptr": o["positions"], "out_ptr": o["out"]},
                  (call.number("rows"), cdiv(cols, block), 1), (y, o["positions"]), (o["out"],), (call.node_id,),
                  call.label)
