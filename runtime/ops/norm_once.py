"""Root-mean-square normalization that is rounded once, alone and after a residual add.

An image tower's norms are torch's own, which multiply by the weight in fp32 and round the product: for x = 7, 1 and
weight 1.125 it gives 1.578125, 0.224609375 where `dflash.rms_norm/1` gives 1.5703125, 0.2255859375.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.registry import ACT, F32, U32, Args, Array, DTypeOf, Scalar, Step, op, reads, to_f32, updates, writes


def rms_norm_once_rows(x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """Normalize along the last axis of `x` (activation type) into `out`; `weight` is fp32."""
    wide = to_f32(x)
    mean = np.add.reduce(np.multiply(wide, wide), axis=-1, keepdims=True) / np.float32(x.shape[-1])
    out[...] = wide * (np.float32(1) / np.sqrt(mean + eps)) * weight


@op("dflash.rms_norm_once/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("eps", F32), Scalar("act", U32), Scalar("w", U32),
    reads("x", ACT, "rows", "cols"), reads("weight", DTypeOf("w"), "cols"), writes("out", ACT, "rows", "cols"))
def rms_norm_once(a: Args) -> Step:
    """out = r(x / rms(x) * weight)."""
    x, out, eps, weight = a.array("x"), a.array("out"), np.float32(a.real("eps")), to_f32(a.array("weight"))
    return lambda: rms_norm_once_rows(x, weight, eps, out)


@op("dflash.add_rms_norm_once/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("eps", F32), Scalar("act", U32), Scalar("w", U32),
    updates("residual", ACT, "rows", "cols"), reads("delta", ACT, "rows", "cols"),
    reads("weight", DTypeOf("w"), "cols"), writes("out", ACT, "rows", "cols"))
def add_rms_norm_once(a: Args) -> Step:
    """residual = r(residual + delta); out = r(residual / rms(residual) * weight)."""
    residual, delta, out, eps = a.array("residual"), a.array("delta"), a.array("out"), np.float32(a.real("eps"))
    weight = to_f32(a.array("weight"))

    def run() -> None:
        residual[...] = to_f32(residual) + to_f32(delta)
        rms_norm_once_rows(residual, weight, eps, out)

    return run
