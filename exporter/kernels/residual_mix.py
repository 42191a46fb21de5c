"""Attention residuals: a row's parts are read to score them and, from the cache, again to mix them."""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import check_act, power_of_two
from exporter.program.builder import Program

TILE = 8192  # values of all parts together that a block scores at once


@triton.jit
def mix_parts(x_ptr, norm_ptr, score_ptr, out_ptr, rows, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
              COLS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
              CHAINED: tl.constexpr):
    """dflash.residual_mix. Grid: rows.

    Products are added up where they fall, and across threads once, after the last chunk: nothing makes a load wait.
    """
    begin(CHAINED)
    row, part = tl.program_id(0), tl.arange(0, PARTS_PAD)
    at = (part.to(tl.int64) * rows + row) * COLS
    squares = tl.zeros((PARTS_PAD, CHUNK), tl.float32)
    products = tl.zeros((PARTS_PAD, CHUNK), tl.float32)
    for first in tl.range(0, COLS, CHUNK, loop_unroll_factor=4):
        c = first + tl.arange(0, CHUNK)
        mask = (part < PARTS)[:, None] & (c < COLS)[None, :]
        here = tl.broadcast_to(c[None, :], (PARTS_PAD, CHUNK))
        x = tl.load(x_ptr + at[:, None] + here, mask=mask, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + here, mask=mask, other=0.0).to(tl.float32)
        score = tl.load(score_ptr + here, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
        products += x * (norm * score)
    mean = tl.div_rn(tl.sum(squares, axis=1), COLS * 1.0)
    scores = tl.div_rn(tl.sum(products, axis=1), tl.sqrt_rn(mean + EPS))
    scores = tl.where(part < PARTS, scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, axis=0))
    shares = tl.div_rn(shares, tl.sum(shares, axis=0))
    for first in tl.static_range(0, COLS, BLOCK):
        c = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(PARTS):
            x = tl.load(x_ptr + (tl.full((), j, tl.int64) * rows + row) * COLS + c, mask=c < COLS, other=0.0)
            total += x.to(tl.float32) * tl.sum(tl.where(part == j, shares, 0.0), axis=0)
        tl.store(out_ptr + row.to(tl.int64) * COLS + c, total.to(tl.bfloat16), mask=c < COLS)


def lower_residual_mix(call: OpCall, program: Program) -> list[Launch]:
    """One block per row; parts are summed in order."""
    check_act(call)
    o, parts, rows, cols = call.operands, call.number("parts"), call.number("rows"), call.number("cols")
    padded = power_of_two(parts)
    chunk = min(max(32, power_of_two(cols)), TILE // padded)
    num_warps = min(16, max(1, padded * chunk // 512))
    kernel = Kernel(mix_parts, (call.op,),
                    {"PARTS": parts, "PARTS_PAD": padded, "COLS": cols, "CHUNK": chunk,
                     "BLOCK": min(max(32, power_of_two(cols)), num_warps * 256), "EPS": call.real("eps")},
                    num_warps=num_warps)
    return [Launch(kernel, {"x_ptr": o["x"], "norm_ptr": o["norm"], "score_ptr": o["score"], "out_ptr": o["out"],
                            "rows": rows}, (rows, 1, 1), (o["x"], o["norm"], o["score"]), (o["out"],),
                   (call.node_id,), call.label)]
