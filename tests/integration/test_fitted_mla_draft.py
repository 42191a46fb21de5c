"""A latent-attention draft fitted to Kimi K3: accepted by turns, lossless, and in need of exactly the taps it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import exporter.export
from exporter.draft_config import DraftConfig
from exporter.models import kimi
from exporter.models.context import Forward
from exporter.plan import PrecisionSettings
from exporter.program.builder import Tensor
from runtime import Engine, LoadedCore, Request
from runtime.engine import Completion
from runtime.ops import DType
from tests.integration.cores import DEMO_PRECISION, Signer, make_core, recipe_without_conversion
from tests.integration.pairs import blocks
from tests.integration.watch import random_tokens, watch
from tests.oracles.kimi_pair import K3, TAPS, DraftBody, KimiPair, make_pair
from tests.oracles.mla_draft_numpy import MlaDraft, mla_json, speculate
from tests.oracles.zlab_pair import FIT_TOKENS, PairSpec

NEW_TOKENS, DEPTH = 60, 7
SPEC = PairSpec(block_size=1 + DEPTH, window=12, fit_steps=400)
Mutate = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A pair whose draft was fitted, and how its cores are exported: fp32 as published, or bf16 and converted."""

    pair: KimiPair
    core: LoadedCore
    signer: Signer
    options: dict[str, Any]

    def generate(self, core: LoadedCore) -> Completion:
        return Engine(core).generate(self.pair.prompt, Request(max_tokens=NEW_TOKENS))

    def export_anew(self, out: Path) -> LoadedCore:
        return make_core(self.signer, out, self.pair.target_path, self.pair.draft_path, **self.options)


@pytest.fixture(scope="module", params=[DType.F32, DType.BF16], ids=["f32", "bf16"])
def fitted(request: pytest.FixtureRequest, signer: Signer,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fitted]:
    folder, act = tmp_path_factory.mktemp("fitted"), request.param
    target: dict[str, Any] = {"act": act, "max_context": 256, "batches": (1, 2)}
    settings = DEMO_PRECISION
    if act is DType.F32:
        target["recipe"], settings = recipe_without_conversion("kimi-k3", folder), PrecisionSettings()

    def write(path: Path, prompt: list[int]) -> list[int]:
        with make_core(signer, folder / "alone", path, **target) as core:
            return list(Engine(core).generate(prompt, Request(max_tokens=FIT_TOKENS)).tokens)

    pair = make_pair(folder, K3, SPEC, write, dtype=torch.bfloat16 if act is DType.BF16 else torch.float32,
                     body=DraftBody.LATENT)
    options = {**target, "settings": settings}
    with make_core(signer, folder / "core", pair.target_path, pair.draft_path, **options) as core:
        yield Fitted(pair, core, signer, options)


def test_text_and_logits_are_the_same_with_and_without_speculation(fitted: Fitted) -> None:
    for prompt in (fitted.pair.prompt, *(random_tokens(n, seed=n) for n in (1, 130))):
        plain = watch(fitted.core, prompt, Request(max_tokens=NEW_TOKENS, speculation=False))
        fast = watch(fitted.core, prompt, Request(max_tokens=NEW_TOKENS),
                     before=[(random_tokens(5, seed=3), Request(max_tokens=9))])
        assert fast.completion.tokens == plain.completion.tokens
        assert fast.logits == plain.logits


def test_draft_is_accepted_whole_in_part_and_not_at_all(fitted: Fitted) -> None:
    """From several places of its text. Tokens a step where this was written, from the first: 4.54 in fp32, 4.92 in
    bf16."""
    engine, completion = Engine(fitted.core), fitted.generate(fitted.core)
    later = [engine.generate([*fitted.pair.prompt, *completion.tokens[:place]], Request(max_tokens=NEW_TOKENS))
             for place in (8, 14, 20, 30)]
    counts = {step.accepted for done in (completion, *later) for step in done.steps if step.proposed == DEPTH}

    assert completion.tokens_per_step > 1.5
    assert counts >= {0, DEPTH} and len(counts) >= 3


@pytest.mark.parametrize("fitted", [DType.F32], ids=["f32"], indirect=True)
def test_every_block_is_that_of_the_float64_ports(fitted: Fitted) -> None:
    pair, completion = fitted.pair, fitted.generate(fitted.core)
    text = [*pair.prompt, *completion.tokens]
    draft = MlaDraft(mla_json(SPEC, target_layers=6, taps=TAPS), load_file(pair.draft_path / "model.safetensors"))

    assert pair.model.forward(text).logits[len(pair.prompt) - 1:-1].argmax(-1).tolist() == list(completion.tokens)
    assert blocks(completion) == speculate(draft, pair.model, text, len(pair.prompt))


def running_sum(patch: pytest.MonkeyPatch) -> None:
    """Tap the residual stream as it runs, in place of the mixture that the next layer reads."""
    read, tap = kimi._Stream.read, Forward.tap
    running: list[Tensor] = []

    def read_and_remember(self: kimi._Stream, name: str) -> Tensor:
        running[:] = [self.running]
        return read(self, name)

    patch.setattr(kimi._Stream, "read", read_and_remember)
    patch.setattr(Forward, "tap", lambda self, x, *rest: tap(self, *running, *rest))


def normed_mixture(patch: pytest.MonkeyPatch) -> None:
    """Tap the mixture after the next layer's norm."""
    tap = Forward.tap

    def tap_normed(self: Forward, x: Tensor, features: Tensor | None, taps: tuple[int, ...], layer_idx: int) -> None:
        last = layer_idx + 1 == K3["text_config"]["num_hidden_layers"]
        norm = "target.norm" if last else f"target.layers.{layer_idx + 1}.input_norm"
        tap(self, self.rms_norm(x, norm, K3["text_config"]["rms_norm_eps"], "normed_tap"), features, taps, layer_idx)

    patch.setattr(Forward, "tap", tap_normed)


def layers(*ids: int) -> Mutate:
    """Tap other layers than the draft's config names, or in another order."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        read = exporter.export.read_draft_config

        def misread(*args: Any) -> DraftConfig:
            return replace(read(*args), target_layer_ids=ids)

        patch.setattr(exporter.export, "read_draft_config", misread)

    return mutate


def test_draft_fed_the_running_sum_is_accepted_far_less(fitted: Fitted, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals accepted a step where this was written: 3.54 and 0.97 in fp32, 3.92 and 0.74 in bf16."""
    right = fitted.generate(fitted.core)
    running_sum(monkeypatch)
    with fitted.export_anew(tmp_path / "core") as core:
        wrong = fitted.generate(core)

    assert wrong.tokens == right.tokens
    assert wrong.tokens_per_step - 1 < 0.6 * (right.tokens_per_step - 1)


@pytest.mark.parametrize("fitted", [DType.F32], ids=["f32"], indirect=True)
@pytest.mark.parametrize("mutate", [
    pytest.param(running_sum, id="running sum"), pytest.param(normed_mixture, id="after the norm"),
    pytest.param(layers(1, 3, 4), id="other layers"), pytest.param(layers(0, 1, 5), id="one tap early"),
    pytest.param(layers(2, 0, 5), id="reordered"),
])
def test_wrong_taps_show_in_the_blocks_alone(fitted: Fitted, mutate: Mutate, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    right = fitted.generate(fitted.core)
    mutate(monkeypatch)
    with fitted.export_anew(tmp_path / "core") as core:
        wrong = fitted.generate(core)

    assert wrong.tokens == right.tokens
    assert blocks(wrong) != blocks(right)
