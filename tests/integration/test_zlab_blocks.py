"""Every block of a tiny pair equals z-lab's: anchor, proposals, candidates, and how many tokens it committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from exporter.plan import PrecisionSettings
from runtime import LoadedCore
from tests.integration.cores import Signer, make_core
from tests.integration.pairs import generate
from tests.oracles.zlab_pair import DraftKind, Pair, PairSpec, greedy, make_pair, speculate

NEW_TOKENS = 48
PAIRS = [
    pytest.param(PairSpec(), id="block-8"),
    pytest.param(PairSpec(block_size=5), id="block-5"),
    pytest.param(PairSpec(block_size=16), id="block-16"),
    pytest.param(PairSpec(causal=True, window=6), id="causal-window-6"),
    pytest.param(PairSpec(causal=True, window=None), id="causal-full"),
    pytest.param(PairSpec(window=6), id="window-6"),
    pytest.param(PairSpec(window=None), id="full"),
    pytest.param(PairSpec(block_size=16, scalars=True), id="block-16-scalars"),
    pytest.param(PairSpec(block_size=5, window=None, scalars=True, rope_theta=1e6), id="block-5-scalars-theta"),
    pytest.param(PairSpec(kind=DraftKind.DFLASH), id="dflash1"),
    pytest.param(PairSpec(kind=DraftKind.DFLASH, block_size=16, causal=True, scalars=True), id="dflash1-scalars"),
    pytest.param(PairSpec(prompt_tokens=100, window=40), id="two-chunks-and-three-pages"),
    pytest.param(PairSpec(fit_steps=0), id="random-draft"),
]


@dataclass(frozen=True, slots=True)
class Run:
    """A pair and the core that was exported from it."""

    pair: Pair
    core: LoadedCore


@pytest.fixture(scope="module", params=PAIRS)
def run(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair(folder, request.param)
    with make_core(signer, folder / "core", pair.target_path, pair.draft_path) as core:
        yield Run(pair, core)


def test_every_block_equals_the_references(run: Run) -> None:
    expected = speculate(run.pair, NEW_TOKENS)
    got = generate(run.core, run.pair, NEW_TOKENS)
    assert got.blocks == expected.blocks
    assert got.tokens == expected.tokens == greedy(run.pair, NEW_TOKENS)


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_a_short_text_has_the_references_blocks(run: Run, new_tokens: int) -> None:
    got = generate(run.core, run.pair, new_tokens)
    assert got == speculate(run.pair, new_tokens)
    assert got.tokens == greedy(run.pair, new_tokens)


@pytest.mark.parametrize("index", [0, 1, 20], ids=["first-token", "second-token", "inside"])
def test_a_stop_token_ends_the_text_where_it_ends_the_references(run: Run, index: int) -> None:
    text = greedy(run.pair, NEW_TOKENS)
    stop = text[index]
    got = generate(run.core, run.pair, NEW_TOKENS, (stop,))
    assert got == speculate(run.pair, NEW_TOKENS, stop=[stop])
    assert got.tokens == text[:text.index(stop) + 1]


def test_a_fitted_draft_is_accepted_and_refused_by_turns(run: Run) -> None:
    produced = [block.produced for block in speculate(run.pair, NEW_TOKENS).blocks]
    if run.pair.spec.fit_steps:
        assert min(produced) == 1 and max(produced) >= 3
    else:
        assert sum(produced) / len(produced) < 1.5


@pytest.fixture(scope="module", params=[PairSpec(), PairSpec(kind=DraftKind.DFLASH)], ids=["dflash2", "dflash1"])
def deep_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_smaller_depth_is_the_references_smaller_block(signer: Signer, deep_pair: Pair, depth: int,
                                                         tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = PrecisionSettings(depth=depth)
    out = tmp_path_factory.mktemp("core") / "core"
    with make_core(signer, out, deep_pair.target_path, deep_pair.draft_path, settings=settings) as core:
        got = generate(core, deep_pair, NEW_TOKENS)
    assert got == speculate(deep_pair, NEW_TOKENS, block_size=1 + depth)
