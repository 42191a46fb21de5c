"""GELU, exact and by tanh, in forms that lose nothing to cancellation where the result is small.

Exact: x / 2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 erfc(|x| / sqrt 2). By tanh: (1 + tanh u) / 2 is the logistic
function of 2 u, which neither overflows nor cancels.

Source of erfc: Press et al., Numerical Recipes, `erfcc`: a Chebyshev fit with a relative error below 1.2e-7 everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.program.builder import Program

BLOCK_COLS = 2048
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)
NOTHING_LEFT = tl.constexpr(16.0)  # erfc(16 / sqrt 2) is below the smallest fp32


@triton.jit
def _erfc(z):
    """The complementary error function of z >= 0."""
    t = tl.div_rn(1.0, 1.0 + 0.5 * z)
    p = 0.17087277 * t - 0.82215223
    p = p * t + 1.48851587
    p = p * t - 1.13520398
    p = p * t + 0.27886807
    p = p * t - 0.18628806
    p = p * t + 0.09678418
    p = p * t + 0.37409196
    p = p * t + 1.00002368
    p = p * t - 1.26551223
    return t * tl.exp(p - z * z)


@triton.jit
def gelu_rows(x_ptr, out_ptr, COLS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.gelu or dflash.gelu_tanh, rounded once. Grid: rows, column tiles."""
    begin(CHAINED)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * COLS + c
    x = tl.load(x_ptr + at, mask=c < COLS, other=0.0).to(tl.float32)
    if TANH:
        u = SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))
        y = tl.div_rn(x, 1.0 + tl.exp(-2.0 * u))
    else:
        size = tl.minimum(tl.abs(x), NOTHING_LEFT)
        y = tl.where(x < 0, 0.0, x) - 0.5 * size * _erfc(size * SQRT_HALF)
    tl.store(out_ptr + at, y.to(tl.bfloat16), mask=c < COLS)


def lower_gelu(call: OpCall, program: Program) -> list[Launch]:
    """Either form."""
    check_act(call)
    o, cols = call.operands, call.number("cols")
    block = min(BLOCK_COLS, max(32, power_of_two(cols)))
    kernel = Kernel(gelu_rows, (call.op,), {"COLS": cols, "TANH": call.op == "dflash.gelu_tanh/1", "BLOCK": block},
                    num_warps=max(1, block // 512))
    return [Launch(kernel, {"x_ptr": o["x"], "out_ptr": o["out"]}, (call.number("rows"), cdiv(cols, block), 1),
                   (o["x"],), (o["out"],), (call.node_id,), call.label)]
