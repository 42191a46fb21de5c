"""Around latent attention: rows that are cached, queries that are absorbed into them, values that are expanded.

The products per head are small, one matrix of `kv_b` each, and there are many heads: a step's block asks for its piece
of a head's matrix before there are rows, holds it, and meets the rows tile by tile, all at one tile shape; a prefill's
block walks the reduction over large tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dflash_core.errors import CaptureError

from exporter.kernels.dependency import begin, start_successor, wait_inputs
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.kernels.tuning import HEAD_ROWS, HEAD_ROWS_PER_BLOCK, HEAD_TILE, HEAD_WEIGHTS, MAX_STEP_ROWS
from exporter.program.builder import Program, Tensor
from runtime.ops import DType


@triton.jit
def _turned(x_ptr, d, inside, table_ptr, position, ROTARY: tl.constexpr):
    """Values `d` of the vector at x_ptr, the first ROTARY of them rotated in halves by the position (a dead row's is
    taken as 0); fp32, not rounded."""
    half: tl.constexpr = ROTARY // 2
    pair = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    turning = inside & (d >= 0) & (d < ROTARY)
    angle = table_ptr + tl.maximum(position, 0).to(tl.int64) * (2 * half) + tl.where(d < half, d, d - half)
    cos = tl.load(angle, mask=turning, other=1.0)
    sin = tl.load(angle + half, mask=turning, other=0.0)
    return tl.where(turning, x * cos + tl.where(d < half, -partner, partner) * sin, x)


@triton.jit
def latent_row(x_ptr, weight_ptr, table_ptr, positions_ptr, slots_ptr, page_table_ptr, out_ptr, block_rows,
               RANK: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr,
               ROTARY: tl.constexpr, EPS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr,
               MAX_PAGES: tl.constexpr, CHAINED: tl.constexpr):
    """One block per row of RANK + ROPE values. With weight_ptr the latent is normalized, rounded as dflash.rms_norm
    rounds; with table_ptr the rest is rotated, rounded once; with page_table_ptr the row goes to its place in the cache
    (a dead one nowhere), otherwise to its place among the rows."""
    begin(CHAINED)
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    c, d = tl.arange(0, BLOCK), tl.arange(0, ROPE_BLOCK)
    source = x_ptr + row.to(tl.int64) * (RANK + ROPE)
    latent = tl.load(source + c, mask=c < RANK, other=0.0)
    if weight_ptr is not None:
        x = latent.to(tl.float32)
        mean = tl.sum(x * x, axis=0) / RANK
        y = (x * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))).to(tl.bfloat16).to(tl.float32)
        latent = (y * tl.load(weight_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)).to(tl.bfloat16)
    if table_ptr is not None:
        shared = _turned(source + RANK, d, d < ROPE, table_ptr, position, ROTARY).to(tl.bfloat16)
    else:
        shared = tl.load(source + RANK + d, mask=d < ROPE, other=0.0)
    if page_table_ptr is not None:
        live = position >= 0
        slot = tl.load(slots_ptr + row // block_rows, mask=live, other=0)
        page = tl.load(page_table_ptr + slot * MAX_PAGES + position // PAGE_TOKENS, mask=live, other=0)
        to = out_ptr + page.to(tl.int64) * (PAGE_BYTES // 2) + position % PAGE_TOKENS * (RANK + ROPE)
    else:
        live = row >= 0
        to = out_ptr + row.to(tl.int64) * (RANK + ROPE)
    tl.store(to + c, latent, mask=live & (c < RANK))
    tl.store(to + RANK + d, shared, mask=live & (d < ROPE))


def lower_latent_cache(call: OpCall, program: Program) -> list[Launch]:
    """Normalized rows into the cache.

    Raises:
        CaptureError: GPU_ACT; activations are not bf16.
    """
    return _row_launch(call, call.operands["kv_a"])


def lower_latent_rows(call: OpCall, program: Program) -> list[Launch]:
    """A draft's rows, normalized and rotated. Raises as `lower_latent_cache`."""
    return _row_launch(call, call.operands["kv_a"])


def lower_latent_store(call: OpCall, program: Program) -> list[Launch]:
    """A draft's accepted rows into its cache. Raises as `lower_latent_cache`."""
    return _row_launch(call, call.operands["rows"])


