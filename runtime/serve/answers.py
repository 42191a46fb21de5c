"""The documents that completions are answered with: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.engine import StepKind, StepRecord, StepTimes, TokenLogprob
from runtime.serve.text import TextAssembler, TextPiece, chat_logprobs, completion_logprobs
from runtime.text import CoreText


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every document of one answer repeats."""

    chat: bool
    model: str
    fingerprint: str
    request_id: str = ""
    created: int = 0

    @classmethod
    def new(cls, *, chat: bool, model: str, fingerprint: str) -> AnswerHead:
        return cls(chat, model, fingerprint, f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()))

    def document(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" if self.chat else "text_completion") + (".chunk" if chunk and self.chat else "")
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint, "choices": choices}


@dataclass(slots=True)
class Answer:
    """An answer in the making: text, log-probabilities and acceptance of one request."""

    head: AnswerHead
    text: CoreText
    assembler: TextAssembler
    prompt_tokens: int
    depth: int
    wants_logprobs: bool = False
    said: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    _spelled: int = 0

    def take(self, record: StepRecord, finish_reason: str | None) -> tuple[list[TextPiece], str]:
        """Add a step; returns its tokens' pieces, and the text that became certain with it."""
        pieces = self.assembler.push(record.tokens)
        self.tokens += len(pieces)
        self.steps.append(record)
        fresh = "".join(piece.text for piece in pieces)
        if self.assembler.stopped:
            self.finish_reason = "stop"
        elif finish_reason is not None:
            fresh += self.assembler.flush()
            self.finish_reason = finish_reason
        self.said.append(fresh)
        if self.wants_logprobs:
            self.logprobs += record.logprobs[:len(pieces)]
        return pieces, fresh

    def whole(self) -> dict[str, Any]:
        """The answer in one document."""
        content = "".join(self.said)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if self.head.chat:
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
        else:
            choice["text"] = content
        if self.wants_logprobs:
            choice["logprobs"] = self._logprobs(self.logprobs)
        return {**self.head.document([choice], chunk=False), "usage": self.usage(), "metrics": self.metrics()}

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat's stream: who speaks."""
        if not self.head.chat:
            return None
        return self.head.document([{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                    "finish_reason": None}], chunk=True)

    def chunk(self, fresh: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A step's chunk; the last one carries the reason of the end."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if self.head.chat:
            choice["delta"] = {"content": fresh}
        else:
            choice["text"] = fresh
        if self.wants_logprobs:
            choice["logprobs"] = self._logprobs(entries)
        return self.head.document([choice], chunk=True)

    def closing(self) -> dict[str, Any]:
        """The chunk after the last: usage, and no choice."""
        return {**self.head.document([], chunk=True), "usage": self.usage(), "metrics": self.metrics()}

    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens,
                "total_tokens": self.prompt_tokens + self.tokens}

    def metrics(self) -> dict[str, Any]:
        """Acceptance of this request, in the shape of vLLM's per-request metrics; None where nothing was drafted."""
        verified = [step for step in self.steps if step.kind is StepKind.VERIFY]
        if not verified:
            return {"speculative_decoding": None}
        kept = [min(step.accepted, step.proposed) for step in verified]
        proposed = sum(step.proposed for step in verified)
        return {"speculative_decoding": {
            "mean_acceptance_length": 1 + sum(kept) / len(kept),
            "draft_acceptance_rate": sum(kept) / proposed if proposed else 0.0,
            "acceptance_histogram": [kept.count(n) for n in range(self.depth + 1)],
            "num_spec_steps": len(kept), "num_accepted_draft_tokens": sum(kept), "num_draft_tokens": proposed,
            "num_spec_tokens": self.depth}}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.head.chat:
            return chat_logprobs(self.text, entries)
        document = completion_logprobs(self.text, entries, self._spelled)
        self._spelled += sum(len(token) for token in document["tokens"])
        return document


def step_document(record: StepRecord, pieces: Sequence[TextPiece], times: StepTimes) -> dict[str, Any]:
    """What a stream with `include_steps` says of a step: how each token came, and where the time went.

    A token's `position` is that of the accepted proposal, from 1; 0 for the target's own.
    """
    def came(index: int) -> dict[str, Any]:
        if record.kind is not StepKind.VERIFY:
            return {"from": "plain", "position": 0}
        if index < record.accepted:
            return {"from": "draft", "position": index + 1}
        return {"from": "bonus", "position": 0}

    return {
        "kind": record.kind.value, "proposed": record.proposed, "accepted": min(record.accepted, record.proposed),
        "tokens": [{"id": piece.token, "text": piece.text, **came(index)} for index, piece in enumerate(pieces)],
        "ms": {"draft": times.draft_s * 1e3, "verify": times.verify_s * 1e3, "prefill": times.prefill_s * 1e3,
               "decode": times.decode_s * 1e3, "host": max(times.host_s, 0.0) * 1e3, "total": times.total_s * 1e3}}
