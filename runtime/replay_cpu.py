"""Replay a graph on a CPU: what each node writes, and whether every order that the edges allow gives the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from dflash_core.v1 import graph_pb2

from runtime.ops import Array
from runtime.run import BoundNode, LoadedCore

ORDERS = 3
"""Random orders that are tried beside the recorded one."""


@dataclass(frozen=True, slots=True)
class NodeWrites:
    """What one node wrote.

    Attributes:
        node_id, name, op: of the node.
        nbytes: of the ranges that it declares as written.
        sha256: over their contents, in order, in hex.
    """

    node_id: int
    name: str
    op: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CpuReplay:
    """Nodes in recorded order; `unordered` names the buffers that another order of the nodes leaves different."""

    nodes: tuple[NodeWrites, ...]
    unordered: tuple[str, ...]


def replay_on_cpu(core: LoadedCore, graph_name: str) -> CpuReplay:
    """Replay a graph from the state that the core is in; the core ends as if the graph had been launched once."""
    graph = core.graphs[graph_name]
    kept = {b.buffer_id for b in core.manifest.buffers if b.buffer_class not in (graph_pb2.WEIGHTS, graph_pb2.SCRATCH)}
    start = _copy(core, kept)
    nodes = []
    for index, step in enumerate(graph.steps):
        step()
        bound = graph.bound[index]
        if bound is not None:
            nodes.append(_writes(core, bound))
    end = _copy(core, kept)
    names = {b.buffer_id: b.name for b in core.manifest.buffers}
    different: set[str] = set()
    for seed in range(ORDERS):
        _restore(core, start)
        graph.run(graph.shuffled_order(seed))
        different |= {names[i] for i, content in end.items() if not np.array_equal(content, core.memory[i])}
    _restore(core, end)
    return CpuReplay(tuple(nodes), tuple(sorted(different)))


def _writes(core: LoadedCore, bound: BoundNode) -> NodeWrites:
    digest, nbytes = hashlib.sha256(), 0
    for access in bound.node.accesses:
        if access.write:
            memory = core.memory[access.buffer_id]
            part = memory[access.offset:access.offset + access.bytes if access.bytes else memory.nbytes]
            digest.update(part.data)
            nbytes += part.nbytes
    return NodeWrites(bound.node.node_id, bound.node.debug_name, bound.op.name, nbytes, digest.hexdigest())


def _copy(core: LoadedCore, buffers: set[int]) -> dict[int, Array]:
    return {i: memory.copy() for i, memory in core.memory.items() if i in buffers}


def _restore(core: LoadedCore, contents: Mapping[int, Array]) -> None:
    for buffer_id, content in contents.items():
        core.memory[buffer_id][:] = content
