"""Run a core under a load and keep every sample: steps of the engine, and requests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dflash_core.errors import QualityError, UsageError

from runtime.core import Core
from runtime.engine import Engine, Request, StepKind
from runtime.engine import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step. `live` counts the sequences that it gave decode tokens, `tokens` those tokens.

    A step that also prefilled is `mixed`: its time is not decoding's alone, and decode summaries leave it out.
    """

    ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float
    live: int
    tokens: int
    mixed: bool


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request: which prompt, its clock, and accepted proposals per verify step."""

    prompt: int
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    e2el_ms: float
    itls_ms: tuple[float, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A scenario's raw samples, in the order they were taken."""

    scenario: str
    concurrency: int
    duration_s: float
    steps: tuple[StepSample, ...]
    requests: tuple[RequestSample, ...]


@dataclass(frozen=True, slots=True)
class ColdPrefill:
    """One long prompt that nothing had seen: `computed_tokens` went through the graphs, `cached_tokens` did not."""

    input_tokens: int
    seconds: float
    computed_tokens: int
    cached_tokens: int


def run_decode(core: Core, prompts: Sequence[Sequence[int]], *, concurrency: int, max_tokens: int,
               speculation: bool = True) -> Measured:
    """Greedy requests, as many at once as asked for, never stopped early.

    Raises:
        UsageError: CONCURRENCY; the core has no graphs for so many.
    """
    engine = Engine(core, record_candidates=False)
    if concurrency > engine.max_batch:
        raise UsageError("CONCURRENCY", "the core serves fewer sequences at once", where=f"c{concurrency}",
                         expected=f"at most {engine.max_batch}", got=concurrency,
                         hint="export with a larger --batch")
    request = Request(max_tokens, speculation=speculation)
    waiting = list(enumerate(prompts))
    added: dict[EngineSequence, tuple[int, float, list[float]]] = {}
    steps, done = [], []
    started = time.perf_counter()
    while waiting or added:
        while waiting and len(added) < concurrency:
            index, prompt = waiting.pop(0)
            added[engine.add(prompt, request)] = (index, time.perf_counter(), [])
        outputs = engine.step()
        now, times = time.perf_counter(), engine.times
        decoded = [o for o in outputs if o.record.kind is not StepKind.PREFILL]
        if decoded:
            steps.append(StepSample(
                times.total_s * 1e3, times.draft_s * 1e3, (times.verify_s + times.decode_s) * 1e3,
                max(times.host_s, 0.0) * 1e3, len(decoded), sum(len(o.record.tokens) for o in decoded),
                times.prefill_s > 0))
        for output in outputs:
            index, arrived, stamps = added[output.sequence]
            stamps.append(now)
            if output.sequence.finish_reason is not None:
                done.append(_request(index, output.sequence, arrived, stamps))
                del added[output.sequence]
    return Measured(f"c{concurrency}", concurrency, time.perf_counter() - started, tuple(steps), tuple(done))


def run_cold_prefill(core: Core, *, tokens: int, repeats: int, seed: int) -> tuple[ColdPrefill, ...]:
    """Prefill fresh prompts of this length, each of its own nonce, and prove that no token of them was cached.

    Raises:
        UsageError: PREFILL_TOKENS; the core's context is shorter.
        QualityError: PREFILL_NOT_COLD; tokens of a prompt did not go through the graphs.
    """
    contract = core.manifest.contract
    if tokens + 1 > contract.max_context:
        raise UsageError("PREFILL_TOKENS", "the core's context is shorter than the prompt", where="--prefill-tokens",
                         expected=f"at most {contract.max_context - 1}", got=tokens)
    (chunk,) = core.shape("chunk_tokens")
    rng = random.Random(f"{seed}:{time.time_ns()}")
    found = []
    for _ in range(repeats):
        prompt = [rng.randrange(contract.vocab_size) for _ in range(tokens)]
        engine = Engine(core, record_candidates=False)
        sequence = engine.add(prompt, Request(1))
        computed, before = 0, 0
        started = time.perf_counter()
        while sequence.finish_reason is None:
            engine.step()
            if engine.times.prefill_s > 0:
                computed += min(chunk, sequence.prefilled - before)
            before = sequence.prefilled
        sample = ColdPrefill(tokens, time.perf_counter() - started, computed, tokens - computed)
        if sample.cached_tokens:
            raise QualityError("PREFILL_NOT_COLD", "tokens of a fresh prompt were not computed", expected=tokens,
                               got=computed, hint="turn the prefix cache off, or compare warm runs with warm runs")
        found.append(sample)
    return tuple(found)


def _request(index: int, sequence: EngineSequence, arrived: float, stamps: Sequence[float]) -> RequestSample:
    verified = [s for s in sequence.steps if s.kind is StepKind.VERIFY]
    return RequestSample(
        index, len(sequence.prompt), len(sequence.tokens), (stamps[0] - arrived) * 1e3, (stamps[-1] - arrived) * 1e3,
        tuple((b - a) * 1e3 for a, b in pairwise(stamps)),
        tuple(s.proposed for s in verified), tuple(min(s.accepted, s.proposed) for s in verified))
