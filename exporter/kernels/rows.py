"""The ends of a step: rows get positions, tokens and embeddings in one launch; what was produced is committed.

A token outside the vocabulary reads nothing and embeds as NaN: the logits of its row are NaN, and the step says so
(produced = -1). A selector without a finite best score proposes -1, which arrives here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from dflash_core.errors import CaptureError

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

BLOCK_COLS = 1024


def check_act(call: OpCall) -> None:
    """Refuse activations that the kernels do not compute in.

    Raises:
        CaptureError: GPU_ACT; not bf16.
    """
    if call.number("act") != DType.BF16:
        raise CaptureError("GPU_ACT", "GPU cores compute in bf16", where=f"{call.op} {call.label}".rstrip(),
                           expected="bf16", got=DType(call.number("act")).view_name,
                           hint="leave out --compute-dtype")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def copy_block(cols: int) -> int:
    return min(BLOCK_COLS, max(32, power_of_two(cols)))


@triton.jit
def _embed(token, table_ptr, out_ptr, row, tile, VOCAB: tl.constexpr, COLS: tl.constexpr, SCALE: tl.constexpr,
           BLOCK: tl.constexpr):
    """Columns of a tile of out[row] = r(table[token] * scale)."""
    c = tile * BLOCK + tl.arange(0, BLOCK)
    known = (token >= 0) & (token < VOCAB)
    x = tl.load(table_ptr + token.to(tl.int64) * COLS + c, mask=known & (c < COLS), other=float("nan")).to(tl.float32)
    if SCALE != 1.0:
        x = x * SCALE
    tl.store(out_ptr + row.to(tl.int64) * COLS + c, x.to(tl.bfloat16), mask=c < COLS)


@triton.jit
def begin_step(slots_ptr, length_ptr, limit_ptr, anchor_ptr, proposals_ptr, table_ptr, positions_ptr, tokens_ptr,
               out_ptr, BLOCK_ROWS: tl.constexpr, FILL: tl.constexpr, VOCAB: tl.constexpr, COLS: tl.constexpr,
               SCALE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.block_positions, then the block's tokens, then their embeddings. Grid: rows, column tiles.

    Row 0 of a block holds the anchor (FILL in an empty lane); the others its proposals, or FILL where there are none.
    """
    begin(CHAINED)
    row, tile = tl.program_id(0), tl.program_id(1)
    group, i = row // BLOCK_ROWS, row % BLOCK_ROWS
    lane = tl.load(slots_ptr + group)
    slot = tl.maximum(lane, 0)
    start, limit = tl.load(length_ptr + slot), tl.load(limit_ptr + slot)
    anchor = tl.where(lane >= 0, tl.load(anchor_ptr + slot), FILL)
    if proposals_ptr is None:
        token = tl.where(i == 0, anchor, FILL)
    else:
        proposed = tl.load(proposals_ptr + group * (BLOCK_ROWS - 1) + i - 1, mask=i > 0, other=0)
        token = tl.where(i == 0, anchor, proposed)
    if tile == 0:
        live = (lane >= 0) & (start + 1 < limit) & (start + i < limit)
        tl.store(positions_ptr + row, tl.where(live, start + i, -1))
        tl.store(tokens_ptr + row, token)
    _embed(token, table_ptr, out_ptr, row, tile, VOCAB, COLS, SCALE, BLOCK)


@triton.jit
def begin_chunk(slots_ptr, count_ptr, length_ptr, tokens_ptr, table_ptr, positions_ptr, out_ptr, VOCAB: tl.constexpr,
                COLS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.chunk_positions and the embeddings of the chunk's tokens. Grid: rows, column tiles."""
    begin(CHAINED)
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens_ptr + row)
    if tile == 0:
        lane = tl.load(slots_ptr)
        start = tl.load(length_ptr + tl.maximum(lane, 0))
        live = (lane >= 0) & (row < tl.load(count_ptr))
        tl.store(positions_ptr + row, tl.where(live, start + row, -1))
    _embed(token, table_ptr, out_ptr, row, tile, VOCAB, COLS, SCALE, BLOCK)


