"""Our bytes in compressed-tensors' layouts: it packs what we pack, and reads what we write, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exporter.convert.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from exporter.convert.nvfp4 import dequantize_nvfp4, quantize_nvfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rows_of(values: list[float], block: int, anchor: float) -> Tensor:
    rows = [[anchor, *values[at : at + block - 1]] for at in range(0, len(values), block - 1)]
    return torch.tensor([row + [0.0] * (block - len(row)) for row in rows], dtype=torch.bfloat16)


def random(scale: float = 1.0) -> Tensor:
    return (torch.randn(32, 64, generator=torch.Generator().manual_seed(9)) * scale).to(torch.bfloat16)


def mxfp8_scheme() -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32, symmetric=True,
                               scale_dtype=torch.uint8)
    return QuantizationScheme(targets=["Linear"], weights=weights)


MXFP8 = [
    ("random", random()),
    ("small", random(2.0**-60)),
    ("codes-and-ties", rows_of([1.0, 1.0625, 1.1875, -1.0625, 432.0, 2.0**-9, 2.0**-10, -(2.0**-10)], 32, 448.0)),
    ("maximum", torch.full((2, 32), 448.0, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("weight", [row[1] for row in MXFP8], ids=[row[0] for row in MXFP8])
def test_mxfp8_is_what_compressed_tensors_stores_and_reads(weight: Tensor) -> None:
    from compressed_tensors.compressors import MXFP8QuantizationCompressor as Compressor

    ours = quantize_mxfp8(weight)

    scale = torch.exp2(ours.block_scale.to(torch.float32) - 127)
    stored = Compressor.compress({"weight": weight.float(), "weight_scale": scale}, mxfp8_scheme())
    assert torch.equal(stored["weight"].view(torch.uint8), ours.codes)
    assert torch.equal(stored["weight_scale"], ours.block_scale)
    read = Compressor.decompress({"weight": ours.codes.view(torch.float8_e4m3fn), "weight_scale": ours.block_scale},
                                 mxfp8_scheme())
    assert torch.equal(read["weight"].float(), dequantize_mxfp8(ours))


NVFP4 = [
    ("random", torch.cat([rows_of([0.0], 64, 2688.0), random()])),
    ("codes-and-ties", torch.cat([
        rows_of([0.0], 16, 2688.0), rows_of([*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0], 16, 6.0)])),
    ("maximum", torch.full((2, 32), 2688.0, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("weight", [row[1] for row in NVFP4], ids=[row[0] for row in NVFP4])
def test_nvfp4_is_what_compressed_tensors_packs_and_reads(weight: Tensor) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4, unpack_fp4_from_uint8

    ours = quantize_nvfp4(weight)  # the global scale is 1: compressed-tensors multiplies by its reciprocal

    scale = ours.block_scale.view(torch.float8_e4m3fn).float()
    assert ours.global_scale is not None and ours.global_scale.item() == 1.0
    assert torch.equal(quantize_and_pack_fp4(weight.float(), scale, global_scale=torch.ones(1)), ours.codes)
    values = unpack_fp4_from_uint8(ours.codes, *weight.shape, dtype=torch.float32)
    assert torch.equal(values * scale.repeat_interleave(16, dim=1), dequantize_nvfp4(ours))
