"""Log-probabilities of emitted tokens, from the logits that a step left in its output buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.core import Core
from runtime.engine.sequence import TokenLogprob


def token_logprobs(core: Core, first_row: int, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """What the target thought of each token: log-softmax of its raw logits, whatever the request's temperature.

    Args:
        first_row: row of the `logits` binding that chose tokens[0]; the next rows chose the next tokens.
        top: how many of the most likely tokens to name, the lowest id first among equals.
    """
    vocab = core.shape("logits")[1]
    found = []
    for index, token in enumerate(tokens):
        row = np.asarray(core.get("logits", (first_row + index) * vocab, vocab), np.float64)
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[:top]
        found.append(TokenLogprob(token, float(logprobs[token]),
                                  tuple((int(at), float(logprobs[at])) for at in best)))
    return tuple(found)
