"""The acceptance canary: what a core generated when it was exported, signed with it, and replayed where it is loaded.

Speculation repairs whatever a draft proposes, so a draft that went wrong still gives the right text, slowly. A canary
notices: it keeps greedy tokens, proposals, accepted counts and log-probabilities of a few prompts.

    (canary,) = read_canaries(path, trust, core.core_digest)
    result = replay(core, canary)          # raises QualityError
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import FormatError, QualityError, VerificationError

from runtime.core import Core
from runtime.engine import Engine, Request, StepKind
from runtime.trust import TrustPolicy
from runtime.verify import VerifiedCore, verify

FORMAT = "dflash-canary/1"
TOP_LOGPROBS = 8
BOUND_RATIO = 0.8
"""A replay must accept at least this share of what the recording accepted per step."""
AGREEMENT = 0.7
"""At least this share of a replay's proposals must be the recorded ones, among steps that continue the same tokens.

Rounding moves few: the demo pair in float32 proposes 0.81 of what it does in bf16, with taps one layer early 0.49.
"""
TIE_NATS = 0.1
"""Devices round differently: a token may differ where the recording saw the two this close."""
LOGPROB_DIGITS = 4

_DRAFT_HINT = "the text is right but slow: compare the draft's graphs and weights with a core that accepts more"

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """One prompt and what became of it.

    Attributes:
        prompt: token ids.
        tokens: the greedy continuation, never stopped early.
        proposals, accepted: those that took part, and how many were kept, per verify step; () without a draft.
        top: the 8 most likely (id, log-probability) of each token's place.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    proposals: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    top: tuple[TopLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Canary:
    """A recorded prompt set; `depth` is the core's proposals per step, 0 without a draft."""

    depth: int
    prompts: tuple[CanaryPrompt, ...]

    def to_bytes(self) -> bytes:
        """The canary as the core stores it."""
        document = {"format": FORMAT, **asdict(self), "accepted_per_step": mean_accepted(self.prompts),
                    "acceptance_by_position": acceptance_by_position(self.prompts, self.depth)}
        return (json.dumps(document, separators=(",", ":")) + "\n").encode()


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """A replay that held: share of equal proposals, mean accepted per step and its bound, and the rate by position."""

    prompts: int
    agreement: float
    accepted_per_step: float
    bound: float
    by_position: tuple[float, ...]


def record(core: Core, prompts: Iterable[Sequence[int]], max_tokens: int) -> Canary:
    """Run every prompt greedily, alone, and note what came out."""
    engine = Engine(core)
    return Canary(engine.depth, tuple(_play(engine, tuple(prompt), max_tokens) for prompt in prompts))


def replay(core: Core, canary: Canary, *, prompts: int | None = None) -> CanaryResult:
    """Run recorded prompts again and compare.

    Args:
        prompts: how many to replay, from the first; None: all.
    Raises:
        QualityError: CANARY_TOKENS, a token differs that was no tie (TIE_NATS); CANARY_PROPOSALS, less than AGREEMENT
            of the proposals are the recorded ones; CANARY_ACCEPTANCE, fewer were kept than BOUND_RATIO of the
            recording. Each says where, or both numbers.
    """
    recorded = canary.prompts[:prompts]
    engine = Engine(core)
    played = []
    for index, old in enumerate(recorded):
        new = _play(engine, old.prompt, len(old.tokens))
        _compare_tokens(index, old, new)
        played.append(new)
    agreement = _agreement(recorded, played)
    if agreement < AGREEMENT:
        raise QualityError(
            "CANARY_PROPOSALS", "the draft proposes other tokens than it did at export",
            where=f"canary prompts 0 to {len(recorded) - 1}", expected=f"at least {AGREEMENT:.2f} of them equal",
            got=f"{agreement:.2f}", hint=_DRAFT_HINT)
    bound = BOUND_RATIO * mean_accepted(recorded)
    found = mean_accepted(played)
    rates = acceptance_by_position(played, canary.depth)
    if found < bound:
        before = acceptance_by_position(recorded, canary.depth)
        raise QualityError(
            "CANARY_ACCEPTANCE", "the target accepts fewer of the draft's proposals than it did at export",
            where=f"canary prompts 0 to {len(recorded) - 1}; by position {_rates(before)} then, {_rates(rates)} now",
            expected=f"at least {bound:.3f} a step", got=f"{found:.3f}",
            hint=_DRAFT_HINT)
    return CanaryResult(len(recorded), agreement, found, bound, rates)


