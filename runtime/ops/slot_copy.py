"""Copy one slot's row of a recurrent state to a snapshot, and back.

Snapshots lie in an arena of `snapshots` places, `snapshot_bytes` apart; an operand points at its buffer's part of place
0. A place or a slot of -1 copies nothing.
"""

from __future__ import annotations

import numpy as np
from dflash_core.errors import CompatibilityError, FormatError

from runtime.ops.registry import U32, Args, Array, DType, Scalar, Step, arena, op, reads, updates

I32, U8 = DType.I32, DType.U8
SHAPE = (Scalar("max_slots", U32), Scalar("row_bytes", U32), Scalar("snapshot_bytes", U32), Scalar("snapshots", U32),
         reads("slots", I32, 1), reads("snapshot", I32, 1))


@op("dflash.save_slot/1", *SHAPE, reads("rows", U8, "max_slots", "row_bytes"), arena("places", write=True))
def save_slot(a: Args) -> Step:
    """Copy the row of slot `slots[0]` to place `snapshot[0]`, byte for byte."""
    slots, snapshot, rows, places = a.array("slots"), a.array("snapshot"), a.array("rows"), _places(a)

    def run() -> None:
        slot, place = int(slots[0]), _checked(a, int(snapshot[0]))
        if slot >= 0 and place >= 0:
            places[place] = rows[slot]

    return run


@op("dflash.load_slot/1", *SHAPE, updates("rows", U8, "max_slots", "row_bytes"), arena("places", read=True))
def load_slot(a: Args) -> Step:
    """Copy place `snapshot[0]` to the row of slot `slots[0]`, byte for byte."""
    slots, snapshot, rows, places = a.array("slots"), a.array("snapshot"), a.array("rows"), _places(a)

    def run() -> None:
        slot, place = int(slots[0]), _checked(a, int(snapshot[0]))
        if slot >= 0 and place >= 0:
            rows[slot] = places[place]

    return run


def _places(a: Args) -> Array:
    """The operand's part of every place, u8 [snapshots, row_bytes]."""
    raw, count, stride, nbytes = (a.array("places"), a.int("snapshots"), a.int("snapshot_bytes"), a.int("row_bytes"))
    if nbytes > stride or (count and (count - 1) * stride + nbytes > raw.nbytes):
        raise FormatError("KV_RANGE", "snapshots reach beyond the arena", where=a.op_name,
                          expected=f"at most {raw.nbytes} bytes", got=(count - 1) * stride + nbytes)
    return np.ndarray((count, nbytes), np.uint8, raw.data, 0, (stride, 1))


def _checked(a: Args, place: int) -> int:
    if place >= a.int("snapshots"):
        raise CompatibilityError("SNAPSHOT_RANGE", "there is no such snapshot", where=a.op_name,
                                 expected=f"at most {a.int('snapshots') - 1}", got=place,
                                 hint="load the core with more snapshots")
    return place
