"""Gated activations and the sigmoid gate, one element at a time: as kernels, and for the kernels that fuse them."""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, copy_block
from exporter.program.builder import Program

SERIES_BELOW = tl.constexpr(0.25)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of fp32; 0 where exp(-x) overflows."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """tanh of fp32, within 1e-6 of itself: near 0, where the closed form cancels, by its series."""
    size, square = tl.abs(x), x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    rest = tl.exp(-2.0 * size)
    closed = tl.div_rn(1.0 - rest, 1.0 + rest)
    return tl.where(size < SERIES_BELOW, series, tl.where(x < 0, -closed, closed))


@triton.jit
def gated(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The product of activated gate and up, in fp32 and not yet rounded, as runtime.ops.activation.gated defines it;
    a BETA of 0 is SiLU, rounded to bf16 before the product."""
    if BETA == 0.0:
        return tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(tl.bfloat16).to(tl.float32) * up
    else:
        if LINEAR_BETA != 0.0:
            up = tanh(tl.div_rn(up, LINEAR_BETA)) * LINEAR_BETA
        return tanh(tl.div_rn(gate, BETA)) * BETA * sigmoid(gate) * up


@triton.jit
def gated_rows(gate_up_ptr, out_ptr, COLS: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
               BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.silu_mul and dflash.situ_mul. Grid: rows, column tiles."""
    begin(CHAINED)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * COLS + c, mask=c < COLS, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * COLS + COLS + c, mask=c < COLS, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * COLS + c, gated(gate, up, BETA, LINEAR_BETA).to(tl.bfloat16), mask=c < COLS)


def betas(call: OpCall) -> dict[str, float]:
    """The constants of `gated`; an op without betas is SiLU."""
    situ = "situ_beta" in call.scalars
    return {"BETA": call.real("situ_beta") if situ else 0.0,
            "LINEAR_BETA": call.real("situ_linear_beta") if situ else 0.0}


def lower_gated(call: OpCall, program: Program) -> list[Launch]:
    """A gated activation that no linear before it computes."""
    check_act(call)
    gate_up, out, cols = call.operands["gate_up"], call.operands["out"], call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(gated_rows, (call.op,), {"COLS": cols, "BLOCK": block, **betas(call)},
                    num_warps=max(1, block // 256))
    return [Launch(kernel, {"gate_up_ptr": gate_up, "out_ptr": out}, (call.number("rows"), cdiv(cols, block), 1),
                   (gate_up,), (out,), (call.node_id,), call.label)]


@triton.jit
def sigmoid_gated_rows(x_ptr, gate_ptr, out_ptr, COLS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.sigmoid_mul. Grid: rows, column tiles."""
    begin(CHAINED)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * COLS + c
    x = tl.load(x_ptr + at, mask=c < COLS, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=c < COLS, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * sigmoid(gate)).to(tl.bfloat16), mask=c < COLS)


def lower_sigmoid_mul(call: OpCall, program: Program) -> list[Launch]:
    """The output gate of latent attention."""
    check_act(call)
    x, gate, out, cols = (*(call.operands[n] for n in ("x", "gate", "out")), call.number("cols"))
    block = copy_block(cols)
    kernel = Kernel(sigmoid_gated_rows, (call.op,), {"COLS": cols, "BLOCK": block}, num_warps=max(1, block // 256))
    return [Launch(kernel, {"x_ptr": x, "gate_ptr": gate, "out_ptr": out},
                   (call.number("rows"), cdiv(cols, block), 1), (x, gate), (out,), (call.node_id,), call.label)]
