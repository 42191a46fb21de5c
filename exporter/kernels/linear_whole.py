"""y = W x for short reductions: every load of a block is issued at once, and the reduction is shared out over warps.

For matrices whose rows fit in registers, time is latency: launch, one trip to memory, and the chain of dependent matrix
instructions. So there is no loop. The reduction is cut into SLICES equal parts, one per warp, multiplied as a batched
product and summed in a fixed order. Weights are asked for first, in a programmatic chain before there are rows; the
norm of the rows is computed while they travel.

Fusions and rounding are those of exporter.kernels.linear.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import start_successor, wait_inputs
from exporter.kernels.epilogue import finish


@triton.jit
def _weight(w_ptr, scale_ptr, n, IN: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
            WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Weight rows as [SLICES, BN, WIDTH] in bf16; columns at or beyond SLICE are zero."""
    s = tl.arange(0, SLICES)[:, None, None]
    row = n.to(tl.int64)[None, :, None]
    if FORMAT == 0:
        j = tl.arange(0, WIDTH)[None, None, :]
        return tl.load(w_ptr + row * IN + s * SLICE + j, mask=j < SLICE, other=0.0)
    elif FORMAT == 1:
        j = tl.arange(0, WIDTH)[None, None, :]
        b = tl.arange(0, WIDTH // 32)[None, None, :]
        codes = tl.load(w_ptr + row * IN + s * SLICE + j, mask=j < SLICE, other=0)
        scale = tl.load(scale_ptr + row * (IN // 32) + s * (SLICE // 32) + b, mask=b < SLICE // 32, other=0)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        power = tl.where(scale == 0, 64, scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        scaled = values.reshape(SLICES, BN, WIDTH // 32, 32) * power[:, :, :, None]
        return scaled.reshape(SLICES, BN, WIDTH)
    else:
        j = tl.arange(0, WIDTH // 2)[None, None, :]
        b = tl.arange(0, WIDTH // 16)[None, None, :]
        packed = tl.load(w_ptr + row * (IN // 2) + s * (SLICE // 2) + j, mask=j < SLICE // 2, other=0)
        scale = tl.load(scale_ptr + row * (IN // 16) + s * (SLICE // 16) + b, mask=b < SLICE // 16, other=0)
        codes = tl.join(packed & 15, packed >> 4).reshape(SLICES, BN, WIDTH).to(tl.int16)
        magnitude = codes & 7
        bits = tl.where(magnitude > 1, (magnitude << 6) + (126 << 7), magnitude * (126 << 7)) | ((codes & 8) << 12)
        values = bits.to(tl.bfloat16, bitcast=True)
        factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        scaled = values.reshape(SLICES, BN, WIDTH // 16, 16) * factor[:, :, :, None]
        return scaled.reshape(SLICES, BN, WIDTH)


@triton.jit
def linear_whole(x_ptr, w_ptr, scale_ptr, global_ptr, norm_ptr, residual_ptr, out_ptr, rows,
                 IN: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr,
                 WIDTH: tl.constexpr, FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, EPS: tl.constexpr,
                 CHAINED: tl.constexpr):
    """Grid: tiles of BN columns, of R rows. OUT counts the result's columns and is a multiple of BN; with SILU the
    weight has 2 * OUT rows, gate first. WIDTH is the power of two at or above IN / SLICES."""
    start_successor(CHAINED)
    slice_: tl.constexpr = IN // SLICES
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * R + tl.arange(0, R)
    live = r < rows
    w = _weight(w_ptr, scale_ptr, n, IN, BN, SLICES, slice_, WIDTH, FORMAT)
    if EPILOGUE == 2:
        w_up = _weight(w_ptr, scale_ptr, n + OUT, IN, BN, SLICES, slice_, WIDTH, FORMAT)
    j = tl.arange(0, WIDTH)
    k = tl.arange(0, SLICES)[:, None] * slice_ + j[None, :]
    inside = (j < slice_)[None, :]
    wait_inputs(CHAINED)
    x = tl.load(x_ptr + r[None, None, :] * IN + k[:, :, None], mask=inside[:, :, None] & live[None, None, :], other=0.0)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        total = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(total / IN + EPS))
        rounded = (wide * inverse[None, None, :]).to(tl.bfloat16).to(tl.float32)
        x = (rounded * weight[:, :, None]).to(tl.bfloat16)
    acc = tl.sum(tl.dot(w, x), axis=0)
    up = acc
    if EPILOGUE == 2:
        up = tl.sum(tl.dot(w_up, x), axis=0)
    if global_ptr is not None:
        factor = tl.load(global_ptr)
        acc = acc * factor
        up = up * factor
    finish(acc, up, residual_ptr, out_ptr, n, r, live, OUT, EPILOGUE)
