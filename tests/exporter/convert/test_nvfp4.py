"""NVFP4 against the slow oracle on every code, tie and edge, and against torchao where both round alike."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from dflash_core.errors import ConvertError
from dflash_core.formats import Format
from torch import Tensor

from exporter.convert import quantized
from exporter.convert.nvfp4 import dequantize_nvfp4, global_scale_of, quantize_nvfp4
from exporter.convert.quantized import QuantizedTensor
from tests.oracles import nvfp4_oracle as oracle


def unpack(codes: Tensor) -> list[list[int]]:
    return [[nibble for byte in row for nibble in (byte & 15, byte >> 4)] for row in codes.tolist()]


def assert_matches_oracle(weight: Tensor) -> None:
    quantized = quantize_nvfp4(weight)
    rows = weight.to(torch.float32).tolist()
    scale = oracle.global_scale([value for row in rows for value in row])
    assert quantized.global_scale is not None
    assert Fraction(quantized.global_scale.item()) == scale
    codes = unpack(quantized.codes)
    for row, values in enumerate(rows):
        for block in range(len(values) // 16):
            part = slice(block * 16, block * 16 + 16)
            byte, expected = oracle.quantize_block(values[part], scale)
            assert quantized.block_scale[row, block].item() == byte
            assert codes[row][part] == expected


def unit_scaled(values: list[float]) -> Tensor:
    """f32 [rows, 16] that holds all values under scale 1: a first row of 2688 = 448 * 6, then rows led by 6."""
    rows = [[6.0, *values[start : start + 15]] for start in range(0, len(values), 15)]
    return torch.tensor([[2688.0] + [0.0] * 15] + [row + [0.0] * (16 - len(row)) for row in rows])


def neighbours(value: float) -> list[float]:
    """The fp32 numbers just below, at and just above a value."""
    exact = torch.tensor(value, dtype=torch.float32)
    return [torch.nextafter(exact, torch.tensor(-math.inf)).item(), value,
            torch.nextafter(exact, torch.tensor(math.inf)).item()]


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [float(oracle.e4m3_magnitude(byte)) for byte in range(0x7F)]


def test_decodes_every_e2m1_code_low_nibble_first() -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    one = torch.tensor([[0x38]], dtype=torch.uint8)

    decoded = dequantize_nvfp4(QuantizedTensor(Format.NVFP4, codes, one, torch.ones(1)))[0].tolist()

    assert [Fraction(value) for value in decoded] == [oracle.e2m1_value(code) for code in range(16)]
    assert decoded[:8] == E2M1 and math.copysign(1.0, decoded[8]) == -1.0


def test_decodes_every_block_scale() -> None:
    codes = torch.full((127, 8), 0x22, dtype=torch.uint8)  # 1.0
    scales = torch.arange(127, dtype=torch.uint8).view(127, 1)

    decoded = dequantize_nvfp4(QuantizedTensor(Format.NVFP4, codes, scales, torch.tensor([0.5])))[:, 0].tolist()

    assert decoded == [value / 2 for value in E4M3]


def test_every_e2m1_value_encodes_to_its_own_code() -> None:
    weight = unit_scaled([*E2M1, *(-value for value in E2M1)])

    assert_matches_oracle(weight)
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(weight)), weight)


TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-0.25, 8), (-0.75, 10), (-5.0, 14)]


@pytest.mark.parametrize(("value", "code"), TIES, ids=[str(value) for value, _ in TIES])
def test_tie_goes_to_the_even_code(value: float, code: int) -> None:
    quantized = quantize_nvfp4(unit_scaled([value]))

    assert unpack(quantized.codes)[1][1] == code


def test_values_beside_every_midpoint_match_the_oracle() -> None:
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    values = [near for midpoint in midpoints for near in neighbours(midpoint)]

    assert_matches_oracle(unit_scaled([*values, *(-value for value in values)]))


def test_block_scales_match_the_oracle_on_every_code_and_midpoint() -> None:
    midpoints = [(low + high) / 2 for low, high in pairwise(E4M3)]
    maxima = [6 * near for value in [*E4M3[1:], *midpoints] for near in neighbours(value) if near <= 448]

    assert_matches_oracle(torch.tensor([[2688.0] + [0.0] * 15] + [[value] + [1.0] * 15 for value in maxima]))


def test_zero_tensor_has_zero_scales_and_codes() -> None:
    quantized = quantize_nvfp4(torch.zeros(2, 32))

    assert quantized.global_scale is not None and quantized.global_scale.tolist() == [0.0]
    assert not quantized.block_scale.any() and not quantized.codes.any()
    assert not dequantize_nvfp4(quantized).any()


def test_block_too_small_for_its_scale_becomes_zero() -> None:
    weight = torch.tensor([[2688.0] * 16, [-0.005] * 16])  # 0.005 / 6 is under half of the least scale, 2**-9

    quantized = quantize_nvfp4(weight)

    assert quantized.block_scale.tolist() == [[0x7E], [0]]
    assert unpack(quantized.codes)[1] == [8] * 16


def test_block_scale_saturates_where_the_global_scale_lost_its_bits() -> None:
    weight = torch.zeros(1, 16)
    weight[0, 0] = 3763 * 2.0**-149  # 3763 / 2688 of the least fp32 number: the global scale is that number

    quantized = quantize_nvfp4(weight)

    assert quantized.block_scale.tolist() == [[0x7E]]
    assert_matches_oracle(weight)


SAMPLES = [
    ("bf16", torch.bfloat16, 0.02),
    ("f16", torch.float16, 0.02),
    ("f32", torch.float32, 0.02),
    ("bf16-denormal", torch.bfloat16, 1e-39),
    ("f32-denormal", torch.float32, 1e-44),
    ("bf16-huge", torch.bfloat16, 5e37),
]


def sample(dtype: torch.dtype, size: float, rows: int = 6, cols: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    spread = torch.exp2(torch.randint(-6, 2, (rows, cols // 16), generator=generator).float())
    values = torch.randn(rows, cols, generator=generator).clamp(-3, 3) * spread.repeat_interleave(16, dim=1)
    return (values.double() * size).to(torch.float32).to(dtype)


@pytest.mark.parametrize(("dtype", "size"), [row[1:] for row in SAMPLES], ids=[row[0] for row in SAMPLES])
def test_random_weights_match_the_oracle(dtype: torch.dtype, size: float) -> None:
    assert_matches_oracle(sample(dtype, size))


def torchao_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(weight.abs().max().float())
    block_scale, codes = nvfp4_quantize(weight, 16, scale)
    return codes, block_scale.view(torch.uint8), scale.reshape(1)


@pytest.mark.parametrize(
    "weight",
    [sample(torch.bfloat16, 0.02, 128, 1024), sample(torch.float32, 0.02, 128, 1024),
     unit_scaled([*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]),
     torch.full((2, 32), 3.3895313892515355e38, dtype=torch.bfloat16)],
    ids=["bf16", "f32", "codes-and-ties", "bf16-maximum"],
)
def test_equals_torchao_bit_for_bit(weight: Tensor) -> None:
    codes, block_scale, scale = torchao_nvfp4(weight)

    ours = quantize_nvfp4(weight)

    assert ours.global_scale is not None and torch.equal(ours.global_scale, scale)
    assert torch.equal(ours.block_scale, block_scale.view_as(ours.block_scale))
    assert torch.equal(ours.codes, codes.view(torch.uint8))


def test_keeps_small_scales_that_torchao_raises_to_its_least() -> None:
    weight = torch.tensor([[2688.0] * 16, [0.03] * 16])  # torchao stores no scale under 2**-6

    assert quantize_nvfp4(weight).block_scale.tolist() == [[0x7E], [0x03]]
    assert torchao_nvfp4(weight)[1].flatten().tolist() == [0x7E, 0x08]


def test_divides_where_torchao_multiplies_by_a_rounded_reciprocal() -> None:
    weight = torch.tensor([[2688.0] + [0.0] * 15, [1.40625, 0.29296875] + [0.0] * 14])  # scale 0.234375: 1.25, a tie

    assert unpack(quantize_nvfp4(weight).codes)[1][:2] == [7, 2]
    assert unpack(torchao_nvfp4(weight)[0])[1][:2] == [7, 3]


def test_rows_of_a_fused_group_share_the_given_scale() -> None:
    first, second = sample(torch.bfloat16, 0.02), sample(torch.bfloat16, 0.3)
    together = quantize_nvfp4(torch.cat([first, second]))
    scale = global_scale_of(torch.cat([first, second]).abs().max())

    parts = [quantize_nvfp4(part, scale) for part in (first, second)]

    assert together.global_scale is not None and torch.equal(scale, together.global_scale)
    assert torch.equal(torch.cat([part.codes for part in parts]), together.codes)
    assert torch.equal(torch.cat([part.block_scale for part in parts]), together.block_scale)
    assert quantize_nvfp4(first).block_scale.tolist() != parts[0].block_scale.tolist()


def test_row_chunks_do_not_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(torch.bfloat16, 0.02, 50, 96)
    whole = quantize_nvfp4(weight)
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 7 * 96)

    chunked = quantize_nvfp4(weight)

    assert torch.equal(chunked.codes, whole.codes) and torch.equal(chunked.block_scale, whole.block_scale)


BAD = [
    ("nan", torch.tensor([[0.0] * 16, [0.0] * 5 + [math.nan] + [0.0] * 10]), "NON_FINITE_WEIGHT", "row 1, column 5"),
    ("torn-block", torch.zeros(2, 24), "BLOCK_DIVISION", "expected a multiple of 16, got 24"),
    ("vector", torch.zeros(64), "NOT_A_MATRIX", "expected two axes, got [64]"),
    ("already-converted", torch.zeros(2, 32, dtype=torch.int8), "SOURCE_DTYPE", "got int8"),
]


@pytest.mark.parametrize(("weight", "code", "text"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses_what_it_cannot_hold(weight: Tensor, code: str, text: str) -> None:
    with pytest.raises(ConvertError) as caught:
        quantize_nvfp4(weight)

    assert caught.value.code == code
    assert text in str(caught.value)
