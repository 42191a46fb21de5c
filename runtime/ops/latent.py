"""Multi-head latent attention without positions, in its absorbed form: one cached row per token serves every head.

A cached row is the normalized latent (`rank` values) and the shared key part (`rope_dim` values, never rotated). The up
projection of keys moves into the query, and that of values behind the weighted sum, so no key or value of a head is
ever formed. Every graph computes this form: a row that was prefilled, verified or decoded has the same bits.

`kv_b` holds, for each head, `nope_dim` rows that make keys and then `v_dim` rows that make values, [rank] each.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.attention import TILE_ROWS, QueryTile, wide
from runtime.ops.decode import decode_plain
from runtime.ops.linear import RowProduct
from runtime.ops.norm import rms_norm_rows
from runtime.ops.paged import PAGE_SCALARS, latent_pages
from runtime.ops.registry import (
    ACT,
    F32,
    U32,
    Args,
    Array,
    DType,
    DTypeOf,
    F32Array,
    Scalar,
    Step,
    arena,
    op,
    reads,
    to_f32,
    writes,
)

I32 = DType.I32
KV_B = reads("kv_b", DTypeOf("w"), "heads*nope_dim+heads*v_dim", "rank")
HEAD_SCALARS = (Scalar("rows", U32), Scalar("heads", U32), Scalar("rank", U32), Scalar("nope_dim", U32),
                Scalar("rope_dim", U32), Scalar("v_dim", U32), Scalar("act", U32), Scalar("w", U32))
TABLES = (reads("slots", I32, "groups"), reads("page_table", I32, "max_slots", "max_pages"))


def _heads_of(a: Args) -> F32Array:
    """kv_b as [heads, nope_dim + v_dim, rank] in fp32."""
    weight = a.array("kv_b")
    found: F32Array = a.prepared.get((weight,), ("decoded",), lambda: decode_plain(weight))
    return found.reshape(a.int("heads"), a.int("nope_dim") + a.int("v_dim"), a.int("rank"))


@op("dflash.absorb_query/1", *HEAD_SCALARS,
    reads("q", ACT, "rows", "heads*nope_dim+heads*rope_dim"), KV_B,
    writes("out", ACT, "rows", "heads*rank+heads*rope_dim"))
def absorb_query(a: Args) -> Step:
    """Per head, out = [r(sum over n of q[n] * key_row[n]), q's last rope_dim values]: a query for cached rows.

    Rounding: products and sums in fp32 at one fixed shape, the absorbed part rounded once, the rest copied.
    """
    rows, heads, rank, nope = a.int("rows"), a.int("heads"), a.int("rank"), a.int("nope_dim")
    q, out = a.array("q").reshape(rows, heads, -1), a.array("out").reshape(rows, heads, -1)
    weights = _heads_of(a)[:, :nope].transpose(0, 2, 1)
    products = [RowProduct(np.ascontiguousarray(weights[h]), rows, TILE_ROWS) for h in range(heads)]

    def run() -> None:
        for head, product in enumerate(products):
            out[:, head, :rank] = product(q[:, head, :nope])
        out[:, :, rank:] = q[:, :, nope:]

    return run


@op("dflash.expand_values/1", *HEAD_SCALARS,
    reads("x", ACT, "rows", "heads*rank"), KV_B, writes("out", ACT, "rows", "heads*v_dim"))
def expand_values(a: Args) -> Step:
    """Per head, out = r(value_rows @ x): a weighted sum of latents becomes the head's output.

    Rounding: products and sums in fp32 at one fixed shape, rounded once.
    """
    rows, heads, nope = a.int("rows"), a.int("heads"), a.int("nope_dim")
    x, out = a.array("x").reshape(rows, heads, -1), a.array("out").reshape(rows, heads, -1)
    products = [RowProduct(np.ascontiguousarray(weight[nope:]), rows, TILE_ROWS) for weight in _heads_of(a)]

    def run() -> None:
        for head, product in enumerate(products):
            out[:, head] = product(x[:, head])

    return run


@op("dflash.latent_cache/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("rank", U32), Scalar("rope_dim", U32), Scalar("eps", F32),
    Scalar("act", U32), Scalar("w", U32), *PAGE_SCALARS,
    reads("kv_a", ACT, "groups*block_rows", "rank+rope_dim"), reads("weight", DTypeOf("w"), "rank"),
    reads("positions", I32, "groups*block_rows"), *TABLES, arena("kv", write=True))
def latent_cache(a: Args) -> Step:
    """Store [r(r(x / rms(x)) * weight), rope part] of each live row at its position, x being the first `rank` values.

    Rounding: as `rms_norm`; the rope part is copied.
    """
    block_rows, rank, eps = a.int("block_rows"), a.int("rank"), np.float32(a.real("eps"))
    kv_a, weight, positions = a.array("kv_a"), to_f32(a.array("weight")), a.array("positions")
    slots, tables = a.array("slots"), a.array("page_table")
    pages = latent_pages(a, "kv", kv_a.shape[1])
    stored = np.empty_like(kv_a)

    def run() -> None:
        live = np.flatnonzero(positions >= 0)
        rms_norm_rows(np.ascontiguousarray(kv_a[:, :rank]), weight, eps, stored[:, :rank])
        stored[:, rank:] = kv_a[:, rank:]
        where = positions[live]
        page = tables[slots[live // block_rows], where // pages.shape[1]]
        pages[page, where % pages.shape[1]] = stored[live]

    return run


@op("dflash.latent_attention/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("heads", U32), Scalar("rank", U32),
    Scalar("rope_dim", U32), Scalar("scale", F32), Scalar("act", U32), *PAGE_SCALARS,
    reads("q", ACT, "groups*block_rows", "heads*rank+heads*rope_dim"), reads("positions", I32, "groups*block_rows"),
    *TABLES, arena("kv", read=True), writes("out", ACT, "groups*block_rows", "heads*rank"))
def latent_attention(a: Args) -> Step:
    """Causal attention of each live row over its sequence's cached rows, its own included; dead rows give zeros.

    A cached row is the key, and its first `rank` values are the value, of every head.

    Rounding: as `attention`: fp32 over stored rows, keys taken a page at a time, the result rounded once.
    """
    block_rows, heads, rank = a.int("block_rows"), a.int("heads"), a.int("rank")
    width = rank + a.int("rope_dim")
    q, out = a.array("q").reshape(-1, heads, width), a.array("out").reshape(-1, heads, rank)
    positions, slots, tables = a.array("positions"), a.array("slots"), a.array("page_table")
    cache, tile = latent_pages(a, "kv", width), QueryTile(heads, 1, width, a.real("scale"))
    page_tokens = cache.shape[1]
    offset = np.arange(page_tokens)
    padded = np.full(TILE_ROWS, -1, np.int64)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            for first in range(group * block_rows, (group + 1) * block_rows, TILE_ROWS):
                last = min(first + TILE_ROWS, (group + 1) * block_rows)
                count = last - first
                padded[:count], padded[count:] = positions[first:last], -1
                top = int(padded.max())
                if top < 0:
                    out[first:last] = 0
                    continue
                key_positions = np.arange(top // page_tokens + 1)[:, None] * page_tokens + offset
                keys = _keys(cache[tables[slot, :len(key_positions)]])
                keys[-1, 0][key_positions[-1] > top] = 0  # what no row has written may hold anything, NaN included
                values = np.ascontiguousarray(keys[..., :rank])
                tile.load(q[first:last], padded[:count] >= 0)
                visible = key_positions[:, None, :] <= padded[None, :, None]
                out[first:last] = tile.attend(keys, values, visible, count)

    return run


def _keys(pages: Array) -> F32Array:
    """Pages [pages, page_tokens, width] as keys of the one head that is cached: a copy in fp32."""
    keys = wide(pages)[:, None]
    return keys.copy() if np.shares_memory(keys, pages) else keys
