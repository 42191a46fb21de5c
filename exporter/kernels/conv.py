"""The grouped dynamic convolution of a draft block, bit for bit `dflash.grouped_conv` in bf16.

Each of its three roundings a tap is a conversion to bf16 of an fp32 result, and nothing is contracted into a fused
multiply-add (kernels are compiled with fp fusion off).
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.program.builder import Program

BLOCK_COLS = 512


@triton.jit
def _round(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def convolve_rows(x_ptr, delta_ptr, base_ptr, out_ptr, HIDDEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                  TAPS: tl.constexpr, GROUP_SIZE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
                  CHAINED: tl.constexpr):
    """Grid: rows, column tiles. A tap that reaches before the block is a load that is masked off, so that what lies
    there, an infinity say, takes no part."""
    begin(CHAINED)
    row, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < HIDDEN
    groups: tl.constexpr = HIDDEN // GROUP_SIZE
    delta_ptr += (row * 2 + SIDE) * TAPS * groups + c // GROUP_SIZE
    base_ptr += SIDE * TAPS * HIDDEN + c
    x_ptr += row.to(tl.int64) * HIDDEN + c
    acc = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(TAPS):
        delta = tl.load(delta_ptr + t * groups, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + t * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr - t * HIDDEN, mask=inside & (row % BLOCK_ROWS >= t), other=0.0).to(tl.float32)
        product = _round(_round(base + delta) * x)
        if t == 0:
            acc = product
        else:
            acc = _round(acc + product)
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + c, acc.to(tl.bfloat16), mask=inside)


def lower_grouped_conv(call: OpCall, program: Program) -> list[Launch]:
    """One side of a block's convolution.

    Raises:
        CaptureError: GPU_ACT; activations are not bf16.
    """
    check_act(call)
    o, hidden = call.operands, call.number("hidden")
    block = min(BLOCK_COLS, max(32, power_of_two(hidden)))
    kernel = Kernel(convolve_rows, (call.op,),
                    {"HIDDEN": hidden, "BLOCK_ROWS": call.number("block_rows"), "TAPS": call.number("taps"),
                     "GROUP_SIZE": call.number("group_size"), "SIDE": call.number("side"), "BLOCK": block},
                    num_warps=max(1, block // 256))
    return [Launch(kernel, {"x_ptr": o["x"], "delta_ptr": o["delta"], "base_ptr": o["base"], "out_ptr": o["out"]},
                   (call.number("rows"), cdiv(hidden, block), 1), (o["x"], o["delta"], o["base"]), (o["out"],),
                   (call.node_id,), call.label)]
