"""Pinned tile choices: which block of a weight one program takes, and how deep it prefetches.

Choices follow from the shape alone, so that an export needs no device and two exports agree. They were found by timing
on an H200; docs/benchmarks.md says how to repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.formats import FORMATS, Format

# Rows of the largest step graph, eight sequences of a block of sixteen; more rows are a prefill's.
MAX_STEP_ROWS = 128
MAX_BLOCK_ROWS = 64  # rows of one sequence in a step graph; more are a prefill's chunk
# Query rows of an attention block, whatever the graph's: how the probabilities of a row are summed depends on it.
STEP_QUERY_ROWS = 8
STEP_ATTENTION_WARPS = 8
PREFILL_QUERY_ROWS, PREFILL_WARPS, PREFILL_STAGES = 64, 4, 3
MAX_SPLITS = 128  # of the context, for which attention's blocks are shared out
MIN_SPLIT, MAX_SPLIT = 64, 512
MAX_LANES = 4096  # tiles whose splits are counted

# Matrices of at least this many weights are streamed through shared memory in a loop.
STREAMED_ELEMENTS = 1 << 23
# Smaller ones than this are taken whole even where nothing is fused before or after them.
WHOLE_ELEMENTS = 1 << 21
WHOLE_ROWS = 8  # activation rows of a block; 16 and 32 were slower at four sequences
WHOLE_OUT_ROWS = 16
WHOLE_BLOCK_NBYTES = 200 << 10  # of bf16 weights and activations that a block has on their way to its matrix units
MIN_SLICE, MAX_SLICE = 128, 512  # columns per warp
MIN_LARGE_TILES = 64  # blocks below which a prefill occupies a device better with small tiles
PACKED_ROWS = 8  # exporter.kernels.linear_packed.ROWS
PACKED_COLUMNS = 256  # of a step of exporter.kernels.linear_packed
PACKED_SLICES = 4
PACKED_STAGES = 3
FEW_PACKED_BLOCKS = 600  # below, a block shares its reduction out over its warps: faster at 544, slower at 3,880
KDA_COLUMNS, KDA_WARPS, KDA_STAGES = 32, 2, 2  # of a state, that one block of the recurrence holds; rows on their way
KDA_BLOCK, KDA_BLOCK_COLUMNS, KDA_BLOCK_WARPS, KDA_BLOCK_STAGES = 16, 32, 4, 3  # of a prefill's recurrence
# Blocks at most, depth, stages: the fewer blocks share one of an H200's 132 processors, the more each has on its way.
_STREAMED = ((132, 1024, 3), (264, 512, 3), (396, 256, 6))


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How dflash.linear is cut.

    Attributes:
        rows: activation rows per block, R.
        out: weight rows per block, BN.
        depth: columns of the reduction per step, BK.
        num_warps: warps per block.
        stages: tiles in flight.
    """

    rows: int
    out: int
    depth: int
    num_warps: int
    stages: int


