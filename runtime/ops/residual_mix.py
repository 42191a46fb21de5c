"""Attention residuals: in place of one residual stream, a softmax over what earlier blocks of layers added up."""

from __future__ import annotations

import numpy as np

from runtime.ops.registry import ACT, F32, U32, Args, DTypeOf, Scalar, Step, op, reads, to_f32, writes


@op("dflash.residual_mix/1",
    Scalar("parts", U32), Scalar("rows", U32), Scalar("cols", U32), Scalar("eps", F32), Scalar("act", U32),
    Scalar("w", U32),
    reads("x", ACT, "parts", "rows", "cols"), reads("norm", DTypeOf("w"), "cols"), reads("score", DTypeOf("w"), "cols"),
    writes("out", ACT, "rows", "cols"))
def residual_mix(a: Args) -> Step:
    """out = r(sum over parts j of p_j * x_j), p the softmax over parts of sum(x_j / rms(x_j) * norm * score).

    The rows themselves are mixed, not their normalized values.

    Shapes: x [parts, rows, cols], the running sum last.
    Rounding: fp32 throughout, parts summed in order, rounded once.
    """
    x, out, eps = a.array("x"), a.array("out"), np.float32(a.real("eps"))
    weight = to_f32(a.array("norm")) * to_f32(a.array("score"))

    def run() -> None:
        rows = to_f32(x)
        mean = np.add.reduce(np.multiply(rows, rows), axis=-1) / np.float32(rows.shape[-1])
        scores = np.add.reduce(rows * weight, axis=-1) / np.sqrt(mean + eps)
        shares = np.exp(scores - scores.max(axis=0))
        shares = shares / np.add.reduce(shares, axis=0)
        total = rows[0] * shares[0][:, None]
        for part in range(1, len(rows)):
            total += rows[part] * shares[part][:, None]
        out[...] = total

    return run
