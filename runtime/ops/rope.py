"""Rotary position embedding, with the per-head normalization before it and the K/V write after it.

Rounding: the rotation is computed in fp32 from the stored values and an fp32 table, and rounded once to the activation
type. Implementations that round cos and sin to bf16 first, or round each product, give other bits; see test_rope.
"""

from __future__ import annotations

import numpy as np

from runtime.ops.norm import rms_norm_rows
from runtime.ops.paged import PAGE_SCALARS, PagedKV
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
HEADS = (Scalar("rows", U32), Scalar("heads", U32), Scalar("kv_heads", U32), Scalar("head_dim", U32),
         Scalar("rotary_dims", U32), Scalar("interleaved", U32), Scalar("context", U32), Scalar("act", U32))


class Rotation:
    """Rotates heads [rows, heads, head_dim] by their rows' positions; a dead row is rotated as position 0."""

    def __init__(self, a: Args) -> None:
        table = a.array("rope_table")
        self.cos, self.sin = table[:, 0, :], table[:, 1, :]
        self.half = a.int("rotary_dims") // 2
        self.interleaved = a.int("interleaved") != 0

    def at(self, positions: Array) -> tuple[F32Array, F32Array]:
        where = np.maximum(positions, 0)
        return self.cos[where][:, None, :], self.sin[where][:, None, :]

    def apply(self, x: Array, cos: F32Array, sin: F32Array, out: Array) -> None:
        half = self.half
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        wide = to_f32(x)
        a, b = wide[..., first], wide[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        if 2 * half < x.shape[-1]:
            out[..., 2 * half:] = x[..., 2 * half:]


def _split(a: Args) -> tuple[Array, Array, Array]:
    """Views of the q, k and v columns of `qkv` as [rows, heads, head_dim]."""
    rows, n, m, d = a.int("rows"), a.int("heads"), a.int("kv_heads"), a.int("head_dim")
    qkv = a.array("qkv").reshape(rows, n + 2 * m, d)
    return qkv[:, :n], qkv[:, n:n + m], qkv[:, n + m:]


@op("dflash.rope_cache/1", *HEADS, Scalar("block_rows", U32), *PAGE_SCALARS,
    reads("qkv", ACT, "rows", "heads*head_dim+2*kv_heads*head_dim"),
    reads("rope_table", DType.F32, "context", 2, "rotary_dims/2"),
    reads("positions", I32, "rows"), reads("slots", I32, "rows/block_rows"),
    reads("page_table", I32, "max_slots", "max_pages"),
    writes("q", ACT, "rows", "heads*head_dim"), arena("kv", write=True))
def rope_cache(a: Args) -> Step:
    """Rotate q and k of each row and store k and v in the paged cache; dead rows are not stored."""
    q, k, v = _split(a)
    return _bind_cache(a, q, k, v)


@op("dflash.norm_rope_cache/1", *HEADS, Scalar("block_rows", U32), Scalar("eps", F32), Scalar("w", U32), *PAGE_SCALARS,
    reads("qkv", ACT, "rows", "heads*head_dim+2*kv_heads*head_dim"),
    reads("q_weight", DTypeOf("w"), "head_dim"), reads("k_weight", DTypeOf("w"), "head_dim"),
    reads("rope_table", DType.F32, "context", 2, "rotary_dims/2"),
    reads("positions", I32, "rows"), reads("slots", I32, "rows/block_rows"),
    reads("page_table", I32, "max_slots", "max_pages"),
    writes("q", ACT, "rows", "heads*head_dim"), arena("kv", write=True))
def norm_rope_cache(a: Args) -> Step:
    """As rope_cache, with q and k normalized per head first (rounded as in rms_norm)."""
    q, k, v = _split(a)
    eps = np.float32(a.real("eps"))
    q_weight, k_weight = to_f32(a.array("q_weight")), to_f32(a.array("k_weight"))
    q_normed, k_normed = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    rotate = _bind_cache(a, q_normed, k_normed, v)

    def run() -> None:
        rms_norm_rows(q, q_weight, eps, q_normed)
        rms_norm_rows(k, k_weight, eps, k_normed)
        rotate()

    return run


def _bind_cache(a: Args, q: Array, k: Array, v: Array) -> Step:
    rotation, cache = Rotation(a), PagedKV.of(a, "kv")
    positions, slots, tables = a.array("positions"), a.array("slots"), a.array("page_table")
    q_out = a.array("q").reshape(q.shape)
    k_out = np.empty(k.shape, k.dtype)
    block_rows = a.int("block_rows")

    def run() -> None:
        cos, sin = rotation.at(positions)
        rotation.apply(q, cos, sin, q_out)
        rotation.apply(k, cos, sin, k_out)
        cache.write(k_out, v, positions, tables, slots, block_rows)

    return run


@op("dflash.norm_rope/1", *HEADS, Scalar("eps", F32), Scalar("w", U32),
    reads("qkv", ACT, "rows", "heads*head_dim+2*kv_heads*head_dim"),
    reads("q_weight", DTypeOf("w"), "head_dim"), reads("k_weight", DTypeOf("w"), "head_dim"),
    reads("rope_table", DType.F32, "context", 2, "rotary_dims/2"), reads("positions", I32, "rows"),
    writes("q", ACT, "rows", "heads*head_dim"), writes("k", ACT, "rows", "kv_heads*head_dim"))
def norm_rope(a: Args) -> Step:
    """Normalize and rotate q and k of a draft block, which is never stored in a cache."""
    q, k, _ = _split(a)
    rotation, positions, eps = Rotation(a), a.array("positions"), np.float32(a.real("eps"))
    q_weight, k_weight = to_f32(a.array("q_weight")), to_f32(a.array("k_weight"))
    q_normed, k_normed = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    q_out, k_out = a.array("q").reshape(q.shape), a.array("k").reshape(k.shape)

    def run() -> None:
        rms_norm_rows(q, q_weight, eps, q_normed)
        rms_norm_rows(k, k_weight, eps, k_normed)
        cos, sin = rotation.at(positions)
        rotation.apply(q_normed, cos, sin, q_out)
        rotation.apply(k_normed, cos, sin, k_out)

    return run


@op("dflash.norm_rope_context/1",
    Scalar("rows", U32), Scalar("kv_heads", U32), Scalar("head_dim", U32), Scalar("rotary_dims", U32),
    Scalar("interleaved", U32), Scalar("context", U32), Scalar("act", U32), Scalar("block_rows", U32),
    Scalar("eps", F32), Scalar("w", U32), *PAGE_SCALARS,
    reads("kv_rows", ACT, "rows", "2*kv_heads*head_dim"), reads("k_weight", DTypeOf("w"), "head_dim"),
    reads("rope_table", DType.F32, "context", 2, "rotary_dims/2"),
    reads("positions", I32, "rows"), reads("slots", I32, "rows/block_rows"),
    reads("page_table", I32, "max_slots", "max_pages"), arena("kv", write=True))
def norm_rope_context(a: Args) -> Step:
    """Store a draft layer's context K (normalized, rotated) and V, projected from the shared feature, at the rows'
    positions; dead rows, the rejected ones among them, are not stored."""
    rows, m, d = a.int("rows"), a.int("kv_heads"), a.int("head_dim")
    kv = a.array("kv_rows").reshape(rows, 2 * m, d)
    k, v = kv[:, :m], kv[:, m:]
    rotation, cache, eps = Rotation(a), PagedKV.of(a, "kv"), np.float32(a.real("eps"))
    positions, slots, tables = a.array("positions"), a.array("slots"), a.array("page_table")
    k_weight, block_rows = to_f32(a.array("k_weight")), a.int("block_rows")
    k_normed, k_out = np.empty(k.shape, k.dtype), np.empty(k.shape, k.dtype)

    def run() -> None:
        rms_norm_rows(k, k_weight, eps, k_normed)
        cos, sin = rotation.at(positions)
        rotation.apply(k_normed, cos, sin, k_out)
        cache.write(k_out, v, positions, tables, slots, block_rows)

    return run
