"""The weight formats a core can hold: bits, block, scales, and the bytes that a shape packs into.

    >>> packed(Format.NVFP4, (64, 576))
    PackedSize(codes=18432, block_scale=2304, global_scale=4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod


class Format(Enum):
    """Element, block and scale of a stored tensor. The value is the word that plans, flags and reports use."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """One row of the format table.

    Attributes:
        view_dtype: `TensorView.dtype` of the codes.
        view_format: `TensorView.format`; empty for plain element types.
        bits: bits per code.
        block: consecutive elements along the last axis that share one scale; 1 for plain types.
        max_value: largest magnitude of a code before scaling.
        scale_bits: bits of a block scale; 0 for plain types.
        has_global_scale: one fp32 scale per tensor (per fused group) multiplies the block scales.
    """

    view_dtype: str
    view_format: str
    bits: int
    block: int
    max_value: float
    scale_bits: int
    has_global_scale: bool

    @property
    def bits_per_weight(self) -> float:
        """Storage per weight in bits, block scale included."""
        return self.bits + self.scale_bits / self.block


FORMATS: dict[Format, FormatSpec] = {
    Format.F32: FormatSpec("f32", "", 32, 1, 3.4028234663852886e38, 0, False),
    Format.F16: FormatSpec("f16", "", 16, 1, 65504.0, 0, False),
    Format.BF16: FormatSpec("bf16", "", 16, 1, 3.3895313892515355e38, 0, False),
    Format.MXFP8: FormatSpec("f8e4m3", "mxfp8-e4m3-ue8m0-k32", 8, 32, 448.0, 8, False),
    Format.NVFP4: FormatSpec("f4e2m1", "nvfp4-e2m1-e4m3-k16", 4, 16, 6.0, 8, True),
}


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Bytes of the parts of one stored tensor."""

    codes: int
    block_scale: int
    global_scale: int

    @property
    def total(self) -> int:
        return self.codes + self.block_scale + self.global_scale


def divides(fmt: Format, shape: Sequence[int]) -> bool:
    """Whether the last axis of `shape` is a whole number of the format's blocks."""
    return len(shape) > 0 and shape[-1] % FORMATS[fmt].block == 0


def packed(fmt: Format, shape: Sequence[int]) -> PackedSize:
    """Bytes that a tensor of `shape` takes in `fmt`. `shape` must pass `divides`."""
    spec = FORMATS[fmt]
    count = prod(shape)
    assert divides(fmt, shape) or spec.block == 1, (fmt, shape)
    scales = count // spec.block * spec.scale_bits // 8 if spec.scale_bits else 0
    return PackedSize(count * spec.bits // 8, scales, 4 if spec.has_global_scale else 0)
