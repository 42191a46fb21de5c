"""Sequences, K/V pages and the speculation loop over a loaded core."""

from runtime.engine.engine import Engine, StepOutput, StepTimes
from runtime.engine.sequence import (
    MAX_TOP_LOGPROBS,
    Completion,
    FinishReason,
    Request,
    Sequence,
    StepKind,
    StepRecord,
    TokenLogprob,
)

__all__ = [
    "MAX_TOP_LOGPROBS", "Completion", "Engine", "FinishReason", "Request", "Sequence", "StepKind", "StepOutput",
    "StepRecord", "StepTimes", "TokenLogprob",
]
