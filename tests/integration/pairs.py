"""Run a core beside the z-lab pair it was made from, and say what its blocks were."""

from __future__ import annotations

from runtime import Engine, LoadedCore, Request
from runtime.engine import Completion, StepKind
from tests.oracles.zlab_pair import Block, Pair, Trace


def generate(core: LoadedCore, pair: Pair, new_tokens: int, stop: tuple[int, ...] = ()) -> Trace:
    """Continue the pair's prompt at temperature 0, and describe each verify step as the oracle describes a block."""
    completion = Engine(core).generate(pair.prompt, Request(max_tokens=new_tokens, stop_token_ids=stop))
    return Trace(completion.tokens, blocks(completion))


def blocks(completion: Completion) -> tuple[Block, ...]:
    return tuple(Block(s.anchor, s.proposals, tuple(map(frozenset, s.candidates)), len(s.tokens))
                 for s in completion.steps if s.kind is StepKind.VERIFY)
