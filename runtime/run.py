"""A loaded core: its graphs, ready to launch, and the buffers the host reads and writes.

    core.io["slots"][0] = 0
    core.launch("decode.b1")
    token = core.io["sampled"][0]
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from dflash_core.v1 import graph_pb2, manifest_pb2

from runtime.core import smallest_bucket
from runtime.mapping import MappedCore
from runtime.ops import DTYPE_BY_NAME, Args, Array, Op, Step


@dataclass(frozen=True, slots=True)
class BoundNode:
    """What a kernel node runs on: its op, and its arguments as arrays over the buffers' memory."""

    op: Op
    args: Args
    node: graph_pb2.GraphNode


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """One launchable graph: a bound step per node, and the edges that order them. An empty node has no arguments."""

    name: str
    role: str
    batch: int
    query_tokens: int
    steps: tuple[Step, ...]
    edges: tuple[tuple[int, int], ...]
    bound: tuple[BoundNode | None, ...] = ()

    def run(self, order: Sequence[int] | None = None) -> None:
        """Run all nodes, in list order or in the given one."""
        if order is None:
            for step in self.steps:
                step()
        else:
            for index in order:
                self.steps[index]()

    def shuffled_order(self, seed: int) -> list[int]:
        """A random order of the nodes that keeps every edge; a missing edge shows as a changed result."""
        rng = random.Random(seed)
        waiting = [0] * len(self.steps)
        followers: list[list[int]] = [[] for _ in self.steps]
        for first, second in self.edges:
            waiting[second] += 1
            followers[first].append(second)
        ready = [i for i, n in enumerate(waiting) if n == 0]
        order = []
        while ready:
            node = ready.pop(rng.randrange(len(ready)))
            order.append(node)
            for follower in followers[node]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        return order


class LoadedCore:
    """A core in memory. Close it, or use it as a context manager, to release the files it was read from."""

    def __init__(self, mapped: MappedCore, graphs: Mapping[str, LoadedGraph]) -> None:
        self._mapped = mapped
        self.graphs = graphs
        self.manifest: manifest_pb2.RebuildManifest = mapped.checked.verified.manifest
        self.core_digest = mapped.checked.verified.core_digest
        self.io: dict[str, Array] = {b.name: self._bound(b) for b in self.manifest.contract.io}
        self._flat = {name: array.reshape(-1) for name, array in self.io.items()}
        self.memory = mapped.memory
        self.symbols = {s.name: mapped.checked.symbols[s.symbol_id] for s in self.manifest.symbols}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._mapped.checked.verified.close()

    def _bound(self, binding: manifest_pb2.IoBinding) -> Array:
        return np.ndarray(tuple(binding.shape), DTYPE_BY_NAME[binding.dtype].numpy,
                          self._mapped.memory[binding.buffer_id].data, binding.offset)

    def put(self, name: str, offset: int, values: Sequence[int] | Sequence[float]) -> None:
        """Write consecutive elements of a binding, counted from its first."""
        self._flat[name][offset:offset + len(values)] = values

    def get(self, name: str, offset: int, count: int) -> list[Any]:
        """Read consecutive elements of a binding."""
        found: list[Any] = self._flat[name][offset:offset + count].tolist()
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a binding; KeyError when the core has none of that name."""
        return tuple(self.io[name].shape)

    def file(self, path: str) -> bytes | None:
        """The bytes of a model file that the core carries as published ("tokenizer.json"), or None."""
        for source in self.manifest.target.files:
            if source.path == path:
                entry = f"config/{source.sha256.hex()}"
                for listed in self.manifest.files:
                    if listed.path == entry:
                        return self._mapped.checked.verified.small_file(listed.ref)
        return None

    def graph(self, role: str, batch: int, query_tokens: int = 1) -> LoadedGraph:
        """The smallest graph of this role that serves a batch of so many rows each.

        Raises:
            CompatibilityError: NO_GRAPH; the core has no bucket of this size.
        """
        of_role = (g for g in self.graphs.values() if g.role == role)
        return smallest_bucket(of_role, role, batch, query_tokens, self.manifest.core_name)
