"""Causal latent attention of a prefill chunk over the paged cache: a tile of (row, head) pairs walks the keys.

As exporter.kernels.attention_many: nothing is split or merged, keys are taken at absolute positions, so a prompt cut
into other chunks gives the same bits. A tile is as many pairs as registers hold with all 512 columns of their mix, so
that no scores are computed twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.latent import pages_of
from exporter.kernels.latent_attention import accumulate, row_parts, step_launch, store_pairs
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, power_of_two
from exporter.kernels.tuning import (
    LATENT_KEYS,
    LATENT_MANY_PAIRS,
    LATENT_MANY_WARPS,
    LATENT_STAGES,
    MAX_BLOCK_ROWS,
)
from exporter.program.builder import Program, Tensor


@triton.jit
def latent_chunk(q_ptr, positions_ptr, slots_ptr, page_table_ptr, kv_ptr, out_ptr, rows, scale, HEADS: tl.constexpr,
                 RANK: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
                 T: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGE_BYTES: tl.constexpr, MAX_PAGES: tl.constexpr,
                 STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: tiles of M pairs, of which the last, with the most keys, start first. Rows of one sequence; dead ones give
    zeros. D, P and T as in exporter.kernels.latent_attention."""
    begin(CHAINED)
    width: tl.constexpr = RANK + ROPE
    m, t = tl.arange(0, M), tl.arange(0, T)
    first_pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    inside = first_pair + m < rows * HEADS
    position = tl.load(positions_ptr + (first_pair + m) // HEADS, mask=inside, other=-1)
    keys_end = tl.max(position, axis=0) + 1
    pair = first_pair.to(tl.int64)
    q, q_shared = row_parts(q_ptr + pair * width, m, inside, RANK, D, ROPE, P)
    slot = tl.maximum(tl.load(slots_ptr), 0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    for key0 in tl.range(0, keys_end, T, num_stages=STAGES):
        page = tl.load(page_table_ptr + slot * MAX_PAGES + key0 // PAGE_TOKENS).to(tl.int64)
        base = kv_ptr + page * (PAGE_BYTES // 2) + key0 % PAGE_TOKENS * width
        latent, shared = row_parts(base, t, key0 + t < keys_end, RANK, D, ROPE, P)
        seen = (key0 + t)[None, :] <= position[:, None]
        top, total, mixed = accumulate(q, q_shared, latent, shared, seen, top, total, mixed, scale)
    store_pairs(out_ptr + pair * RANK, tl.arange(0, D), inside, total, mixed, RANK, M)


def lower_latent_attention(call: OpCall, program: Program) -> list[Launch]:
    """Causal attention over the cache: of a step's blocks, or of a prefill's chunk.

    Raises:
        CaptureError: GPU_ACT; activations are not bf16.
    """
    check_act(call)
    return [_chunk_launch(call) if call.number("block_rows") > MAX_BLOCK_ROWS else step_launch(call, program)]


def _chunk_launch(call: OpCall) -> Launch:
    o, rows, heads = call.operands, call.number("block_rows"), call.number("heads")
    rank, rope, page_tokens = call.number("rank"), call.number("rope_dim"), call.number("page_tokens")
    assert call.number("groups") == 1, call.label
    kv = pages_of(o["kv"])
    kernel = Kernel(
        latent_chunk, (call.op,),
        {"HEADS": heads, "RANK": rank, "D": max(16, power_of_two(rank)), "ROPE": rope,
         "P": max(16, power_of_two(rope)), "M": LATENT_MANY_PAIRS, "T": min(page_tokens, LATENT_KEYS),
         "PAGE_TOKENS": page_tokens, "PAGE_BYTES": call.number("page_bytes"), "MAX_PAGES": call.number("max_pages"),
         "STAGES": LATENT_STAGES},
        num_warps=LATENT_MANY_WARPS)
    arguments: dict[str, Tensor | int | float] = {
        "q_ptr": o["q"], "positions_ptr": o["positions"], "slots_ptr": o["slots"], "page_table_ptr": o["page_table"],
        "kv_ptr": kv, "out_ptr": o["out"], "rows": rows, "scale": call.real("scale")}
    return Launch(kernel, arguments, (cdiv(rows * heads, LATENT_MANY_PAIRS), 1, 1),
                  (o["q"], o["positions"], o["slots"], o["page_table"], kv), (o["out"],), (call.node_id,), call.label)
