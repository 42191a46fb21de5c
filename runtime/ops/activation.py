"""The gated activations of feed-forward layers, and the sigmoid gate of an attention output.

`gated` is what every op that computes a feed-forward layer calls, so that one model has one activation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dflash_core.errors import FormatError

from runtime.ops.registry import ACT, F32, U32, Args, Array, F32Array, Scalar, Step, op, reads, to_f32, writes

Gated = Callable[[Array, Array], F32Array]


def sigmoid(x: F32Array) -> F32Array:
    """1 / (1 + exp(-x)) in fp32; where exp(-x) overflows it is 0."""
    with np.errstate(over="ignore"):
        result: F32Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def silu(x: F32Array) -> F32Array:
    """x / (1 + exp(-x)) in fp32; where exp(-x) overflows it is -0."""
    with np.errstate(over="ignore"):
        result: F32Array = np.divide(x, np.float32(1) + np.exp(-x), dtype=np.float32)
    return result


def gated(a: Args, dtype: np.dtype[np.generic]) -> Gated:
    """The product of activated gate and up, in fp32 and not yet rounded, for an op with the scalars `situ_beta` and
    `situ_linear_beta`.

    A `situ_beta` of 0 is SiLU: r(silu(gate)) * up. Otherwise beta * tanh(gate / beta) * sigmoid(gate) * up, and a
    `situ_linear_beta` other than 0 first makes up beta' * tanh(up / beta').

    Args:
        dtype: the activation type, to which SiLU is rounded.
    Raises:
        FormatError: OP_SCALAR; a negative or unbounded beta, or a linear beta without a beta.
    """
    beta, linear = np.float32(a.real("situ_beta")), np.float32(a.real("situ_linear_beta"))
    if not (np.isfinite(beta) and np.isfinite(linear) and beta >= 0 and linear >= 0 and (beta > 0 or linear == 0)):
        raise FormatError("OP_SCALAR", "activation with an impossible beta", where=a.op_name,
                          expected="finite numbers of at least 0", got=f"beta {beta}, linear beta {linear}")
    if not beta:
        return lambda gate, up: to_f32(silu(to_f32(gate)).astype(dtype)) * to_f32(up)

    def situ(gate: Array, up: Array) -> F32Array:
        gate, up = to_f32(gate), to_f32(up)
        up = np.tanh(up / linear) * linear if linear else up
        result: F32Array = np.tanh(gate / beta) * beta * sigmoid(gate) * up
        return result

    return situ


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
        gate = silu(gate)
        if out.dtype != np.float32:
            gate = to_f32(gate.astype(out.dtype))
        out[...] = gate * up

    return run


@op("dflash.situ_mul/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("situ_beta", F32), Scalar("situ_linear_beta", F32),
    Scalar("act", U32),
    reads("gate_up", ACT, "rows", "2*cols"), writes("out", ACT, "rows", "cols"))
def situ_mul(a: Args) -> Step:
    """out = r(beta * tanh(gate / beta) * sigmoid(gate) * up), up first bounded as `gated` says.

    Rounding: fp32 throughout, the product rounded once.
    """
    gate_up, out, cols = a.array("gate_up"), a.array("out"), a.int("cols")
    activate = gated(a, out.dtype)

    def run() -> None:
        out[...] = activate(gate_up[:, :cols], gate_up[:, cols:])

    return run


@op("dflash.sigmoid_mul/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32),
    reads("x", ACT, "rows", "cols"), reads("gate", ACT, "rows", "cols"), writes("out", ACT, "rows", "cols"))
def sigmoid_mul(a: Args) -> Step:
    """out = r(x * sigmoid(gate)): the output gate of latent attention.

    Rounding: fp32 throughout, the product rounded once.
    """
    x, gate, out = a.array("x"), a.array("gate"), a.array("out")

    def run() -> None:
        out[...] = to_f32(x) * sigmoid(to_f32(gate))

    return run
