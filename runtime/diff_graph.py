"""A graph in words that two cores share: buffers, kernels and symbols by name, so that numbering does not matter.

    before, after = (described(graph, GraphNames.of(manifest), templates) for …)
    first_difference(before, after)          # ("node 12 layers.0.qkv, rows", "08000000", "20000000")
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash_core.v1.graph_pb2 import (
    CHILD,
    SYMBOL_VALUE,
    Graph,
    GraphNode,
    GraphTemplate,
    Kernel,
    KernelModule,
    NodeKind,
    NodeOverride,
    ParamSlot,
    Relocation,
)
from dflash_core.v1.manifest_pb2 import RebuildManifest

Facts = Mapping[str, str]
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class GraphNames:
    """What a core's ids stand for.

    Attributes:
        buffers, symbols, kernels: id -> name.
        views: id of a WEIGHTS buffer -> offset -> name of the tensor that begins there.
        params: id of a kernel -> its parameter slots.
    """

    buffers: Mapping[int, str]
    views: Mapping[int, Mapping[int, str]]
    symbols: Mapping[int, str]
    kernels: Mapping[int, str]
    params: Mapping[int, Sequence[ParamSlot]]

    @classmethod
    def of(cls, manifest: RebuildManifest) -> GraphNames:
        """The names of one core. A kernel's name covers its content, so two kernels of one name stay apart."""
        modules = {module.module_id: _module_text(module) for module in manifest.modules}
        by_blob: dict[int, dict[int, str]] = {}
        for view in manifest.tensor_views:
            by_blob.setdefault(view.blob_id, {}).setdefault(view.offset_bytes, view.name)
        return cls(
            {buffer.buffer_id: buffer.name for buffer in manifest.buffers},
            {buffer.buffer_id: by_blob.get(buffer.blob_id, {}) for buffer in manifest.buffers
             if buffer.HasField("blob_id")},
            {symbol.symbol_id: symbol.name for symbol in manifest.symbols},
            {kernel.kernel_id: _kernel_text(kernel, modules) for kernel in manifest.kernels},
            {kernel.kernel_id: kernel.variants[0].params for kernel in manifest.kernels},
        )

    def place(self, buffer_id: int, offset: int) -> str:
        """A place in memory: the tensor that begins there, or a buffer and an offset."""
        return self.views.get(buffer_id, {}).get(offset) or f"{self.buffers[buffer_id]}+{offset}"


def described(graph: Graph, names: GraphNames, templates: Mapping[int, GraphTemplate]) -> tuple[Facts, ...]:
    """A graph as facts: first about itself, then about each node, with a bucket's overrides in place.

    Args:
        graph: from a graph set that the structure rules have passed.
        names: of its core.
        templates: those of its graph set, by id.
    """
    nodes, edges = graph.nodes, graph.edges
    if graph.HasField("template_id"):
        template = templates[graph.template_id]
        nodes, edges = template.nodes, template.edges
    overrides = {override.node_id: override for override in graph.overrides}
    head = {
        "": "graph", "role": graph.role, "batch": str(graph.bucket.batch), "tokens": str(graph.bucket.query_tokens),
        "inputs": _sorted(names.buffers[buffer_id] for buffer_id in graph.input_buffers),
        "outputs": _sorted(names.buffers[buffer_id] for buffer_id in graph.output_buffers),
        "nodes": str(len(nodes)),
        "edges": _sorted(f"{getattr(edge, 'from')}>{edge.to}:{edge.from_port}:{edge.type}" for edge in edges),
    }
    return (head, *(_node(node, overrides.get(node.node_id), names, templates) for node in nodes))


def first_difference(left: Sequence[Facts], right: Sequence[Facts]) -> tuple[str, str, str] | None:
    """Place and both values of the first fact that differs; None when two descriptions are equal."""
    for ours, theirs in zip(left, right, strict=False):
        if ours == theirs:
            continue
        for name in (*ours, *(name for name in theirs if name not in ours)):
            values = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
            if values[0] != values[1]:
                return f"{ours['']}, {name}" if name else "node", *values
    return None


