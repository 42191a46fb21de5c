"""Speculation never changes a token, and no row's bits depend on its block, its batch, its chunk or the node order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from runtime import Engine, LoadedCore, Request
from runtime.ops import DType
from tests.integration.cores import Signer, make_core
from tests.integration.drive import Lane
from tests.integration.reference import read_reference
from tests.integration.watch import Prompted, random_tokens, watch
from tests.oracles.zlab_pair import DraftKind, Pair, PairSpec, make_pair

NEW_TOKENS = 48
TINY = [
    pytest.param((PairSpec(), DType.F32), id="block-8-f32"),
    pytest.param((PairSpec(), DType.BF16), id="block-8-bf16"),
    pytest.param((PairSpec(block_size=5, causal=True), DType.BF16), id="block-5-bf16"),
    pytest.param((PairSpec(block_size=16, window=None), DType.F32), id="block-16-f32"),
    pytest.param((PairSpec(kind=DraftKind.DFLASH), DType.BF16), id="dflash1-bf16"),
]


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny pair and its core, with graphs for one sequence and for four."""

    pair: Pair
    core: LoadedCore


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    spec, act = request.param
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair(folder, spec)
    with make_core(signer, folder / "core", pair.target_path, pair.draft_path, act=act, batches=(1, 4)) as core:
        yield Tiny(pair, core)


@pytest.fixture(params=["demo_f32", "demo_bf16"])
def demo(request: pytest.FixtureRequest) -> LoadedCore:
    core: LoadedCore = request.getfixturevalue(request.param)
    return core


def test_demo_text_is_the_same_with_and_without_speculation(demo: LoadedCore) -> None:
    prompts = [row.prompt for row in read_reference()[:4]]
    engine = Engine(demo)
    plain = [engine.add(prompt, Request(max_tokens=64, speculation=False)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    for prompt, sequence in zip(prompts, plain, strict=True):
        assert engine.generate(prompt, Request(max_tokens=64)).tokens == tuple(sequence.tokens)


def test_tiny_text_is_the_same_with_and_without_speculation(tiny: Tiny) -> None:
    texts = [tiny.pair.prompt, *(random_tokens(length, seed=length) for length in (1, 63, 64, 100))]
    for prompt in texts:
        plain = watch(tiny.core, prompt, Request(max_tokens=NEW_TOKENS, speculation=False))
        fast = watch(tiny.core, prompt, Request(max_tokens=NEW_TOKENS))
        assert fast.completion.tokens == plain.completion.tokens
        assert fast.logits == plain.logits
        assert len(fast.completion.steps) <= len(plain.completion.steps)


@pytest.mark.parametrize("prompt_tokens", [1, 20, 60, 64], ids=lambda n: f"after-{n}")
def test_verify_gives_the_bytes_of_decode(tiny: Tiny, prompt_tokens: int) -> None:
    _assert_verify_is_decode(tiny.core, random_tokens(prompt_tokens, seed=1), random_tokens(16, seed=2))


@pytest.mark.parametrize("index", [0, 3])
def test_verify_of_the_demo_gives_the_bytes_of_decode(demo: LoadedCore, index: int) -> None:
    row = read_reference()[index]
    _assert_verify_is_decode(demo, row.prompt, row.tokens[:4] + tuple(range(100, 110)))


def _assert_verify_is_decode(core: LoadedCore, prompt: Sequence[int], text: Sequence[int]) -> None:
    block_rows = 1 + core.io["proposals"].shape[1]
    lane = Lane(core, limit=len(prompt) + len(text) + 2)
    lane.prefill(prompt)
    one_by_one = [lane.decode(token).tobytes() for token in text[:block_rows]]
    lane.rewind(len(prompt))
    block = lane.verify(text[0], text[1:block_rows])
    assert [row.tobytes() for row in block] == one_by_one


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("speculation", [True, False], ids=["speculating", "plain"])
def test_companions_in_the_batch_change_nothing(tiny: Tiny, temperature: float, speculation: bool) -> None:
    def companion(length: int, new_tokens: int) -> Prompted:
        return random_tokens(length, seed=length), Request(max_tokens=new_tokens, temperature=1.0, top_p=0.9,
                                                           seed=length, speculation=speculation)

    request = Request(max_tokens=NEW_TOKENS, temperature=temperature, seed=5, speculation=speculation)
    alone = watch(tiny.core, tiny.pair.prompt, request)
    # The first of them ends soon: from then on the watched sequence's lane is not its slot.
    together = watch(tiny.core, tiny.pair.prompt, request, before=[companion(3, 4)],
                     after=[companion(17, 60), companion(70, 90), companion(5, 30)])
    assert together == alone


CHUNKINGS = [
    pytest.param(1, [1], id="1"),
    pytest.param(63, [1] * 63, id="63-one-by-one"),
    pytest.param(63, [31, 32], id="63-in-halves"),
    pytest.param(64, [63, 1], id="64-last-alone"),
    pytest.param(64, [1, 63], id="64-first-alone"),
    pytest.param(65, [1, 64], id="65-first-alone"),
    pytest.param(65, [8, 9, 7, 1, 40], id="65-uneven"),
    pytest.param(130, [2, 64, 64], id="130-first-two"),
    pytest.param(130, [50, 50, 30], id="130-across-pages"),
    pytest.param(130, [13] * 10, id="130-in-thirteens"),
]


@pytest.mark.parametrize(("length", "chunks"), CHUNKINGS)
def test_chunks_of_a_prompt_change_nothing(tiny: Tiny, length: int, chunks: list[int]) -> None:
    prompt = random_tokens(length, seed=length)
    assert _after_prefill(tiny.core, prompt, chunks) == _after_prefill(tiny.core, prompt, None)


def _after_prefill(core: LoadedCore, prompt: list[int], chunks: list[int] | None) -> list[bytes]:
    """What follows from a prefilled prompt: its logits, a draft with its probabilities, and a verified block."""
    for name in ("proposal_ids", "proposal_probs", "proposals"):
        core.io[name][...] = 0
    lane = Lane(core, limit=len(prompt) + 20)
    first = lane.prefill(prompt, chunks)
    core.io["temperature"][0] = 1.0
    core.io["seed"][0] = 9
    proposals = lane.propose(int(first.argmax()))
    drafted = [core.io[name][0].tobytes() for name in ("proposals", "proposal_ids", "proposal_probs")]
    return [first.tobytes(), *drafted, lane.verify(int(first.argmax()), proposals).tobytes()]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_order_that_keeps_the_edges_gives_the_same_bytes(tiny: Tiny, seed: int, temperature: float,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(max_tokens=24, temperature=temperature, seed=seed)
    companions = [(random_tokens(9, seed=9), request), (random_tokens(70, seed=70), request)]
    in_order = watch(tiny.core, tiny.pair.prompt, request, after=companions)
    shuffled = {name: replace(graph, steps=tuple(graph.steps[i] for i in graph.shuffled_order(seed)), edges=())
                for name, graph in tiny.core.graphs.items()}
    monkeypatch.setattr(tiny.core, "graphs", shuffled)
    assert watch(tiny.core, tiny.pair.prompt, request, after=companions) == in_order


def test_shuffling_does_move_nodes_and_forgets_none(tiny: Tiny) -> None:
    moved = set()
    for graph in tiny.core.graphs.values():
        in_order = list(range(len(graph.steps)))
        for seed in (1, 2, 3):
            order = graph.shuffled_order(seed)
            assert sorted(order) == in_order
            moved |= {graph.role} if order != in_order else set()
    assert moved >= {"prefill", "verify"}  # a draft and a decode step are chains: there is one order
