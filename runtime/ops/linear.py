"""y = W x for rows of activations: one op per weight format, all with fp32 accumulation and one rounding.

Rounding: inputs as stored, products and sums in fp32, the result rounded once to the output's type. A bf16 bias-free
layer that rounds partial sums (as a split reduction with bf16 partials would) gives other bits; see test_linear.

Rows are computed `tile_rows` at a time against blocks of weight rows, every product at one fixed GEMM shape, the last
tile padded with zero rows. So a row's bits depend neither on its neighbours nor on how many there are, and a block of
weights stays in the cache while it meets every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from runtime.ops.decode import decode_mxfp8, decode_nvfp4, decode_plain
from runtime.ops.parallel import crew, ranges
from runtime.ops.registry import ACT, U32, Args, Array, DType, DTypeOf, F32Array, Scalar, Step, op, reads, writes

# OpenBLAS computes a product of at most this many multiply-adds on the calling thread, without repacking.
DIRECT_GEMM_SIZE = 1 << 18
BLOCK_ROWS = 16  # weight rows per block are a multiple of this, the height of the widest micro-kernels
# Matrices smaller than this are not worth waking a second thread for.
SPLIT_ELEMENTS = 1 << 18


@op("dflash.linear/1",
    Scalar("rows", U32), Scalar("in_features", U32), Scalar("out_features", U32), Scalar("tile_rows", U32),
    Scalar("act", U32), Scalar("w", U32), Scalar("result", U32),
    reads("x", ACT, "rows", "in_features"), reads("weight", DTypeOf("w"), "out_features", "in_features"),
    writes("out", DTypeOf("result"), "rows", "out_features"))
def linear(a: Args) -> Step:
    """Weight in bf16 or fp32, as in the checkpoint."""
    weight = a.array("weight")
    return _bind(a, a.prepared.get((weight,), ("decoded",), lambda: decode_plain(weight)), None)


@op("dflash.linear_mxfp8/1",
    Scalar("rows", U32), Scalar("in_features", U32), Scalar("out_features", U32), Scalar("tile_rows", U32),
    Scalar("act", U32), Scalar("result", U32),
    reads("x", ACT, "rows", "in_features"), reads("weight", DType.E4M3, "out_features", "in_features"),
    reads("block_scale", DType.U8, "out_features", "in_features/32"),
    writes("out", DTypeOf("result"), "rows", "out_features"))
def linear_mxfp8(a: Args) -> Step:
    """Weight-only MXFP8: the weight is E4M3 code x E8M0 block scale, activations stay as they are."""
    codes, scale = a.array("weight"), a.array("block_scale")
    return _bind(a, a.prepared.get((codes, scale), ("decoded",), lambda: decode_mxfp8(codes, scale)), None)


@op("dflash.linear_nvfp4/1",
    Scalar("rows", U32), Scalar("in_features", U32), Scalar("out_features", U32), Scalar("tile_rows", U32),
    Scalar("act", U32), Scalar("result", U32),
    reads("x", ACT, "rows", "in_features"), reads("weight", DType.E2M1, "out_features", "in_features"),
    reads("block_scale", DType.U8, "out_features", "in_features/16"), reads("global_scale", DType.F32, 1),
    writes("out", DTypeOf("result"), "rows", "out_features"))
def linear_nvfp4(a: Args) -> Step:
    """Weight-only NVFP4: the sum runs over code x block scale; the global scale then multiplies it in fp32."""
    codes, scale = a.array("weight"), a.array("block_scale")
    weight = a.prepared.get((codes, scale), ("decoded",), lambda: decode_nvfp4(codes, scale))
    return _bind(a, weight, np.float32(a.array("global_scale")[0]))


def _bind(a: Args, weight: F32Array, factor: np.float32 | None) -> Step:
    x, out = a.array("x"), a.array("out")
    product = RowProduct(weight, a.int("rows"), a.int("tile_rows"))

    def run() -> None:
        product.load(x)
        for first, y in product.columns():
            out[:, first:first + y.shape[1]] = y if factor is None else y * factor

    return run


class RowProduct:
    """x @ weight.T for up to `rows` rows of x, at the fixed shapes that this module promises.

        product = RowProduct(weight, rows=3, tile_rows=8)
        y = product(x)                                       # [3, out_features]
    """

    def __init__(self, weight: F32Array, rows: int, tile_rows: int) -> None:
        out_features, in_features = weight.shape
        tiles = -(-rows // tile_rows)
        self._rows, self._out_features = rows, out_features
        self._padded = np.zeros((tiles * tile_rows, in_features), np.float32)
        self._columns = np.empty((tiles, in_features, tile_rows), np.float32)
        self._by_tile = self._padded.reshape(tiles, tile_rows, in_features).transpose(0, 2, 1)
        block = _block_rows(out_features, in_features, tile_rows)
        whole = out_features // block * block
        self._pieces = [_Piece(weight[:whole], block, self._columns, tiles, tile_rows)]
        if whole < out_features:
            self._pieces.append(_Piece(weight[whole:], out_features - whole, self._columns, tiles, tile_rows))
        self._parts = [p for piece in self._pieces for p in piece.parts(weight.size >= SPLIT_ELEMENTS)]

    def load(self, x: Array) -> None:
        """Take `x`, [rows, in_features], and compute."""
        self._padded[:self._rows] = x
        self._columns[...] = self._by_tile
        if len(self._parts) > 1:
            crew().run(self._parts)
        else:
            self._parts[0]()

    def columns(self) -> Iterator[tuple[int, F32Array]]:
        """The product in parts: the first column of each, and [rows, some columns]."""
        first = 0
        for piece in self._pieces:
            y = piece.rows()[:self._rows]
            yield first, y
            first += y.shape[1]

    def __call__(self, x: Array) -> F32Array:
        self.load(x)
        out = np.empty((self._rows, self._out_features), np.float32)
        for first, y in self.columns():
            out[:, first:first + y.shape[1]] = y
        return out


class _Piece:
    """Some consecutive weight rows, cut into blocks of one size, against all tiles of columns."""

    def __init__(self, weight: F32Array, block: int, columns: F32Array, tiles: int, tile: int) -> None:
        count, in_features = weight.shape
        self.weight = weight.reshape(count // block, 1, block, in_features)
        self.columns = columns
        self.product = np.empty((count // block, tiles, block, tile), np.float32)

    def parts(self, split: bool) -> list[Callable[[], None]]:
        """Calls that together compute the product; the blocks are shared out when `split`."""
        cuts = ranges(len(self.weight), crew().threads if split else 1)
        return [partial(self._multiply, i, j) for i, j in cuts]

    def _multiply(self, first: int, last: int) -> None:
        np.matmul(self.weight[first:last], self.columns, out=self.product[first:last])

    def rows(self) -> F32Array:
        """The product as [tiles * tile_rows, weight rows]."""
        blocks, tiles, block, tile = self.product.shape
        result: F32Array = self.product.transpose(1, 3, 0, 2).reshape(tiles * tile, blocks * block)
        return result


def _block_rows(out_features: int, in_features: int, tile: int) -> int:
    """Weight rows per block. It depends on the shape alone, never on the number of threads: the shape decides bits."""
    largest = max(DIRECT_GEMM_SIZE // (in_features * tile), BLOCK_ROWS) // BLOCK_ROWS * BLOCK_ROWS
    fitting = [b for b in range(largest, 0, -BLOCK_ROWS) if out_features % b == 0]
    return fitting[0] if fitting else min(largest, out_features)