def read_canaries(path: Path, trust: TrustPolicy, core_digest: str) -> tuple[Canary, ...]:
    """The canaries that a signed core carries, in the order its manifest lists them; empty when it has none.

    Raises:
        PolicyError, VerificationError, FormatError: as `verify`; CORE_CHANGED, the core is no longer the one that was
            loaded; CANARY, a canary is malformed.
    """
    with verify(path, trust) as verified:
        if verified.core_digest != core_digest:
            raise VerificationError("CORE_CHANGED", "the core was replaced while it was loaded", where=str(path),
                                    expected=core_digest, got=verified.core_digest, hint="start again")
        return carried_canaries(verified)


def carried_canaries(verified: VerifiedCore) -> tuple[Canary, ...]:
    """The canaries among a core's golden files. Raises VerificationError, or FormatError: CANARY."""
    entries = [e for e in verified.manifest.files if e.role == "golden" and e.path.endswith(".json")]
    return tuple(parse(verified.small_file(entry.ref), entry.path) for entry in entries)


def parse(data: bytes, where: str) -> Canary:
    """Read a stored canary. Raises FormatError: CANARY."""
    try:
        document: dict[str, Any] = json.loads(data)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        prompts = tuple(
            CanaryPrompt(_ints(item["prompt"]), _ints(item["tokens"]),
                         tuple(_ints(block) for block in item["proposals"]), _ints(item["accepted"]),
                         tuple(tuple((int(token), float(value)) for token, value in place) for place in item["top"]))
            for item in document["prompts"])
        canary = Canary(int(document["depth"]), prompts)
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError("CANARY", "not a canary", where=where, expected=FORMAT, got=str(e),
                          hint="export the core again") from e
    if not prompts or any(not p.tokens or len(p.top) != len(p.tokens) or len(p.accepted) != len(p.proposals)
                          for p in prompts):
        raise FormatError("CANARY", "a canary's lists do not belong together", where=where,
                          hint="export the core again")
    return canary


def mean_accepted(prompts: Sequence[CanaryPrompt]) -> float:
    """Proposals kept per verify step, over all steps of all prompts; 0 when there was none."""
    kept = [count for prompt in prompts for count in prompt.accepted]
    return sum(kept) / len(kept) if kept else 0.0


def acceptance_by_position(prompts: Sequence[CanaryPrompt], depth: int) -> tuple[float, ...]:
    """Share of steps whose proposal at each position was kept, among the steps where it took part."""
    steps = [pair for p in prompts for pair in zip(map(len, p.proposals), p.accepted, strict=True)]
    rates = []
    for position in range(depth):
        took_part = [accepted > position for proposed, accepted in steps if proposed > position]
        rates.append(round(sum(took_part) / len(took_part), 4) if took_part else 0.0)
    return tuple(rates)


def _play(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> CanaryPrompt:
    completion = engine.generate(prompt, Request(max_tokens, top_logprobs=TOP_LOGPROBS))
    verified = [s for s in completion.steps if s.kind is StepKind.VERIFY]
    top = tuple(tuple((token, round(value, LOGPROB_DIGITS)) for token, value in entry.top)
                for step in completion.steps for entry in step.logprobs)
    return CanaryPrompt(prompt, completion.tokens, tuple(s.proposals for s in verified),
                        tuple(min(s.accepted, s.proposed) for s in verified), top)


def _agreement(recorded: Sequence[CanaryPrompt], played: Sequence[CanaryPrompt]) -> float:
    """Share of equal proposals, place by place, over steps that start after the same tokens; 1 if there are none."""
    equal = compared = 0
    for old, new in zip(recorded, played, strict=True):
        before, now = _blocks(old), _blocks(new)
        for start in before.keys() & now.keys():
            if old.tokens[:start] == new.tokens[:start]:
                pairs = list(zip(before[start], now[start], strict=False))
                equal += sum(a == b for a, b in pairs)
                compared += len(pairs)
    return equal / compared if compared else 1.0


def _blocks(prompt: CanaryPrompt) -> dict[int, tuple[int, ...]]:
    """The proposals of each step by how many tokens came before it; the prefill's token is the first."""
    blocks, start = {}, 1
    for proposals, accepted in zip(prompt.proposals, prompt.accepted, strict=True):
        blocks[start] = proposals
        start += accepted + 1
    return blocks


def _compare_tokens(index: int, old: CanaryPrompt, new: CanaryPrompt) -> None:
    at = next((i for i, pair in enumerate(zip(old.tokens, new.tokens, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return
    recorded = dict(old.top[at])
    gap = recorded.get(old.tokens[at], 0.0) - recorded.get(new.tokens[at], float("-inf"))
    if gap <= TIE_NATS:
        return
    raise QualityError("CANARY_TOKENS", "the core no longer generates the tokens that it did at export",
                       where=f"canary prompt {index}, token {at}", expected=old.tokens[at], got=new.tokens[at],
                       hint="compare this device's results with a CPU's, op by op; the recording saw these two "
                            f"{gap:.3f} nats apart")


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
