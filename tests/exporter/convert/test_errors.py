"""The error report says what was lost, by arithmetic done another way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dflash_core.formats import Format
from torch import Tensor

from exporter.convert import quantized
from exporter.convert.errors import ErrorStats, report_bytes
from exporter.convert.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from exporter.convert.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from exporter.convert.quantized import QuantizedTensor
from runtime.error_report import WeightErrors, worst_first

CODECS: dict[Format, tuple[Callable[[Tensor], QuantizedTensor], Callable[[QuantizedTensor], Tensor]]] = {
    Format.MXFP8: (quantize_mxfp8, dequantize_mxfp8), Format.NVFP4: (quantize_nvfp4, dequantize_nvfp4),
}


def measured(weight: Tensor, fmt: Format) -> WeightErrors:
    stats = ErrorStats()
    CODECS[fmt][0](weight, stats=stats)
    return stats.summary("w", fmt)


def block(values: list[float], length: int) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (length - len(values))]], dtype=torch.bfloat16)


def test_figures_of_an_mxfp8_block_worked_by_hand() -> None:
    found = measured(block([448.0, 1.0625, -33.0], 32), Format.MXFP8)  # scale 1: 1.0625 -> 1, 33 -> 32

    signal, noise = 448.0**2 + 1.0625**2 + 33.0**2, 0.0625**2 + 1.0
    assert found == WeightErrors("w", "mxfp8", 32, round(10 * math.log10(signal / noise), 2), 1.0, 0.05882, 0.0, 0)


def test_figures_of_an_nvfp4_block_worked_by_hand() -> None:
    weight = torch.cat([block([2688.0], 16), block([6.25, 2.5, -0.25], 16)])  # second block's scale: 1.04 -> 1

    found = measured(weight, Format.NVFP4)

    signal, noise = 2688.0**2 + 6.25**2 + 2.5**2 + 0.25**2, 0.25**2 + 0.5**2 + 0.25**2
    assert found == WeightErrors("w", "nvfp4", 32, round(10 * math.log10(signal / noise), 2), 0.5, 1.0, 1 / 32, 0)


def test_weights_of_a_block_of_zeros_are_not_saturated() -> None:
    found = measured(torch.tensor([[2688.0] * 16, [-0.005] * 16]), Format.NVFP4)

    assert (found.saturated, found.zero_blocks) == (0.0, 1)


def test_weights_that_the_format_holds_lose_nothing() -> None:
    found = measured(block([448.0, 1.0, -2.0**-9], 32), Format.MXFP8)

    assert (found.sqnr_db, found.max_abs, found.max_rel) == (None, 0.0, 0.0)


ZEROS = [
    ("mxfp8-one-of-two", Format.MXFP8, [[1.0] * 32 + [0.0] * 32], 1),
    ("mxfp8-least-scale-with-codes", Format.MXFP8, [[2.0**-120] * 32], 0),
    ("mxfp8-negative-zero", Format.MXFP8, [[-0.0] * 32], 1),
    ("nvfp4-two-of-three", Format.NVFP4, [[2688.0] * 16 + [0.0] * 16 + [-0.005] * 16], 2),
    ("nvfp4-all", Format.NVFP4, [[0.0] * 32], 2),
]


@pytest.mark.parametrize(("fmt", "weight", "count"), [row[1:] for row in ZEROS], ids=[row[0] for row in ZEROS])
def test_blocks_whose_codes_are_all_zero_are_counted(fmt: Format, weight: list[list[float]], count: int) -> None:
    assert measured(torch.tensor(weight), fmt).zero_blocks == count


@pytest.mark.parametrize("fmt", list(CODECS), ids=lambda fmt: fmt.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_figures_equal_those_of_the_decoded_weights(fmt: Format, dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)
    weight[3] = 0
    quantize, dequantize = CODECS[fmt]

    found = measured(weight, fmt)

    exact, decoded = weight.double(), dequantize(quantize(weight)).double()
    noise = (decoded - exact).abs()
    assert found.sqnr_db == pytest.approx(10 * float(torch.log10((exact**2).sum() / (noise**2).sum())), abs=0.006)
    assert found.max_abs == pytest.approx(float(noise.max()), rel=1e-3)
    assert found.max_rel == pytest.approx(float((noise / exact.abs())[exact != 0].max()), rel=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e30], ids=["small", "large"])
def test_weights_whose_squares_are_no_fp32_numbers_have_a_ratio(size: float) -> None:
    plain = (torch.randn(8, 64, generator=torch.Generator().manual_seed(3))).to(torch.bfloat16)
    scaled = (plain.double() * 2.0 ** round(math.log2(size))).to(torch.bfloat16)

    assert measured(scaled, Format.MXFP8).sqnr_db == measured(plain, Format.MXFP8).sqnr_db


def test_largest_loss_may_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 32)  # a row at a time
    weight = torch.cat([block([448.0, 1.0625], 32), block([448.0, 2.0**-12], 32), block([448.0, 33.0], 32)])

    assert measured(weight, Format.MXFP8).max_rel == 1.0
    assert measured(weight[:1], Format.MXFP8).max_rel == 0.05882


LARGEST = 3.3895313892515355e38  # of bf16, with a mantissa above 1.75: the largest scales there are


@pytest.mark.parametrize("fmt", list(CODECS), ids=lambda fmt: fmt.value)
@pytest.mark.parametrize(("size", "shift"), [(LARGEST, 16), (2.0**-133, 1)], ids=["largest", "least"])
def test_weights_at_the_ends_of_the_range_have_figures(fmt: Format, size: float, shift: int) -> None:
    weight = torch.full((2, 32), size, dtype=torch.bfloat16)
    weight[1] = -weight[1]
    quantize, dequantize = CODECS[fmt]

    found = measured(weight, fmt)

    smaller = weight / shift  # has the same codes; the largest weight is rounded to 2**128, which fp32 has not
    lost = (dequantize(quantize(smaller)).double() - smaller.double()).abs() * shift
    assert found.max_abs == pytest.approx(float(lost.max()), rel=1e-3)
    assert found.max_rel == pytest.approx(float((lost / weight.double().abs()).max()), rel=1e-3)


def test_weight_that_becomes_zero_loses_all_of_itself_and_none_loses_more() -> None:
    for fmt, (quantize, dequantize) in CODECS.items():
        weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
        weight[0, 0] = 2.0**-30
        loss = (dequantize(quantize(weight)) - weight).abs() / weight.abs()
        assert float(loss.max()) == 1.0 == measured(weight, fmt).max_rel


def test_pieces_add_up_to_the_whole() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    weight[40, :32] = 0
    whole, first, second = ErrorStats(), ErrorStats(), ErrorStats()
    quantize_mxfp8(weight, whole)

    quantize_mxfp8(weight[:24], first)
    quantize_mxfp8(weight[24:], second)
    first.merge(second)

    assert first.summary("w", Format.MXFP8) == whole.summary("w", Format.MXFP8)
    assert first.zero_blocks == 1


def entry(name: str, sqnr_db: float | None) -> WeightErrors:
    return WeightErrors(name, "mxfp8", 32, sqnr_db, 0.0, 0.0, 0.0, 0)


def test_worst_comes_first() -> None:
    entries = [entry("b", 30.0), entry("exact", None), entry("a", 30.0), entry("worst", 9.5)]

    assert [found.name for found in worst_first(entries)] == ["worst", "a", "b", "exact"]


def test_report_is_json_in_storage_order() -> None:
    assert json.loads(report_bytes([entry("b", 30.0), entry("a", None)])) == {
        "kind": "dflash-conversion-errors/1",
        "weights": [
            {"name": "b", "format": "mxfp8", "num_weights": 32, "sqnr_db": 30.0, "max_abs": 0.0, "max_rel": 0.0,
             "saturated": 0.0, "zero_blocks": 0},
            {"name": "a", "format": "mxfp8", "num_weights": 32, "sqnr_db": None, "max_abs": 0.0, "max_rel": 0.0,
             "saturated": 0.0, "zero_blocks": 0},
        ],
    }


def test_conversion_reports_every_converted_weight_and_no_other(tmp_path: Path) -> None:
    from tests.exporter.convert.test_stream import LAYOUT, TENSORS, convert

    converted = convert(tmp_path, TENSORS, LAYOUT)

    assert [(found.name, found.format, found.num_weights) for found in converted.errors] == [
        ("body", "mxfp8", 2560), ("qkv", "nvfp4", 5120), ("head", "nvfp4", 2560)
    ]
    assert converted.errors[0] == stats_of(TENSORS["w"]).summary("body", Format.MXFP8)


def stats_of(weight: Tensor) -> ErrorStats:
    stats = ErrorStats()
    quantize_mxfp8(weight, stats)
    return stats
