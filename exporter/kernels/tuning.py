"""Pinned tile choices: which block of a weight one program takes, and how deep it prefetches.

Choices follow from the shape alone, so that an export needs no device and two exports agree. They were found by timing
on an H200; docs/benchmarks.md says how to repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.formats import Format


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How dflash.linear is cut.

    Attributes:
        rows: activation rows per block, R.
        out: weight rows per block, BN.
        depth: columns of the reduction per step, BK.
        num_warps: warps per block.
        stages: tiles in flight.
    """

    rows: int
    out: int
    depth: int
    num_warps: int
    stages: int


def linear_tile(out_features: int, in_features: int, rows: int, fmt: Format) -> LinearTile:
    """The tile for a matrix of this shape and this many activation rows."""
    tile_rows = 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64
    largest = 256 if fmt is Format.NVFP4 else 128
    depth = next(d for d in (largest, largest // 2, largest // 4, 32) if in_features % d == 0)
    if tile_rows == 64:
        return LinearTile(64, 64, min(depth, 64), 4, 4)
    if out_features * in_features >= 1 << 24:
        return LinearTile(tile_rows, 64, depth, 4, 4)
    return LinearTile(tile_rows, 16, min(depth, 64), 1, 6)


# Keys that one attention block handles: a split of the context, at absolute positions.
SPLIT_TOKENS = 512
STEP_QUERY_ROWS = 8
PREFILL_QUERY_ROWS = 32
