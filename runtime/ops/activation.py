"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import numpy as np

from runtime.ops.registry import ACT, U32, Args, Scalar, Step, op, reads, to_f32, writes


@op("dflash.silu_mul/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32),
    reads("gate_up", ACT, "rows", "2*cols"), writes("out", ACT, "rows", "cols"))
def silu_mul(a: Args) -> Step:
    """out = r(r(silu(gate)) * up), gate in the first `cols` columns and up in the rest.

    Rounding: silu is computed in fp32 as g / (1 + exp(-g)) and rounded before the product, which is rounded again.
    """
    gate_up, out, cols = a.array("gate_up"), a.array("out"), a.int("cols")

    def run() -> None:
        gate, up = to_f32(gate_up[:, :cols]), to_f32(gate_up[:, cols:])
        with np.errstate(over="ignore"):  # exp(-g) may be inf: silu is then -0
            gate = np.divide(gate, np.float32(1) + np.exp(-gate), dtype=np.float32)
        if out.dtype != np.float32:
            gate = to_f32(gate.astype(out.dtype))
        out[...] = gate * up

    return run
