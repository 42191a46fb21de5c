"""How far converted weights are from the checkpoint's: one line of figures for each, measured while they are converted.

    stats = ErrorStats()
    quantize_mxfp8(piece, stats)
    stats.summary("target.layers.0.qkv", Format.MXFP8).sqnr_db
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from dflash_core.formats import Format
from torch import Tensor

from runtime.error_report import REPORT_KIND, WeightErrors

_LEAST_SUM, _MOST_SUM = 1e-24, 1e30
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

    def add(
        self, exact: Tensor, values: Tensor, scale: Tensor, unit: float, saturated: int = 0, zero_blocks: int = 0
    ) -> None:
        """Take in some blocks, of which each code stands for its value * unit * scale.

        Args:
            exact: f32 [blocks, block], as the checkpoint has them, finite; or their magnitudes.
            values: f32 [blocks, block], of their codes, with the same signs; overwritten.
            scale: f32 [blocks, 1].
            unit: a power of two.
            saturated: how many weights are beyond the largest code.
            zero_blocks: how many blocks have no code but zero.
        """
        noise = torch.addcmul(exact, values, scale, value=-unit, out=values)
        self.num_weights += exact.numel()
        self.signal += _sum_of_squares(exact)
        self.noise += _sum_of_squares(noise)
        self.max_abs = max(self.max_abs, _largest(noise))
        if self.max_rel < 1:  # no weight loses more than all of itself: zero is a code, and the nearest code is taken
            self.max_rel = max(self.max_rel, _largest(noise.div_(exact).nan_to_num_(0.0)))  # 0 / 0 where a weight is 0
        self.saturated += saturated
        self.zero_blocks += zero_blocks

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


def _largest(values: Tensor) -> float:
    """The largest magnitude."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _sum_of_squares(values: Tensor) -> float:
    flat = values.view(-1)
    total = float(torch.dot(flat, flat))
    if not _LEAST_SUM < total < _MOST_SUM:  # squares of very small or very large weights are no fp32 numbers
        total = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    return total


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