def _row_launch(call: OpCall, x: Tensor) -> list[Launch]:
    check_act(call)
    o, rank, rope = call.operands, call.number("rank"), call.number("rope_dim")
    cached = "kv" in o
    out = pages_of(o["kv"]) if cached else o["out"]
    optional = {"weight_ptr": o.get("weight"), "table_ptr": o.get("rope_table"), "slots_ptr": o.get("slots"),
                "page_table_ptr": o.get("page_table")}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    block = max(32, power_of_two(rank))
    constants: dict[str, int | float | None] = {
        "RANK": rank, "BLOCK": block, "ROPE": rope, "ROPE_BLOCK": power_of_two(rope), "ROTARY": _rotary(call),
        "EPS": call.real("eps") if "eps" in call.scalars else 0.0,
        "PAGE_TOKENS": call.number("page_tokens") if cached else 1,
        "PAGE_BYTES": call.number("page_bytes") if cached else 2,
        "MAX_PAGES": call.number("max_pages") if cached else 1, **dict.fromkeys(optional.keys() - given.keys())}
    kernel = Kernel(latent_row, (call.op,), constants, num_warps=min(4, max(1, block // 256)))
    arguments: dict[str, Tensor | int] = {
        "x_ptr": x, "positions_ptr": o["positions"], "out_ptr": out,
        "block_rows": call.number("block_rows") if cached else 1, **given}
    return [Launch(kernel, arguments, (x.shape[0], 1, 1), (x, o["positions"], *given.values()), (out,),
                   (call.node_id,), call.label)]


def _rotary(call: OpCall) -> int:
    if "rotary_dims" not in call.scalars:
        return 0
    assert call.number("interleaved") == 0, call.label
    return call.number("rotary_dims")


def pages_of(kv: Tensor) -> Tensor:
    """A layer's pages as kernels see them: bf16, to the end of the arena."""
    return Tensor(kv.buffer_id, kv.offset, DType.BF16, (0,), kv.name)


@triton.jit
def turn_queries(q_ptr, table_ptr, positions_ptr, out_ptr, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
                 ROTARY: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.rope_query. Grid: rows, heads."""
    begin(CHAINED)
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    at = row.to(tl.int64) * (HEADS * (NOPE + ROPE)) + tl.program_id(1) * (NOPE + ROPE)
    inside = c < NOPE + ROPE
    copied = tl.load(q_ptr + at + c, mask=inside, other=0.0)
    turned = _turned(q_ptr + at + NOPE, c - NOPE, inside & (c >= NOPE), table_ptr, tl.load(positions_ptr + row), ROTARY)
    tl.store(out_ptr + at + c, tl.where(c < NOPE, copied, turned.to(tl.bfloat16)), mask=inside)


def lower_rope_query(call: OpCall, program: Program) -> list[Launch]:
    """The rotated part of every head's query. Raises as `lower_latent_cache`."""
    check_act(call)
    o, heads, nope, rope = call.operands, call.number("heads"), call.number("nope_dim"), call.number("rope_dim")
    kernel = Kernel(turn_queries, (call.op,),
                    {"HEADS": heads, "NOPE": nope, "ROPE": rope, "ROTARY": _rotary(call),
                     "BLOCK": max(32, power_of_two(nope + rope))}, num_warps=1)
    return [Launch(kernel, {"q_ptr": o["q"], "table_ptr": o["rope_table"], "positions_ptr": o["positions"],
                            "out_ptr": o["out"]}, (call.number("rows"), heads, 1),
                   (o["q"], o["rope_table"], o["positions"]), (o["out"],), (call.node_id,), call.label)]


@triton.jit
def _copy_rest(x, out, live, HEADS: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, N: tl.constexpr,
               REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """The REST values behind a head's first IN go behind its first N. x, out: pointers to the head in each row, [R]."""
    e = tl.arange(0, REST_BLOCK)
    mask = live[:, None] & (e < REST)[None, :]
    tl.store(out[:, None] + N + e[None, :], tl.load(x[:, None] + IN + e[None, :], mask=mask, other=0.0), mask=mask)


@triton.jit
def head_products(x_ptr, w_ptr, out_ptr, rows, HEADS: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr,
                  IN: tl.constexpr, N: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, K_STRIDE: tl.constexpr,
                  N_STRIDE: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, R: tl.constexpr,
                  ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHAINED: tl.constexpr):
    """Per head, out[n] = r(sum over k < IN of x[k] * w[k, n]) for n < N, the whole reduction at once.

    x is [rows, HEADS, X], out [rows, HEADS, OUT]; head h's w lies at w_ptr + h * W + FIRST, with these strides.
    Grid: tiles of BN columns, HEADS, shares of ROWS rows. BK is the power of two at or above IN.
    """
    start_successor(CHAINED)
    head, share = tl.program_id(1), tl.program_id(2)
    k, n = tl.arange(0, BK), tl.program_id(0) * BN + tl.arange(0, BN)
    w = tl.load(w_ptr + head.to(tl.int64) * W + FIRST + k[:, None] * K_STRIDE + n[None, :] * N_STRIDE,
                mask=(k < IN)[:, None] & (n < N)[None, :], other=0.0)
    wait_inputs(CHAINED)
    for first in range(share * ROWS, tl.minimum((share + 1) * ROWS, rows), R):
        r = first + tl.arange(0, R)
        live = r < rows
        at = r.to(tl.int64) * HEADS + head
        x = tl.load(x_ptr + at[:, None] * X + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
        acc = tl.dot(x, w)
        tl.store(out_ptr + at[:, None] * OUT + n[None, :], acc.to(tl.bfloat16), mask=live[:, None] & (n < N)[None, :])
        if REST > 0:
            _copy_rest(x_ptr + at * X, out_ptr + at * OUT, live & (tl.program_id(0) == 0), HEADS, X, OUT, IN, N, REST,
                       REST_BLOCK)


@triton.jit
def head_tiles(x_ptr, w_ptr, out_ptr, rows, HEADS: tl.constexpr, X: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
               N: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, K_STRIDE: tl.constexpr, N_STRIDE: tl.constexpr,
               REST: tl.constexpr, REST_BLOCK: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """As head_products, BK of the reduction at a time. Grid: tiles of R rows, of BN columns, HEADS."""
    begin(CHAINED)
    head, n = tl.program_id(2), tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.program_id(0) * R + tl.arange(0, R)
    live = r < rows
    at = r.to(tl.int64) * HEADS + head
    w_ptr += head.to(tl.int64) * W + FIRST
    acc = tl.zeros([R, BN], tl.float32)
    for k0 in tl.range(0, IN, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_ptr + at[:, None] * X + k[None, :], mask=live[:, None] & (k < IN)[None, :], other=0.0)
        w = tl.load(w_ptr + k[:, None] * K_STRIDE + n[None, :] * N_STRIDE, mask=(k < IN)[:, None] & (n < N)[None, :],
                    other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(out_ptr + at[:, None] * OUT + n[None, :], acc.to(tl.bfloat16), mask=live[:, None] & (n < N)[None, :])
    if REST > 0:
        _copy_rest(x_ptr + at * X, out_ptr + at * OUT, live & (tl.program_id(1) == 0), HEADS, X, OUT, IN, N, REST,
                   REST_BLOCK)


def lower_absorb_query(call: OpCall, program: Program) -> list[Launch]:
    """Every head's query times its key rows, the rest of the query behind it.

    Raises:
        CaptureError: GPU_ACT or GPU_WEIGHT; activations or kv_b are not bf16.
    """
    rank, nope, rope = call.number("rank"), call.number("nope_dim"), call.number("rope_dim")
    return _head_launch(call, call.operands["q"], {
        "X": nope + rope, "OUT": rank + rope, "IN": nope, "N": rank, "FIRST": 0, "K_STRIDE": rank, "N_STRIDE": 1,
        "REST": rope})


def lower_expand_values(call: OpCall, program: Program) -> list[Launch]:
    """Every head's weighted sum of latents times its value rows. Raises as `lower_absorb_query`."""
    rank, nope, v_dim = call.number("rank"), call.number("nope_dim"), call.number("v_dim")
    return _head_launch(call, call.operands["x"], {
        "X": rank, "OUT": v_dim, "IN": rank, "N": v_dim, "FIRST": nope * rank, "K_STRIDE": 1, "N_STRIDE": rank,
        "REST": 0})


def _head_launch(call: OpCall, x: Tensor, shape: dict[str, int]) -> list[Launch]:
    check_act(call)
    weight, out, rows, heads = call.operands["kv_b"], call.operands["out"], call.number("rows"), call.number("heads")
    if weight.dtype is not DType.BF16:
        raise CaptureError("GPU_WEIGHT", "GPU kernels read bf16 weights", where=call.label, expected="bf16",
                           got=weight.dtype.view_name, hint="publish the checkpoint in bfloat16")
    constants = {**shape, "HEADS": heads, "W": (call.number("nope_dim") + call.number("v_dim")) * call.number("rank"),
                 "REST_BLOCK": power_of_two(max(1, shape["REST"]))}
    columns = max(16, power_of_two(shape["N"]))
    if rows <= MAX_STEP_ROWS:
        depth = max(16, power_of_two(shape["IN"]))
        tile = min(columns, max(16, HEAD_WEIGHTS // depth))
        constants |= {"R": HEAD_ROWS, "ROWS": HEAD_ROWS_PER_BLOCK, "BN": tile, "BK": depth}
        kernel = Kernel(head_products, (call.op,), constants, num_warps=min(4, tile // 8))
        grid = (cdiv(shape["N"], tile), heads, cdiv(rows, HEAD_ROWS_PER_BLOCK))
    else:
        tile = min(columns, HEAD_TILE.out)
        constants |= {"R": HEAD_TILE.rows, "BN": tile, "BK": HEAD_TILE.depth, "STAGES": HEAD_TILE.stages}
        kernel = Kernel(head_tiles, (call.op,), constants, num_warps=HEAD_TILE.num_warps, num_stages=HEAD_TILE.stages)
        grid = (cdiv(rows, HEAD_TILE.rows), cdiv(shape["N"], tile), heads)
    return [Launch(kernel, {"x_ptr": x, "w_ptr": weight, "out_ptr": out, "rows": rows}, grid, (x, weight), (out,),
                   (call.node_id,), call.label)]
