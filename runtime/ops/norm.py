"""Root-mean-square normalization, alone and after a residual add.

Rounding, as the published models were trained: the normalized value is rounded to the activation type, then
multiplied by the weight and rounded again. Rounding once gives other bits: for x = 7, 1 and weight 1.125 it gives
1.578125, 0.224609375 in place of 1.5703125, 0.2255859375; see test_norm.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.registry import (
    ACT,
    F32,
    U32,
    Args,
    Array,
    DTypeOf,
    F32Array,
    Scalar,
    Step,
    op,
    reads,
    to_f32,
    updates,
    writes,
)


def rms_norm_rows(x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """Normalize along the last axis of `x` (activation type) into `out`; `weight` is fp32. The sum of squares is
    NumPy's pairwise fp32 sum over one contiguous row: it depends on that row alone."""
    wide: F32Array = to_f32(x)
    square = np.multiply(wide, wide)
    mean = np.add.reduce(square, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    wide = np.multiply(wide, np.float32(1) / np.sqrt(mean + eps), dtype=np.float32)
    if out.dtype != np.float32:
        wide = to_f32(wide.astype(out.dtype))
    out[...] = wide * weight


@op("dflash.rms_norm/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("eps", F32), Scalar("act", U32), Scalar("w", U32),
    reads("x", ACT, "rows", "cols"), reads("weight", DTypeOf("w"), "cols"), writes("out", ACT, "rows", "cols"))
def rms_norm(a: Args) -> Step:
    """out = r(r(x / rms(x)) * weight)."""
    x, out, eps = a.array("x"), a.array("out"), np.float32(a.real("eps"))
    weight = to_f32(a.array("weight"))
    return lambda: rms_norm_rows(x, weight, eps, out)


@op("dflash.add_rms_norm/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("eps", F32), Scalar("act", U32), Scalar("w", U32),
    updates("residual", ACT, "rows", "cols"), reads("delta", ACT, "rows", "cols"),
    reads("weight", DTypeOf("w"), "cols"), writes("out", ACT, "rows", "cols"))
def add_rms_norm(a: Args) -> Step:
    """residual = r(residual + delta); out = r(r(residual / rms(residual)) * weight)."""
    residual, delta, out, eps = a.array("residual"), a.array("delta"), a.array("out"), np.float32(a.real("eps"))
    weight = to_f32(a.array("weight"))

    def run() -> None:
        residual[...] = to_f32(residual) + to_f32(delta)
        rms_norm_rows(residual, weight, eps, out)

    return run


@op("dflash.add/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32),
    updates("residual", ACT, "rows", "cols"), reads("delta", ACT, "rows", "cols"))
def add(a: Args) -> Step:
    """residual = r(residual + delta)."""
    residual, delta = a.array("residual"), a.array("delta")

    def run() -> None:
        residual[...] = to_f32(residual) + to_f32(delta)

    return run
