"""The format table: bits, blocks, scales and packed bytes."""

from __future__ import annotations

import pytest
from dflash_core.formats import FORMATS, Format, PackedSize, divides, packed

SIZES = [
    ("f32", Format.F32, (3, 5), PackedSize(60, 0, 0), 60),
    ("f16", Format.F16, (3, 5), PackedSize(30, 0, 0), 30),
    ("bf16-vector", Format.BF16, (7,), PackedSize(14, 0, 0), 14),
    ("bf16-cube", Format.BF16, (2, 2, 576), PackedSize(4608, 0, 0), 4608),
    ("mxfp8", Format.MXFP8, (3, 64), PackedSize(192, 6, 0), 198),
    ("nvfp4", Format.NVFP4, (3, 64), PackedSize(96, 12, 4), 112),
    ("mxfp8-head", Format.MXFP8, (49152, 576), PackedSize(28311552, 884736, 0), 29196288),
    ("nvfp4-head", Format.NVFP4, (49152, 576), PackedSize(14155776, 1769472, 4), 15925252),
]


@pytest.mark.parametrize(("fmt", "shape", "parts", "total"), [row[1:] for row in SIZES], ids=[row[0] for row in SIZES])
def test_shape_packs_into_known_bytes(fmt: Format, shape: tuple[int, ...], parts: PackedSize, total: int) -> None:
    assert packed(fmt, shape) == parts
    assert packed(fmt, shape).total == total


DIVIDES = [
    ("mxfp8-32", Format.MXFP8, (5, 32), True),
    ("mxfp8-48", Format.MXFP8, (32, 48), False),
    ("nvfp4-48", Format.NVFP4, (5, 48), True),
    ("nvfp4-24", Format.NVFP4, (16, 24), False),
    ("bf16-odd", Format.BF16, (5, 7), True),
    ("scalar", Format.BF16, (), False),
]


@pytest.mark.parametrize(("fmt", "shape", "expected"), [row[1:] for row in DIVIDES], ids=[row[0] for row in DIVIDES])
def test_last_axis_alone_decides_whether_blocks_fit(fmt: Format, shape: tuple[int, ...], expected: bool) -> None:
    assert divides(fmt, shape) is expected


def test_views_carry_the_published_names() -> None:
    names = {fmt.value: (spec.view_dtype, spec.view_format) for fmt, spec in FORMATS.items()}

    assert names == {
        "f32": ("f32", ""),
        "f16": ("f16", ""),
        "bf16": ("bf16", ""),
        "mxfp8": ("f8e4m3", "mxfp8-e4m3-ue8m0-k32"),
        "nvfp4": ("f4e2m1", "nvfp4-e2m1-e4m3-k16"),
    }


def test_bits_per_weight_include_the_block_scale() -> None:
    assert {fmt.value: spec.bits_per_weight for fmt, spec in FORMATS.items()} == {
        "f32": 32.0, "f16": 16.0, "bf16": 16.0, "mxfp8": 8.25, "nvfp4": 4.5,
    }


def test_block_formats_refuse_a_shape_that_does_not_divide() -> None:
    with pytest.raises(AssertionError):
        packed(Format.MXFP8, (4, 33))
