"""Above temperature 0, speculation draws from the target's own distribution.

The second new token of a prompt has an exact marginal: the sum over first tokens t of p(t) p(second | t), from
transformers' logits. Draws of it, one seed each, must lie as near to that marginal as independent draws would: within
the 95 % bound of the total variation distance of as many multinomial draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime import LoadedCore
from tests.integration.cores import Signer, make_core
from tests.integration.drive import Lane
from tests.oracles.zlab_pair import VOCAB, Pair, PairSpec, make_pair

BATCH = 32
DRAWS = 64 * BATCH
F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a request draws."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0


SETTINGS = [
    pytest.param(Settings(0.3), id="T=0.3"),
    pytest.param(Settings(1.0), id="T=1.0"),
    pytest.param(Settings(1.6), id="T=1.6"),
    pytest.param(Settings(1.0, top_p=0.8), id="T=1.0-top_p"),
    pytest.param(Settings(1.6, top_p=0.9, top_k=12), id="T=1.6-top_p-top_k"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), PairSpec(block_size=5, fit_steps=200))


@pytest.fixture(scope="module")
def core(signer: Signer, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedCore]:
    out = tmp_path_factory.mktemp("core") / "core"
    with make_core(signer, out, pair.target_path, pair.draft_path, batches=(1, BATCH), max_context=64) as loaded:
        yield loaded


@pytest.mark.parametrize("settings", SETTINGS)
def test_second_token_has_the_targets_marginal(core: LoadedCore, pair: Pair, settings: Settings) -> None:
    exact = exact_marginal(pair, settings)
    drawn = second_tokens(core, pair, settings)
    counts = np.bincount(drawn.tokens, minlength=VOCAB)
    assert 0.02 < drawn.accepted_share < 0.98
    assert total_variation(counts / DRAWS, exact) <= null_bound(exact)


def test_the_bound_tells_a_slightly_wrong_distribution(pair: Pair) -> None:
    exact, hotter = (exact_marginal(pair, Settings(t)) for t in (1.0, 1.15))
    counts = np.random.default_rng(1).multinomial(DRAWS, hotter)
    assert total_variation(counts / DRAWS, exact) > null_bound(exact)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The second token of each seed, and the share of them that were accepted proposals."""

    tokens: list[int]
    accepted_share: float


def second_tokens(core: LoadedCore, pair: Pair, settings: Settings) -> Drawn:
    """The second token of the seeds 0 to DRAWS - 1, BATCH sequences at a time.

    Every slot holds the prompt. A decode step of its last token draws the first token, then the sequences draft and
    verify together; what the verify step emits first is the second token.
    """
    io, length = core.io, len(pair.prompt)
    for slot in range(BATCH):
        Lane(core, limit=length + 10, slot=slot).prefill(pair.prompt)
    io["temperature"][:], io["top_p"][:], io["top_k"][:] = settings.temperature, settings.top_p, settings.top_k
    io["slots"][:] = np.arange(BATCH)
    tokens, accepted = [], 0
    for first_seed in range(0, DRAWS, BATCH):
        io["seed"][:] = np.arange(first_seed, first_seed + BATCH)
        io["length"][:], io["anchor"][:] = length - 1, pair.prompt[-1]
        for role in ("decode", "draft", "verify"):
            core.graph(role, BATCH).run()
        tokens += io["emitted"][:, 0].tolist()
        accepted += int(np.count_nonzero(io["accepted"]))
    return Drawn(tokens, accepted / DRAWS)


@torch.no_grad()
def exact_marginal(pair: Pair, settings: Settings) -> F64Array:
    """The second token's distribution, [VOCAB], with every first token followed."""
    prompt = torch.tensor([pair.prompt])
    first = _distribution(pair.target(prompt).logits[0, -1], settings)
    followed = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
    second = [_distribution(row, settings) for row in pair.target(followed).logits[:, -1]]
    return first @ np.array(second)


def _distribution(logits: torch.Tensor, settings: Settings) -> F64Array:
    """Temperature, then the top_k most likely, then the fewest of those that hold top_p; what is kept sums to 1."""
    scores = logits.double().numpy() / settings.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[:settings.top_k or VOCAB]
    weights = np.exp(scores[kept] - scores[kept[0]])
    weights /= weights.sum()
    count = 1 + int(np.count_nonzero(np.cumsum(weights)[:-1] < settings.top_p))
    result = np.zeros(VOCAB)
    result[kept[:count]] = weights[:count] / weights[:count].sum()
    return result


def total_variation(p: F64Array, q: F64Array) -> float:
    return float(np.abs(p - q).sum() / 2)


def null_bound(exact: F64Array) -> float:
    """What 95 % of samples of DRAWS independent draws stay below, by simulation from a fixed seed."""
    samples = np.random.default_rng(0).multinomial(DRAWS, exact / exact.sum(), size=4000) / DRAWS
    return float(np.quantile(np.abs(samples - exact).sum(-1) / 2, 0.95))
