"""NVFP4: E2M1 codes, one E4M3 scale for 16 columns, one fp32 scale for the tensor.

    >>> quantized = quantize_nvfp4(torch.full((1, 16), 3.0))
    >>> quantized.codes[0, 0].item(), quantized.block_scale[0, 0].item()     # 6 and 6, low nibble first; scale 448
    (119, 126)
"""

from __future__ import annotations

import torch
from dflash_core.formats import Format
from torch import Tensor

from exporter.convert.quantized import QuantizedTensor, block_amax, check_matrix

BLOCK = 16
CHUNK_WEIGHTS = 1 << 18

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def global_scale_of(amax: Tensor) -> Tensor:
    """The fp32 scale of a tensor, or of a fused group, whose largest magnitude is `amax` (f32, one element): f32 [1].

    The block that holds the largest magnitude then gets the largest E4M3 scale.
    """
    return amax.to(torch.float32).reshape(1) / (_E4M3_MAX * _E2M1_MAX)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Quantize a weight matrix to NVFP4, in blocks of 16 along the last axis.

    global_scale = amax / (448 * 6); block_scale = E4M3(block_amax / 6 / global_scale);
    code = E2M1(weight / (block_scale * global_scale)). Every step is one fp32 operation; a code is the nearest one,
    ties to even, and saturates. A block whose scale rounds to zero gets zero codes of its weights' signs.

    Args:
        weight: [rows, cols], bf16, f16 or f32; cols divisible by 16.
        global_scale: f32 [1], for rows that share a scale with others (`global_scale_of`); None: this tensor's own.
    Returns:
        codes, two E2M1 codes a byte, low nibble first [rows, cols / 2]; block_scale, E4M3 bytes [rows, cols / 16], not
        swizzled; global_scale, f32 [1].
    Raises:
        ConvertError: not a matrix, cols does not divide into blocks, or a value is not finite.
    Source: NVIDIA's description of NVFP4 two-level scaling; OCP Microscaling Formats v1.0 for E2M1.
    """
    check_matrix(Format.NVFP4, weight)
    rows, cols = weight.shape
    amax = block_amax(weight, BLOCK)
    if global_scale is None:
        global_scale = global_scale_of(amax.max() if amax.numel() else torch.zeros(1))
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
    block_scale = torch.empty(rows, cols // BLOCK, dtype=torch.uint8)
    step = max(1, CHUNK_WEIGHTS // max(cols, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale = _block_scale(amax[part], global_scale)
        block_scale[part] = scale.view(torch.uint8)
        divisor = scale.to(torch.float32) * global_scale
        divisor[divisor == 0] = torch.inf
        blocks = weight[part].to(torch.float32).view(-1, cols // BLOCK, BLOCK)
        code = _encode_e2m1(blocks / divisor.unsqueeze(-1)).view(-1, cols // 2, 2)
        codes[part] = code[..., 0] | (code[..., 1] << 4)
    return QuantizedTensor(Format.NVFP4, codes, block_scale, global_scale)


def dequantize_nvfp4(quantized: QuantizedTensor) -> Tensor:
    """The weights that NVFP4 codes stand for: code * (block_scale * global_scale), in fp32.

    Returns:
        f32 [rows, cols].
    """
    rows, half = quantized.codes.shape
    code = torch.stack((quantized.codes & 0xF, quantized.codes >> 4), dim=-1).view(rows, 2 * half // BLOCK, BLOCK)
    values = torch.tensor(_E2M1_VALUES)[code.to(torch.int64)]
    assert quantized.global_scale is not None
    scale = quantized.block_scale.view(torch.float8_e4m3fn).to(torch.float32) * quantized.global_scale
    return (values * scale.unsqueeze(-1)).view(rows, 2 * half)


def _block_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    if global_scale == 0:  # all weights are zero, or so small that their scale is
        return torch.zeros_like(amax).to(torch.float8_e4m3fn)
    return (amax / _E2M1_MAX / global_scale).to(torch.float8_e4m3fn)  # the cast saturates


def _encode_e2m1(scaled: Tensor) -> Tensor:
    """E2M1 codes, one a byte, of f32 values: count the midpoints below |value|; a tie goes to the even code."""
    magnitude = scaled.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    code += torch.signbit(scaled).to(torch.uint8) << 3
    return code
