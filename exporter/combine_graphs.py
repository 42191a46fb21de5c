"""Merge graph sets: lead every reference to the combined ids, then graphs of one name are equal or refused.

    sets = merge_graphs(tables, inputs)
    sets[0].graphs.graphs[0].component_id

Source: docs/compatibility.md, "Which cores combine".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as g

from exporter.combine_batch import check_fixed, widen_node
from exporter.combine_ids import IdMaps, Tables, conflict, field_text, first_field
from exporter.combine_inputs import Input

_NOT_COMPARED = ("component_id", "load_priority")
_ADDRESSES = (g.BUFFER_ADDRESS, g.TENSOR_MAP_ADDRESS)
_HINT = "export them with --batch sizes of their own, or from the same checkpoints with the same settings and release"


@dataclass(slots=True)
class MergedSet:
    """The graphs of one device target and rank class; `owners` says which input had each graph first."""

    target_id: int
    rank: int | None
    graphs: g.GraphSet
    owners: dict[str, str] = field(default_factory=dict)
    templates: dict[bytes, int] = field(default_factory=dict)


def merge_graphs(tables: Tables, inputs: Sequence[Input]) -> tuple[MergedSet, ...]:
    """One graph set per device target and rank class, ids and component ids those of the combined core.

    Raises:
        CompatibilityError: COMBINE_GRAPH, one name and two graphs, with the first thing that differs; COMBINE_BATCH.
    """
    sets: dict[tuple[int, int | None], MergedSet] = {}
    first_component = 1
    for item, maps in zip(inputs, tables.maps, strict=True):
        for graph_file in item.manifest.graph_files:
            rank = graph_file.rank if graph_file.HasField("rank") else None
            key = (maps.target[graph_file.target_id], rank)
            merged = sets.setdefault(key, MergedSet(*key, g.GraphSet(format_version=1)))
            mover = _Mover(tables, maps, item, inputs, merged.target_id)
            _add_set(merged, item, item.core.graph_set(graph_file), mover, first_component)
        first_component += len(item.parts)
    return tuple(sets.values())


def _add_set(merged: MergedSet, item: Input, graph_set: g.GraphSet, mover: _Mover, first_component: int) -> None:
    components = {part.component.component_id: first_component + index for index, part in enumerate(item.parts)}
    ids: dict[int, int] = {}
    for template in _children_first(graph_set.templates):
        moved = g.GraphTemplate()
        moved.CopyFrom(template)
        mover.nodes(moved.nodes, ids, f"template {template.template_id}")
        moved.ClearField("template_id")
        if mover.renumbers_kernels:
            moved.ClearField("topology_sha256")  # it covers kernel ids, which are others now
        content = moved.SerializeToString(deterministic=True)
        if content not in merged.templates:
            merged.templates[content] = moved.template_id = len(merged.templates)
            merged.graphs.templates.append(moved)
        ids[template.template_id] = merged.templates[content]
    known = {graph.name: graph for graph in merged.graphs.graphs}
    for graph in graph_set.graphs:
        moved_graph = mover.graph(graph, ids)
        moved_graph.component_id = components.get(graph.component_id, first_component)
        kept = known.get(graph.name)
        if kept is None:
            merged.graphs.graphs.append(moved_graph)
            merged.owners[graph.name] = item.label
            continue
        difference = _difference(kept, moved_graph, mover.tables)
        if difference is not None:
            where, expected, got = difference
            raise conflict("COMBINE_GRAPH", "a graph differs", (merged.owners[graph.name], item.label),
                           f"graph {graph.name}, {where}", expected, got, _HINT)


def _children_first(templates: Sequence[g.GraphTemplate]) -> Iterable[g.GraphTemplate]:
    """Templates in an order in which each follows those it contains; the structure rules exclude cycles."""
    waiting = {template.template_id: template for template in templates}
    while waiting:
        ready = [t for t in waiting.values()
                 if not any(n.kind == g.CHILD and n.child_template in waiting for n in t.nodes)]
        for template in ready:
            del waiting[template.template_id]
            yield template


class _Mover:
    """Leads the references of one input's graphs to the combined core, and tells its ops of more slots if need be."""

    def __init__(self, tables: Tables, maps: IdMaps, item: Input, inputs: Sequence[Input], target_id: int) -> None:
        self.tables, self.maps, self.item = tables, maps, item
        self.kernels = {kernel.kernel_id: kernel for kernel in tables.kernels}
        self.symbols = {symbol.symbol_id: symbol for symbol in tables.symbols}
        self.target = next(t for t in tables.targets if t.target_id == target_id)
        self.slots = (item.manifest.contract.max_batch, max(i.manifest.contract.max_batch for i in inputs))
        self.renumbers_kernels = any(old != new for old, new in maps.kernel.items())
        check_fixed(item, self.target, self.slots[1])

    def graph(self, graph: g.Graph, templates: Mapping[int, int]) -> g.Graph:
        moved = g.Graph()
        moved.CopyFrom(graph)
        where = f"{self.item.label}: graph {graph.name}"
        if graph.HasField("template_id"):
            moved.template_id = templates[graph.template_id]
        self.nodes(moved.nodes, templates, where)
        if moved.overrides and self.slots[0] != self.slots[1]:
            raise CompatibilityError(
                "COMBINE_BATCH", "the cores do not combine: a graph that shares a template keeps its number of slots",
                where=where, expected=self.slots[1], got=self.slots[0],
                hint=f"export every core with --batch {self.slots[1]} as its largest")
        for override in moved.overrides:
            if override.HasField("kernel_id"):
                override.kernel_id = self.maps.kernel[override.kernel_id]
            for relocation in override.relocations:
                self._relocation(relocation)
        for buffers in (moved.input_buffers, moved.output_buffers):
            buffers[:] = sorted(self.maps.buffer[buffer_id] for buffer_id in buffers)
        return moved

    def nodes(self, nodes: Iterable[g.GraphNode], templates: Mapping[int, int], where: str) -> None:
        """Lead every reference of these nodes to the combined core, in place."""
        for node in nodes:
            if node.HasField("child_template"):
                node.child_template = templates[node.child_template]
            places = [*node.relocations]
            if node.HasField("copy"):
                places += [node.copy.source, node.copy.destination]
            if node.HasField("fill"):
                places.append(node.fill.destination)
            for relocation in places:
                self._relocation(relocation)
            for access in node.accesses:
                access.buffer_id = self.maps.buffer[access.buffer_id]
            if node.HasField("kernel_id"):
                node.kernel_id = self.maps.kernel[node.kernel_id]
                if self.slots[0] != self.slots[1]:
                    widen_node(node, self._variant(node.kernel_id), self.symbols, self.slots,
                               f"{where} node {node.node_id}")

    def _relocation(self, relocation: g.Relocation) -> None:
        if relocation.kind in _ADDRESSES:
            relocation.buffer_id = self.maps.buffer[relocation.buffer_id]
        if relocation.HasField("symbol_id"):
            relocation.symbol_id = self.maps.symbol[relocation.symbol_id]
        sizes = relocation.tensor_map.dim_symbols
        for axis, symbol_id in list(sizes.items()):
            sizes[axis] = self.maps.symbol[symbol_id]

    def _variant(self, kernel_id: int) -> g.KernelVariant:
        variants = {variant.module_id: variant for variant in self.kernels[kernel_id].variants}
        return next(variants[module_id] for module_id in self.target.module_ids if module_id in variants)


