"""A tiny Kimi K3 that sees: an image in a prompt changes what follows, speculation and batching do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dflash_core.errors import CompatibilityError
from safetensors.torch import load_file

from exporter.combine import CombineRequest, combine
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import Engine, LoadedCore, Request, load
from runtime.inspect import inspect_core
from runtime.ops import DType
from runtime.vision.rows import PromptImages
from tests.integration.cores import Signer, recipe_without_conversion
from tests.integration.watch import random_tokens
from tests.oracles import moonvit_oracle
from tests.oracles.drawn_images import drawn, jpeg_of, png_of
from tests.oracles.kimi_numpy import Kimi
from tests.oracles.kimi_pair import K3, KimiPair, make_pair
from tests.oracles.zlab_pair import PairSpec

HEADLINE = PrecisionSettings(online_mxfp8_scope="kda-input", draft_body="mxfp8", draft_head="nvfp4")
PAD = K3["media_placeholder_token_id"]
SMALL, LARGE = png_of(drawn(56, 30)), jpeg_of(drawn(160, 90))
ROW_BOUND = 1e-5     # of an image's largest value, as of the tower alone
LOGIT_BOUND = 2e-5   # of the row's largest logit, as without images


class Cores:
    """A tiny K3 pair, its draft random, and cores of it that see."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signer = folder, Signer.create(folder / "keys")
        self.pair: KimiPair = make_pair(folder, K3, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])

    def core(self, *batches: int, patches: tuple[int, ...] = (16, 128)) -> Path:
        out = self.folder / f"core-{batches}-{patches}".replace(" ", "")
        if not out.exists():
            export(ExportRequest(target=self.pair.target_path, draft=self.pair.draft_path, out=out, batches=batches,
                                 settings=HEADLINE, max_context=128, image_patches=patches), self.signer.key)
        return out

    def load(self, core: Path) -> LoadedCore:
        return load(core, trust=self.signer.trust)


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    yield Cores(tmp_path_factory.mktemp("k3"))


def question(engine: Engine, tokens: list[int], *files: bytes) -> PromptImages:
    return PromptImages.of(engine.encoder, tokens, [engine.encoder.patches(file) for file in files])


def ask(engine: Engine, tokens: list[int], *files: bytes, speculation: bool = True, count: int = 16) -> tuple[int, ...]:
    request = Request(max_tokens=count, speculation=speculation)
    if not files:
        return engine.generate(tokens, request).tokens
    images = question(engine, tokens, *files)
    return engine.generate(images.prompt.tokens, request, images=images).tokens


TEXT = random_tokens(7, seed=1)
BEHIND = random_tokens(60, seed=2)
QUESTIONS = [
    pytest.param([*TEXT, PAD, 5, 6], (SMALL,), id="small"), pytest.param([PAD, *TEXT], (LARGE,), id="first"),
    pytest.param([*BEHIND, PAD, 4], (LARGE,), id="across a chunk border"),
    pytest.param([1, PAD, 2, PAD, 3], (SMALL, SMALL), id="twice the same"),
    pytest.param([1, PAD, 2, PAD, 3], (LARGE, SMALL), id="two"), pytest.param(TEXT, (), id="text"),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "files"), QUESTIONS)
def test_answer_is_the_same_with_and_without_speculation(cores: Cores, tokens: list[int],
                                                         files: tuple[bytes, ...]) -> None:
    with cores.load(cores.core(1)) as core:
        engine = Engine(core)
        assert ask(engine, tokens, *files) == ask(engine, tokens, *files, speculation=False)


def test_questions_in_one_batch_have_the_answers_they_have_alone_also_from_a_combined_core(cores: Cores) -> None:
    both = cores.folder / "both"
    combine(CombineRequest((cores.core(1), cores.core(1, 4)), both), cores.signer.trust, cores.signer.key)
    asked = [(p.values[0], p.values[1]) for p in QUESTIONS]
    with cores.load(cores.core(1)) as core:
        alone = [ask(Engine(core), tokens, *files) for tokens, files in asked]

    with cores.load(both) as core:
        engine, running = Engine(core), []
        for tokens, files in asked:
            images = question(engine, tokens, *files) if files else None
            running.append(engine.add(images.prompt.tokens if images else tokens, Request(max_tokens=16), images))
        while not engine.idle:
            engine.step()

    assert [tuple(sequence.tokens) for sequence in running] == alone


def test_text_has_the_answer_it_has_before_any_image_was_seen(cores: Cores) -> None:
    with cores.load(cores.core(1)) as core:
        engine = Engine(core)
        before = ask(engine, TEXT)
        ask(engine, [PAD, *TEXT], LARGE)

        assert ask(engine, TEXT) == before


