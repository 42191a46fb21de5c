"""Op calls of real models' sizes, over empty arrays: what the kernels compile for."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case

BF16, F32, I32 = ml_dtypes.bfloat16, np.float32, np.int32
TYPES = {"act": DType.BF16, "w": DType.BF16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and its draft."""

    groups: int
    block_rows: int
    vocab: int
    live_vocab: int
    hidden: int
    top_k: int
    rank: int
    chunk_rows: int = 64
    slots: int = 8
    taps: int = 5


DEMO = Shape(groups=1, block_rows=8, vocab=49152, live_vocab=49152, hidden=576, top_k=16, rank=32)
LARGEST = Shape(groups=8, block_rows=16, vocab=262144, live_vocab=262139, hidden=5120, top_k=32, rank=512)


def empty(dtype: type, *shape: int) -> np.ndarray:
    """An array of this shape that takes no memory: only its type and size are looked at."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def lowered_ops(s: Shape) -> dict[str, tuple[str, Case]]:
    """Every lowering with a case of this shape: name to (lowering, case)."""
    groups, block_rows, depth, rows, slots = s.groups, s.block_rows, s.block_rows - 1, s.groups * s.block_rows, s.slots
    lanes = {"slots": empty(I32, groups), "length": empty(I32, slots), "limit": empty(I32, slots),
             "anchor": empty(I32, slots)}
    sampling = {"temperature": empty(F32, slots), "top_p": empty(F32, slots), "top_k": empty(I32, slots),
                "seed": empty(np.uint64, slots)}
    step = {"positions": empty(I32, rows), "tokens": empty(I32, rows)}
    table, out = empty(BF16, s.vocab, s.hidden), empty(BF16, rows, s.hidden)
    logits = empty(F32, rows, s.vocab)
    ids, probs = empty(I32, groups, depth, s.top_k), empty(F32, groups, depth, s.top_k)
    proposals = {"proposals": empty(I32, groups, depth), "proposal_ids": ids, "proposal_probs": probs}
    block = {"groups": groups, "block_rows": block_rows}
    embedding = ("dflash.embedding/1", {"rows": rows, "vocab": s.vocab, "cols": s.hidden, "scale": 1.0, **TYPES})
    positions = ("dflash.block_positions/1", {**block, "max_slots": slots})
    vocab = {"vocab": s.vocab, "live_vocab": s.live_vocab}
    chunk = {"slots": empty(I32, 1), "count": empty(I32, 1), "length": empty(I32, slots), "anchor": empty(I32, slots),
             "positions": empty(I32, s.chunk_rows), "tokens": empty(I32, s.chunk_rows), "table": table,
             "emitted": empty(I32, 1, 1), "x": empty(BF16, s.chunk_rows, s.hidden)}
    return {
        "begin a draft": ("rows.lower_begin", Case(
            {**lanes, **step, "table": table, "out": out},
            [positions, ("dflash.block_tokens/1", {**block, "mask_token_id": 3, "max_slots": slots}), embedding])),
        "begin a verification": ("rows.lower_begin", Case(
            {**lanes, **step, "proposals": proposals["proposals"], "table": table, "out": out},
            [positions, ("dflash.verify_tokens/1", {**block, "depth": depth, "max_slots": slots}), embedding])),
        "begin a chunk": ("rows.lower_begin", Case(
            {**chunk, "out": empty(BF16, s.chunk_rows, s.hidden)},
            [("dflash.chunk_positions/1", {"rows": s.chunk_rows, "max_slots": slots}),
             ("dflash.embedding/1", {**embedding[1], "rows": s.chunk_rows})])),
        "tap": ("rows.lower_tap", Case(
            {"x": out, "features": empty(BF16, rows, s.taps * s.hidden)},
            [("dflash.tap/1", {"rows": rows, "cols": s.hidden, "taps": s.taps, "index": 2, "act": DType.BF16})])),
        "last row": ("rows.lower_last_row", Case(
            {**chunk, "out": empty(BF16, 1, s.hidden), "last_position": empty(I32, 1)},
            [("dflash.last_row/1", {"rows": s.chunk_rows, "cols": s.hidden, "act": DType.BF16})])),
        "commit": ("rows.lower_commit", Case(
            {**lanes, "produced": empty(I32, groups), "emitted": empty(I32, groups, block_rows)},
            [("dflash.commit/1", {**block, "max_slots": slots})])),
        "commit a chunk": ("rows.lower_commit_chunk", Case(chunk, [("dflash.commit_chunk/1", {"max_slots": slots})])),
        "convolution": ("conv.lower_grouped_conv", Case(
            {"x": out, "delta": empty(BF16, rows, 2 * 2 * s.hidden // 16), "base": empty(BF16, 2, 2, s.hidden),
             "out": out},
            [("dflash.grouped_conv/1", {"rows": rows, "hidden": s.hidden, "block_rows": block_rows, "taps": 2,
                                        "group_size": 16, "side": 1, **TYPES})])),
        "candidates": ("candidates.lower_top_candidates", Case(
            {"logits": logits, "candidate_ids": empty(I32, rows, s.top_k),
             "candidate_scores": empty(F32, rows, s.top_k)},
            [("dflash.top_candidates/1", {"rows": rows, **vocab, "top_k": s.top_k, "multiplier": 0.5, "cap": 30.0})])),
        "selector": ("selector.lower_selector_walk", Case(
            {**step, "slots": empty(I32, groups), **sampling, **proposals,
             "candidate_ids": empty(I32, rows, s.top_k), "candidate_scores": empty(F32, rows, s.top_k),
             "projected": empty(BF16, rows, s.rank), "predecessor": empty(BF16, s.vocab, s.rank),
             "successor": empty(BF16, s.vocab, s.rank)},
            [("dflash.selector_walk/1", {**block, "depth": depth, "top_k": s.top_k, "rank": s.rank, "vocab": s.vocab,
                                         "max_slots": slots, **TYPES})])),
        "argmax proposals": ("selector.lower_argmax_proposals", Case(
            {"logits": logits, "proposals": proposals["proposals"], "proposal_ids": empty(I32, groups, depth, 1),
             "proposal_probs": empty(F32, groups, depth, 1)},
            [("dflash.argmax_proposals/1", {**block, "depth": depth, **vocab})])),
        "sample": ("sampling.lower_sample", Case(
            {"logits": empty(F32, groups, s.vocab), "positions": empty(I32, groups), "slots": empty(I32, groups),
             **sampling, "emitted": empty(I32, groups, 1), "produced": empty(I32, groups)},
            [("dflash.sample/1", {"groups": groups, **vocab, "max_slots": slots})])),
        "accept": ("accept.lower_accept", Case(
            {"logits": logits, **step, "slots": empty(I32, groups), "limit": empty(I32, slots), "proposal_ids": ids,
             "proposal_probs": probs, **sampling, "emitted": empty(I32, groups, block_rows),
             "produced": empty(I32, groups), "accepted": empty(I32, groups), "context_positions": empty(I32, rows)},
            [("dflash.accept/1", {**block, "depth": depth, "candidates": s.top_k, **vocab, "max_slots": slots}),
             ("dflash.accepted_positions/1", block)])),
    }
