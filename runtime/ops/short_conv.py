"""The short causal convolution of a recurrent layer, and the window of earlier rows that each sequence keeps for it.

A window holds the last `history` rows of the convolution's *input*, oldest first. No step that may be undone writes
it: `short_conv` reads it, and `conv_window` moves it on by exactly the rows that are kept.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.activation import silu
from runtime.ops.registry import (
    ACT,
    U32,
    Args,
    Array,
    DType,
    DTypeOf,
    Scalar,
    Step,
    op,
    reads,
    to_f32,
    updates,
    writes,
)

I32 = DType.I32
SHAPE = (Scalar("groups", U32), Scalar("block_rows", U32), Scalar("channels", U32), Scalar("history", U32),
         Scalar("max_slots", U32), Scalar("act", U32))
ROWS = (reads("x", ACT, "groups*block_rows", "channels"), reads("positions", I32, "groups*block_rows"),
        reads("slots", I32, "groups"))


@op("dflash.short_conv/1", *SHAPE, Scalar("w", U32), *ROWS,
    reads("window", ACT, "max_slots", "history", "channels"), reads("weight", DTypeOf("w"), "channels", "history+1"),
    writes("out", ACT, "groups*block_rows", "channels"))
def short_conv(a: Args) -> Step:
    """out = r(silu(sum over j of weight[c, j] * u[t - history + j, c])), u being the sequence's rows so far.

    Rows before the group's first come from its slot's window; before position 0 there are zeros, whatever the window
    holds. Dead rows give zeros.

    Rounding: products and sums in fp32, in ascending j, no fused multiply-add; one rounding after SiLU.
    """
    groups, block_rows, history = a.int("groups"), a.int("block_rows"), a.int("history")
    x, out = (a.array(n).reshape(groups, block_rows, a.int("channels")) for n in ("x", "out"))
    positions, slots = a.array("positions").reshape(groups, block_rows), a.array("slots")
    window = a.array("window")
    taps = np.ascontiguousarray(to_f32(a.array("weight")).T)
    rows = np.empty((history + block_rows, a.int("channels")), np.float32)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            count = live_rows(positions[group])
            if count:
                rows[:history] = window[slot] if positions[group, 0] > 0 else 0
                rows[history:] = x[group]
            for row in range(count):
                total = taps[0] * rows[row]
                for j in range(1, history + 1):
                    total += taps[j] * rows[row + j]
                out[group, row] = silu(total)
            out[group, count:] = 0

    return run


@op("dflash.conv_window/1", *SHAPE, *ROWS, updates("window", ACT, "max_slots", "history", "channels"))
def conv_window(a: Args) -> Step:
    """Move a slot's window on by the group's kept rows: those at positions >= 0, which come first.

    The new window is the last `history` rows of the old one and the kept rows; a group that starts at position 0 has
    zeros for an old window. A group that keeps nothing leaves its slot as it is.

    Rounding: none, rows are copied.
    """
    groups, block_rows, history = a.int("groups"), a.int("block_rows"), a.int("history")
    x = a.array("x").reshape(groups, block_rows, a.int("channels"))
    positions, slots = a.array("positions").reshape(groups, block_rows), a.array("slots")
    window = a.array("window")

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            count = live_rows(positions[group])
            if not count:
                continue
            old = window[slot] if positions[group, 0] > 0 else np.zeros_like(window[slot])
            window[slot] = np.concatenate([old, x[group, :count]])[-history:]

    return run


def live_rows(positions: Array) -> int:
    """How many rows of a group are live: those before the first at position -1."""
    dead = np.flatnonzero(positions < 0)
    return int(dead[0]) if dead.size else len(positions)
