"""NVFP4: E2M1 codes, one E4M3 scale for 16 columns, one fp32 scale for the tensor.

    >>> quantized = quantize_nvfp4(torch.full((1, 16), 3.0))
    >>> quantized.codes[0, 0].item(), quantized.block_scale[0, 0].item()     # 6 and 6, low nibble first; scale 448
    (119, 126)
"""

from __future__ import annotations

import numpy as np
import torch
from dflash_core.formats import Format
from torch import Tensor

from exporter.convert.errors import ErrorStats
from exporter.convert.quantized import (
    SCRATCH,
    QuantizedTensor,
    block_amax,
    check_matrix,
    magnitudes,
    row_chunks,
    values_of_e4m3,
)

BLOCK = 16

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# The magnitude codes of E2M1 lie on three lines, 2x up to 2, x + 2 up to 4 and x / 2 + 4 up to 6, and the lowest line
# is the right one everywhere. Adding 1.5 * 2**23 to a line rounds it to a whole number, ties to even, in that one
# addition; the number is then found in the low bits of the float.
_ROUNDER = 1.5 * 2.0**23
_LINES = ((2.0, _ROUNDER), (1.0, _ROUNDER + 2.0), (0.5, _ROUNDER + 4.0))

# A magnitude code is the middle of a half float too: moved up by 9, its bits are its value * 2**-14.
_HALF_SHIFT = 9
_HALF_UNIT = 2.0**14


def global_scale_of(amax: Tensor) -> Tensor:
    """The fp32 scale of a tensor, or of a fused group, whose largest magnitude is `amax` (f32, one element): f32 [1].

    The block that holds the largest magnitude then gets the largest E4M3 scale.
    """
    return amax.to(torch.float32).reshape(1) / (_E4M3_MAX * _E2M1_MAX)


