"""Weights are placed without reading them: offsets, views and refusals."""

from __future__ import annotations

import pytest
from dflash_core.errors import ConvertError
from dflash_core.formats import Format

from exporter.weights import WeightSpec, layout_weights


def spec(name: str, fmt: Format, shape: tuple[int, ...], blob: str = "target") -> WeightSpec:
    return WeightSpec(name, blob, "target", "target", (f"{name}.weight",), "copy/1", fmt, shape)


def test_views_lie_at_multiples_of_256_in_the_order_given() -> None:
    layout = layout_weights([
        spec("norm", Format.BF16, (5,)),
        spec("body", Format.MXFP8, (3, 64)),
        spec("head", Format.NVFP4, (2, 48), "head"),
        spec("scale", Format.F32, (1,)),
    ])

    placed = [
        (v.blob, v.blob_id, v.name, v.offset_bytes, v.size_bytes, v.dtype, v.shape, v.format, v.scale_view)
        for v in layout.views
    ]
    assert placed == [
        ("target", 1, "norm", 0, 10, "bf16", (5,), "", ""),
        ("target", 1, "body", 256, 192, "f8e4m3", (3, 64), "mxfp8-e4m3-ue8m0-k32", "body.block_scale"),
        ("target", 1, "body.block_scale", 512, 6, "u8", (3, 2), "", ""),
        ("target", 1, "scale", 768, 4, "f32", (1,), "", ""),
        ("head", 2, "head", 0, 48, "f4e2m1", (2, 48), "nvfp4-e2m1-e4m3-k16", "head.block_scale"),
        ("head", 2, "head.block_scale", 256, 6, "u8", (2, 3), "", ""),
        ("head", 2, "head.global_scale", 512, 4, "f32", (1,), "", ""),
    ]
    assert [(blob.key, blob.size_bytes) for blob in layout.blobs] == [("target", 772), ("head", 516)]
    assert layout.size_bytes == 1288


def test_view_that_ends_on_the_boundary_leaves_no_gap() -> None:
    layout = layout_weights([spec("a", Format.BF16, (128,)), spec("b", Format.BF16, (1,))])

    assert layout.view("b").offset_bytes == 256


def test_view_is_found_by_name_or_not_at_all() -> None:
    layout = layout_weights([spec("a", Format.BF16, (2, 2))])

    assert layout.view("a").shape == (2, 2)
    with pytest.raises(KeyError):
        layout.view("a.block_scale")


BAD = [
    ("f16", Format.F16, (4, 4), "FORMAT_F16", "cores hold no F16 weights"),
    ("torn-mxfp8", Format.MXFP8, (4, 48), "BLOCK_DIVISION", "expected a multiple of 32, got 48\n   at: w [4, 48]"),
    ("torn-nvfp4", Format.NVFP4, (4, 24), "BLOCK_DIVISION", "expected a multiple of 16, got 24"),
    ("vector", Format.MXFP8, (64,), "NOT_A_MATRIX", "expected two axes, got [64]"),
]


@pytest.mark.parametrize(("fmt", "shape", "code", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses_a_weight_its_format_cannot_hold(fmt: Format, shape: tuple[int, ...], code: str, text: str) -> None:
    with pytest.raises(ConvertError) as caught:
        layout_weights([spec("w", fmt, shape)])

    assert caught.value.code == code
    assert text in str(caught.value)


def test_name_used_twice_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="w"):
        layout_weights([spec("w", Format.BF16, (4,)), spec("w", Format.BF16, (4,), "head")])
