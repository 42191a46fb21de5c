"""MXFP8: E4M3 codes, one power-of-two scale for 32 columns.

    >>> quantized = quantize_mxfp8(torch.ones(1, 32))
    >>> quantized.codes[0, 0].item(), quantized.block_scale[0, 0].item()     # 256 * 2**-8
    (120, 119)
"""

from __future__ import annotations

import numpy as np
import torch
from dflash_core.formats import Format
from numpy.typing import NDArray
from torch import Tensor

from exporter.convert.errors import ErrorStats
from exporter.convert.quantized import SCRATCH, QuantizedTensor, block_amax, check_matrix, row_chunks, values_of_e4m3

BLOCK = 32

# float32 has its exponent from bit 23 on. 448 is 1.75 * 2**8: a mantissa above 1.75 (0x600000) needs the next power of
# two, and adding 0x1FFFFF carries exactly then.
_EXPONENT_SHIFT = 23
_ROUND_UP_ABOVE_1_75 = 0x1FFFFF
_MAX_EXPONENT = 8


def quantize_mxfp8(weight: Tensor, stats: ErrorStats | None = None) -> QuantizedTensor:
    """Quantize a weight matrix to MXFP8, in blocks of 32 along the last axis.

    A block's scale is the smallest power of two with amax / scale <= 448 (rounded up, so nothing saturates),
    or 2**-127 if the block is all zero. Codes are rounded to nearest, ties to even; the division is exact.

    Args:
        weight: [rows, cols], bf16, f16 or f32; cols divisible by 32.
        stats: takes in how far the codes are from the weight, while both are at hand.
    Returns:
        codes, E4M3 bytes [rows, cols]; block_scale, E8M0 bytes [rows, cols / 32], not swizzled; no global_scale.
    Raises:
        ConvertError: not a matrix, cols does not divide into blocks, or a value is not finite.
    Source: OCP Microscaling Formats v1.0 for the format; scale rounded up as NVIDIA's cvt.rp.ue8m0 does.
    """
    check_matrix(Format.MXFP8, weight)
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    block_scale = torch.empty(rows, cols // BLOCK, dtype=torch.uint8)
    amax = block_amax(weight, BLOCK)
    for part in row_chunks(rows, cols):
        exponent = _scale_exponent(amax[part].numpy())
        block_scale[part] = torch.from_numpy(exponent)
        exponent = exponent.reshape(-1, 1)
        exact, scaled = (SCRATCH.take(slot, (exponent.size, BLOCK), torch.float32) for slot in (0, 1))
        exact.view(-1, cols).copy_(weight[part])
        torch.mul(exact, _power_of_two(254 - exponent), out=scaled)
        codes[part].view(torch.float8_e4m3fn).copy_(scaled.view(-1, cols))
        if stats is not None:
            values = values_of_e4m3(codes[part].view(exact.shape), out=scaled)
            zero_blocks = _num_zero_blocks(values, exponent)
            twice_scale = _power_of_two(exponent + 1)  # the least scale itself is no normal number
            stats.add(exact, values, twice_scale, 2.0**7, zero_blocks=zero_blocks)
    return QuantizedTensor(Format.MXFP8, codes, block_scale, None)


def dequantize_mxfp8(quantized: QuantizedTensor) -> Tensor:
    """The weights that MXFP8 codes stand for: code * 2**(scale byte - 127); scale byte 255 is NaN.

    Returns:
        f32 [rows, cols].
    """
    rows, cols = quantized.codes.shape
    values = quantized.codes.view(torch.float8_e4m3fn).to(torch.float32).view(rows, cols // BLOCK, BLOCK)
    scale = quantized.block_scale.view(torch.float8_e8m0fnu).to(torch.float32)
    return (values * scale.unsqueeze(-1)).view(rows, cols)


def _scale_exponent(amax: NDArray[np.float32]) -> NDArray[np.int32]:
    """The E8M0 byte (exponent + 127) of the smallest power of two with amax / scale <= 448."""
    exponent = (amax.view(np.int32) + _ROUND_UP_ABOVE_1_75) >> _EXPONENT_SHIFT
    return np.maximum(exponent - _MAX_EXPONENT, 0)


def _power_of_two(exponent: NDArray[np.int32]) -> Tensor:
    """f32, 2**(exponent - 127), for exponents of normal numbers."""
    return torch.from_numpy((exponent << _EXPONENT_SHIFT).view(np.float32))


def _num_zero_blocks(values: Tensor, exponent: NDArray[np.int32]) -> int:
    """Only a block with the least scale can be all zeros: a larger scale has a code that is not."""
    least = np.flatnonzero(exponent == 0)
    return int((values.numpy()[least] == 0).all(-1).sum())
