"""What the target would sample: a row of logits as probabilities, and a draw from them.

    p = target_distribution(logits, temperature=0.8, top_k=50, top_p=0.95)
    token = inverse_cdf(p, draw(seed, position, Purpose.TARGET))
"""

from __future__ import annotations

import numpy as np

from runtime.ops.candidates import top_ids
from runtime.ops.registry import F32Array


def softmax(scores: F32Array, temperature: float) -> F32Array:
    """Probabilities of `scores / temperature`, in fp32; the top score must be finite and the temperature positive.

    The top score is subtracted before the division, so that no temperature can overflow the sum.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / np.float32(temperature))
    probabilities: F32Array = weights / weights.sum()
    return probabilities


def target_distribution(logits: F32Array, temperature: float, top_k: int, top_p: float) -> F32Array:
    """The distribution that a request's settings make of one row of logits.

    Temperature first; then exactly the top_k highest (equal logits by ascending id); softmax over those; then, from
    the most probable downwards, each id whose predecessors sum to less than top_p; what is kept is scaled to sum to 1.
    The most probable id is always kept.

    Rounding: fp32, but the sums that top_p compares run in fp64.

    Args:
        logits: [n], finite at the top (-inf excludes an id).
        temperature: > 0.
        top_k: 0, or n and more, keeps all.
        top_p: 1 keeps all.
    Returns:
        probabilities [n], fp32; exactly 0 for what was cut.
    Source: the order and the comparisons of z-lab's dflash.
    """
    if not 0 < top_k < logits.size:
        probabilities = softmax(logits, temperature)
        return _nucleus(probabilities, top_p) if top_p < 1 else probabilities
    ids = top_ids(logits, top_k)
    kept = softmax(logits[ids], temperature)
    probabilities = np.zeros_like(logits)
    probabilities[ids] = _nucleus(kept, top_p) if top_p < 1 else kept
    return probabilities


def _nucleus(probabilities: F32Array, top_p: float) -> F32Array:
    # Ids below this floor sum to at most half of what top_p leaves out: they need no sorting.
    floor = 0.5 * (1 - top_p) / probabilities.size
    likely = np.flatnonzero(probabilities >= floor)
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    descending = probabilities[order]
    before = np.cumsum(descending, dtype=np.float64) - descending
    kept = order[: max(1, np.count_nonzero(before < top_p))]
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    scaled: F32Array = out / out.sum()
    return scaled


def inverse_cdf(probabilities: F32Array, u: float | np.float32) -> int:
    """The first id, ascending, at which the running sum exceeds u times the total; its probability is never 0.

    The running sum is fp64 in id order. The values need not sum to 1: the draw is scaled by their total.

    Args:
        probabilities: [n], >= 0, not all 0.
        u: in [0, 1).
    """
    ids = np.flatnonzero(probabilities)
    running = np.cumsum(probabilities[ids], dtype=np.float64)
    return int(ids[np.searchsorted(running, float(u) * running[-1], side="right")])
