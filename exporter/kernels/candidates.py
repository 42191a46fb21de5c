"""The best few ids of each row of logits: exact, in two stages, equal logits by ascending id.

Each chunk of a row keeps its best top_k keys; one block per row then merges them and maps the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import LOWEST, key_id, key_of, ordered
from exporter.kernels.rows import cdiv, power_of_two
from exporter.program.builder import Program
from runtime.ops import DType

CHUNK_SIZES = (1024, 2048, 4096)
MERGED_KEYS = 2048  # that one block sorts without spilling


@triton.jit
def best_of_chunk(logits_ptr, keys_ptr, VOCAB: tl.constexpr, LIVE: tl.constexpr, CHUNKS: tl.constexpr,
                  SIZE: tl.constexpr, KEPT: tl.constexpr, CHAINED: tl.constexpr):
    """keys[row, chunk, :KEPT], best first. Grid: chunks, rows. NaN ranks with infinity."""
    begin(CHAINED)
    chunk, row = tl.program_id(0), tl.program_id(1)
    idx = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + idx, mask=idx < LIVE, other=0.0)
    x = tl.where(x != x, float("inf"), x)
    keys = tl.topk(tl.where(idx < LIVE, key_of(ordered(x), idx), LOWEST), KEPT)
    tl.store(keys_ptr + (row * CHUNKS + chunk) * KEPT + tl.arange(0, KEPT), keys)


@triton.jit
def _tanh(x):
    """tanh of fp32, computed in fp64 and rounded once."""
    y = x.to(tl.float64)
    size, square = tl.abs(y), y * y
    series = size * (1.0 - square / 3.0 + 2.0 * square * square / 15.0)
    # The closed form cancels near 0, where three terms of the series are exact to fp64.
    result = tl.where(size < 1e-3, series, 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0))
    return tl.where(y < 0, -result, result).to(tl.float32)


@triton.jit
def merge_chunks(logits_ptr, keys_ptr, ids_ptr, scores_ptr, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
                 KEPT: tl.constexpr, MERGED: tl.constexpr, TOP_K: tl.constexpr, MULTIPLIER: tl.constexpr,
                 CAP: tl.constexpr, CHAINED: tl.constexpr):
    """The row's best ids, and their logits times MULTIPLIER, then capped. Grid: rows."""
    begin(CHAINED)
    row, i, k = tl.program_id(0), tl.arange(0, MERGED), tl.arange(0, KEPT)
    held = i < CHUNKS * KEPT
    keys = tl.load(keys_ptr + row * CHUNKS * KEPT + i, mask=held, other=0).to(tl.int64)
    ids = key_id(tl.topk(tl.where(held, keys, LOWEST), KEPT))
    score = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + ids, mask=k < TOP_K, other=0.0) * MULTIPLIER
    if CAP != 0.0:
        score = _tanh(tl.div_rn(score, CAP)) * CAP
    tl.store(ids_ptr + row * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(scores_ptr + row * TOP_K + k, score, mask=k < TOP_K)


def chunk_size(live_vocab: int, kept: int) -> int:
    """Logits per chunk: few enough chunks that their keys merge in one block."""
    fitting = (size for size in CHUNK_SIZES if cdiv(live_vocab, size) * kept <= MERGED_KEYS)
    return next(fitting, CHUNK_SIZES[-1])


def lower_top_candidates(call: OpCall, program: Program) -> list[Launch]:
    """Candidates of each row: ids are the CPU op's, scores within 2 ulp where a cap is set and equal elsewhere."""
    o, rows, top_k = call.operands, call.number("rows"), call.number("top_k")
    vocab, live_vocab = call.number("vocab"), call.number("live_vocab")
    kept = max(2, power_of_two(top_k))
    size = chunk_size(live_vocab, kept)
    chunks = cdiv(live_vocab, size)
    keys = program.scratch("candidate_keys", DType.U64, (rows, chunks, kept))
    shape = {"VOCAB": vocab, "CHUNKS": chunks, "KEPT": kept}
    first = Kernel(best_of_chunk, (call.op,), {**shape, "LIVE": live_vocab, "SIZE": size}, num_warps=size // 256)
    merged = power_of_two(chunks * kept)
    second = Kernel(merge_chunks, (call.op,),
                    {**shape, "MERGED": merged, "TOP_K": top_k, "MULTIPLIER": call.real("multiplier"),
                     "CAP": call.real("cap")}, num_warps=min(8, max(1, merged // 128)))
    return [
        Launch(first, {"logits_ptr": o["logits"], "keys_ptr": keys}, (chunks, rows, 1), (o["logits"],), (keys,), (),
               call.label),
        Launch(second, {"logits_ptr": o["logits"], "keys_ptr": keys, "ids_ptr": o["candidate_ids"],
                        "scores_ptr": o["candidate_scores"]}, (rows, 1, 1), (o["logits"], keys),
               (o["candidate_ids"], o["candidate_scores"]), (call.node_id,), call.label),
    ]
