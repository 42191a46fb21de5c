"""How well two cores keep each converted weight: signal to quantization noise, side by side.

    for row in compare_errors(ours, theirs) or ():
        print(row.name, row.left, row.right)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .error_report import WeightErrors


@dataclass(frozen=True, slots=True)
class Kept:
    """A converted weight of one side; `sqnr_db` is None when nothing was lost."""

    format: str
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class SqnrDiff:
    """One weight on both sides; None where that side's report does not list it, because it was not converted."""

    name: str
    left: Kept | None
    right: Kept | None


def compare_errors(left: Iterable[WeightErrors], right: Iterable[WeightErrors]) -> tuple[SqnrDiff, ...] | None:
    """Every weight that either report lists: those that differ first, and the lowest ratio first among each.

    Returns:
        None unless both cores carry a report: a core without one says nothing about its weights.
    """
    ours, theirs = ({entry.name: Kept(entry.format, entry.sqnr_db) for entry in side} for side in (left, right))
    if not ours or not theirs:
        return None
    rows = [SqnrDiff(name, ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()]
    return tuple(sorted(rows, key=lambda row: (row.left == row.right, _lowest(row), row.name)))


def _lowest(row: SqnrDiff) -> float:
    return min(math.inf if side is None or side.sqnr_db is None else side.sqnr_db for side in (row.left, row.right))
