"""MXFP8 against the slow oracle on every code, tie and edge, and against torchao bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from dflash_core.errors import ConvertError
from dflash_core.formats import Format
from torch import Tensor

from exporter.convert import quantized
from exporter.convert.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from exporter.convert.nvfp4 import quantize_nvfp4
from exporter.convert.quantized import QuantizedTensor
from tests.oracles import mxfp8_oracle as oracle


def assert_matches_oracle(weight: Tensor) -> None:
    quantized = quantize_mxfp8(weight)
    for row, values in enumerate(weight.to(torch.float32).tolist()):
        for block in range(weight.shape[1] // 32):
            byte, codes = oracle.quantize_block(values[block * 32 : block * 32 + 32])
            assert quantized.block_scale[row, block].item() == byte
            assert quantized.codes[row, block * 32 : block * 32 + 32].tolist() == codes


def rows_of_32(values: list[float], anchor: float) -> Tensor:
    """f32 [rows, 32] that holds all values, each row led by `anchor`, which fixes its scale."""
    rows = [[anchor, *values[start : start + 31]] for start in range(0, len(values), 31)]
    return torch.tensor([row + [0.0] * (32 - len(row)) for row in rows], dtype=torch.float32)


def neighbours(value: float) -> list[float]:
    """The fp32 numbers just below, at and just above a value."""
    exact = torch.tensor(value, dtype=torch.float32)
    return [torch.nextafter(exact, torch.tensor(-math.inf)).item(), value,
            torch.nextafter(exact, torch.tensor(math.inf)).item()]


E4M3 = [float(value) for value in (oracle.e4m3_value(byte) for byte in range(0x7F)) if value is not None]
MIDPOINTS = [(low + high) / 2 for low, high in pairwise(E4M3)]


def test_decodes_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.full((8, 1), 127, dtype=torch.uint8)

    decoded = dequantize_mxfp8(QuantizedTensor(Format.MXFP8, codes, scales, None)).flatten().tolist()

    expected = [oracle.e4m3_value(byte) for byte in range(256)]
    assert [None if math.isnan(value) else Fraction(value) for value in decoded] == expected
    assert decoded[0x7E] == 448.0 and decoded[0x01] == 2.0**-9 and decoded[0xB8] == -1.0


def test_decodes_every_e8m0_scale() -> None:
    codes = torch.full((256, 32), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)

    decoded = dequantize_mxfp8(QuantizedTensor(Format.MXFP8, codes, scales, None))[:, 0].tolist()

    assert [None if math.isnan(value) else Fraction(value) for value in decoded] == [
        oracle.e8m0_value(byte) for byte in range(256)
    ]
    assert decoded[0] == 2.0**-127 and decoded[127] == 1.0


def test_every_e4m3_value_encodes_to_its_own_code() -> None:
    weight = rows_of_32([*E4M3, *(-value for value in E4M3)], anchor=448.0)

    assert_matches_oracle(weight)
    assert torch.equal(dequantize_mxfp8(quantize_mxfp8(weight)), weight)


def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_theirs() -> None:
    values = [near for midpoint in MIDPOINTS for near in neighbours(midpoint)]

    assert_matches_oracle(rows_of_32([*values, *(-value for value in values)], anchor=448.0))


TIES = [
    ("between-1-and-1.125", 1.0625, 0x38),
    ("between-1.125-and-1.25", 1.1875, 0x3A),
    ("between-416-and-448", 432.0, 0x7E),
    ("half-the-least", 2.0**-10, 0x00),
    ("between-least-and-next", 3 * 2.0**-10, 0x02),
    ("negative-half-the-least", -(2.0**-10), 0x80),
]


@pytest.mark.parametrize(("value", "code"), [row[1:] for row in TIES], ids=[row[0] for row in TIES])
def test_tie_goes_to_the_even_code(value: float, code: int) -> None:
    assert quantize_mxfp8(rows_of_32([value], anchor=448.0)).codes[0, 1].item() == code


SCALES = [
    ("zero-block", 0.0, 0),
    ("fits-exactly", 448.0, 127),
    ("just-above-rounds-up", 448.00003, 128),
    ("bf16-above", 450.0, 128),
    ("one", 1.0, 119),
    ("1.75", 1.75, 119),
    ("above-1.75", 1.7578125, 120),
    ("least-fp32", 2.0**-149, 0),
    ("largest-fp32", 3.4028234663852886e38, 247),
    ("largest-power-under-the-clamp", 1.75 * 2.0**-119, 0),
    ("first-scale-above-the-clamp", 1.75 * 2.0**-118, 1),
]


@pytest.mark.parametrize(("amax", "byte"), [row[1:] for row in SCALES], ids=[row[0] for row in SCALES])
def test_scale_is_the_smallest_power_of_two_that_does_not_saturate(amax: float, byte: int) -> None:
    quantized = quantize_mxfp8(torch.tensor([[-amax] + [0.0] * 31]))

    assert quantized.block_scale.tolist() == [[byte]]


def test_scale_is_right_around_every_power_of_two() -> None:
    maxima = [near for exponent in range(-126, 127) for near in neighbours(1.75 * 2.0**exponent)]

    quantized = quantize_mxfp8(torch.tensor([[value] + [0.0] * 31 for value in maxima]))

    assert quantized.block_scale.flatten().tolist() == [oracle.scale_byte(Fraction(value)) for value in maxima]


SAMPLES = [
    ("bf16", torch.bfloat16, 0.02),
    ("f16", torch.float16, 0.02),
    ("f32", torch.float32, 0.02),
    ("bf16-denormal", torch.bfloat16, 1e-39),
    ("f32-denormal", torch.float32, 1e-44),
    ("bf16-huge", torch.bfloat16, 5e37),
]


def sample(dtype: torch.dtype, size: float, rows: int = 6, cols: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    spread = torch.exp2(torch.randint(-6, 2, (rows, cols // 32), generator=generator).float())
    values = torch.randn(rows, cols, generator=generator).clamp(-3, 3) * spread.repeat_interleave(32, dim=1)
    return (values.double() * size).to(torch.float32).to(dtype)


@pytest.mark.parametrize(("dtype", "size"), [row[1:] for row in SAMPLES], ids=[row[0] for row in SAMPLES])
def test_random_weights_match_the_oracle(dtype: torch.dtype, size: float) -> None:
    assert_matches_oracle(sample(dtype, size))


@pytest.mark.parametrize(
    "weight",
    [sample(torch.bfloat16, 0.02, 64, 1024), sample(torch.float32, 0.02, 64, 1024), torch.zeros(4, 64),
     rows_of_32(MIDPOINTS, 448.0), torch.full((2, 32), 3.3895313892515355e38, dtype=torch.bfloat16),
     sample(torch.bfloat16, 1e-30, 8, 64)],
    ids=["bf16", "f32", "zero", "ties", "bf16-maximum", "small"],
)
def test_equals_torchao_bit_for_bit(weight: Tensor) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    ours = quantize_mxfp8(weight)

    assert torch.equal(ours.block_scale, scale.view(torch.uint8).view_as(ours.block_scale))
    assert torch.equal(ours.codes, codes.view(torch.uint8).view_as(ours.codes))


def test_row_chunks_do_not_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(torch.bfloat16, 0.02, 50, 96)
    whole = quantize_mxfp8(weight)
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 7 * 96)

    chunked = quantize_mxfp8(weight)

    assert torch.equal(chunked.codes, whole.codes) and torch.equal(chunked.block_scale, whole.block_scale)


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_nvfp4], ids=["mxfp8", "nvfp4"])
def test_row_of_a_weight_that_is_not_finite_counts_from_the_first(
    monkeypatch: pytest.MonkeyPatch, quantize: Callable[[Tensor], QuantizedTensor]
) -> None:
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 4 * 32)
    weight = torch.zeros(10, 32)
    weight[9, 7] = math.nan

    with pytest.raises(ConvertError, match="row 9, column 7"):
        quantize(weight)


def test_every_e4m3_code_is_read_as_the_middle_of_a_half_float() -> None:
    codes = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)

    found = quantized.values_of_e4m3(codes, out=torch.empty(codes.shape)) * 2**8

    assert [Fraction(value) for value in found.tolist()] == [oracle.e4m3_value(byte) for byte in codes.tolist()]


AMAX_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", AMAX_DTYPES, ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("block", [16, 32])
def test_largest_of_a_block_is_found_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int
) -> None:
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 3 * 2 * block)
    weight = torch.full((block, 2 * block), 1.0, dtype=dtype)
    for place in range(block):
        weight[place, place], weight[place, block + place] = 3.0, -5.0 - place

    assert quantized.block_amax(weight, block).tolist() == [[3.0, 5.0 + place] for place in range(block)]


BAD = [
    ("nan", torch.tensor([[0.0] * 32, [0.0] * 5 + [math.nan] + [0.0] * 26]), "NON_FINITE_WEIGHT", "row 1, column 5"),
    ("infinity-bf16", torch.tensor([[0.0] * 31 + [-math.inf]], dtype=torch.bfloat16), "NON_FINITE_WEIGHT",
     "row 0, column 31"),
    ("first-of-two-f16", torch.tensor([[0.0, math.inf] + [0.0] * 29 + [math.nan]], dtype=torch.float16),
     "NON_FINITE_WEIGHT", "row 0, column 1"),
    ("torn-block", torch.zeros(2, 48), "BLOCK_DIVISION", "expected a multiple of 32, got 48"),
    ("vector", torch.zeros(64), "NOT_A_MATRIX", "expected two axes, got [64]"),
    ("cube", torch.zeros(2, 2, 32), "NOT_A_MATRIX", "expected two axes, got [2, 2, 32]"),
    ("already-converted", torch.zeros(2, 32, dtype=torch.uint8), "SOURCE_DTYPE", "got uint8"),
]


@pytest.mark.parametrize(("weight", "code", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses_what_it_cannot_hold(weight: Tensor, code: str, text: str) -> None:
    with pytest.raises(ConvertError) as caught:
        quantize_mxfp8(weight)

    assert caught.value.code == code
    assert text in str(caught.value)
