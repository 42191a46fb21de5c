"""Attention among the patches of an image, without a mask: a tile of patches of one head walks all live keys.

Tiles of keys begin at patch 0 and are summed in order, one kernel serves every bucket, and keys beyond the image are
never read: a row's bits depend on the image alone. As in exporter.kernels.attention_many the probabilities meet V as
two bf16 halves, so that they are not rounded to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.kernels.vision import image_size
from exporter.program.builder import Program

LOG2_E = 1.4426950408889634
# As a prefill's attention is cut (exporter.kernels.tuning), for the same head sizes.
QUERY_ROWS, KEY_ROWS, WARPS, STAGES = 64, 64, 4, 3


@triton.jit
def _tile(q, k_ptr, v_ptr, key, live, d, top, total, mixed, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
          FACTOR: tl.constexpr):
    """Keys `key`: online softmax to the base 2, in fp32. Those from `live` on take no part; None: all are live."""
    row = key.to(tl.int64)[:, None]
    mask = (d < HEAD_DIM)[None, :]
    if live is not None:
        mask = mask & (key < live)[:, None]
    keys = tl.load(k_ptr + row * WIDE + d[None, :], mask=mask, other=0.0)
    values = tl.load(v_ptr + row * (3 * WIDE) + d[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(keys)) * FACTOR
    if live is not None:
        scores = tl.where((key < live)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    p = tl.exp2(scores - new_top[:, None])
    alpha = tl.exp2(top - new_top)
    high = p.to(tl.bfloat16)
    low = (p - high.to(tl.float32)).to(tl.bfloat16)
    mixed = mixed * alpha[:, None]
    mixed = tl.dot(high, values, mixed)
    mixed = tl.dot(low, values, mixed)
    return new_top, total * alpha + tl.sum(p, axis=1), mixed


@triton.jit
def image_attention(q_ptr, k_ptr, qkv_ptr, grid_ptr, out_ptr, patches, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                    D: tl.constexpr, FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
                    CHAINED: tl.constexpr):
    """Grid: tiles of BM patches, HEADS. D is the power of two at or above HEAD_DIM; FACTOR is the scale over ln 2."""
    begin(CHAINED)
    rows, cols = image_size(grid_ptr, patches)
    live = rows * cols
    tile, head = tl.program_id(0), tl.program_id(1)
    r, d, n = tile * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    wide_enough = d < HEAD_DIM
    wide: tl.constexpr = HEADS * HEAD_DIM
    at = r.to(tl.int64)[:, None] * wide + head * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + at, mask=(r < live)[:, None] & wide_enough[None, :], other=0.0)
    keys_end = tl.where(tile * BM < live, live, 0)
    whole = keys_end // BN * BN
    k_ptr += head * HEAD_DIM
    v_ptr = qkv_ptr + 2 * wide + head * HEAD_DIM
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, D], tl.float32)
    for key0 in tl.range(0, whole, BN, num_stages=STAGES):
        top, total, mixed = _tile(q, k_ptr, v_ptr, key0 + n, None, d, top, total, mixed, wide, HEAD_DIM, FACTOR)
    for key0 in tl.range(whole, keys_end, BN):
        top, total, mixed = _tile(q, k_ptr, v_ptr, key0 + n, live, d, top, total, mixed, wide, HEAD_DIM, FACTOR)
    result = tl.div_rn(mixed, total[:, None] + tl.zeros([BM, D], tl.float32))
    result = tl.where((r < live)[:, None], result, 0.0)
    tl.store(out_ptr + at, result.to(tl.bfloat16), mask=(r < patches)[:, None] & wide_enough[None, :])


def lower_image_attention(call: OpCall, program: Program) -> list[Launch]:
    """Every patch attends to every patch."""
    check_act(call)
    o, patches, heads, head_dim = call.operands, call.number("rows"), call.number("heads"), call.number("head_dim")
    kernel = Kernel(image_attention, (call.op,),
                    {"HEADS": heads, "HEAD_DIM": head_dim, "D": max(16, power_of_two(head_dim)),
                     "FACTOR": call.real("scale") * LOG2_E, "BM": QUERY_ROWS, "BN": KEY_ROWS, "STAGES": STAGES},
                    num_warps=WARPS, num_stages=STAGES)
    arguments = {"q_ptr": o["q"], "k_ptr": o["k"], "qkv_ptr": o["qkv"], "grid_ptr": o["grid"], "out_ptr": o["out"],
                 "patches": patches}
    return [Launch(kernel, arguments, (cdiv(patches, QUERY_ROWS), heads, 1), (o["q"], o["k"], o["qkv"], o["grid"]),
                   (o["out"],), (call.node_id,), call.label)]
