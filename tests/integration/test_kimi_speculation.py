"""Speculation on a Kimi target changes no token and no logit, and leaves the state of exactly the accepted rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime import Engine, LoadedCore, Request
from runtime.ops import DType
from tests.integration.cores import Signer, make_core
from tests.integration.drive import Lane
from tests.integration.watch import random_tokens, watch
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, KimiPair, make_pair
from tests.oracles.zlab_pair import FIT_TOKENS, MASK_TOKEN, PairSpec

NEW_TOKENS, DEPTH = 40, 7
PAIRS = [
    pytest.param((KIMI_LINEAR, DType.F32, "plain"), id="linear-f32"),
    pytest.param((KIMI_LINEAR, DType.BF16, "plain"), id="linear-bf16"),
    pytest.param((K3, DType.F32, "plain"), id="k3-f32"), pytest.param((K3, DType.BF16, "plain"), id="k3-bf16"),
    pytest.param((KIMI_LINEAR, DType.BF16, "nvfp4-modelopt"), id="linear-bf16-nvfp4-experts"),
    pytest.param((K3, DType.F32, "nvfp4-compressed-tensors"), id="k3-f32-nvfp4-experts"),
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pair and its core, with graphs for one sequence and for four; the target's inputs are MXFP8 by default."""

    pair: KimiPair
    core: LoadedCore

    def states(self, slot: int) -> dict[str, bytes]:
        """The bytes of every recurrent buffer's row for a slot."""
        found = {}
        for buffer in self.core.manifest.buffers:
            if buffer.name.startswith("slot_"):
                rows = self.core.memory[buffer.buffer_id].reshape(self.core.manifest.contract.max_batch, -1)
                found[buffer.name] = rows[slot].tobytes()
        return found


@pytest.fixture(scope="module", params=PAIRS)
def kimi(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    config, act, experts = request.param
    folder = tmp_path_factory.mktemp("kimi")
    def write(target: Path, prompt: list[int]) -> list[int]:
        with make_core(signer, folder / "alone", target, act=act, max_context=256) as core:
            return list(Engine(core).generate(prompt, Request(max_tokens=FIT_TOKENS)).tokens)

    pair = make_pair(folder, config, PairSpec(block_size=1 + DEPTH, fit_steps=200), write,
                     dtype=torch.bfloat16 if act is DType.BF16 else torch.float32, experts=experts)
    with make_core(signer, folder / "core", pair.target_path, pair.draft_path, act=act, batches=(1, 4),
                   max_context=256) as core:
        yield Loaded(pair, core)


def test_text_and_logits_are_the_same_with_and_without_speculation(kimi: Loaded) -> None:
    for prompt in (kimi.pair.prompt, *(random_tokens(n, seed=n) for n in (1, 130))):
        plain = watch(kimi.core, prompt, Request(max_tokens=NEW_TOKENS, speculation=False))
        fast = watch(kimi.core, prompt, Request(max_tokens=NEW_TOKENS))
        assert fast.completion.tokens == plain.completion.tokens
        assert fast.logits == plain.logits


def test_fitted_draft_is_accepted_often_enough_to_test_rollback(kimi: Loaded) -> None:
    """From several places of the text that it was fitted to: from one alone, a processor's rounding decides."""
    engine = Engine(kimi.core)
    first = engine.generate(kimi.pair.prompt, Request(max_tokens=NEW_TOKENS))
    later = [engine.generate([*kimi.pair.prompt, *first.tokens[:place]], Request(max_tokens=NEW_TOKENS))
             for place in (8, 14, 20, 30)]
    counts = {step.accepted for done in (first, *later) for step in done.steps if step.proposed == DEPTH}

    assert first.tokens_per_step > 1.5
    assert len(counts) >= 3, "some blocks are accepted in part"


@pytest.mark.parametrize("prompt_tokens", [1, 60], ids=lambda n: f"after-{n}")
def test_state_after_verifying_is_that_of_decoding_the_accepted_rows(kimi: Loaded, prompt_tokens: int) -> None:
    """Proposals of which the first 0, 1 ... are what the target would choose: their rows and the anchor's are kept."""
    prompt, limit = random_tokens(prompt_tokens, seed=prompt_tokens), prompt_tokens + 32
    slow, fast = Lane(kimi.core, limit, slot=0), Lane(kimi.core, limit, slot=2)
    text, rows, states = [int(slow.prefill(prompt).argmax())], [], []
    for _ in range(DEPTH + 2):
        rows.append(slow.decode(text[-1]))
        states.append(kimi.states(0))
        text.append(int(rows[-1].argmax()))

    for accepted in range(DEPTH + 1):
        wrong = [(token + 1) % MASK_TOKEN for token in text[1 + accepted:1 + DEPTH]]
        fast.reset()
        fast.prefill(prompt)
        verified = fast.verify(text[0], [*text[1:1 + accepted], *wrong])

        assert kimi.core.io["accepted"][0] == accepted
        assert kimi.states(2) == states[accepted], accepted
        assert [r.tobytes() for r in verified[:accepted + 1]] == [r.tobytes() for r in rows[:accepted + 1]]
        assert fast.decode(text[accepted + 1]).tobytes() == rows[accepted + 1].tobytes()


def test_drafting_and_other_sequences_leave_a_state_alone(kimi: Loaded) -> None:
    lane, other = Lane(kimi.core, 64, slot=1), Lane(kimi.core, 64, slot=3)
    lane.prefill(random_tokens(20, seed=1))
    before = kimi.states(1)

    lane.propose(5)
    other.prefill(random_tokens(30, seed=2))
    other.verify(3, random_tokens(DEPTH, seed=3))
    other.decode(4)

    assert kimi.states(1) == before


def test_sequences_in_one_batch_do_not_see_each_other(kimi: Loaded) -> None:
    """Five sequences of different lengths on four slots, some without speculation, each as it is alone."""
    engine = Engine(kimi.core)
    lengths = (1, 20, 63, 70, 5)
    requests = [Request(max_tokens=20 + n, speculation=n != 63) for n in range(len(lengths))]
    alone = [engine.generate(random_tokens(length, seed=length), request).tokens
             for length, request in zip(lengths, requests, strict=True)]

    together = [engine.add(random_tokens(length, seed=length), request)
                for length, request in zip(lengths, requests, strict=True)]
    while not engine.idle:
        engine.step()

    assert [tuple(s.tokens) for s in together] == alone


def test_a_used_slot_is_a_new_one(kimi: Loaded) -> None:
    """A, B, A again, and A after garbage in every recurrent buffer: a sequence starts from zeros wherever it starts."""
    first, second = random_tokens(33, seed=7), random_tokens(50, seed=8)
    expected = _logits(kimi.core, first)
    _logits(kimi.core, second)
    assert _logits(kimi.core, first) == expected

    for buffer in kimi.core.manifest.buffers:
        if buffer.name.startswith("slot_"):
            kimi.core.memory[buffer.buffer_id][...] = 255  # NaN
    assert _logits(kimi.core, first) == expected


def _logits(core: LoadedCore, prompt: Sequence[int]) -> list[bytes]:
    lane = Lane(core, len(prompt) + 12)
    rows: list[Any] = [lane.prefill(prompt)]
    for token in random_tokens(8, seed=9):
        rows.append(lane.decode(token))
    assert np.isfinite(rows).all()
    return [row.tobytes() for row in rows]
