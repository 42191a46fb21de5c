"""y = W x, with what surrounds it fused in, split along the weight's rows and the activations' alone.

Each block owns some weight rows and walks the whole reduction in one fixed order, so a row of activations gets the same
bits in decode, verify and every batch. Weights are the matrix instruction's wide side and activations its narrow one;
MXFP8 and NVFP4 codes are decoded in registers to bf16, which holds code x block scale exactly.
Weights in fp32 are multiplied in fp32's precision.

Fused before: the root-mean-square norm of the rows, rounded as dflash.rms_norm rounds. Fused after: the residual add
(rounded as linear, then add), or SiLU times up (each rounded as its op rounds).
"""

from __future__ import annotations

import triton
import triton.language as tl
from dflash_core.formats import Format

from exporter.kernels.dependency import begin
from exporter.kernels.epilogue import finish

FORMAT_CODE = {Format.BF16: 0, Format.MXFP8: 1, Format.NVFP4: 2, Format.F32: 3}


@triton.jit
def _product(w, x, acc, FORMAT: tl.constexpr):
    """acc + w @ x; fp32 weights, a router's, in three TF32 terms, which is fp32's precision."""
    if FORMAT == 3:
        return tl.dot(w, x.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(w, x, acc)


@triton.jit
def _decode(w_ptr, scale_ptr, n, k0, IN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
            OUT: tl.constexpr):
    """Weight tile [BN, BK] in bf16, or fp32 as stored, from column k0 on; rows at or beyond OUT read as row 0 and are
    never stored."""
    rows = tl.where(n < OUT, n, 0).to(tl.int64)
    if FORMAT == 0 or FORMAT == 3:
        k = k0 + tl.arange(0, BK)
        if IN % BK:
            return tl.load(w_ptr + rows[:, None] * IN + k[None, :], mask=(k < IN)[None, :], other=0.0)
        else:
            return tl.load(w_ptr + rows[:, None] * IN + k[None, :])
    elif FORMAT == 1:
        codes = tl.load(w_ptr + rows[:, None] * IN + (k0 + tl.arange(0, BK))[None, :])
        scale = tl.load(scale_ptr + rows[:, None] * (IN // 32) + (k0 // 32 + tl.arange(0, BK // 32))[None, :])
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        power = tl.where(scale == 0, 64, scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
        return (values.reshape(BN, BK // 32, 32) * power[:, :, None]).reshape(BN, BK)
    else:
        packed = tl.load(w_ptr + rows[:, None] * (IN // 2) + (k0 // 2 + tl.arange(0, BK // 2))[None, :])
        scale = tl.load(scale_ptr + rows[:, None] * (IN // 16) + (k0 // 16 + tl.arange(0, BK // 16))[None, :])
        codes = tl.join(packed & 15, packed >> 4).reshape(BN, BK).to(tl.int16)
        magnitude = codes & 7
        # e2m1 to bf16 bits: exponents 1..3 are biased by 126; code 1 is the subnormal 0.5
        bits = tl.where(magnitude > 1, (magnitude << 6) + (126 << 7), magnitude * (126 << 7)) | ((codes & 8) << 12)
        values = bits.to(tl.bfloat16, bitcast=True)
        factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        return (values.reshape(BN, BK // 16, 16) * factor[:, :, None]).reshape(BN, BK)


@triton.jit
def _inverse_rms(x_ptr, r, live, IN: tl.constexpr, EPS: tl.constexpr, R: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) per row, [R] in fp32."""
    total = tl.zeros([R], tl.float32)
    for k0 in range(0, IN, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_ptr + r[:, None] * IN + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
        wide = x.to(tl.float32)
        total += tl.sum(wide * wide, axis=1)
    return tl.div_rn(1.0, tl.sqrt_rn(total / IN + EPS))


@triton.jit
def linear_rows(x_ptr, w_ptr, scale_ptr, global_ptr, norm_ptr, residual_ptr, out_ptr, rows,
                IN: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, EPS: tl.constexpr, NORM_BK: tl.constexpr,
                STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: tiles of R rows, tiles of BN columns: neighbours share a weight tile. OUT counts the result's columns; with
    SILU the weight has 2 * OUT rows, gate rows first."""
    begin(CHAINED)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.program_id(0) * R + tl.arange(0, R)
    live = r < rows
    if norm_ptr is not None:
        inverse = _inverse_rms(x_ptr, r, live, IN, EPS, R, NORM_BK)
    acc = tl.zeros([BN, R], tl.float32)
    up = tl.zeros([BN, R], tl.float32)
    for k0 in tl.range(0, IN, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        if IN % BK:
            inside = live[None, :] & (k < IN)[:, None]
        else:
            inside = live[None, :]
        x = tl.load(x_ptr + r[None, :].to(tl.int64) * IN + k[:, None], mask=inside, other=0.0)
        if norm_ptr is not None:
            rounded = (x.to(tl.float32) * inverse[None, :]).to(tl.bfloat16).to(tl.float32)
            if IN % BK:
                scale = tl.load(norm_ptr + k, mask=k < IN, other=0.0)
            else:
                scale = tl.load(norm_ptr + k)
            x = (rounded * scale[:, None].to(tl.float32)).to(tl.bfloat16)
        if EPILOGUE == 2:
            acc = _product(_decode(w_ptr, scale_ptr, n, k0, IN, BN, BK, FORMAT, OUT), x, acc, FORMAT)
            up = _product(_decode(w_ptr, scale_ptr, n + OUT, k0, IN, BN, BK, FORMAT, 2 * OUT), x, up, FORMAT)
        else:
            acc = _product(_decode(w_ptr, scale_ptr, n, k0, IN, BN, BK, FORMAT, OUT), x, acc, FORMAT)
    if global_ptr is not None:
        factor = tl.load(global_ptr)
        acc = acc * factor
        up = up * factor
    finish(acc, up, residual_ptr, out_ptr, n, r, live, OUT, EPILOGUE)
