"""Weights that come quantized are recognised by names, dtypes and shapes, kept byte for byte, or refused by name."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_core.errors import CheckpointError, ConvertError
from dflash_core.formats import Format

from exporter.convert.packed import PackedFormat, group_packed, kept_specs
from exporter.safetensors_header import TensorEntry
from exporter.weights import GlobalScale, WeightSpec, layout_weights
from tests.exporter.convert.test_stream import checkpoint_of, convert_weights, raw, view_bytes

BITS = {"U8": 8, "I32": 32, "F8_E4M3": 8, "F32": 32, "BF16": 16, "F16": 16}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def entries(tensors: Tensors) -> dict[str, TensorEntry]:
    return {f"w.{name}": TensorEntry(f"w.{name}", dtype, shape, "s", 0, prod(shape) * BITS[dtype] // 8)
            for name, (dtype, shape) in tensors.items()}


MXFP4: Tensors = {"weight_packed": ("U8", (64, 32)), "weight_scale": ("U8", (64, 2))}
NVFP4: Tensors = {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ())}
NVFP4_CT: Tensors = {"weight_packed": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)),
                     "weight_global_scale": ("F32", (1,))}
FP8: Tensors = {"weight": ("F8_E4M3", (200, 300)), "weight_scale": ("F32", (2, 3))}
KNOWN = [
    ("mxfp4", MXFP4, PackedFormat.MXFP4, (64, 64), 64 * 34),
    ("nvfp4-modelopt", NVFP4, PackedFormat.NVFP4, (64, 64), 64 * 36 + 4),
    ("nvfp4-with-input-scale", {**NVFP4, "input_scale": ("F32", ())}, PackedFormat.NVFP4, (64, 64), 64 * 36 + 8),
    ("nvfp4-compressed-tensors", NVFP4_CT, PackedFormat.NVFP4, (64, 64), 64 * 36 + 4),
    ("nvfp4-compressed-tensors-with-input-scale", {**NVFP4_CT, "input_global_scale": ("F32", (1,))},
     PackedFormat.NVFP4, (64, 64), 64 * 36 + 8),
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


def test_what_a_global_scale_does_is_told_by_its_spelling() -> None:
    for tensors, applied in ((NVFP4, GlobalScale.MULTIPLIES), (NVFP4_CT, GlobalScale.DIVIDES), (MXFP4, None)):
        assert group_packed(entries(tensors))[1]["w.weight"].global_scale is applied


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


UNKNOWN = [
    ("int4", {"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 2)), "weight_shape": ("I32", (2,))}),
    ("gptq", {"qweight": ("I32", (8, 64)), "weight_scale": ("F16", (2, 64))}),
    ("codes-without-scales", {"weight_packed": ("U8", (64, 32))}),
    ("fp8-without-scales", {"weight": ("F8_E4M3", (64, 64))}),
    ("scales-of-another-block", {"weight_packed": ("U8", (64, 32)), "weight_scale": ("U8", (64, 4))}),
    ("fp8-per-row", {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (256, 1))}),
    ("fp8-padded-rows", {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (2, 1, 2, 1))}),
    ("nvfp4-without-global-scale", without(NVFP4, "weight_scale_2")),
    ("nvfp4-packed-without-global-scale", without(NVFP4_CT, "weight_global_scale")),
    ("nvfp4-without-block-scales", without(NVFP4, "weight_scale")),
    ("nvfp4-of-blocks-of-32", {**NVFP4, "weight_scale": ("F8_E4M3", (64, 2))}),
    ("nvfp4-packed-of-blocks-of-32", {**NVFP4_CT, "weight_scale": ("F8_E4M3", (64, 2))}),
    ("nvfp4-with-a-global-scale-per-row", {**NVFP4_CT, "weight_global_scale": ("F32", (64,))}),
    ("nvfp4-with-a-bf16-global-scale", {**NVFP4, "weight_scale_2": ("BF16", ())}),
    ("nvfp4-of-two-spellings", {**without(NVFP4, "weight_scale_2"), "weight_global_scale": ("F32", ())}),
    ("nvfp4-packed-of-two-spellings", {**without(NVFP4_CT, "weight_global_scale"), "weight_scale_2": ("F32", ())}),
    ("nvfp4-of-both-spellings", {**NVFP4_CT, "weight_scale_2": ("F32", ())}),
    ("nvfp4-with-zero-point", {**NVFP4_CT, "weight_zero_point": ("F8_E4M3", (64, 4))}),
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


def global_scales(folder: Path, applied: GlobalScale, scales: dict[str, torch.Tensor]) -> bytes:
    """Bytes of the view that is stored from these scales."""
    checkpoint = checkpoint_of(folder / applied.value, scales)
    layout = layout_weights([WeightSpec("g", "target", "target", "target", tuple(scales), "made/1", Format.F32,
                                        (len(scales),), global_scale=applied)])
    out = folder / f"{applied.value} core"
    return view_bytes(out, convert_weights(layout, {"target": checkpoint}, out, lambda nbytes: None), "g")


def test_global_scales_become_multipliers_in_the_order_of_their_tensors(tmp_path: Path) -> None:
    values = np.float32([3e38, 1e-38, 7, 1, 2688 / 5, *np.random.default_rng(0).uniform(1e-6, 1e6, 20)])
    scales = {f"w{i:02}.s": torch.tensor(value) if i % 2 else torch.tensor([value]) for i, value in enumerate(values)}

    kept = global_scales(tmp_path, GlobalScale.MULTIPLIES, scales)
    inverted = global_scales(tmp_path, GlobalScale.DIVIDES, scales)

    assert kept == values.tobytes()
    assert inverted == (1 / values.astype(np.float64)).astype(np.float32).tobytes()


@pytest.mark.parametrize("applied", GlobalScale)
@pytest.mark.parametrize("value", [0.0, -0.5, float("inf"), float("nan")])
def test_global_scale_that_cannot_scale_is_refused_by_name(tmp_path: Path, value: float, applied: GlobalScale) -> None:
    with pytest.raises(ConvertError) as caught:
        global_scales(tmp_path, applied, {"a.s": torch.tensor(2.0), "b.s": torch.tensor([value])})

    assert (caught.value.code, caught.value.where) == ("GLOBAL_SCALE", "b.s in model.safetensors")
    assert str(caught.value.expected).endswith(f"which {applied.value}")


def test_divisor_whose_reciprocal_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="global scale"):
        global_scales(tmp_path, GlobalScale.DIVIDES, {"a.s": torch.tensor(1e-39)})
