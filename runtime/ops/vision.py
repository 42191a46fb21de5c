"""Ops of an image encoder: pixels to patch rows, positions on a grid, attention among them, groups to embedding rows.

A graph has rows for its bucket's patches; the image's grid, i32 (rows, cols), says how many are live: rows x cols, in
reading order. Rows beyond them are zeros after every op here, so what a live row becomes depends on the image alone,
never on the bucket. Grids are whole 2 x 2 groups.

Rounding: fp32 from the stored values, rounded once to the activation type, except that a position's embedding is
rounded by itself before it is added, as a table that was interpolated in the activation type would be.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from dflash_core.errors import CompatibilityError

from runtime.ops.parallel import crew, ranges
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
    op,
    reads,
    round_to,
    to_f32,
    updates,
    writes,
)

I32 = DType.I32
GROUP = 2  # patches along a side of a group
# One product of queries and keys at head_dim 128 is as large as OpenBLAS computes on the calling thread.
QUERY_TILE, KEY_TILE = 32, 64


def live_grid(grid: Array, patches: int) -> tuple[int, int]:
    """Rows and columns of the image.

    Raises:
        CompatibilityError: IMAGE_GRID; not whole groups, or more patches than the graph has rows for.
    """
    rows, cols = int(grid[0]), int(grid[1])
    if rows < 0 or cols < 0 or rows % GROUP or cols % GROUP or rows * cols > patches:
        raise CompatibilityError("IMAGE_GRID", "an image's grid does not fit the graph", where="image_grid",
                                 expected=f"even numbers of at most {patches} patches in all", got=f"{rows} x {cols}",
                                 hint="scale the image to the core's largest image, or use a larger bucket")
    return rows, cols


@op("dflash.pixel_patches/1",
    Scalar("rows", U32), Scalar("channels", U32), Scalar("pixels", U32), Scalar("act", U32),
    reads("levels", DType.U8, "rows", "channels*pixels"), reads("table", DType.F32, "channels", 256),
    reads("grid", I32, 2), writes("out", ACT, "rows", "channels*pixels"))
def pixel_patches(a: Args) -> Step:
    """out = r(table[channel, level]): each level of a patch, normalized by a table."""
    rows, channels = a.int("rows"), a.int("channels")
    levels, out = (a.array(name).reshape(rows, channels, -1) for name in ("levels", "out"))
    table, grid = a.array("table").astype(out.dtype), a.array("grid")

    def run() -> None:
        live = int(np.prod(live_grid(grid, rows)))
        for channel in range(channels):
            out[:live, channel] = table[channel][levels[:live, channel]]
        out[live:] = 0

    return run


@op("dflash.grid_embedding/1",
    Scalar("rows", U32), Scalar("height", U32), Scalar("width", U32), Scalar("cols", U32), Scalar("act", U32),
    Scalar("w", U32),
    reads("table", DTypeOf("w"), "height", "width", "cols"), reads("grid", I32, 2), updates("x", ACT, "rows", "cols"))
def grid_embedding(a: Args) -> Step:
    """x = r(x + r(e)): e is the table, bilinear between the middles of its cells, read at the middle of each patch.

    In fp32, along a row first and then between two rows: y0 (x0 a + x1 b) + y1 (x0 c + x1 d).
    """
    x, stored, grid = a.array("x"), a.array("table"), a.array("grid")
    table = a.prepared.get((stored,), ("f32",), lambda: to_f32(stored))
    height, width, channels = table.shape

    def run() -> None:
        rows, cols = live_grid(grid, len(x))
        live = rows * cols
        if live:
            left, right, near, far = _between(cols, width)
            across = near[:, None] * table[:, left] + far[:, None] * table[:, right]
            top, bottom, near, far = _between(rows, height)
            position = near[:, None, None] * across[top] + far[:, None, None] * across[bottom]
            x[:live] = to_f32(x[:live]) + round_to(position.reshape(live, channels), x.dtype)
        x[live:] = 0

    return run


def _between(count: int, cells: int) -> tuple[Array, Array, F32Array, F32Array]:
    """For the middle of each of `count` parts of an axis: the two cells around it and the weight of each."""
    place = np.float32(cells / count) * (np.arange(count, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    place = np.maximum(place, np.float32(0))
    low = place.astype(np.int64)
    far = place - low.astype(np.float32)
    return low, np.minimum(low + 1, cells - 1), np.float32(1) - far, far


@op("dflash.rope_grid/1",
    Scalar("rows", U32), Scalar("heads", U32), Scalar("head_dim", U32), Scalar("positions", U32), Scalar("act", U32),
    reads("qkv", ACT, "rows", "3*heads*head_dim"), reads("rope_table", DType.F32, "positions", 2, "head_dim/4"),
    reads("grid", I32, 2), writes("q", ACT, "rows", "heads*head_dim"), writes("k", ACT, "rows", "heads*head_dim"))
def rope_grid(a: Args) -> Step:
    """Rotate q and k by their patch's column and row: dims (4j, 4j + 1) by the column's angle j, (4j + 2, 4j + 3) by
    the row's. The table holds cosines, then sines, of every place along a side."""
    rows, heads, head_dim = a.int("rows"), a.int("heads"), a.int("head_dim")
    qkv = a.array("qkv").reshape(rows, 3, heads, head_dim)
    outs = [a.array(name).reshape(rows, heads, head_dim) for name in "qk"]
    table, grid = a.array("rope_table"), a.array("grid")

    def run() -> None:
        height, width = live_grid(grid, rows)
        if max(height, width) > len(table):
            raise CompatibilityError("IMAGE_GRID", "an image's side is longer than the model has positions for",
                                     where="image_grid", expected=f"at most {len(table)}", got=f"{height} x {width}",
                                     hint="scale the image down")
        live = height * width
        row, col = np.divmod(np.arange(live), max(width, 1))
        angles = np.stack([table[col], table[row]], axis=-1)  # [live, cos and sin, head_dim / 4, column and row]
        cos, sin = angles[:, None, 0], angles[:, None, 1]
        for part, out in enumerate(outs):
            pairs = to_f32(qkv[:live, part]).reshape(live, heads, head_dim // 4, 2, 2)
            turned = out[:live].reshape(live, heads, head_dim // 4, 2, 2)
            turned[..., 0] = pairs[..., 0] * cos - pairs[..., 1] * sin
            turned[..., 1] = pairs[..., 1] * cos + pairs[..., 0] * sin
            out[live:] = 0

    return run


@op("dflash.image_attention/1",
    Scalar("rows", U32), Scalar("heads", U32), Scalar("head_dim", U32), Scalar("scale", F32), Scalar("act", U32),
    reads("q", ACT, "rows", "heads*head_dim"), reads("k", ACT, "rows", "heads*head_dim"),
    reads("qkv", ACT, "rows", "3*heads*head_dim"), reads("grid", I32, 2), writes("out", ACT, "rows", "heads*head_dim"))
def image_attention(a: Args) -> Step:
    """Every patch attends to every patch of the image; v are the last columns of `qkv`.

    q * scale, scores, softmax and sums in fp32; r of the result. Keys are taken in tiles from the first on, each a
    product of one fixed shape, and tiles are summed in order.
    """
    rows, heads, head_dim = a.int("rows"), a.int("heads"), a.int("head_dim")
    q, k, out = (a.array(name).reshape(rows, heads, head_dim) for name in ("q", "k", "out"))
    v = a.array("qkv").reshape(rows, 3, heads, head_dim)[:, 2]
    grid, scale = a.array("grid"), np.float32(a.real("scale"))

    def run() -> None:
        live = int(np.prod(live_grid(grid, rows)))
        keys = _tiles(k[:live], KEY_TILE).transpose(0, 1, 3, 2).copy()
        values = _tiles(v[:live], KEY_TILE)
        queries = _tiles(q[:live], QUERY_TILE)
        queries *= scale
        cuts = ranges(len(queries), crew().threads) if live else []
        crew_run = [partial(attend, first, last, queries, keys, values, live) for first, last in cuts]
        if crew_run:
            crew().run(crew_run)
        out[live:] = 0

    def attend(first: int, last: int, queries: F32Array, keys: F32Array, values: F32Array, live: int) -> None:
        for tile in range(first, last):
            mixed = _attend(queries[tile], keys, values, live)
            start = tile * QUERY_TILE
            out[start:min(start + QUERY_TILE, live)] = mixed.transpose(1, 0, 2)[:live - start]

    return run


def _tiles(x: Array, tile: int) -> F32Array:
    """[rows, heads, head_dim] as fp32 [tiles, heads, tile, head_dim], the last tile filled up with zeros."""
    rows, heads, head_dim = x.shape
    count = -(-rows // tile)
    padded = np.zeros((count * tile, heads, head_dim), np.float32)
    padded[:rows] = x
    return np.ascontiguousarray(padded.reshape(count, tile, heads, head_dim).transpose(0, 2, 1, 3))


def _attend(queries: F32Array, keys: F32Array, values: F32Array, live: int) -> F32Array:
    """Softmax-weighted values [heads, QUERY_TILE, head_dim] of one tile of scaled queries over all live keys."""
    scores = np.matmul(queries, keys)
    spare = len(keys) * KEY_TILE - live
    if spare:
        scores[-1, :, :, KEY_TILE - spare:] = -np.inf
    scores -= scores.max(axis=(0, 3), keepdims=True)
    np.exp(scores, out=scores)
    total = np.add.reduce(np.add.reduce(scores, axis=3), axis=0)
    mixed: F32Array = np.add.reduce(np.matmul(scores, values), axis=0)
    mixed /= total[:, :, None]
    return mixed


@op("dflash.merge_patches/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32),
    reads("x", ACT, "rows", "cols"), reads("grid", I32, 2), writes("out", ACT, "rows/4", "4*cols"))
def merge_patches(a: Args) -> Step:
    """A row per 2 x 2 group of patches, groups in reading order: top left, top right, bottom left, bottom right."""
    x, out, grid, channels = a.array("x"), a.array("out"), a.array("grid"), a.int("cols")

    def run() -> None:
        rows, cols = live_grid(grid, len(x))
        groups = x[:rows * cols].reshape(rows // GROUP, GROUP, cols // GROUP, GROUP, channels).transpose(0, 2, 1, 3, 4)
        live = rows * cols // GROUP**2
        out[:live] = groups.reshape(live, GROUP**2 * channels)
        out[live:] = 0

    return run


@op("dflash.store_image/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("capacity", U32), Scalar("act", U32),
    reads("x", ACT, "rows", "cols"), reads("grid", I32, 2), reads("first", I32, 1),
    updates("embeddings", ACT, "capacity", "cols"))
def store_image(a: Args) -> Step:
    """Copy an image's rows, one per group of its grid, to the rows of `embeddings` from `first` on."""
    x, embeddings, grid, first = a.array("x"), a.array("embeddings"), a.array("grid"), a.array("first")

    def run() -> None:
        rows, cols = live_grid(grid, GROUP**2 * len(x))
        start, live = int(first[0]), rows * cols // GROUP**2
        if not 0 <= start <= start + live <= len(embeddings):
            raise CompatibilityError("IMAGE_ROWS", "an image's rows do not fit where they are to be kept",
                                     where="image_first", expected=f"within {len(embeddings)} rows",
                                     got=f"{live} rows from {start}", hint="keep fewer images at a time")
        embeddings[start:start + live] = x[:live]

    return run


@op("dflash.splice_embedding/1",
    Scalar("rows", U32), Scalar("cols", U32), Scalar("capacity", U32), Scalar("act", U32),
    reads("sources", I32, "rows"), reads("embeddings", ACT, "capacity", "cols"), updates("x", ACT, "rows", "cols"))
def splice_embedding(a: Args) -> Step:
    """x[i] = embeddings[sources[i] - 1] where sources[i] is not 0: rows of an image in place of a placeholder's."""
    sources, embeddings, x = a.array("sources"), a.array("embeddings"), a.array("x")

    def run() -> None:
        wanted = sources[sources != 0]
        if wanted.size and not 1 <= int(wanted.min()) <= int(wanted.max()) <= len(embeddings):
            raise CompatibilityError("IMAGE_ROWS", "a prompt names an image's row that does not exist",
                                     where="chunk_images", expected=f"0 to {len(embeddings)}",
                                     got=sorted({int(wanted.min()), int(wanted.max())}),
                                     hint="splice images with runtime.vision.splice")
        x[sources != 0] = embeddings[wanted - 1]

    return run
