"""Weights that come quantized are recognised by names, dtypes and shapes, kept byte for byte, or refused by name."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from dflash_core.errors import CheckpointError

from exporter.convert.packed import PackedFormat, group_packed, kept_specs
from exporter.safetensors_header import TensorEntry
from exporter.weights import layout_weights
from tests.exporter.convert.test_stream import checkpoint_of, convert_weights, raw, view_bytes

BITS = {"U8": 8, "I32": 32, "F8_E4M3": 8, "F32": 32, "BF16": 16, "F16": 16}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def entries(tensors: Tensors) -> dict[str, TensorEntry]:
    return {f"w.{name}": TensorEntry(f"w.{name}", dtype, shape, "s", 0, prod(shape) * BITS[dtype] // 8)
            for name, (dtype, shape) in tensors.items()}


MXFP4: Tensors = {"weight_packed": ("U8", (64, 32)), "weight_scale": ("U8", (64, 2))}
NVFP4: Tensors = {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ())}
FP8: Tensors = {"weight": ("F8_E4M3", (200, 300)), "weight_scale": ("F32", (2, 3))}
KNOWN = [
    ("mxfp4", MXFP4, PackedFormat.MXFP4, (64, 64), 64 * 34),
    ("nvfp4-modelopt", NVFP4, PackedFormat.NVFP4, (64, 64), 64 * 36 + 4),
    ("nvfp4-with-input-scale", {**NVFP4, "input_scale": ("F32", ())}, PackedFormat.NVFP4, (64, 64), 64 * 36 + 8),
    ("nvfp4-compressed-tensors", {"weight_packed": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)),
                                  "weight_global_scale": ("F32", (1,))}, PackedFormat.NVFP4, (64, 64), 64 * 36 + 4),
    ("fp8-block", FP8, PackedFormat.FP8_BLOCK, (200, 300), 60000 + 24),
    ("fp8-block-inverse-name", {"weight": ("F8_E4M3", (200, 300)), "weight_scale_inv": ("BF16", (2, 3))},
     PackedFormat.FP8_BLOCK, (200, 300), 60000 + 12),
]


@pytest.mark.parametrize(
    ("tensors", "kind", "shape", "nbytes"), [row[1:] for row in KNOWN], ids=[row[0] for row in KNOWN]
)
def test_published_layouts_are_recognised(
    tensors: Tensors, kind: PackedFormat, shape: tuple[int, ...], nbytes: int
) -> None:
    given = entries(tensors)

    logical, packed = group_packed(given)

    assert list(packed) == list(logical) == ["w.weight"]
    assert (packed["w.weight"].kind, packed["w.weight"].shape, packed["w.weight"].nbytes) == (kind, shape, nbytes)
    assert (logical["w.weight"].dtype, logical["w.weight"].shape) == (kind.value, shape)
    assert [part.name for part in packed["w.weight"].parts] == list(given)


UNKNOWN = [
    ("int4", {"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 2)), "weight_shape": ("I32", (2,))}),
    ("gptq", {"qweight": ("I32", (8, 64)), "weight_scale": ("F16", (2, 64))}),
    ("codes-without-scales", {"weight_packed": ("U8", (64, 32))}),
    ("fp8-without-scales", {"weight": ("F8_E4M3", (64, 64))}),
    ("scales-of-another-block", {"weight_packed": ("U8", (64, 32)), "weight_scale": ("U8", (64, 4))}),
    ("fp8-per-row", {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (256, 1))}),
    ("fp8-padded-rows", {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (2, 1, 2, 1))}),
    ("nvfp4-without-global-scale", {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4))}),
    ("zero-point", {**MXFP4, "weight_zero_point": ("U8", (64, 2))}),
]


@pytest.mark.parametrize("tensors", [row[1] for row in UNKNOWN], ids=[row[0] for row in UNKNOWN])
def test_layout_that_is_not_read_is_refused_by_name(tensors: Tensors) -> None:
    with pytest.raises(CheckpointError) as caught:
        group_packed(entries(tensors))

    first, (dtype, shape) = next(iter(tensors.items()))
    assert caught.value.code == "PACKED_UNKNOWN"
    assert caught.value.where == "w in s"
    assert str(caught.value.got).startswith(f".{first} {dtype} {list(shape)}")


def test_plain_checkpoint_is_left_alone() -> None:
    plain = entries({"weight": ("BF16", (64, 64)), "bias": ("BF16", (64,))})

    assert group_packed(plain) == (plain, {})


def test_plain_tensors_keep_their_place_between_packed_ones() -> None:
    given = {"a.weight": TensorEntry("a.weight", "BF16", (2,), "s", 0, 4), **entries(MXFP4),
             "z.weight": TensorEntry("z.weight", "BF16", (2,), "s", 0, 4)}

    assert list(group_packed(given)[0]) == ["a.weight", "w.weight", "z.weight"]


STORED = [
    ("mxfp4", {"w.weight_packed": torch.randint(0, 256, (64, 32), dtype=torch.uint8),
               "w.weight_scale": torch.randint(0, 255, (64, 2), dtype=torch.uint8)},
     "keep/1+mxfp4-e2m1-ue8m0-k32", {"x.weight_packed": ("u8", [64, 32]), "x.weight_scale": ("u8", [64, 2])}),
    ("nvfp4", {"w.weight": torch.randint(0, 256, (64, 32), dtype=torch.uint8),
               "w.weight_scale": torch.rand(64, 4).to(torch.float8_e4m3fn), "w.weight_scale_2": torch.tensor(0.5)},
     "keep/1+nvfp4-e2m1-e4m3-k16",
     {"x.weight": ("u8", [64, 32]), "x.weight_scale": ("f8e4m3", [64, 4]), "x.weight_scale_2": ("f32", [])}),
    ("fp8", {"w.weight": torch.randn(200, 300).to(torch.float8_e4m3fn), "w.weight_scale": torch.rand(2, 3)},
     "keep/1+fp8-e4m3-f32-b128x128", {"x.weight": ("f8e4m3", [200, 300]), "x.weight_scale": ("f32", [2, 3])}),
]


@pytest.mark.parametrize(
    ("tensors", "recipe", "views"), [row[1:] for row in STORED], ids=[row[0] for row in STORED]
)
def test_quantized_weight_passes_through_byte_for_byte(
    tmp_path: Path, tensors: dict[str, torch.Tensor], recipe: str, views: dict[str, tuple[str, list[int]]]
) -> None:
    checkpoint = checkpoint_of(tmp_path / "model", tensors)
    weight = group_packed(checkpoint.tensors)[1]["w.weight"]

    layout = layout_weights(kept_specs(weight, "x", "target", "target", "target"))
    converted = convert_weights(layout, {"target": checkpoint}, tmp_path / "core", lambda nbytes: None)

    assert {view.name: (view.dtype, list(view.shape)) for view in converted.views} == views
    assert {view.recipe for view in converted.views} == {recipe}
    assert not any(view.HasField("format") for view in converted.views), "a reader need not know the format"
    assert converted.errors == ()
    for name, tensor in tensors.items():
        stored = view_bytes(tmp_path / "core", converted, name.replace("w.", "x."))
        assert stored == raw(tensor.reshape(-1) if tensor.dim() else tensor.reshape(1))