def quantize_nvfp4(
    weight: Tensor, global_scale: Tensor | None = None, amax: Tensor | None = None, stats: ErrorStats | None = None
) -> QuantizedTensor:
    """Quantize a weight matrix to NVFP4, in blocks of 16 along the last axis.

    global_scale = amax / (448 * 6); block_scale = E4M3(block_amax / 6 / global_scale);
    code = E2M1(weight / (block_scale * global_scale)). Every step is one fp32 operation; a code is the nearest one,
    ties to even, and saturates. A block whose scale rounds to zero gets zero codes of its weights' signs.

    Args:
        weight: [rows, cols], bf16, f16 or f32; cols divisible by 16.
        global_scale: f32 [1], for rows that share a scale with others (`global_scale_of`); None: this tensor's own.
        amax: `block_amax(weight, 16)`, when it is at hand already; None: it is computed.
        stats: takes in how far the codes are from the weight, while both are at hand.
    Returns:
        codes, two E2M1 codes a byte, low nibble first [rows, cols / 2]; block_scale, E4M3 bytes [rows, cols / 16], not
        swizzled; global_scale, f32 [1].
    Raises:
        ConvertError: not a matrix, cols does not divide into blocks, or a value is not finite.
    Source: NVIDIA's description of NVFP4 two-level scaling; OCP Microscaling Formats v1.0 for E2M1.
    """
    check_matrix(Format.NVFP4, weight)
    rows, cols = weight.shape
    if amax is None:
        amax = block_amax(weight, BLOCK)
    if global_scale is None:
        global_scale = global_scale_of(amax.max() if amax.numel() else torch.zeros(1))
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
    block_scale = torch.empty(rows, cols // BLOCK, dtype=torch.uint8)
    for part in row_chunks(rows, cols):
        scale = _block_scale(amax[part], global_scale)
        block_scale[part] = scale.view(torch.uint8)
        decoded = values_of_e4m3(block_scale[part], out=torch.empty(scale.shape)).mul_(2.0**8 * global_scale)
        _encode_e2m1(weight[part].contiguous(), decoded, codes[part], stats)
    return QuantizedTensor(Format.NVFP4, codes, block_scale, global_scale)


def dequantize_nvfp4(quantized: QuantizedTensor) -> Tensor:
    """The weights that NVFP4 codes stand for: code * (block_scale * global_scale), in fp32.

    Returns:
        f32 [rows, cols].
    """
    rows, half = quantized.codes.shape
    code = torch.stack((quantized.codes & 0xF, quantized.codes >> 4), dim=-1).view(rows, 2 * half // BLOCK, BLOCK)
    values = torch.tensor(E2M1_VALUES)[code.to(torch.int64)]
    assert quantized.global_scale is not None
    scale = quantized.block_scale.view(torch.float8_e4m3fn).to(torch.float32) * quantized.global_scale
    return (values * scale.unsqueeze(-1)).view(rows, 2 * half)


def _block_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    if global_scale == 0:  # all weights are zero, or so small that their scale is
        return torch.zeros_like(amax).to(torch.float8_e4m3fn)
    return (amax / _E2M1_MAX / global_scale).to(torch.float8_e4m3fn)  # the cast saturates


def _encode_e2m1(weight: Tensor, scale: Tensor, out: Tensor, stats: ErrorStats | None) -> None:
    """Write the E2M1 codes of weight / scale, two a byte.

    Args:
        weight: [rows, cols], contiguous.
        scale: f32 [rows, cols / 16]; where it is zero, so are the codes.
        out: u8 [rows, cols / 2].
    """
    scale = scale.view(-1, 1)
    blocks = (scale.numel(), BLOCK)
    magnitude, scaled, line = (SCRATCH.take(slot, blocks, torch.float32) for slot in (0, 1, 2))
    code, another = (SCRATCH.take(slot, blocks, torch.uint8) for slot in (3, 4))
    magnitude.view(weight.shape).copy_(magnitudes(weight, 2).view(weight.dtype))
    zero_blocks = scale.numel() - int(np.count_nonzero(scale.numpy()))
    torch.div(magnitude, scale.masked_fill(scale == 0, torch.inf) if zero_blocks else scale, out=scaled)
    saturated = 0 if stats is None else _num_above(scaled, _E2M1_MAX)
    scaled.clamp_(max=_E2M1_MAX)
    for (slope, start), found in zip(_LINES, (code, another, another), strict=True):
        torch.add(start, scaled, alpha=slope, out=line)
        found.copy_(line.view(torch.int32))  # the low byte
        if found is another:
            torch.minimum(code, another, out=code)
    if stats is not None:
        half = SCRATCH.take(2, blocks, torch.int16).copy_(code).bitwise_left_shift_(_HALF_SHIFT).view(torch.float16)
        stats.add(magnitude, scaled.copy_(half), scale, _HALF_UNIT, saturated, zero_blocks)
    code.bitwise_or_(_signs(weight).view(blocks))
    pairs = code.view(torch.int16)
    shifted = torch.bitwise_right_shift(pairs, 4, out=SCRATCH.take(2, pairs.shape, torch.int16))
    out.copy_(pairs.bitwise_or_(shifted).view(out.shape))  # the low byte of each


def _signs(weight: Tensor) -> Tensor:
    """8 where a weight is negative, -0.0 included, else 0: u8 [rows, cols] in the fifth slot of the scratch memory."""
    integer, shift = (torch.int32, 28) if weight.dtype == torch.float32 else (torch.int16, 12)
    bits, signs = SCRATCH.take(2, weight.shape, integer), SCRATCH.take(4, weight.shape, torch.uint8)
    torch.bitwise_right_shift(weight.view(integer), shift, out=bits)
    return signs.copy_(bits.bitwise_and_(8))


def _num_above(values: Tensor, limit: float) -> int:
    above = SCRATCH.take(3, values.shape, torch.bool).numpy()
    return int(np.count_nonzero(np.greater(values.numpy(), np.float32(limit), out=above)))
