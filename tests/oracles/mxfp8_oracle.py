"""MXFP8 restated slowly with fractions, from the OCP Microscaling Formats v1.0 text. Imports nothing of ours."""

from __future__ import annotations

import math
from fractions import Fraction


def e4m3_value(byte: int) -> Fraction | None:
    """The number that an E4M3 byte stands for; None for NaN. There are no infinities."""
    sign = -1 if byte & 0x80 else 1
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(2) ** -6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [number for number in (e4m3_value(byte) for byte in range(0x7F)) if number is not None]


def e8m0_value(byte: int) -> Fraction | None:
    """The power of two that an E8M0 byte stands for; None for NaN."""
    return None if byte == 255 else Fraction(2) ** (byte - 127)


def encode_e4m3(value: Fraction, negative: bool) -> int:
    """The E4M3 byte nearest to |value| <= 448, ties to the even byte, with the given sign bit."""
    best = min(range(0x7F), key=lambda byte: (abs(MAGNITUDES[byte] - abs(value)), byte & 1))
    return best | (0x80 if negative else 0)


def scale_byte(amax: Fraction) -> int:
    """The E8M0 byte of the smallest power of two, not below 2**-127, with amax / scale <= 448."""
    for byte in range(255):
        scale = e8m0_value(byte)
        assert scale is not None
        if amax <= 448 * scale:
            return byte
    raise AssertionError(amax)


def quantize_block(weights: list[float]) -> tuple[int, list[int]]:
    """The scale byte and the E4M3 bytes of one block of 32 weights."""
    assert len(weights) == 32
    exact = [Fraction(weight) for weight in weights]
    byte = scale_byte(max(abs(weight) for weight in exact))
    scale = e8m0_value(byte)
    assert scale is not None
    codes = [
        encode_e4m3(number / scale, math.copysign(1.0, weight) < 0)
        for number, weight in zip(exact, weights, strict=True)
    ]
    return byte, codes
