"""Sequences, K/V pages and the speculation loop over a loaded core."""

from runtime.engine.engine import Engine
from runtime.engine.sequence import Completion, FinishReason, Request, StepKind, StepRecord

__all__ = ["Completion", "Engine", "FinishReason", "Request", "StepKind", "StepRecord"]
