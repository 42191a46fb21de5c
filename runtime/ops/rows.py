"""Ops that prepare the rows of a step: which positions they hold, which tokens, and their embeddings.

A row's position is -1 when the row is dead: beyond the block, beyond the chunk, or in an empty lane (slot -1).
"""

from __future__ import annotations

import numpy as np
from dflash_core.errors import CompatibilityError

from runtime.ops.registry import (
    ACT,
    F32,
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


@op("dflash.block_positions/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("max_slots", U32),
    reads("slots", I32, "groups"), reads("length", I32, "max_slots"), reads("limit", I32, "max_slots"),
    writes("positions", I32, "groups*block_rows"))
def block_positions(a: Args) -> Step:
    """Rows of a block start at the sequence's length; rows at or beyond its limit are dead, and so is the whole block
    when no token can follow the anchor (length + 1 >= limit)."""
    slots, length, limit = a.array("slots"), a.array("length"), a.array("limit")
    positions = a.array("positions").reshape(a.int("groups"), a.int("block_rows"))
    offset = np.arange(a.int("block_rows"), dtype=np.int32)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            if slot < 0 or length[slot] + 1 >= limit[slot]:
                positions[group] = -1
                continue
            rows = length[slot] + offset
            positions[group] = np.where(rows < limit[slot], rows, -1)

    return run


@op("dflash.chunk_positions/1",
    Scalar("rows", U32), Scalar("max_slots", U32),
    reads("slots", I32, 1), reads("count", I32, 1), reads("length", I32, "max_slots"), writes("positions", I32, "rows"))
def chunk_positions(a: Args) -> Step:
    """The first `count` rows of a prefill chunk continue the sequence at its length; the rest are dead."""
    slots, count, length, positions = a.array("slots"), a.array("count"), a.array("length"), a.array("positions")
    offset = np.arange(a.int("rows"), dtype=np.int32)

    def run() -> None:
        positions[...] = np.where(offset < count[0], length[slots[0]] + offset, -1)

    return run


@op("dflash.block_tokens/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("mask_token_id", U32), Scalar("max_slots", U32),
    reads("slots", I32, "groups"), reads("anchor", I32, "max_slots"), writes("tokens", I32, "groups*block_rows"))
def block_tokens(a: Args) -> Step:
    """A draft block: the anchor, then mask tokens."""
    slots, anchor = a.array("slots"), a.array("anchor")
    tokens = a.array("tokens").reshape(a.int("groups"), a.int("block_rows"))
    mask = a.int("mask_token_id")

    def run() -> None:
        tokens[:, 1:] = mask
        tokens[:, 0] = np.where(slots >= 0, anchor[np.maximum(slots, 0)], mask)

    return run


@op("dflash.verify_tokens/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("depth", U32), Scalar("max_slots", U32),
    reads("slots", I32, "groups"), reads("anchor", I32, "max_slots"), reads("proposals", I32, "groups", "depth"),
    writes("tokens", I32, "groups*block_rows"))
def verify_tokens(a: Args) -> Step:
    """A block to verify: the anchor, then the draft's proposals."""
    slots, anchor, proposals = a.array("slots"), a.array("anchor"), a.array("proposals")
    tokens = a.array("tokens").reshape(a.int("groups"), a.int("block_rows"))

    def run() -> None:
        tokens[:, 0] = np.where(slots >= 0, anchor[np.maximum(slots, 0)], 0)
        tokens[:, 1:] = proposals

    return run


@op("dflash.embedding/1",
    Scalar("rows", U32), Scalar("vocab", U32), Scalar("cols", U32), Scalar("scale", F32), Scalar("act", U32),
    Scalar("w", U32),
    reads("tokens", I32, "rows"), reads("table", DTypeOf("w"), "vocab", "cols"), writes("out", ACT, "rows", "cols"))
def embedding(a: Args) -> Step:
    """out = r(table[token] * scale); a scale of 1 copies the row."""
    tokens, table, out, scale = a.array("tokens"), a.array("table"), a.array("out"), np.float32(a.real("scale"))

    def run() -> None:
        _check_tokens(tokens, len(table))
        rows = to_f32(table[tokens])
        out[...] = rows if scale == 1 else rows * scale

    return run


def _check_tokens(tokens: Array, vocab: int) -> None:
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
        raise CompatibilityError("TOKEN_RANGE", "token id outside the vocabulary", expected=f"0 to {vocab - 1}",
                                 got=[int(t) for t in tokens if not 0 <= t < vocab][:4],
                                 hint="encode the prompt with the core's own tokenizer")


@op("dflash.tap/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("taps", U32), Scalar("index", U32), Scalar("act", U32),
    reads("x", ACT, "rows", "cols"), updates("features", ACT, "rows", "taps*cols"))
def tap(a: Args) -> Step:
    """Copy a layer's output into its place in the row of tap features."""
    x, cols, index = a.array("x"), a.int("cols"), a.int("index")
    target = a.array("features")[:, index * cols:(index + 1) * cols]

    def run() -> None:
        target[...] = x

    return run


@op("dflash.last_row/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32),
    reads("x", ACT, "rows", "cols"), reads("positions", I32, "rows"),
    writes("out", ACT, 1, "cols"), writes("last_position", I32, 1))
def last_row(a: Args) -> Step:
    """The last live row of a chunk and its position (row 0 and -1 when none is live)."""
    x, positions, out, last = a.array("x"), a.array("positions"), a.array("out"), a.array("last_position")

    def run() -> None:
        index = max(int(np.count_nonzero(positions >= 0)) - 1, 0)
        out[0] = x[index]
        last[0] = positions[index]

    return run
