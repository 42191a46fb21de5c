"""The demo's precision (bf16, draft body in MXFP8, proposal head in NVFP4) keeps the acceptance of float32.

Tokens/step depend on the text, and greedy decoding in bf16 leaves the float32 text on some prompts. So acceptance is
compared on one text first: the reference's own, which the core is made to follow.
"""

from __future__ import annotations

from itertools import takewhile

import pytest

from runtime import Engine, LoadedCore, Request
from tests.integration.drive import Lane
from tests.integration.pairs import blocks
from tests.integration.reference import (
    MAX_NEW_TOKENS,
    STOP_TOKEN_IDS,
    TOKENS_PER_STEP,
    ReferenceRow,
    read_reference,
)


def test_on_the_references_text_tokens_per_step_stay_within_three_percent(demo_bf16: LoadedCore) -> None:
    steps = [count for row in read_reference() for count in _steps_along(demo_bf16, row)]
    assert sum(steps) / len(steps) == pytest.approx(TOKENS_PER_STEP, rel=0.03)


def test_on_its_own_text_tokens_per_step_do_not_fall_by_three_percent(demo_bf16: LoadedCore) -> None:
    engine, request = Engine(demo_bf16), Request(max_tokens=MAX_NEW_TOKENS, stop_token_ids=STOP_TOKEN_IDS)
    sequences = [engine.add(row.prompt, request) for row in read_reference()]
    while not engine.idle:
        engine.step()
    produced = [block.produced for sequence in sequences for block in blocks(sequence.completion())]
    assert sum(produced) / len(produced) >= 0.97 * TOKENS_PER_STEP


def _steps_along(core: LoadedCore, row: ReferenceRow) -> list[int]:
    """Tokens per step if the target's choice were always the reference's: proposals that agree with it, and one."""
    text = [*row.prompt, *row.tokens]
    lane = Lane(core, limit=len(row.prompt) + MAX_NEW_TOKENS)
    lane.prefill(row.prompt)
    steps, start = [], len(row.prompt)
    while start + 1 < len(text):
        proposals = lane.propose(text[start])
        agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(proposals, text[start + 1:], strict=False))))
        steps.append(min(agreed + 1, len(text) - 1 - start))
        _follow(lane, text, start, start + steps[-1])
        start += steps[-1]
    return steps


def _follow(lane: Lane, text: list[int], start: int, end: int) -> None:
    """Append text[start:end]: verify it as a block, again from wherever the core's own argmax is another token."""
    depth = lane.core.io["proposals"].shape[1]
    while start < end:
        lane.rewind(start)
        lane.verify(text[start], [*text[start + 1:start + 1 + depth], *[0] * depth][:depth])
        start += int(lane.core.io["produced"][0])
    lane.rewind(end)
