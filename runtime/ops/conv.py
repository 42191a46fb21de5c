"""The grouped dynamic convolution of a DFlash2 block: every slot sees the slots just before it, without a second pass.

    registry.call("dflash.grouped_conv/1", {"x": x, "delta": delta, "base": base, "out": out},
                  rows=8, hidden=576, block_rows=8, taps=2, group_size=16, side=0, act=DType.BF16, w=DType.BF16)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from dflash_core.errors import FormatError

from runtime.ops.registry import ACT, U32, Args, Array, DTypeOf, Scalar, Step, op, reads, to_f32, writes


@op(
    "dflash.grouped_conv/1",
    Scalar("rows", U32), Scalar("hidden", U32), Scalar("block_rows", U32), Scalar("taps", U32),
    Scalar("group_size", U32), Scalar("side", U32), Scalar("act", U32), Scalar("w", U32),
    reads("x", ACT, "rows", "hidden"),
    reads("delta", ACT, "rows", "2*taps*hidden/group_size"),
    reads("base", DTypeOf("w"), 2, "taps", "hidden"),
    writes("out", ACT, "rows", "hidden"),
)
def grouped_conv(a: Args) -> Step:
    """Convolve each block of `block_rows` rows with coefficients that the rows themselves choose.

    out[i, c] = sum over taps t of (base[side, t, c] + delta[i, side, t, c // group_size]) * x[i - t, c], where a tap
    that reaches before its block (i mod block_rows < t) reads zeros: x is selected away, never multiplied by a mask,
    so an infinity in the previous block cannot become a NaN here. The coefficient belongs to row i, not to row i - t.

    Rounding (r = to the activation's dtype, ties to even; all else in fp32), for taps in ascending order:
    w = r(base + delta); p = r(w * x'); acc = p at tap 0, then acc = r(acc + p). No fused multiply-add.

    Shapes: x, out [rows, hidden]; delta [rows, (side, tap, group)], group fastest; base [side, tap, hidden].
    Raises:
        FormatError: OP_SCALAR; groups do not divide the hidden size, an unknown side, or an empty block.
    Source: the grouped dynamic convolution of z-lab's dflash; rounding as in vLLM's eager chain.
    """
    rows, hidden, block_rows, taps = a.int("rows"), a.int("hidden"), a.int("block_rows"), a.int("taps")
    group_size, side = a.int("group_size"), a.int("side")
    if not group_size or hidden % group_size or side > 1 or not block_rows or not taps:
        raise FormatError("OP_SCALAR", "convolution of an impossible shape", where=a.op_name,
                          expected="groups that divide the hidden size, side 0 or 1, at least one row and tap",
                          got=f"hidden {hidden}, group {group_size}, side {side}, block {block_rows}, taps {taps}")
    groups = hidden // group_size
    x, out = a.array("x").reshape(rows, groups, group_size), a.array("out").reshape(rows, groups, group_size)
    delta = a.array("delta").reshape(rows, 2, taps, groups, 1)[:, side]
    base = a.prepared.get((a.array("base"),), ("f32",), lambda: to_f32(a.array("base")))[side]
    base = base.reshape(taps, groups, group_size)

    dead = [np.flatnonzero(np.arange(rows) % block_rows < t) for t in range(taps)]
    delta_f32 = np.empty((rows, taps, groups, 1), np.float32)
    weight = np.empty((rows, taps, groups, group_size), np.float32)
    x_f32, shifted, acc = (np.empty((rows, groups, group_size), np.float32) for _ in range(3))
    round_weight = _rounder(weight.shape, out.dtype)
    round_row = _rounder(acc.shape, out.dtype)

    def run() -> None:
        x_f32[...] = x
        delta_f32[...] = delta
        np.add(base, delta_f32, out=weight)
        round_weight(weight)
        np.multiply(weight[:, 0], x_f32, out=acc)
        round_row(acc)
        for t in range(1, taps):
            shifted[t:] = x_f32[:-t]
            shifted[dead[t]] = 0.0
            np.multiply(weight[:, t], shifted, out=shifted)
            round_row(shifted)
            np.add(acc, shifted, out=acc)
            round_row(acc)
        out[...] = acc

    return run


def _rounder(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[Array], None]:
    """A function that rounds an fp32 array of this shape to `dtype` in place."""
    if dtype == np.float32:
        return lambda values: None
    narrow = np.empty(shape, dtype)

    def round_in_place(values: Array) -> None:
        narrow[...] = values
        values[...] = narrow

    return round_in_place
