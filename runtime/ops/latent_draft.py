"""Latent attention of a draft: as `latent`, but its shared key part is rotated, and a block attends to itself too.

A stored row is [latent, normalized; shared key part, rotated]. The block's own rows are made the same way and never
stored.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.attention import QueryTile, attend_block, blank, wide
from runtime.ops.norm import rms_norm_rows
from runtime.ops.paged import PAGE_SCALARS, latent_pages
from runtime.ops.registry import (
    ACT,
    F32,
    U32,
    Args,
    DType,
    DTypeOf,
    Scalar,
    Step,
    arena,
    op,
    reads,
    to_f32,
    writes,
)
from runtime.ops.rope import Rotation

I32 = DType.I32
TABLE = reads("rope_table", DType.F32, "context", 2, "rotary_dims/2")
ROTATED = (Scalar("rotary_dims", U32), Scalar("interleaved", U32), Scalar("context", U32), Scalar("act", U32))
GROUPS = (Scalar("groups", U32), Scalar("block_rows", U32), Scalar("rank", U32), Scalar("rope_dim", U32))
TABLES = (reads("positions", I32, "groups*block_rows"), reads("slots", I32, "groups"),
          reads("page_table", I32, "max_slots", "max_pages"))


@op("dflash.rope_query/1",
    Scalar("rows", U32), Scalar("heads", U32), Scalar("nope_dim", U32), Scalar("rope_dim", U32), *ROTATED,
    reads("q", ACT, "rows", "heads*nope_dim+heads*rope_dim"), TABLE, reads("positions", I32, "rows"),
    writes("out", ACT, "rows", "heads*nope_dim+heads*rope_dim"))
def rope_query(a: Args) -> Step:
    """Rotate the last rope_dim values of every head; the rest is copied. Rounding: the rotation once, from fp32."""
    rows, heads, nope = a.int("rows"), a.int("heads"), a.int("nope_dim")
    q, out = a.array("q").reshape(rows, heads, -1), a.array("out").reshape(rows, heads, -1)
    rotation, positions = Rotation(a), a.array("positions")

    def run() -> None:
        out[..., :nope] = q[..., :nope]
        rotation.apply(q[..., nope:], *rotation.at(positions), out[..., nope:])

    return run


@op("dflash.latent_rows/1",
    Scalar("rows", U32), Scalar("rank", U32), Scalar("rope_dim", U32), Scalar("eps", F32), Scalar("w", U32), *ROTATED,
    reads("kv_a", ACT, "rows", "rank+rope_dim"), reads("weight", DTypeOf("w"), "rank"), TABLE,
    reads("positions", I32, "rows"), writes("out", ACT, "rows", "rank+rope_dim"))
def latent_rows(a: Args) -> Step:
    """[r(r(x / rms(x)) * weight), r(rotated part)] of each row, x being the first `rank` values."""
    rank, eps, weight = a.int("rank"), np.float32(a.real("eps")), to_f32(a.array("weight"))
    kv_a, out, rotation, positions = a.array("kv_a"), a.array("out"), Rotation(a), a.array("positions")

    def run() -> None:
        rms_norm_rows(np.ascontiguousarray(kv_a[:, :rank]), weight, eps, out[:, :rank])
        rotation.apply(kv_a[:, None, rank:], *rotation.at(positions), out[:, None, rank:])

    return run


@op("dflash.latent_store/1", *GROUPS, Scalar("act", U32), *PAGE_SCALARS,
    reads("rows", ACT, "groups*block_rows", "rank+rope_dim"), *TABLES, arena("kv", write=True))
def latent_store(a: Args) -> Step:
    """Store each live row at its position; rejected and other dead rows are left out. Rounding: none."""
    rows, positions, slots, tables = (a.array(n) for n in ("rows", "positions", "slots", "page_table"))
    pages, block_rows = latent_pages(a, "kv", rows.shape[1]), a.int("block_rows")
    tokens = pages.shape[1]

    def run() -> None:
        live = np.flatnonzero(positions >= 0)
        where = positions[live]
        pages[tables[slots[live // block_rows], where // tokens], where % tokens] = rows[live]

    return run


@op("dflash.latent_block_attention/1", *GROUPS, Scalar("heads", U32), Scalar("scale", F32), Scalar("causal", U32),
    Scalar("window", U32), Scalar("act", U32), *PAGE_SCALARS,
    reads("q", ACT, "groups*block_rows", "heads*rank+heads*rope_dim"),
    reads("rows", ACT, "groups*block_rows", "rank+rope_dim"), *TABLES, arena("kv", read=True),
    writes("out", ACT, "groups*block_rows", "heads*rank"))
def latent_block_attention(a: Args) -> Step:
    """A draft block over its stored context (positions before the anchor's) and its own live rows.

    Visible: all of both; with `causal`, keys at or before the query; with a `window` W > 0, keys nearer than W.
    Rounding: as `attention`.
    """
    block_rows, heads, rank = a.int("block_rows"), a.int("heads"), a.int("rank")
    width = rank + a.int("rope_dim")
    causal, window = a.int("causal") != 0, a.int("window")
    q, out = a.array("q").reshape(-1, heads, width), a.array("out").reshape(-1, heads, rank)
    rows, positions, slots, tables = (a.array(n) for n in ("rows", "positions", "slots", "page_table"))
    cache, tile = latent_pages(a, "kv", width), QueryTile(heads, 1, width, a.real("scale"))
    page = cache.shape[1]
    block_pages = -(-block_rows // page)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            base = group * block_rows
            start = int(positions[base])
            if start < 0:
                out[base:base + block_rows] = 0
                continue
            pages = tables[slot, :-(-start // page)]
            count = len(pages)
            keys = np.zeros((count + block_pages, 1, page, width), np.float32)
            keys[:count, 0] = wide(cache[pages])
            own = keys[count:].reshape(-1, width)
            own[:block_rows] = to_f32(rows[base:base + block_rows])
            key_positions = np.full((count + block_pages) * page, -1)
            key_positions[:start] = np.arange(start)
            key_positions[count * page:count * page + block_rows] = positions[base:base + block_rows]
            key_positions = key_positions.reshape(-1, page)
            blank(keys, keys, key_positions < 0)
            values = np.ascontiguousarray(keys[..., :rank])
            block = slice(base, base + block_rows)
            attend_block(tile, q[block], positions[block], out[block], keys, values, key_positions, causal, window)

    return run
