"""From candidates to proposals: the left-to-right walk of DFlash2, and the plain argmax of DFlash1.

Both write the proposals and the probabilities they were drawn with, which verification needs to stay exact.
"""

from __future__ import annotations

import numpy as np
from dflash_core.errors import FormatError, QualityError

from runtime.ops.distribution import inverse_cdf, softmax
from runtime.ops.philox import Purpose, draw
from runtime.ops.registry import ACT, U32, Args, DType, DTypeOf, Scalar, Step, op, reads, round_to, to_f32, writes


@op(
    "dflash.selector_walk/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("depth", U32), Scalar("top_k", U32), Scalar("rank", U32),
    Scalar("vocab", U32), Scalar("max_slots", U32), Scalar("act", U32), Scalar("w", U32),
    reads("candidate_ids", DType.I32, "groups*block_rows", "top_k"),
    reads("candidate_scores", DType.F32, "groups*block_rows", "top_k"),
    reads("projected", ACT, "groups*block_rows", "rank"),
    reads("predecessor", DTypeOf("w"), "vocab", "rank"),
    reads("successor", DTypeOf("w"), "vocab", "rank"),
    reads("tokens", DType.I32, "groups*block_rows"),
    reads("positions", DType.I32, "groups*block_rows"),
    reads("slots", DType.I32, "groups"),
    reads("temperature", DType.F32, "max_slots"),
    reads("seed", DType.U64, "max_slots"),
    writes("proposals", DType.I32, "groups", "depth"),
    writes("proposal_ids", DType.I32, "groups", "depth", "top_k"),
    writes("proposal_probs", DType.F32, "groups", "depth", "top_k"),
)
def selector_walk(a: Args) -> Step:
    """Choose one candidate per row 1..depth of a group, from left to right, each in view of the choice before it.

    score(c) = candidate_score(c) + sum over the rank of (predecessor[previous] * projected[row]) * successor[c]; the
    choice before row 1 is the anchor, tokens[row 0]. At temperature 0 the highest score wins, equal scores by lowest
    rank, and its probability is 1. Above 0 the probabilities are softmax(score / temperature) over the candidates,
    and the choice is their inverse CDF, in candidate order, at the PROPOSAL draw of the row's own position.
    Dead rows (position < 0) and empty lanes (slot < 0) give zeros.

    Rounding: predecessor * projected is rounded to the activation's dtype; the products with the successor, their sum
    (pairwise, in rank order), the score and the probabilities stay fp32.

    Shapes: proposals [groups, depth]; proposal_ids, proposal_probs [groups, depth, top_k].
    Raises:
        FormatError: OP_SCALAR; block_rows is not depth + 1.
        QualityError: SELECTOR_NAN; the best score of a live row is not finite.
    Source: the candidate selector of z-lab's dflash; numerics as in vLLM, which keeps the score in fp32.
    """
    groups, block_rows, depth, top_k = a.int("groups"), a.int("block_rows"), a.int("depth"), a.int("top_k")
    _check_block(a.op_name, block_rows, depth)
    ids = a.array("candidate_ids").reshape(groups, block_rows, top_k)
    unary = a.array("candidate_scores").reshape(groups, block_rows, top_k)
    projected = a.array("projected").reshape(groups, block_rows, a.int("rank"))
    predecessor, successor = a.array("predecessor"), a.array("successor")
    tokens = a.array("tokens").reshape(groups, block_rows)
    positions = a.array("positions").reshape(groups, block_rows)
    slots, temperature, seed = a.array("slots"), a.array("temperature"), a.array("seed")
    proposals, out_ids, probs = a.array("proposals"), a.array("proposal_ids"), a.array("proposal_probs")
    act = projected.dtype

    def walk(g: int, slot: int) -> None:
        heat, request_seed, previous = float(temperature[slot]), int(seed[slot]), int(tokens[g, 0])
        live = np.count_nonzero(positions[g] >= 0)
        following = to_f32(successor[ids[g, 1:live]])
        hidden = to_f32(projected[g])
        for row, position in enumerate(positions[g, 1:live].tolist(), start=1):
            link = round_to(to_f32(predecessor[previous]) * hidden[row], act)
            score = unary[g, row] + (following[row - 1] * link).sum(axis=-1)
            rank = int(score.argmax())
            if not np.isfinite(score[rank]):
                raise QualityError("SELECTOR_NAN", "the selector's best score is not finite",
                                   where=f"row {row} of group {g}, request slot {slot}", got=score[rank],
                                   hint="compare the draft's precision with its checkpoint: an activation overflowed")
            if heat > 0:
                q = softmax(score, heat)
                rank = inverse_cdf(q, draw(request_seed, position, Purpose.PROPOSAL))
                probs[g, row - 1] = q
            else:
                probs[g, row - 1, rank] = 1.0
            out_ids[g, row - 1] = ids[g, row]
            previous = int(ids[g, row, rank])
            proposals[g, row - 1] = previous

    def run() -> None:
        proposals[...] = 0
        out_ids[...] = 0
        probs[...] = 0.0
        for g, slot in enumerate(slots.tolist()):
            if slot >= 0:
                walk(g, slot)

    return run


@op(
    "dflash.argmax_proposals/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("depth", U32), Scalar("vocab", U32),
    Scalar("live_vocab", U32),
    reads("logits", DType.F32, "groups*block_rows", "vocab"),
    writes("proposals", DType.I32, "groups", "depth"),
    writes("proposal_ids", DType.I32, "groups", "depth", 1),
    writes("proposal_probs", DType.F32, "groups", "depth", 1),
)
def argmax_proposals(a: Args) -> Step:
    """Propose the most likely id below live_vocab of each row 1..depth of a group, with probability 1.

    Equal logits: the lowest id. Row 0, the anchor's, is not read.

    Rounding: none; fp32 logits are compared as they are.

    Shapes: logits [groups * block_rows, vocab]; proposals [groups, depth]; ids and probabilities [groups, depth, 1].
    Raises:
        FormatError: OP_SCALAR; block_rows is not depth + 1, or not 1 <= live_vocab <= vocab.
    Source: greedy drafting of z-lab's dflash.
    """
    groups, block_rows, depth, live_vocab = a.int("groups"), a.int("block_rows"), a.int("depth"), a.int("live_vocab")
    _check_block(a.op_name, block_rows, depth)
    if not 1 <= live_vocab <= a.int("vocab"):
        raise FormatError("OP_SCALAR", "live ids are not part of the vocabulary", where=a.op_name,
                          expected=f"1 to {a.int('vocab')}", got=live_vocab)
    logits = a.array("logits")
    rows = [(g, i, logits[g * block_rows + 1 + i, :live_vocab]) for g in range(groups) for i in range(depth)]
    proposals, ids, probs = a.array("proposals"), a.array("proposal_ids"), a.array("proposal_probs")

    def run() -> None:
        for g, i, row in rows:
            proposals[g, i] = row.argmax()
        ids[:, :, 0] = proposals
        probs[...] = 1.0

    return run


def _check_block(op_name: str, block_rows: int, depth: int) -> None:
    if block_rows != depth + 1:
        raise FormatError("OP_SCALAR", "a block is the anchor and one row per proposal", where=op_name,
                          expected=depth + 1, got=block_rows)
