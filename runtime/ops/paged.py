"""The paged K/V layout that every attention op shares.

An arena is pages of `page_bytes`. A page holds, per layer, K then V, each [kv_heads, page_tokens, head_dim] in the
activation type; an operand points at its layer's K in page 0. Sequence position p lives in row p % page_tokens of the
page that the sequence's page table names at index p // page_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dflash_core.errors import FormatError

from runtime.ops.registry import U32, Args, Array, Scalar

PAGE_SCALARS = (Scalar("page_tokens", U32), Scalar("page_bytes", U32), Scalar("kv_pages", U32),
                Scalar("max_slots", U32), Scalar("max_pages", U32))


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's K and V in an arena, as arrays [pages, kv_heads, page_tokens, head_dim]."""

    keys: Array
    values: Array
    page_tokens: int

    @classmethod
    def of(cls, a: Args, operand: str) -> PagedKV:
        raw = a.array(operand)
        dtype = a.dtype("act").numpy
        shape = (a.int("kv_pages"), a.int("kv_heads"), a.int("page_tokens"), a.int("head_dim"))
        side = shape[1] * shape[2] * shape[3] * dtype.itemsize
        stride = a.int("page_bytes")
        if shape[0] < 1 or 2 * side > stride or (shape[0] - 1) * stride + 2 * side > raw.nbytes:
            raise FormatError("KV_RANGE", "a layer's K/V pages reach beyond the arena", where=a.op_name,
                              expected=f"at most {raw.nbytes} bytes", got=(shape[0] - 1) * stride + 2 * side)
        strides = (stride, side // shape[1], shape[3] * dtype.itemsize, dtype.itemsize)
        return cls(np.ndarray(shape, dtype, raw.data, 0, strides), np.ndarray(shape, dtype, raw.data, side, strides),
                   shape[2])

    def write(self, keys: Array, values: Array, positions: Array, tables: Array, slots: Array, block_rows: int) -> None:
        """Store K and V rows [rows, kv_heads, head_dim] (fp32 or stored type) at the rows' positions; dead rows are
        left out. Rows are packed `block_rows` per entry of `slots`."""
        live = np.nonzero(positions >= 0)[0]
        if live.size == 0:
            return
        where = positions[live]
        pages = tables[slots[live // block_rows], where // self.page_tokens]
        offset = where % self.page_tokens
        self.keys[pages, :, offset] = keys[live]
        self.values[pages, :, offset] = values[live]


def latent_pages(a: Args, operand: str, width: int) -> Array:
    """One layer's latent rows in an arena, as an array [pages, page_tokens, width] in the activation type.

    A page of such an arena holds, per layer, one row per position and no separate V.

    Raises:
        FormatError: KV_RANGE; the last page ends beyond the arena.
    """
    raw, dtype = a.array(operand), a.dtype("act").numpy
    pages, tokens, stride = a.int("kv_pages"), a.int("page_tokens"), a.int("page_bytes")
    layer = tokens * width * dtype.itemsize
    if pages < 1 or layer > stride or (pages - 1) * stride + layer > raw.nbytes:
        raise FormatError("KV_RANGE", "a layer's latent pages reach beyond the arena", where=a.op_name,
                          expected=f"at most {raw.nbytes} bytes", got=(pages - 1) * stride + layer)
    return np.ndarray((pages, tokens, width), dtype, raw.data, 0, (stride, width * dtype.itemsize, dtype.itemsize))
