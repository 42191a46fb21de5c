"""The recorded float32 trace of the demo pair: twelve prompts, 128 new tokens each, made with z-lab's loop.

It lies beside the draft, in `examples/smollm2-135m-dflash2/reference.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.oracles.zlab_pair import Block

PATH = Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-dflash2" / "reference.json"
MAX_NEW_TOKENS = 128
STOP_TOKEN_IDS = (2,)
TOKENS_PER_STEP = 2.3153310104529616  # over all blocks of all prompts
PROMPTS = range(12)


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """One prompt and what the reference did with it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    blocks: tuple[Block, ...]


def read_reference() -> list[ReferenceRow]:
    """The rows, in file order."""
    return [_row(row) for row in json.loads(PATH.read_text())["rows"]]


def _row(row: dict[str, list]) -> ReferenceRow:
    blocks = tuple(
        Block(block["anchor"], tuple(block["draft"]), tuple(map(frozenset, block["candidates"])), produced)
        for block, produced in zip(row["blocks"], row["produced"], strict=True))
    return ReferenceRow(tuple(row["prompt_ids"]), tuple(row["new_tokens"]), blocks)
