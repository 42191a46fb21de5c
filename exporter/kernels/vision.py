"""The ops around an image tower's matrices: pixels to patches, positions on a grid, groups of patches, where rows go.

All but the matrices are copies and a few multiplications, with the bits of the CPU ops. A graph has rows for its
bucket's patches and the image's grid says how many are live; a grid that the CPU ops refuse is an image of no patches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, copy_block
from exporter.program.builder import Program


@triton.jit
def image_size(grid_ptr, patches):
    """Rows and columns of the image; none of a grid that is not whole 2 x 2 groups, or has more patches than the
    graph."""
    rows, cols = tl.load(grid_ptr), tl.load(grid_ptr + 1)
    whole = (rows >= 0) & (cols >= 0) & (rows % 2 == 0) & (cols % 2 == 0)
    fits = whole & (rows.to(tl.int64) * cols.to(tl.int64) <= patches)
    return tl.where(fits, rows, 0), tl.where(fits, cols, 0)


@triton.jit
def normalize_pixels(levels_ptr, table_ptr, grid_ptr, out_ptr, patches, PIXELS: tl.constexpr, COLS: tl.constexpr,
                     BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.pixel_patches. Grid: patches, column tiles. COLS is channels x PIXELS; the table has 256 levels each."""
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    patch, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = patch.to(tl.int64) * COLS + c
    live = (c < COLS) & (patch < rows * cols)
    level = tl.load(levels_ptr + at, mask=live, other=0).to(tl.int32)
    value = tl.load(table_ptr + c // PIXELS * 256 + level, mask=live, other=0.0)
    tl.store(out_ptr + at, value.to(tl.bfloat16), mask=c < COLS)


def lower_pixel_patches(call: OpCall, program: Program) -> list[Launch]:
    """Levels of the image's patches, normalized."""
    check_act(call)
    o, patches, pixels = call.operands, call.number("rows"), call.number("pixels")
    cols = call.number("channels") * pixels
    block = copy_block(cols)
    kernel = Kernel(normalize_pixels, (call.op,), {"PIXELS": pixels, "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 256))
    arguments = {"levels_ptr": o["levels"], "table_ptr": o["table"], "grid_ptr": o["grid"], "out_ptr": o["out"],
                 "patches": patches}
    return [Launch(kernel, arguments, (patches, cdiv(cols, block), 1), (o["levels"], o["table"], o["grid"]),
                   (o["out"],), (call.node_id,), call.label)]


@triton.jit
def _between(i, count, CELLS: tl.constexpr):
    """For the middle of part i of `count` along an axis: the two cells around it and the weight of each."""
    place = tl.div_rn(CELLS * 1.0, tl.maximum(count, 1).to(tl.float32)) * (i.to(tl.float32) + 0.5) - 0.5
    place = tl.maximum(place, 0.0)
    low = place.to(tl.int32)
    far = place - low.to(tl.float32)
    return low, tl.minimum(low + 1, CELLS - 1), 1.0 - far, far


@triton.jit
def _cell(table_ptr, y, x, c, live, WIDTH: tl.constexpr, COLS: tl.constexpr):
    return tl.load(table_ptr + (y * WIDTH + x).to(tl.int64) * COLS + c, mask=live, other=0.0).to(tl.float32)


@triton.jit
def add_positions(table_ptr, grid_ptr, x_ptr, patches, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
                  BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.grid_embedding. Grid: patches, column tiles."""
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    patch, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (c < COLS) & (patch < rows * cols)
    across, down = patch % tl.maximum(cols, 1), patch // tl.maximum(cols, 1)
    left, right, near_x, far_x = _between(across, cols, WIDTH)
    top, bottom, near_y, far_y = _between(down, rows, HEIGHT)
    upper = near_x * _cell(table_ptr, top, left, c, live, WIDTH, COLS)
    upper += far_x * _cell(table_ptr, top, right, c, live, WIDTH, COLS)
    lower = near_x * _cell(table_ptr, bottom, left, c, live, WIDTH, COLS)
    lower += far_x * _cell(table_ptr, bottom, right, c, live, WIDTH, COLS)
    position = (near_y * upper + far_y * lower).to(tl.bfloat16).to(tl.float32)
    at = x_ptr + patch.to(tl.int64) * COLS + c
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, tl.where(live, x + position, 0.0).to(tl.bfloat16), mask=c < COLS)


def lower_grid_embedding(call: OpCall, program: Program) -> list[Launch]:
    """Each patch's place on the learned grid is added to its row."""
    check_act(call)
    o, patches, cols = call.operands, call.number("rows"), call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(add_positions, (call.op,), {"HEIGHT": call.number("height"), "WIDTH": call.number("width"),
                                                "COLS": cols, "BLOCK": block}, num_warps=max(1, block // 256))
    arguments = {"table_ptr": o["table"], "grid_ptr": o["grid"], "x_ptr": o["x"], "patches": patches}
    return [Launch(kernel, arguments, (patches, cdiv(cols, block), 1), (o["table"], o["grid"], o["x"]), (o["x"],),
                   (call.node_id,), call.label)]


@triton.jit
def rotate_by_grid(qkv_ptr, table_ptr, grid_ptr, q_ptr, k_ptr, patches, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
                   POSITIONS: tl.constexpr, PAIRS: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.rope_grid. Grid: patches, tiles of PAIRS pairs of the WIDE columns of q and of k alike.

    A place that the table does not have turns to NaN.
    """
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    patch, pair = tl.program_id(0), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < WIDE // 2
    live = inside & (patch < rows * cols)
    across, down = patch % tl.maximum(cols, 1), patch // tl.maximum(cols, 1)
    place = tl.where(pair % 2 == 0, across, down)
    angle = table_ptr + place * (HEAD_DIM // 2) + pair % (HEAD_DIM // 2) // 2
    known = live & (place < POSITIONS)
    cos = tl.load(angle, mask=known, other=float("nan"))
    sin = tl.load(angle + HEAD_DIM // 4, mask=known, other=float("nan"))
    c = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
    row = patch.to(tl.int64)
    for part in tl.static_range(2):
        x = tl.load(qkv_ptr + row * (3 * WIDE) + part * WIDE + c, mask=live[:, None], other=0.0).to(tl.float32)
        first, second = tl.split(x)
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.where(live[:, None], turned, 0.0).to(tl.bfloat16)
        if part == 0:
            tl.store(q_ptr + row * WIDE + c, turned, mask=inside[:, None])
        else:
            tl.store(k_ptr + row * WIDE + c, turned, mask=inside[:, None])


def lower_rope_grid(call: OpCall, program: Program) -> list[Launch]:
    """q and k, turned by column and row."""
    check_act(call)
    o, patches, head_dim = call.operands, call.number("rows"), call.number("head_dim")
    wide = call.number("heads") * head_dim
    block = copy_block(wide)
    kernel = Kernel(rotate_by_grid, (call.op,),
                    {"WIDE": wide, "HEAD_DIM": head_dim, "POSITIONS": call.number("positions"), "PAIRS": block // 2},
                    num_warps=max(1, block // 256))
    arguments = {"qkv_ptr": o["qkv"], "table_ptr": o["rope_table"], "grid_ptr": o["grid"], "q_ptr": o["q"],
                 "k_ptr": o["k"], "patches": patches}
    return [Launch(kernel, arguments, (patches, cdiv(wide, block), 1), (o["qkv"], o["rope_table"], o["grid"]),
                   (o["q"], o["k"]), (call.node_id,), call.label)]


@triton.jit
def gather_groups(x_ptr, grid_ptr, out_ptr, patches, COLS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.merge_patches. Grid: groups, column tiles, the four patches of a group."""
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    group, c, member = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2)
    across = tl.maximum(cols // 2, 1)
    patch = (group // across * 2 + member // 2) * cols + group % across * 2 + member % 2
    live = (c < COLS) & (group < rows * cols // 4)
    x = tl.load(x_ptr + patch.to(tl.int64) * COLS + c, mask=live, other=0.0)
    tl.store(out_ptr + (group.to(tl.int64) * 4 + member) * COLS + c, x, mask=c < COLS)


def lower_merge_patches(call: OpCall, program: Program) -> list[Launch]:
    """The patches of each group side by side."""
    check_act(call)
    o, patches, cols = call.operands, call.number("rows"), call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(gather_groups, (call.op,), {"COLS": cols, "BLOCK": block}, num_warps=max(1, block // 256))
    arguments = {"x_ptr": o["x"], "grid_ptr": o["grid"], "out_ptr": o["out"], "patches": patches}
    return [Launch(kernel, arguments, (patches // 4, cdiv(cols, block), 4), (o["x"], o["grid"]), (o["out"],),
                   (call.node_id,), call.label)]


@triton.jit
def keep_rows(x_ptr, grid_ptr, first_ptr, embeddings_ptr, patches, CAPACITY: tl.constexpr, COLS: tl.constexpr,
              BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.store_image. Grid: groups, column tiles. An image whose rows do not all fit is not kept."""
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    group, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    groups, first = rows * cols // 4, tl.load(first_ptr)
    kept = (c < COLS) & (group < groups) & (first >= 0) & (first <= CAPACITY - groups)
    x = tl.load(x_ptr + group.to(tl.int64) * COLS + c, mask=kept)
    tl.store(embeddings_ptr + (first + group).to(tl.int64) * COLS + c, x, mask=kept)


def lower_store_image(call: OpCall, program: Program) -> list[Launch]:
    """An image's rows, to where prompts take them from."""
    check_act(call)
    o, groups, cols = call.operands, call.number("rows"), call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(keep_rows, (call.op,), {"CAPACITY": call.number("capacity"), "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 256))
    arguments = {"x_ptr": o["x"], "grid_ptr": o["grid"], "first_ptr": o["first"], "embeddings_ptr": o["embeddings"],
                 "patches": 4 * groups}
    return [Launch(kernel, arguments, (groups, cdiv(cols, block), 1),
                   (o["x"], o["grid"], o["first"], o["embeddings"]), (o["embeddings"],), (call.node_id,), call.label)]


@triton.jit
def splice_rows(sources_ptr, embeddings_ptr, x_ptr, CAPACITY: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
                CHAINED: tl.constexpr):
    """dflash.splice_embedding. Grid: rows, column tiles. A row of an image that does not exist is NaN."""
    begin(CHAINED)
    row, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + row)
    taken = (c < COLS) & (source != 0)
    known = taken & (source > 0) & (source <= CAPACITY)
    x = tl.load(embeddings_ptr + (source - 1).to(tl.int64) * COLS + c, mask=known, other=float("nan"))
    tl.store(x_ptr + row.to(tl.int64) * COLS + c, x, mask=taken)


def lower_splice_embedding(call: OpCall, program: Program) -> list[Launch]:
    """Rows of an image in place of a placeholder's."""
    check_act(call)
    o, cols = call.operands, call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(splice_rows, (call.op,), {"CAPACITY": call.number("capacity"), "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 256))
    return [Launch(kernel, {"sources_ptr": o["sources"], "embeddings_ptr": o["embeddings"], "x_ptr": o["x"]},
                   (call.number("rows"), cdiv(cols, block), 1), (o["sources"], o["embeddings"]), (o["x"],),
                   (call.node_id,), call.label)]
