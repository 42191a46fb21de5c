"""Bring a core to the moment before one of its graphs is launched, so that the graph has inputs of a real step.

    with load(path, trust=trust) as core:
        run_until(core, "verify.b1", prompts)
        core.graphs["verify.b1"].run()

The engine runs prompts as it always does; it is stopped where it would launch the graph, with every input in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_core.errors import UsageError

from runtime.engine import Engine, Request
from runtime.run import LoadedCore, LoadedGraph

MAX_TOKENS = 32
PROMPT_TOKENS = 24
"""Of a prompt that is made up where a core carries none."""


class _Reached(Exception):
    """The graph would be launched now."""


class _Stop:
    """In place of the graph: stops the engine."""

    def run(self) -> None:
        raise _Reached


class _Until:
    """A core, but for one graph."""

    def __init__(self, core: LoadedCore, graph_name: str) -> None:
        self._core, self._graph_name = core, graph_name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def graph(self, role: str, batch: int) -> LoadedGraph | _Stop:
        found = self._core.graph(role, batch)
        return _Stop() if found.name == self._graph_name else found


def run_until(core: LoadedCore, graph_name: str, prompts: Sequence[Sequence[int]]) -> None:
    """Run prompts until a graph would be launched.

    Args:
        core: freshly loaded on a CPU.
        prompts: token ids; used in turn to fill the graph's batch. None: made up.
    Raises:
        UsageError: REPLAY_GRAPH; the core has no graph of that name, or its engine never launches it.
    """
    graph = core.graphs.get(graph_name)
    if graph is None:
        raise UsageError("REPLAY_GRAPH", "the core has no graph of this name", where=core.manifest.core_name,
                         expected=", ".join(core.graphs), got=graph_name, hint="name one of them with --graph")
    stand_in: Any = _Until(core, graph_name)
    engine = Engine(stand_in)
    chosen = list(prompts) or [made_up_prompt(core, seed) for seed in range(graph.batch)]
    for lane in range(graph.batch):
        prompt = chosen[lane % len(chosen)]
        engine.add(prompt, Request(max_tokens=MAX_TOKENS, speculation=graph.role != "decode"))
    try:
        while not engine.idle:
            engine.step()
    except _Reached:
        return
    raise UsageError("REPLAY_GRAPH", "the engine never launches this graph", where=graph_name,
                     hint="choose a prefill, draft, verify or decode graph")


def made_up_prompt(core: LoadedCore, seed: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    vocab = core.manifest.contract.vocab_size
    return [(7919 * (index + 1) + 104729 * seed) % vocab for index in range(PROMPT_TOKENS)]