def _node(
    node: GraphNode, override: NodeOverride | None, names: GraphNames, templates: Mapping[int, GraphTemplate]
) -> Facts:
    patches: dict[int, bytes] = {}
    if override is not None:
        node, patches = _overridden(node, override), {patch.param_index: patch.value for patch in override.params}
    facts = {"": f"node {node.node_id} {node.debug_name}".rstrip(), "kind": NodeKind.Name(node.kind)}
    if node.HasField("kernel_id"):
        facts["kernel"] = names.kernels[node.kernel_id]
        facts |= _params(node, patches, names)
    for name in ("grid", "block", "cluster"):
        if node.HasField(name):
            dims = getattr(node, name)
            facts[name] = f"{dims.x},{dims.y},{dims.z}"
    if node.HasField("dynamic_shared_bytes"):
        facts["dynamic_shared_bytes"] = str(node.dynamic_shared_bytes)
    if node.attributes:
        facts["attributes"] = _sorted(f"{item.id}={item.value}" for item in node.attributes)
    if node.HasField("copy"):
        facts["copy"] = f"{_place(node.copy.source, names)} → {_place(node.copy.destination, names)} {node.copy.bytes}"
    if node.HasField("fill"):
        fill = node.fill
        facts["fill"] = f"{_place(fill.destination, names)} {fill.value} {fill.element_bytes}×{fill.count}"
    if node.kind == CHILD:
        inner = templates[node.child_template]
        words = [f"{sorted(_node(child, None, names, templates).items())}" for child in inner.nodes]
        words += [str(edge) for edge in inner.edges]
        facts["child"] = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    facts["accesses"] = _sorted(
        f"{'write' if a.write else 'read'} {names.place(a.buffer_id, a.offset)}:{a.bytes}" for a in node.accesses)
    return facts


def _params(node: GraphNode, patches: Mapping[int, bytes], names: GraphNames) -> Facts:
    """Every parameter by name: where it points, which symbol it takes, or its bytes."""
    facts, at = {}, 0
    relocations: dict[int, list[Relocation]] = {}
    for relocation in node.relocations:
        relocations.setdefault(relocation.param_index, []).append(relocation)
    for index, slot in enumerate(names.params[node.kernel_id]):
        value = patches.get(index, node.param_block[at : at + slot.size])
        at += slot.size
        places = [f"{place.offset or ''}@{_place(place, names)}" for place in relocations.get(index, ())]
        facts[slot.name or f"parameter {index}"] = " ".join(places) if places and not any(value) else " ".join(
            [value.hex(), *places])
    return facts


def _place(relocation: Relocation, names: GraphNames) -> str:
    if relocation.kind == SYMBOL_VALUE:
        return f"{names.symbols[relocation.symbol_id]}+{relocation.addend}"
    text = names.place(relocation.buffer_id, relocation.addend)
    if relocation.HasField("tensor_map"):
        sizes = sorted((axis, names.symbols[i]) for axis, i in relocation.tensor_map.dim_symbols.items())
        spec = type(relocation.tensor_map)()
        spec.CopyFrom(relocation.tensor_map)
        spec.ClearField("dim_symbols")
        text += f" map {spec.SerializeToString(deterministic=True).hex()} {sizes}"
    return text


def _overridden(node: GraphNode, override: NodeOverride) -> GraphNode:
    result = GraphNode()
    result.CopyFrom(node)
    if override.HasField("grid"):
        result.grid.CopyFrom(override.grid)
    if override.HasField("dynamic_shared_bytes"):
        result.dynamic_shared_bytes = override.dynamic_shared_bytes
    if override.HasField("kernel_id"):
        result.kernel_id = override.kernel_id
    for changed in override.relocations:
        for relocation in result.relocations:
            if (relocation.param_index, relocation.offset) == (changed.param_index, changed.offset):
                relocation.CopyFrom(changed)
    return result


def _kernel_text(kernel: Kernel, modules: Mapping[int, str]) -> str:
    """Name and a digest of the content, in which modules stand by what they are."""
    copy = Kernel()
    copy.CopyFrom(kernel)
    copy.ClearField("kernel_id")
    words = []
    for variant in copy.variants:
        words.append(modules[variant.module_id])
        variant.ClearField("module_id")
    content = copy.SerializeToString(deterministic=True) + "\n".join(words).encode()
    return f"{kernel.name} {hashlib.sha256(content).hexdigest()[:8]}"


def _module_text(module: KernelModule) -> str:
    copy = KernelModule()
    copy.CopyFrom(module)
    copy.ClearField("module_id")
    return copy.SerializeToString(deterministic=True).hex()


def _sorted(words: Iterable[str]) -> str:
    return " ".join(sorted(words))