STEP_TOKENS = ("dflash.block_tokens/1", "dflash.verify_tokens/1")


def lower_begin(calls: Sequence[OpCall], program: Program) -> list[Launch]:
    """One launch for the calls that begin a graph: positions, tokens (in a step graph) and embedding.

    Raises:
        CaptureError: GPU_BEGIN or GPU_ACT; the graph begins otherwise, or computes in another type.
    """
    ops = tuple(c.op for c in calls)
    embedding = calls[-1]
    if ops == ("dflash.chunk_positions/1", "dflash.embedding/1"):
        arguments, constants, writes = _chunk_arguments(calls[0])
        function = begin_chunk
    elif ops in [("dflash.block_positions/1", tokens, "dflash.embedding/1") for tokens in STEP_TOKENS]:
        arguments, constants, writes = _step_arguments(calls[0], calls[1])
        function = begin_step
    else:
        raise CaptureError("GPU_BEGIN", "a graph begins with positions, tokens and an embedding", where=calls[0].label,
                           got=", ".join(ops))
    check_act(embedding)
    table, out = embedding.operands["table"], embedding.operands["out"]
    cols, rows = embedding.number("cols"), embedding.number("rows")
    block = copy_block(cols)
    kernel = Kernel(function, ops, {**constants, "VOCAB": embedding.number("vocab"), "COLS": cols,
                                    "SCALE": embedding.real("scale"), "BLOCK": block}, num_warps=max(1, block // 256))
    arguments = {**arguments, "tokens_ptr": embedding.operands["tokens"], "table_ptr": table}
    reads = tuple(t for t in arguments.values() if t not in writes)
    return [Launch(kernel, {**arguments, "out_ptr": out}, (rows, cdiv(cols, block), 1), reads, (*writes, out),
                   tuple(c.node_id for c in calls), embedding.label)]


def _chunk_arguments(positions: OpCall) -> tuple[dict[str, Tensor], dict[str, int | float | None], tuple[Tensor, ...]]:
    o = positions.operands
    return ({"slots_ptr": o["slots"], "count_ptr": o["count"], "length_ptr": o["length"],
             "positions_ptr": o["positions"]}, {}, (o["positions"],))


def _step_arguments(positions: OpCall, tokens: OpCall,
                    ) -> tuple[dict[str, Tensor], dict[str, int | float | None], tuple[Tensor, ...]]:
    o = positions.operands
    arguments = {"slots_ptr": o["slots"], "length_ptr": o["length"], "limit_ptr": o["limit"],
                 "anchor_ptr": tokens.operands["anchor"], "positions_ptr": o["positions"],
                 "tokens_ptr": tokens.operands["tokens"]}
    constants: dict[str, int | float | None] = {"BLOCK_ROWS": positions.number("block_rows"), "FILL": 0}
    if tokens.op == "dflash.verify_tokens/1":
        arguments["proposals_ptr"] = tokens.operands["proposals"]
    else:
        constants |= {"FILL": tokens.number("mask_token_id"), "proposals_ptr": None}
    return arguments, constants, (o["positions"], tokens.operands["tokens"])


@triton.jit
def tap_rows(x_ptr, features_ptr, index, TAPS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
             CHAINED: tl.constexpr):
    """dflash.tap. Grid: rows, column tiles."""
    begin(CHAINED)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * COLS + c, mask=c < COLS)
    tl.store(features_ptr + (row * TAPS + index) * COLS + c, x, mask=c < COLS)


def lower_tap(call: OpCall, program: Program) -> list[Launch]:
    """A layer's output into its columns of the tap features."""
    check_act(call)
    x, features, cols = call.operands["x"], call.operands["features"], call.number("cols")
    block = copy_block(cols)
    kernel = Kernel(tap_rows, (call.op,), {"TAPS": call.number("taps"), "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 256))
    return [Launch(kernel, {"x_ptr": x, "features_ptr": features, "index": call.number("index")},
                   (call.number("rows"), cdiv(cols, block), 1), (x, features), (features,), (call.node_id,),
                   call.label)]


@triton.jit
def copy_last_row(x_ptr, positions_ptr, out_ptr, last_position_ptr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
                  COLS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.last_row. Grid: column tiles."""
    begin(CHAINED)
    tile, r = tl.program_id(0), tl.arange(0, ROWS_PAD)
    position = tl.load(positions_ptr + r, mask=r < ROWS, other=-1)
    last = tl.maximum(tl.sum((position >= 0).to(tl.int32), axis=0) - 1, 0)
    if tile == 0:
        tl.store(last_position_ptr, tl.load(positions_ptr + last))
    c = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + last.to(tl.int64) * COLS + c, mask=c < COLS)
    tl.store(out_ptr + c, x, mask=c < COLS)


def lower_last_row(call: OpCall, program: Program) -> list[Launch]:
    """The last live row of a chunk, and its position."""
    check_act(call)
    o, cols, rows = call.operands, call.number("cols"), call.number("rows")
    block = copy_block(cols)
    kernel = Kernel(copy_last_row, (call.op,),
                    {"ROWS": rows, "ROWS_PAD": power_of_two(rows), "COLS": cols, "BLOCK": block},
                    num_warps=max(1, block // 256))
    return [Launch(kernel, {"x_ptr": o["x"], "positions_ptr": o["positions"], "out_ptr": o["out"],
                            "last_position_ptr": o["last_position"]}, (cdiv(cols, block), 1, 1),
                   (o["x"], o["positions"]), (o["out"], o["last_position"]), (call.node_id,), call.label)]


@triton.jit
def commit_lanes(slots_ptr, produced_ptr, emitted_ptr, length_ptr, anchor_ptr, groups, BLOCK_ROWS: tl.constexpr,
                 LANES: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.commit, one block for all lanes; no two lanes serve one slot."""
    begin(CHAINED)
    g = tl.arange(0, LANES)
    slot = tl.load(slots_ptr + g, mask=g < groups, other=-1)
    count = tl.load(produced_ptr + g, mask=g < groups, other=0)
    live = (slot >= 0) & (count > 0)
    length = tl.load(length_ptr + slot, mask=live)
    anchor = tl.load(emitted_ptr + g * BLOCK_ROWS + count - 1, mask=live)
    tl.store(length_ptr + slot, length + count, mask=live)
    tl.store(anchor_ptr + slot, anchor, mask=live)


def lower_commit(call: OpCall, program: Program) -> list[Launch]:
    """Slots advance by what their lanes produced."""
    o, groups = call.operands, call.number("groups")
    kernel = Kernel(commit_lanes, (call.op,),
                    {"BLOCK_ROWS": call.number("block_rows"), "LANES": max(32, power_of_two(groups))}, num_warps=1)
    return [Launch(kernel, {"slots_ptr": o["slots"], "produced_ptr": o["produced"], "emitted_ptr": o["emitted"],
                            "length_ptr": o["length"], "anchor_ptr": o["anchor"], "groups": groups}, (1, 1, 1),
                   (o["slots"], o["produced"], o["emitted"], o["length"], o["anchor"]), (o["length"], o["anchor"]),
                   (call.node_id,), call.label)]


@triton.jit
def commit_one(slots_ptr, count_ptr, emitted_ptr, length_ptr, anchor_ptr, CHAINED: tl.constexpr):
    """dflash.commit_chunk, one block."""
    begin(CHAINED)
    slot = tl.load(slots_ptr)
    if slot >= 0:
        tl.store(length_ptr + slot, tl.load(length_ptr + slot) + tl.load(count_ptr))
        tl.store(anchor_ptr + slot, tl.load(emitted_ptr))


def lower_commit_chunk(call: OpCall, program: Program) -> list[Launch]:
    """One slot advances by a prefilled chunk."""
    o = call.operands
    return [Launch(Kernel(commit_one, (call.op,), {}, num_warps=1),
                   {"slots_ptr": o["slots"], "count_ptr": o["count"], "emitted_ptr": o["emitted"],
                    "length_ptr": o["length"], "anchor_ptr": o["anchor"]}, (1, 1, 1),
                   (o["slots"], o["count"], o["emitted"], o["length"], o["anchor"]), (o["length"], o["anchor"]),
                   (call.node_id,), call.label)]
