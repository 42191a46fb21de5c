"""Attention over a paged cache: the target's causal attention, and a draft block's over its context and itself.

Rounding: q is scaled in fp32; scores, softmax and the weighted sum are fp32 over the stored K and V; the result is
rounded once to the activation type. (Rounding the probabilities to bf16 first gives other bits; see test_attention.)

Keys are taken a page at a time, at absolute positions, each page at one fixed GEMM shape, and pages are summed in
order; a page without visible keys adds exact zeros. So a row's bits depend on its own query and its own visible keys.
Memory that holds no key yet may hold anything, NaN included: it is blanked before it meets a product.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.decode import bf16_to_f32
from runtime.ops.paged import PAGE_SCALARS, PagedKV
from runtime.ops.registry import (
    ACT,
    F32,
    U32,
    Args,
    Array,
    DType,
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
TILE_ROWS = 8

SHAPE = (Scalar("groups", U32), Scalar("block_rows", U32), Scalar("heads", U32), Scalar("kv_heads", U32),
         Scalar("head_dim", U32), Scalar("scale", F32), Scalar("act", U32), *PAGE_SCALARS)


def wide(x: Array) -> F32Array:
    return x if x.dtype == np.float32 else bf16_to_f32(x)


class QueryTile:
    """Up to TILE_ROWS query rows as [kv_heads, heads_per_kv, head_dim, TILE_ROWS]: fp32, scaled, zero-padded.

    Queries are the columns of every product: a BLAS gives a column of TILE_ROWS equal bits wherever it stands, and a
    row of a taller matrix not on every processor.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        self.shape = (kv_heads, heads // kv_heads, head_dim)
        self.scale = np.float32(scale)
        self.columns = np.zeros((*self.shape, TILE_ROWS), np.float32)

    @classmethod
    def of(cls, a: Args) -> QueryTile:
        return cls(a.int("heads"), a.int("kv_heads"), a.int("head_dim"), a.real("scale"))

    def load(self, q: Array, live: Array) -> None:
        """Take `q`, [rows, heads, head_dim]; rows that are not `live`, bool [rows], become zeros."""
        count = len(q)
        np.multiply(to_f32(q).reshape(count, *self.shape).transpose(1, 2, 3, 0), self.scale,
                    out=self.columns[..., :count])
        self.columns[..., :count][..., ~live] = 0
        self.columns[..., count:] = 0

    def attend(self, keys: F32Array, values: F32Array, visible: Array, count: int) -> F32Array:
        """Softmax-weighted values for the loaded rows.

        Args:
            keys, values: [pages, kv_heads, page_tokens, head_dim]; values may be narrower.
            visible: bool [pages, TILE_ROWS, page_tokens]; a row that sees nothing gives zeros.
            count: rows loaded.
        Returns:
            [count, heads, width of the values].
        """
        scores = np.matmul(keys[:, :, None], self.columns)
        np.copyto(scores, -np.inf, where=~visible.transpose(0, 2, 1)[:, None, None])
        top = scores.max(axis=(0, 3), keepdims=True)
        top[np.isneginf(top)] = 0
        np.subtract(scores, top, out=scores)
        np.exp(scores, out=scores)
        # Tokens last, so that NumPy sums them pairwise: along another axis it adds one by one, and loses bits.
        total = np.add.reduce(np.add.reduce(np.ascontiguousarray(scores.swapaxes(3, 4)), axis=4), axis=0)
        mixed = np.add.reduce(np.matmul(values.transpose(0, 1, 3, 2)[:, :, None], scores), axis=0)
        mixed /= np.where(total > 0, total, np.float32(1))[:, :, None]
        kv_heads, repeat, width, _ = mixed.shape
        result: F32Array = mixed.transpose(3, 0, 1, 2)[:count].reshape(count, kv_heads * repeat, width)
        return result


def blank(keys: F32Array, values: F32Array, absent: Array) -> None:
    """Zero the keys and values [pages, kv_heads, page_tokens, head_dim] that are `absent`, bool [pages, page_tokens]:
    a masked key's weight is 0, and 0 times what lies there must be 0."""
    for side in (keys, values):
        side.transpose(0, 2, 1, 3)[absent] = 0


@op("dflash.attention/1", *SHAPE,
    reads("q", ACT, "groups*block_rows", "heads*head_dim"), reads("positions", I32, "groups*block_rows"),
    reads("slots", I32, "groups"), reads("page_table", I32, "max_slots", "max_pages"), arena("kv", read=True),
    writes("out", ACT, "groups*block_rows", "heads*head_dim"))
def attention(a: Args) -> Step:
    """Causal attention of each live row over its sequence's cache, its own position included; dead rows give zeros."""
    block_rows, heads, head_dim = a.int("block_rows"), a.int("heads"), a.int("head_dim")
    q = a.array("q").reshape(-1, heads, head_dim)
    out = a.array("out").reshape(-1, heads, head_dim)
    positions, slots, tables = a.array("positions"), a.array("slots"), a.array("page_table")
    cache, tile = PagedKV.of(a, "kv"), QueryTile.of(a)
    offset = np.arange(cache.page_tokens)
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
                pages = tables[slot, :top // cache.page_tokens + 1]
                key_positions = np.arange(len(pages))[:, None] * cache.page_tokens + offset
                visible = key_positions[:, None, :] <= padded[None, :, None]
                keys, values = wide(cache.keys[pages]), wide(cache.values[pages])
                blank(keys[-1:], values[-1:], key_positions[-1:] > top)
                tile.load(q[first:last], padded[:count] >= 0)
                out[first:last] = tile.attend(keys, values, visible, count)

    return run


@op("dflash.block_attention/1", *SHAPE, Scalar("causal", U32), Scalar("window", U32),
    reads("q", ACT, "groups*block_rows", "heads*head_dim"), reads("k", ACT, "groups*block_rows", "kv_heads*head_dim"),
    reads("qkv", ACT, "groups*block_rows", "heads*head_dim+2*kv_heads*head_dim"),
    reads("positions", I32, "groups*block_rows"), reads("slots", I32, "groups"),
    reads("page_table", I32, "max_slots", "max_pages"), arena("kv", read=True),
    writes("out", ACT, "groups*block_rows", "heads*head_dim"))
def block_attention(a: Args) -> Step:
    """A draft block over its context (positions before the anchor's) and the block's own live rows.

    Visible: all of both; with `causal`, keys at or before the query; with a `window` W > 0, keys nearer than W.
    The block's K is `k`; its V are the last columns of `qkv`.
    """
    block_rows, heads, kv_heads, head_dim = a.int("block_rows"), a.int("heads"), a.int("kv_heads"), a.int("head_dim")
    causal, window = a.int("causal") != 0, a.int("window")
    q = a.array("q").reshape(-1, heads, head_dim)
    k = a.array("k").reshape(-1, kv_heads, head_dim)
    v = a.array("qkv").reshape(len(q), heads + 2 * kv_heads, head_dim)[:, heads + kv_heads:]
    out = a.array("out").reshape(-1, heads, head_dim)
    positions, slots, tables = a.array("positions"), a.array("slots"), a.array("page_table")
    cache, tile = PagedKV.of(a, "kv"), QueryTile.of(a)
    page = cache.page_tokens
    block_pages = -(-block_rows // page)
    offset = np.arange(page)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            base = group * block_rows
            start = int(positions[base])
            if start < 0:
                out[base:base + block_rows] = 0
                continue
            pages = tables[slot, :-(-start // page)]
            count = len(pages)
            keys = np.zeros((count + block_pages, kv_heads, page, head_dim), np.float32)
            values = np.zeros_like(keys)
            keys[:count], values[:count] = wide(cache.keys[pages]), wide(cache.values[pages])
            key_positions = np.arange(count)[:, None] * page + offset
            key_positions[key_positions >= start] = -1
            block = np.full(block_pages * page, -1)
            block[:block_rows] = positions[base:base + block_rows]
            for i in range(block_pages):
                rows = slice(base + i * page, base + min(block_rows, (i + 1) * page))
                keys[count + i, :, :rows.stop - rows.start] = to_f32(k[rows]).transpose(1, 0, 2)
                values[count + i, :, :rows.stop - rows.start] = to_f32(v[rows]).transpose(1, 0, 2)
            key_positions = np.concatenate([key_positions, block.reshape(block_pages, page)])
            blank(keys, values, key_positions < 0)
            own = slice(base, base + block_rows)
            attend_block(tile, q[own], positions[own], out[own], keys, values, key_positions, causal, window)

    return run


def attend_block(tile: QueryTile, q: Array, positions: Array, out: Array, keys: F32Array, values: F32Array,
                 key_positions: Array, causal: bool, window: int) -> None:
    """Attention of a draft block's rows, a tile at a time.

    Args:
        q, positions, out: of the block's rows.
        keys, values: as `QueryTile.attend` takes them.
        key_positions: [pages, page_tokens], -1 where there is no key.
        causal, window: as `visible_keys` takes them.
    """
    for first in range(0, len(q), TILE_ROWS):
        part = slice(first, min(first + TILE_ROWS, len(q)))
        query = np.full(TILE_ROWS, -1)
        query[:part.stop - first] = positions[part]
        tile.load(q[part], query[:part.stop - first] >= 0)
        visible = visible_keys(query[None, :, None], key_positions[:, None, :], causal, window)
        out[part] = tile.attend(keys, values, visible, part.stop - first)


def visible_keys(query: Array, key: Array, causal: bool, window: int) -> Array:
    """Which keys a query sees, by absolute position; -1 marks a dead query or an absent key."""
    seen: Array = (key >= 0) & (query >= 0)
    if causal:
        seen = seen & (key <= query)
    if window:
        seen = seen & (np.abs(query - key) < window)
    return seen
