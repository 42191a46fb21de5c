"""How far converted weights are from the checkpoint's: one line of figures for each, measured while they are converted.

    stats = ErrorStats()
    stats.add(piece, quantized)
    stats.summary("target.layers.0.qkv", Format.MXFP8).sqnr_db
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from dflash_core.formats import FORMATS, Format
from numpy.typing import NDArray
from torch import Tensor

from exporter.convert.nvfp4 import E2M1_VALUES
from exporter.convert.quantized import SCRATCH, QuantizedTensor
from runtime.error_report import REPORT_KIND, WeightErrors

_LEAST_NORM, _MOST_NORM = 1e-12, 1e15
_DIGITS = 4  # of every figure: what survives another order of summation


@dataclass(slots=True)
class ErrorStats:
    """Sums over the pieces of one weight; `merge` and `add` in storage order give the same figures every time."""

    num_weights: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    saturated: int = 0
    zero_blocks: int = 0

    def add(self, weight: Tensor, quantized: QuantizedTensor) -> None:
        """Take in some rows.

        Args:
            weight: [rows, cols], as the checkpoint has them; finite.
            quantized: the same rows converted.
        """
        block = FORMATS[quantized.format].block
        exact = SCRATCH.take(0, (weight.numel() // block, block), torch.float32)
        exact.view(weight.shape).copy_(weight)
        scale = _scales(quantized)
        noise = _code_values(quantized).view_as(exact).mul_(scale).sub_(exact)
        self.num_weights += exact.numel()
        self.signal += _sum_of_squares(exact)
        self.noise += _sum_of_squares(noise)
        self.max_abs = max(self.max_abs, _largest(noise))
        self.max_rel = max(self.max_rel, _largest(noise.div_(exact).nan_to_num_(0.0)))  # 0 / 0 where a weight is 0
        self.saturated += _num_saturated(quantized.format, exact, scale)
        self.zero_blocks += _num_zero_blocks(quantized)

    def merge(self, later: ErrorStats) -> None:
        """Take in what another instance has summed up over the rows that follow."""
        self.num_weights += later.num_weights
        self.signal += later.signal
        self.noise += later.noise
        self.max_abs = max(self.max_abs, later.max_abs)
        self.max_rel = max(self.max_rel, later.max_rel)
        self.saturated += later.saturated
        self.zero_blocks += later.zero_blocks

    def summary(self, name: str, fmt: Format) -> WeightErrors:
        """The figures, rounded to four digits."""
        sqnr = round(10 * math.log10(self.signal / self.noise), 2) if self.noise else None
        return WeightErrors(
            name, fmt.value, self.num_weights, sqnr, _rounded(self.max_abs),
            _rounded(self.max_rel), _rounded(self.saturated / max(self.num_weights, 1)), self.zero_blocks,
        )


def report_bytes(errors: Sequence[WeightErrors]) -> bytes:
    """The report as the JSON file that a core carries, in storage order."""
    document: dict[str, Any] = {"kind": REPORT_KIND, "weights": [asdict(entry) for entry in errors]}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _scales(quantized: QuantizedTensor) -> Tensor:
    """f32 [blocks, 1]: what multiplies the codes of each block."""
    scale = torch.from_numpy(_SCALE_TABLES[quantized.format][quantized.block_scale.numpy()]).view(-1, 1)
    return scale if quantized.global_scale is None else scale.mul_(quantized.global_scale)


def _code_values(quantized: QuantizedTensor) -> Tensor:
    """f32, what each code stands for before scaling. Codes are looked up two at a time: half the look-ups."""
    codes = quantized.codes.numpy().reshape(-1)
    if quantized.format is Format.MXFP8:
        codes = codes.view(np.uint16)
    values = SCRATCH.take(1, (2 * codes.size,), torch.float32)
    np.take(_PAIR_TABLES[quantized.format], codes, out=values.numpy().view(np.complex64), mode="clip")
    return values


def _num_saturated(fmt: Format, exact: Tensor, scale: Tensor) -> int:
    if fmt is Format.MXFP8:
        return 0  # its scales are rounded up
    limit = scale * FORMATS[fmt].max_value
    limit[limit == 0] = math.inf  # a block of zeros holds nothing in its largest code
    beyond = exact.abs_().sub_(limit).flatten()
    found = SCRATCH.take(1, beyond.shape, torch.bool).numpy()
    return int(np.count_nonzero(np.greater(beyond.numpy(), np.float32(0), out=found)))


def _num_zero_blocks(quantized: QuantizedTensor) -> int:
    """Only a block with the least scale can be all zeros: a larger scale has a code that is not."""
    least = quantized.block_scale.view(-1) == 0
    if not least.any():
        return 0
    codes = quantized.codes.view(least.numel(), -1)[least]
    signs = 0x7F if quantized.format is Format.MXFP8 else 0x77
    return int((codes & signs == 0).all(-1).sum())


def _largest(values: Tensor) -> float:
    """The largest magnitude."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _sum_of_squares(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    if not _LEAST_NORM < norm < _MOST_NORM:  # squares of very small or very large weights are no fp32 numbers
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm * norm


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _pairs(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.complex64]:
    """Two values as one table entry, the lower column first."""
    return np.stack((low, high), axis=-1).astype(np.float32).view(np.complex64).reshape(-1)


_BYTES = torch.arange(256, dtype=torch.uint8)
_E4M3 = _BYTES.view(torch.float8_e4m3fn).to(torch.float32).numpy()
_E2M1 = np.array(E2M1_VALUES, np.float32)
_PAIR_TABLES = {
    Format.MXFP8: _pairs(np.tile(_E4M3, 256), np.repeat(_E4M3, 256)),
    Format.NVFP4: _pairs(np.tile(_E2M1, 16), np.repeat(_E2M1, 16)),
}
_SCALE_TABLES = {
    Format.MXFP8: _BYTES.view(torch.float8_e8m0fnu).to(torch.float32).numpy(), Format.NVFP4: _E4M3,
}
