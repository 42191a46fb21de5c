"""Root-mean-square norm that is rounded once, of whole rows, with or without the residual add before it."""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import check_act, power_of_two
from exporter.program.builder import Program


@triton.jit
def norm_once_rows(x_ptr, delta_ptr, weight_ptr, out_ptr, COLS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
                   CHAINED: tl.constexpr):
    """One block per row. With delta_ptr, x += delta first, in place and rounded; out = r(x / rms(x) * weight)."""
    begin(CHAINED)
    c = tl.arange(0, BLOCK)
    mask = c < COLS
    at = tl.program_id(0).to(tl.int64) * COLS + c
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        rounded = (x + tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(x_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / COLS
    w = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS)) * w).to(tl.bfloat16), mask=mask)


def lower_norm_once(call: OpCall, program: Program) -> list[Launch]:
    """The norm, after the residual add if the op has one."""
    check_act(call)
    o, cols = call.operands, call.number("cols")
    x, delta = o.get("residual", o.get("x")), o.get("delta")
    assert x is not None, call.op
    constants: dict[str, int | float | None] = {"COLS": cols, "BLOCK": power_of_two(cols), "EPS": call.real("eps")}
    arguments = {"x_ptr": x, "weight_ptr": o["weight"], "out_ptr": o["out"]}
    if delta is None:
        constants["delta_ptr"] = None
    else:
        arguments["delta_ptr"] = delta
    reads = (x, o["weight"], *(() if delta is None else (delta,)))
    writes = (o["out"],) if delta is None else (o["out"], x)
    return [Launch(Kernel(norm_once_rows, (call.op,), constants, num_warps=4), arguments, (call.number("rows"), 1, 1),
                   reads, writes, (call.node_id,), call.label)]
