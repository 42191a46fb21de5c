"""A slot's row of a recurrent state is copied to a place of the snapshots, or from it, byte for byte.

Copied in words of four bytes, sixteen bytes a thread and access, where everything divides into words.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, power_of_two
from exporter.program.builder import Program
from runtime.ops import DType

BLOCK_ITEMS = 4096
WORD_NBYTES = 4


@triton.jit
def copy_row(slots_ptr, snapshot_ptr, rows_ptr, places_ptr, snapshots, ROW: tl.constexpr, STRIDE: tl.constexpr,
             SAVE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.save_slot or dflash.load_slot. Grid: tiles of a row. ROW items a slot, STRIDE between places.

    Nothing is copied without a slot, or without a place among `snapshots`.
    """
    begin(CHAINED)
    slot, place = tl.load(slots_ptr), tl.load(snapshot_ptr)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < ROW) & (slot >= 0) & (place >= 0) & (place < snapshots)
    row_at = rows_ptr + slot.to(tl.int64) * ROW + c
    place_at = places_ptr + place.to(tl.int64) * STRIDE + c
    if SAVE:
        tl.store(place_at, tl.load(row_at, mask=inside), mask=inside)
    else:
        tl.store(row_at, tl.load(place_at, mask=inside), mask=inside)


def lower_slot_copy(call: OpCall, program: Program) -> list[Launch]:
    """Either direction."""
    o, row_bytes, stride = call.operands, call.number("row_bytes"), call.number("snapshot_bytes")
    save = call.op == "dflash.save_slot/1"
    words = all(n % WORD_NBYTES == 0 for n in (row_bytes, stride, o["rows"].offset, o["places"].offset))
    nbytes, dtype = (WORD_NBYTES, DType.I32) if words else (1, DType.U8)
    items = row_bytes // nbytes
    rows = replace(o["rows"], dtype=dtype, shape=(call.number("max_slots"), items))
    places = replace(o["places"], dtype=dtype, shape=(0,))
    block = min(BLOCK_ITEMS, max(32, power_of_two(items)))
    kernel = Kernel(copy_row, (call.op,), {"ROW": items, "STRIDE": stride // nbytes, "SAVE": save, "BLOCK": block},
                    num_warps=max(1, block // 512))
    source, target = (rows, places) if save else (places, rows)
    arguments = {"slots_ptr": o["slots"], "snapshot_ptr": o["snapshot"], "rows_ptr": rows, "places_ptr": places,
                 "snapshots": call.scalars["snapshots"]}
    return [Launch(kernel, arguments, (cdiv(items, block), 1, 1), (o["slots"], o["snapshot"], source), (target,),
                   (call.node_id,), call.label)]