def test_prompt_that_is_given_up_frees_its_rows(cores: Cores) -> None:
    with cores.load(cores.core(1)) as core:
        engine = Engine(core)
        expected = ask(engine, [PAD, *TEXT], LARGE)
        images = question(engine, [*BEHIND, PAD, 4], LARGE)
        given_up = engine.add(images.prompt.tokens, Request(max_tokens=4), images)
        engine.step()
        assert given_up.prefilled == 64
        engine.abort(given_up)

        assert ask(engine, [PAD, *TEXT], LARGE) == expected


def test_text_core_of_the_same_checkpoint_says_that_it_cannot_see(cores: Cores) -> None:
    with cores.load(cores.core(1, patches=())) as core, pytest.raises(CompatibilityError, match="no vision"):
        question(Engine(core), [PAD], SMALL)


def test_picture_is_seen(cores: Cores) -> None:
    """Same tokens, same size, other pixels: the first logits differ by far more than rounding."""
    with cores.load(cores.core(1)) as core:
        found = []
        for pixels in (drawn(56, 30), drawn(56, 30)[::-1], 255 - drawn(56, 30)):
            ask(Engine(core), [*TEXT, PAD], png_of(np.ascontiguousarray(pixels)), count=1)
            found.append(core.io["logits"][0].copy())

    assert min(np.abs(found[a] - found[b]).max() for a, b in ((0, 1), (0, 2), (1, 2))) > 0.05


@pytest.mark.parametrize(("tokens", "files"), QUESTIONS)
def test_logits_are_those_of_both_float64_ports(tmp_path: Path, cores: Cores, tokens: list[int],
                                                files: tuple[bytes, ...]) -> None:
    """fp32, nothing converted: the tower's rows against one port, and the logits over these rows against the other,
    joined by the rule that rows replace placeholders. Apart, since the text model enlarges what rows differ by."""
    out = tmp_path / "core"
    export(ExportRequest(target=cores.pair.target_path, out=out, act=DType.F32, max_context=128,
                         recipe=recipe_without_conversion("kimi-k3", tmp_path), image_patches=(16, 128)),
           cores.signer.key)
    named = {name: value.double().numpy()
             for name, value in load_file(cores.pair.target_path / "model.safetensors").items()}
    with cores.load(out) as core:
        engine = Engine(core)
        images = question(engine, tokens, *files)
        ask(engine, tokens, *files, count=1)
        found = core.io["logits"][0].astype(np.float64)
        seen = []
        for image in images.images:
            engine.encoder.encode(image, 0)
            seen.append(engine.encoder.rows(0, image.tokens).astype(np.float64))
    rows = [moonvit_oracle.embeddings(K3["vision_config"], named, image.levels, image.rows, image.cols)
            for image in images.images]

    def expected(embeddings: list[np.ndarray]) -> np.ndarray:
        """The text port's last logits over these rows."""
        text = dict(cores.pair.model.weights)
        extended = np.concatenate([text["embed_tokens.weight"], *embeddings])
        fresh = iter(range(len(text["embed_tokens.weight"]), len(extended)))
        ids = [next(fresh) if token == PAD else token for token in images.prompt.tokens]
        return Kimi(K3, {**text, "embed_tokens.weight": extended}).forward(ids).logits[-1]

    for mine, theirs in zip(seen, rows, strict=True):
        assert np.abs(mine - theirs).max() <= ROW_BOUND * np.abs(theirs).max()
    logits = expected(seen)
    assert np.abs(found - logits).max() <= LOGIT_BOUND * np.abs(logits).max()


def test_inspect_shows_the_four_precisions_and_the_tower(cores: Cores) -> None:
    report = inspect_core(cores.core(1), cores.signer.trust)

    assert [(p.role, p.effective, p.origin) for p in report.precision] == [
        ("target inputs", "mxfp8:kda-input", "flag"), ("draft body", "mxfp8", "flag"),
        ("proposal head", "nvfp4", "flag"), ("verification head", "checkpoint", "checkpoint")]
    assert report.vision is not None
    assert report.vision.max_image_tokens == 32
    assert {w.format for w in report.weights if w.owner == "vision"} <= {"bf16", "f32"}


def test_a_picture_does_not_inherit_the_answer_of_another_with_the_same_tokens(cores: Cores) -> None:
    """Prompts that begin alike share pages; pictures of one size give equal tokens and are not alike."""
    tokens = [PAD, *(token for token in random_tokens(80, seed=5) if token != PAD)]
    one, other = LARGE, jpeg_of(np.ascontiguousarray(255 - drawn(160, 90)))
    with cores.load(cores.core(1)) as core:
        expected = ask(Engine(core), tokens, other)
        logits = core.io["logits"][0].copy()

    with cores.load(cores.core(1)) as core:
        engine = Engine(core)
        ask(engine, tokens, one)
        assert engine.prefix is not None

        assert ask(engine, tokens, other) == expected
        assert core.io["logits"][0].tobytes() == logits.tobytes()
