"""Run a prompt among others and look at every logits row that decided one of its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from runtime import Engine, LoadedCore, Request
from runtime.engine import Completion, StepKind
from tests.oracles.zlab_pair import MASK_TOKEN

Prompted = tuple[Sequence[int], Request]


@dataclass(frozen=True, slots=True)
class Watched:
    """A completion, and the bytes of the logits row that decided each of its tokens after the first."""

    completion: Completion
    logits: tuple[bytes, ...]


def watch(core: LoadedCore, prompt: Sequence[int], request: Request,
          before: Sequence[Prompted] = (), after: Sequence[Prompted] = ()) -> Watched:
    """Run a prompt in a batch with others, admitted before and after it."""
    engine = Engine(core)
    for other, other_request in before:
        engine.add(other, other_request)
    sequence = engine.add(prompt, request)
    for other, other_request in after:
        engine.add(other, other_request)
    logits = []
    while not engine.idle:
        stepped = [output for output in engine.step() if output.record.kind is not StepKind.PREFILL]
        for lane, output in enumerate(stepped):
            if output.sequence is sequence:
                rows = core.io["emitted"].shape[1] if output.record.kind is StepKind.VERIFY else 1
                logits += [core.io["logits"][lane * rows + i].tobytes() for i in range(len(output.record.tokens))]
    return Watched(sequence.completion(), tuple(logits))


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(MASK_TOKEN) for _ in range(count)]
