"""A graph's nodes as they will be launched: bucket overrides applied, addresses and symbols written into parameters.

Pure functions over messages; nothing here knows a driver.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as pb

Dims = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """Where a kernel's parameters lie in a node's `param_block`: they follow each other without padding."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> ParamLayout:
        return cls(tuple(sizes), tuple(accumulate(sizes, initial=0))[:-1])


@dataclass(frozen=True, slots=True)
class Addresses:
    """What relocations resolve to: device address of each buffer, value of each symbol."""

    buffers: Mapping[int, int]
    symbols: Mapping[int, int]

    def of(self, relocation: pb.Relocation) -> int:
        return self.buffers[relocation.buffer_id] + relocation.addend


def place_of(graph: str, node: pb.GraphNode) -> str:
    """How messages name a node."""
    return f"graph {graph} node {node.node_id} {node.debug_name}".rstrip()


def expand(
    graph: pb.Graph, templates: Mapping[int, pb.GraphTemplate], layout_of: Callable[[int], ParamLayout]
) -> tuple[Sequence[pb.GraphNode], Sequence[pb.GraphEdge]]:
    """A graph's nodes and edges: its own, or copies of its template's with the bucket's overrides applied.

    Args:
        layout_of: kernel id to the layout of its parameters.
    """
    if not graph.HasField("template_id"):
        return graph.nodes, graph.edges
    template = templates[graph.template_id]
    nodes = list(template.nodes)
    for override in graph.overrides:
        nodes[override.node_id] = _overridden(nodes[override.node_id], override, layout_of)
    return nodes, template.edges


def _overridden(
    original: pb.GraphNode, override: pb.NodeOverride, layout_of: Callable[[int], ParamLayout]
) -> pb.GraphNode:
    node = pb.GraphNode()
    node.CopyFrom(original)
    if override.HasField("grid"):
        node.grid.CopyFrom(override.grid)
    if override.HasField("dynamic_shared_bytes"):
        node.dynamic_shared_bytes = override.dynamic_shared_bytes
    if override.HasField("kernel_id"):
        node.kernel_id = override.kernel_id
    if override.params:
        offsets, block = layout_of(node.kernel_id).offsets, bytearray(node.param_block)
        for patch in override.params:
            start = offsets[patch.param_index]
            block[start : start + len(patch.value)] = patch.value
        node.param_block = bytes(block)
    for changed in override.relocations:
        for relocation in node.relocations:
            if (relocation.param_index, relocation.offset) == (changed.param_index, changed.offset):
                relocation.CopyFrom(changed)
    return node


def parameters(node: pb.GraphNode, layout: ParamLayout, addresses: Addresses, where: str) -> bytearray:
    """A kernel node's parameter bytes with every relocation written.

    Raises:
        CompatibilityError: FEATURE_UNSUPPORTED, a kind of relocation that this runtime does not write.
    """
    block = bytearray(node.param_block)
    for relocation in node.relocations:
        at = layout.offsets[relocation.param_index] + relocation.offset
        if relocation.kind == pb.BUFFER_ADDRESS:
            struct.pack_into("<Q", block, at, addresses.of(relocation))
        elif relocation.kind in (pb.SYMBOL_VALUE, pb.RANK_VALUE):
            value = addresses.symbols[relocation.symbol_id] if relocation.kind == pb.SYMBOL_VALUE else 0
            width = relocation.width if relocation.HasField("width") else 8
            struct.pack_into("<i" if width == 4 else "<q", block, at, value + relocation.addend)
        else:
            raise unsupported(f"relocation {pb.RelocationKind.Name(relocation.kind)}", where)
    return block


def unsupported(what: str, where: str) -> CompatibilityError:
    return CompatibilityError("FEATURE_UNSUPPORTED", f"this runtime does not run it on a GPU: {what}", where=where,
                              hint="use a newer dflash")


def dims(message: pb.Dim3) -> Dims:
    return message.x, message.y, message.z