def _difference(kept: g.Graph, other: g.Graph, tables: Tables) -> tuple[str, str, str] | None:
    """The first thing in which two graphs differ and both its values, or None."""
    field_name = first_field(kept, other, ignore=_NOT_COMPARED)
    if field_name is None:
        return None
    if field_name == "nodes":
        return _node_difference(kept, other, tables)
    if field_name in ("edges", "overrides"):
        left, right = getattr(kept, field_name), getattr(other, field_name)
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return f"{field_name} {index}", _line(a), _line(b)
        return field_name, str(len(left)), str(len(right))
    return field_name, field_text(kept, field_name), field_text(other, field_name)


def _node_difference(kept: g.Graph, other: g.Graph, tables: Tables) -> tuple[str, str, str]:
    kernels = {kernel.kernel_id: kernel for kernel in tables.kernels}
    for left, right in zip(kept.nodes, other.nodes, strict=False):
        name = first_field(left, right)
        if name is None:
            continue
        where = f"node {left.node_id} {left.debug_name}".rstrip()
        if name == "kernel_id":
            return f"{where}, kernel", kernels[left.kernel_id].name, kernels[right.kernel_id].name
        if name == "param_block" and left.kernel_id == right.kernel_id:
            at = 0
            for slot in kernels[left.kernel_id].variants[0].params:
                values = [node.param_block[at:at + slot.size] for node in (left, right)]
                if values[0] != values[1]:
                    return f"{where}, {slot.name or 'parameter'}", values[0].hex(), values[1].hex()
                at += slot.size
        return f"{where}, {name}", field_text(left, name), field_text(right, name)
    return "number of nodes", str(len(kept.nodes)), str(len(other.nodes))


def _line(message: g.GraphEdge | g.NodeOverride) -> str:
    return str(message).replace("\n", " ").strip()[:80]
