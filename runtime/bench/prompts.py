"""Prompt sets: the core's own canary, a JSONL file, or synthetic tokens."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import DflashError, UsageError

from runtime.canary import Canary
from runtime.core import Core
from runtime.text import CoreText

SYNTHETIC_PROMPTS, SYNTHETIC_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts as token ids, where they came from, and a digest over the ids."""

    source: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts as compact JSON, in hex."""
        return hashlib.sha256(json.dumps(self.prompts, separators=(",", ":")).encode()).hexdigest()


def canary_prompts(canaries: Sequence[Canary]) -> PromptSet:
    """The prompts of the core's canary. Raises UsageError: NO_CANARY."""
    prompts = tuple(prompt.prompt for canary in canaries for prompt in canary.prompts)
    if not prompts:
        raise UsageError("NO_CANARY", "the core carries no canary, so it has no prompts of its own", where="--prompts",
                         hint="give --prompts synthetic or a JSONL file")
    return PromptSet("canary", prompts)


def synthetic_prompts(vocab_size: int, seed: int, *, count: int = SYNTHETIC_PROMPTS,
                      tokens: int = SYNTHETIC_TOKENS) -> PromptSet:
    """Uniformly drawn tokens; acceptance on them says nothing about text."""
    rng = random.Random(seed)
    return PromptSet("synthetic", tuple(tuple(rng.randrange(vocab_size) for _ in range(tokens)) for _ in range(count)))


def jsonl_prompts(path: Path, core: Core) -> PromptSet:
    """One prompt a line: {"prompt": text}, {"messages": [...]} or {"token_ids": [...]}.

    Raises:
        UsageError: PROMPTS; the file cannot be read, a line is malformed, or there is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError("PROMPTS", "the prompts cannot be read", where=str(path), got=str(e)) from e
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(tuple(_tokens(json.loads(line), core)))
            except (ValueError, KeyError, TypeError, DflashError) as e:
                raise UsageError("PROMPTS", "a line is not a prompt", where=f"{path}:{number}", got=str(e),
                                 expected='{"prompt": …}, {"messages": …} or {"token_ids": …}') from e
    if not prompts:
        raise UsageError("PROMPTS", "the file holds no prompt", where=str(path))
    return PromptSet(path.name, tuple(prompts))


def _tokens(entry: Any, core: Core) -> list[int]:
    if "token_ids" in entry:
        return [int(token) for token in entry["token_ids"]]
    text = CoreText(core)
    return text.encode_chat(entry["messages"]) if "messages" in entry else text.encode(entry["prompt"])
