"""NVFP4 restated slowly with fractions: E2M1 codes, E4M3 block scales, one fp32 scale. Imports nothing of ours.

Source: NVIDIA's published description of NVFP4 scaling; OCP Microscaling Formats v1.0 for E2M1; IEEE 754 for fp32.
"""

from __future__ import annotations

import math
from fractions import Fraction

E2M1_MAGNITUDES = [Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4),
                   Fraction(6)]


def e2m1_value(code: int) -> Fraction:
    """The number that a 4-bit code stands for."""
    return E2M1_MAGNITUDES[code & 7] * (-1 if code & 8 else 1)


def e4m3_magnitude(byte: int) -> Fraction:
    """The number that a non-negative E4M3 byte below 0x7F stands for."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def nearest(value: Fraction, grid: list[Fraction]) -> int:
    """Index of the grid number nearest to `value`, ties to the even index; beyond the last one, the last one."""
    return min(range(len(grid)), key=lambda index: (abs(grid[index] - value), index & 1))


def round_fp32(value: Fraction) -> Fraction:
    """The fp32 number nearest to a non-negative number, ties to even, subnormals kept."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(value.numerator) - math.log2(value.denominator))
    while Fraction(2) ** exponent > value:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / unit) * unit


def global_scale(weights: list[float]) -> Fraction:
    """The fp32 scale of a tensor."""
    return round_fp32(max(abs(Fraction(weight)) for weight in weights) / (448 * 6))


def quantize_block(weights: list[float], scale: Fraction) -> tuple[int, list[int]]:
    """The E4M3 scale byte and the E2M1 codes of one block of 16 weights under the tensor's fp32 scale."""
    assert len(weights) == 16
    exact = [abs(Fraction(weight)) for weight in weights]
    signs = [8 if math.copysign(1.0, weight) < 0 else 0 for weight in weights]
    ratio = round_fp32(round_fp32(max(exact) / 6) / scale) if scale else Fraction(0)
    byte = nearest(ratio, [e4m3_magnitude(code) for code in range(0x7F)])
    divisor = round_fp32(e4m3_magnitude(byte) * scale)
    if divisor == 0:
        return byte, signs
    codes = [nearest(round_fp32(number / divisor), E2M1_MAGNITUDES) for number in exact]
    return byte, [code | sign for code, sign in zip(codes, signs, strict=True)]
