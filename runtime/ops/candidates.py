"""The best few ids of a row of logits, in an order that everybody agrees on.

    >>> top_ids(np.float32([1, 5, 5, 2]), 3)
    array([1, 2, 3])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from dflash_core.errors import FormatError

from runtime.ops.registry import F32, U32, Args, DType, Scalar, Step, op, reads, writes

_FOLD = 64  # ids that share one peak: 49152 logits fold to 768 peaks


def top_ids(row: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """The ids of the k highest values, best first; equal values by ascending id.

    NaN ranks with +infinity, so that it surfaces instead of hiding.

    Args:
        row: [n], fp32, contiguous; 1 <= k <= n.
    Returns:
        ids [k].
    """
    # 1. Fold the row: the k-th highest peak of disjoint sets of ids is a lower bound of the k-th highest value.
    # 2. Keep the ids at or above it, ascending. 3. Sort these few, stably.
    if np.isnan(row.max()):
        return top_ids(np.where(np.isnan(row), np.float32(np.inf), row), k)
    width = row.size // _FOLD
    if width < k:
        return np.argsort(-row, kind="stable")[:k]
    folded, tail = row[: _FOLD * width].reshape(_FOLD, width), row[_FOLD * width :]
    peaks = folded.max(axis=0)
    bound = np.partition(peaks, width - k)[width - k]
    columns = np.flatnonzero(peaks >= bound)
    major, minor = np.nonzero(folded[:, columns] >= bound)
    ids = np.concatenate([major * width + columns[minor], _FOLD * width + np.flatnonzero(tail >= bound)])
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


@op(
    "dflash.top_candidates/1",
    Scalar("rows", U32), Scalar("vocab", U32), Scalar("live_vocab", U32), Scalar("top_k", U32),
    Scalar("multiplier", F32), Scalar("cap", F32),
    reads("logits", DType.F32, "rows", "vocab"),
    writes("candidate_ids", DType.I32, "rows", "top_k"),
    writes("candidate_scores", DType.F32, "rows", "top_k"),
)
def top_candidates(a: Args) -> Step:
    """The top_k candidates of each row among ids below live_vocab, best first, equal logits by ascending id.

    The order is that of the raw logits. Scores are the K logits times `multiplier`, then cap * tanh(z / cap) where
    cap is not 0: both maps rise, so the order stands even where the cap makes scores equal.

    Rounding: fp32 throughout, each operation rounded; nothing is rounded to the activation's dtype.

    Shapes: logits [rows, vocab]; candidate_ids, candidate_scores [rows, top_k].
    Raises:
        FormatError: OP_SCALAR; not 1 <= top_k <= live_vocab <= vocab, or a multiplier or cap that would not rise.
    Source: output_multiplier and final_logit_softcapping of z-lab's dflash, applied to the K values as vLLM does.
    """
    rows, vocab, live_vocab, top_k = a.int("rows"), a.int("vocab"), a.int("live_vocab"), a.int("top_k")
    multiplier, cap = np.float32(a.real("multiplier")), np.float32(a.real("cap"))
    if not (1 <= top_k <= live_vocab <= vocab and multiplier > 0 and cap >= 0):
        raise FormatError("OP_SCALAR", "candidates of an impossible shape", where=a.op_name,
                          expected="1 <= top_k <= live_vocab <= vocab, multiplier > 0, cap >= 0",
                          got=f"top_k {top_k}, live {live_vocab}, vocab {vocab}, multiplier {multiplier}, cap {cap}")
    live = [a.array("logits")[r, :live_vocab] for r in range(rows)]
    ids, scores = a.array("candidate_ids"), a.array("candidate_scores")

    def run() -> None:
        for r, row in enumerate(live):
            best = top_ids(row, top_k)
            ids[r] = best
            scores[r] = row[best]
        np.multiply(scores, multiplier, out=scores)
        if cap:
            np.divide(scores, cap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, cap, out=scores)

    return run
