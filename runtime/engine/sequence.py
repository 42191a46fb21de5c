"""What is asked of the engine, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dflash_core.errors import UsageError

from runtime.engine.prefix import Node

if TYPE_CHECKING:
    from runtime.vision.rows import PromptImages

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Request:
    """How to continue a prompt.

    Attributes:
        max_tokens: most new tokens, at least 1.
        temperature: 0 is greedy; above it, tokens are drawn.
        top_p: smallest probability mass that is kept, in (0, 1]; 1: all.
        top_k: most likely tokens that are kept; 0: all.
        seed: of all draws of this request, 0 to 2**64 - 1.
        stop_token_ids: generation ends after any of them.
        speculation: False decodes one token at a time, as if the core had no draft.
        top_logprobs: record each token's log-probability, and this many of the most likely ones; None: neither.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    speculation: bool = True
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.temperature < float("inf"), "temperature", "a number of at least 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.top_k < 2**31, "top_k", "0 to 2**31 - 1", self.top_k)
        _require(0 <= self.seed < 2**64, "seed", "0 to 2**64 - 1", self.seed)
        _require(self.top_logprobs is None or 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs",
                 f"0 to {MAX_TOP_LOGPROBS}", self.top_logprobs)


def _require(holds: bool, field_name: str, expected: str, got: object) -> None:
    if not holds:
        raise UsageError("REQUEST", f"{field_name} is out of range", where=field_name, expected=expected, got=got,
                         hint="give a value in that range, or leave it out")


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class StepKind(Enum):
    """What produced tokens."""

    PREFILL = "prefill"
    VERIFY = "verify"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability by the target at temperature 1, and the most likely (id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence.

    Attributes:
        anchor: the token the step continued from; for a prefill, the prompt's last.
        proposals: the draft's tokens that took part, at most depth; () outside a verify step.
        candidates: the ids the draft chose among, per proposal.
        accepted: proposals that the target agreed with.
        tokens: committed tokens, cut at a stop token and at the limit.
        proposed: how many of the draft's tokens took part; 0 outside a verify step.
        logprobs: one per committed token; () unless the request asks for them.
    """

    kind: StepKind
    anchor: int
    proposals: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    accepted: int
    tokens: tuple[int, ...]
    proposed: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    steps: tuple[StepRecord, ...]

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per verify or decode step; the prefill's token is not counted. 0 when there was none."""
        counted = [len(s.tokens) for s in self.steps if s.kind is not StepKind.PREFILL]
        return sum(counted) / len(counted) if counted else 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress; the engine alone changes it. Two of equal requests are still two.

    Attributes:
        prefix: the part of the prompt that it holds in the prefix cache, whose pages are in `shared_pages`.
        taken_over: prompt tokens that an earlier prompt had already run.
    """

    prompt: tuple[int, ...]
    request: Request
    images: PromptImages | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    prefix: Node | None = None
    shared_pages: set[int] = field(default_factory=set)
    taken_over: int = 0
    prefilled: int = 0
    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def limit(self) -> int:
        """Most tokens the sequence may hold, prompt included."""
        return len(self.prompt) + self.request.max_tokens

    def commit(self, kind: StepKind, anchor: int, produced: list[int], *, proposals: tuple[int, ...] = (),
               candidates: tuple[tuple[int, ...], ...] = (), accepted: int = 0, proposed: int = 0,
               logprobs: tuple[TokenLogprob, ...] = ()) -> StepRecord:
        """Take a step's tokens up to a stop token, inclusive, and note why the sequence ended if it did."""
        taken = []
        for token in produced:
            taken.append(token)
            if token in self.request.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                break
        self.tokens += taken
        if self.finish_reason is None and len(self.tokens) >= self.request.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        record = StepRecord(kind, anchor, proposals, candidates, accepted, tuple(taken), proposed,
                            logprobs[:len(taken)])
        self.steps.append(record)
        return record

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(tuple(self.tokens), self.finish_reason, tuple(self.steps))