def linear_tile(out_features: int, in_features: int, rows: int, fmt: Format, *, gated: bool = False,
                normalized: bool = False) -> LinearTile:
    """The tile for a matrix of this shape and this many activation rows.

    Args:
        gated: two products share the block's registers.
        normalized: the block normalizes its activations, in registers.
    """
    if fmt is Format.F32:  # its three terms take three times the registers, so all tiles are small
        return LinearTile(8 if rows <= 8 else 16, 16, _depth(64, in_features), 1, 5)
    if rows > MAX_STEP_ROWS and in_features % 64 == 0:
        tile = LinearTile(128 if gated else 256, 128, 64, 8, 3)
        if -(-out_features // tile.out) * -(-rows // tile.rows) >= MIN_LARGE_TILES:
            return tile
    if rows > MAX_STEP_ROWS:
        return LinearTile(64, 64, _depth(64, in_features), 4, 4)
    # At most 32 weight rows: from 64 on the compiler takes another matrix instruction, whose sums may round otherwise,
    # and it would do so for some numbers of rows only.
    if rows > 16:
        return LinearTile(32 if rows <= 32 else 64, 32, _depth(128, in_features), 2, 4)
    depth, stages = 128, 5
    if fmt is Format.BF16 and not normalized:  # nothing is held in registers: shared memory alone bounds the depth
        blocks = -(-out_features // 16)
        depth, stages = next((choice for most, *choice in _STREAMED if blocks <= most and not gated), (128, 8))
    return LinearTile(8 if rows <= 8 else 16, 16, _depth(depth, in_features), 1, stages)


def image_tile(in_features: int) -> LinearTile:
    """The tile of an image tower's matrices, alike for every number of patches."""
    return LinearTile(64, 64, _depth(64, in_features), 4, 4)


def _depth(most: int, in_features: int) -> int:
    """Columns of a step: a power of two of at least 32 that divides the reduction; 32, the last step shortened, where
    none does."""
    return next((depth for depth in (1024, 512, 256, 128, 64) if depth <= most and in_features % depth == 0), 32)


# Latent attention. Rows of a tile of the products per head, rows that one block takes, and weights that it holds.
HEAD_ROWS, HEAD_ROWS_PER_BLOCK, HEAD_WEIGHTS = 16, 32, 8192
HEAD_TILE = LinearTile(rows=64, out=64, depth=64, num_warps=4, stages=3)  # of the same in a prefill

# (row, head) pairs of an attention block, cached rows that it takes at a time. A row's page is looked up a stage ahead:
# with five stages, two tiles of rows are on their way.
LATENT_PAIRS, LATENT_WARPS, LATENT_KEYS, LATENT_STAGES = 16, 4, 32, 5
LATENT_MANY_PAIRS, LATENT_MANY_WARPS = 32, 8  # in a prefill
# A split's part is large, rank fp32 values per pair: fewer splits than of other attention.
LATENT_SPLITS, MIN_LATENT_SPLIT, MAX_LATENT_SPLIT = 32, 128, 1024


@dataclass(frozen=True, slots=True)
class WholeTile:
    """How dflash.linear is cut where a block takes the whole reduction at once.

    Attributes:
        out: weight rows per block.
        slices: parts of the reduction, one per warp.
        width: columns of a part, padded to a power of two.
    """

    out: int
    slices: int
    width: int


def whole_tile(out_features: int, in_features: int, fmt: Format, *, gated: bool = False) -> WholeTile | None:
    """The tile for a short reduction; None where one block cannot hold it or the matrix is large enough to stream.

    Args:
        gated: the block holds a second tile of as many weight rows.
    """
    block = FORMATS[fmt].block
    if out_features * in_features >= STREAMED_ELEMENTS or out_features % WHOLE_OUT_ROWS:
        return None
    for slices in (8, 4, 2, 1):
        part = in_features // slices
        width = 1 << (part - 1).bit_length()
        if in_features % slices == 0 and part % block == 0 and part >= MIN_SLICE and width <= MAX_SLICE:
            held = 2 * slices * width * (WHOLE_OUT_ROWS * (2 if gated else 1) + WHOLE_ROWS)
            return WholeTile(WHOLE_OUT_ROWS, slices, width) if held <= WHOLE_BLOCK_NBYTES else None
    return None


def takes_norm(out_features: int, in_features: int, rows: int) -> bool:
    """Whether a matrix's kernel repeats the norm of its rows in every block, rather than read normalized rows."""
    return rows <= MAX_STEP_ROWS and out_features * in_features < STREAMED_ELEMENTS


def packed_slices(out_features: int, in_features: int, fmt: Format) -> int | None:
    """Slices of the reduction for exporter.kernels.linear_packed; None where it does not apply."""
    if fmt in (Format.BF16, Format.F32) or in_features % PACKED_COLUMNS:
        return None
    if out_features * in_features < STREAMED_ELEMENTS:
        return None
    few = out_features // 64 < FEW_PACKED_BLOCKS
    return PACKED_SLICES if few and in_features % (PACKED_SLICES * PACKED_COLUMNS) == 0 else 1


def split_tokens(context: int) -> int:
    """Positions that one attention block of a step handles: short splits finish sooner, but all that are live are
    merged by one block."""
    evenly = -(-context // MAX_SPLITS)
    return min(max(1 << (evenly - 1).bit_length(), MIN_SPLIT), MAX_SPLIT)


def latent_split_tokens(context: int) -> int:
    """Positions that one latent attention block of a step handles."""
    evenly = -(-context // LATENT_SPLITS)
    return min(max(1 << (evenly - 1).bit_length(), MIN_LATENT_SPLIT), MAX_LATENT_SPLIT)
