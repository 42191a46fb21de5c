"""The demo pair in float32 does what z-lab's loop did, token by token and block by block, on twelve prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from runtime import Engine, LoadedCore, Request
from tests.integration.pairs import blocks
from tests.integration.reference import (
    MAX_NEW_TOKENS,
    PROMPTS,
    STOP_TOKEN_IDS,
    TOKENS_PER_STEP,
    ReferenceRow,
    read_reference,
)
from tests.oracles.zlab_pair import Block, Trace

REQUEST = Request(max_tokens=MAX_NEW_TOKENS, stop_token_ids=STOP_TOKEN_IDS)
Generate = Callable[[int], Trace]


@pytest.fixture(scope="module")
def reference() -> list[ReferenceRow]:
    return read_reference()


@pytest.fixture(scope="module")
def generate(demo_f32: LoadedCore, reference: list[ReferenceRow]) -> Generate:
    """What the core does with the prompt of this number; each runs once."""

    @cache
    def run(index: int) -> Trace:
        completion = Engine(demo_f32).generate(reference[index].prompt, REQUEST)
        return Trace(completion.tokens, blocks(completion))

    return run


@pytest.mark.parametrize("index", PROMPTS)
def test_every_token_and_block_equals_the_references(generate: Generate, reference: list[ReferenceRow],
                                                     index: int) -> None:
    got, expected = generate(index), reference[index]
    assert got.tokens == expected.tokens
    assert [_readable(b) for b in got.blocks] == [_readable(b) for b in expected.blocks]


def test_tokens_per_step_equal_the_references(generate: Generate) -> None:
    produced = [block.produced for index in PROMPTS for block in generate(index).blocks]
    assert sum(produced) / len(produced) == pytest.approx(TOKENS_PER_STEP, rel=0.005)


def _readable(block: Block) -> tuple[int, tuple[int, ...], list[list[int]], int]:
    return block.anchor, block.drafts, [sorted(ids) for ids in block.candidates], block.produced
