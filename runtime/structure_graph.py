"""Rules for a graph set: identities, edges without cycles, templates without recursion, and each node by itself.

Nothing here recurses: order is found by counting predecessors, and what a template expands to by adding up.
Source: docs/core-format.md, "Templates and buckets".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dflash_core.errors import CompatibilityError
from dflash_core.v1.graph_pb2 import (
    CHILD,
    CPU_REGISTRY,
    KERNEL,
    GraphEdge,
    GraphNode,
    GraphSet,
    Kernel,
    NodeOverride,
)
from dflash_core.v1.graph_pb2 import Graph as GraphMessage
from dflash_core.v1.manifest_pb2 import RebuildManifest

from .structure_node import Layout, NodeTables, check_node, layout_of
from .structure_rules import (
    MAX_EDGES,
    MAX_GRAPHS,
    MAX_NODES,
    broken,
    buffer_ranges,
    refuse_unknown_fields,
    unique,
    unsupported,
)


def check_graph_set(graph_set: GraphSet, manifest: RebuildManifest, target_id: int | None = None) -> None:
    """Check all graphs of one graph file.

    1. Unknown fields and limits. 2. Nodes and edges of every template. 3. Templates do not contain themselves.
    4. Graphs: nodes and edges of their own, or a template and what they override.

    Args:
        graph_set: parsed from verified bytes.
        manifest: passed by `check_manifest_structure`.
        target_id: the device target whose kernel variants the nodes use; None: the nodes fit every target's.
    Raises:
        FormatError: MANIFEST_UNKNOWN, GRAPH_REF, GRAPH_CYCLE, GRAPH_LIMIT or RELOC_RANGE.
        CompatibilityError: VERSION_UNSUPPORTED; FEATURE_UNSUPPORTED, named: conditional and load-capture nodes,
            edges other than full and programmatic ones, peer and multicast addresses.
    """
    # 1.
    if graph_set.format_version != 1:
        raise CompatibilityError("VERSION_UNSUPPORTED", "unknown version of a graph set", where="graphs/", expected=1,
                                 got=graph_set.format_version, hint="use a newer dflash")
    refuse_unknown_fields(graph_set, "graphs/")
    if len(graph_set.graphs) > MAX_GRAPHS:
        raise broken("GRAPH_LIMIT", "too many graphs", "graphs/", expected=f"at most {MAX_GRAPHS}",
                     got=len(graph_set.graphs))
    unique((template.template_id for template in graph_set.templates), "GRAPH_REF", "template")
    unique((graph.name for graph in graph_set.graphs), "GRAPH_REF", "graph")
    tables = _tables(manifest, target_id)
    # 2.
    templates = {template.template_id: template.nodes for template in graph_set.templates}
    chained = {template.template_id: {edge.to for edge in template.edges if edge.type}
               for template in graph_set.templates}
    for template in graph_set.templates:
        place = f"template {template.template_id}"
        _check_nodes(template.nodes, tables, templates.keys(), place)
        _check_edges(template.edges, template.nodes, tables, place)
    # 3.
    expanded = _expanded_nodes(templates)
    # 4.
    listed = {name for graph_file in manifest.graph_files for name in graph_file.graph_names}
    components = {component.component_id for component in manifest.components}
    for graph in graph_set.graphs:
        place = f"graph {graph.name}"
        if graph.name not in listed:
            raise broken("GRAPH_REF", "graph is not in the manifest", place)
        _check_graph(graph, tables, components, place)
        if graph.HasField("template_id"):
            if graph.template_id not in templates:
                raise broken("GRAPH_REF", "unknown template", place, got=graph.template_id)
            _check_overrides(graph.overrides, templates[graph.template_id], tables, templates.keys(), place)
            _check_chained(graph, chained[graph.template_id], tables, place)
        elif graph.overrides:
            raise broken("GRAPH_REF", "overrides without a template", place)
        else:
            _check_nodes(graph.nodes, tables, templates.keys(), place)
            _check_edges(graph.edges, graph.nodes, tables, place)
            _check_expansion(len(graph.nodes) + sum(expanded[child] for child in _children(graph.nodes)), place)


def _tables(manifest: RebuildManifest, target_id: int | None) -> NodeTables:
    targets = [t for t in manifest.device_targets if target_id is None or t.target_id == target_id]
    on_cpu = {module.module_id: module.kind == CPU_REGISTRY for module in manifest.modules}
    layouts: dict[int, tuple[Layout, ...]] = {}
    for kernel in manifest.kernels:
        found = [_layout_for(kernel, target.module_ids, on_cpu) for target in targets]
        chosen = tuple(dict.fromkeys(layout for layout in found if layout is not None))
        if chosen:
            layouts[kernel.kernel_id] = chosen
    return NodeTables(
        layouts=layouts, buffers=buffer_ranges(manifest),
        symbols={symbol.symbol_id: symbol for symbol in manifest.symbols},
        waiting=frozenset(k.kernel_id for k in manifest.kernels if all(v.waits_on_dependency for v in k.variants)),
    )


def _layout_for(kernel: Kernel, module_ids: Sequence[int], on_cpu: Mapping[int, bool]) -> Layout | None:
    """Layout of the variant in the first of a device target's modules that has one."""
    variants = {variant.module_id: variant for variant in kernel.variants}
    for module_id in module_ids:
        if module_id in variants:
            return layout_of(variants[module_id], on_cpu=on_cpu[module_id])
    return None


def _check_graph(graph: GraphMessage, tables: NodeTables, components: set[int], place: str) -> None:
    if graph.conditionals:
        raise unsupported("conditional graph", place)
    if graph.HasField("template_id") and (graph.nodes or graph.edges):
        raise broken("GRAPH_REF", "graph has a template and nodes of its own", place)
    for buffer_id in (*graph.input_buffers, *graph.output_buffers):
        if buffer_id not in tables.buffers:
            raise broken("GRAPH_REF", "graph binds an unknown buffer", place, got=buffer_id)
    if graph.HasField("component_id") and graph.component_id not in components:
        raise broken("GRAPH_REF", "graph of an unknown component", place, got=graph.component_id)


def _check_nodes(nodes: Sequence[GraphNode], tables: NodeTables, templates: Iterable[int], place: str) -> None:
    if len(nodes) > MAX_NODES:
        raise broken("GRAPH_LIMIT", "too many nodes", place, expected=f"at most {MAX_NODES}", got=len(nodes))
    for index, node in enumerate(nodes):
        where = f"node {index} of {place}"
        if node.node_id != index:
            raise broken("GRAPH_REF", "node id is not its place in the list", where, expected=index, got=node.node_id)
        _check_one(node, tables, templates, where)


def _check_one(node: GraphNode, tables: NodeTables, templates: Iterable[int], where: str) -> None:
    check_node(node, tables, where)
    if node.kind == CHILD and node.child_template not in templates:
        raise broken("GRAPH_REF", "unknown child template", where, got=node.child_template)


def _check_edges(edges: Sequence[GraphEdge], nodes: Sequence[GraphNode], tables: NodeTables, place: str) -> None:
    """Edges join present nodes, each pair once, and form no cycle; a programmatic one leads to a kernel that waits."""
    node_count = len(nodes)
    if len(edges) > MAX_EDGES:
        raise broken("GRAPH_LIMIT", "too many edges", place, expected=f"at most {MAX_EDGES}", got=len(edges))
    successors: list[list[int]] = [[] for _ in range(node_count)]
    predecessors = [0] * node_count
    for index, edge in enumerate(edges):
        source, sink = getattr(edge, "from"), edge.to
        if source >= node_count or sink >= node_count:
            raise broken("GRAPH_REF", "edge to an absent node", f"edge {index} of {place}",
                         expected=f"below {node_count}", got=f"{source} to {sink}")
        if edge.from_port or edge.type:
            _check_port(edge, nodes, tables, f"edge {index} of {place}")
        successors[source].append(sink)
        predecessors[sink] += 1
    for source, sinks in enumerate(successors):
        if len(set(sinks)) != len(sinks):
            raise broken("GRAPH_REF", "edge occurs twice", f"edges from node {source} of {place}")
    left = _peel(successors, predecessors)
    if left:
        raise broken("GRAPH_CYCLE", "edges form a cycle", f"{place}, nodes {', '.join(map(str, left[:8]))}")


def _check_port(edge: GraphEdge, nodes: Sequence[GraphNode], tables: NodeTables, where: str) -> None:
    """A programmatic edge joins two kernels, and the second waits for the first before it uses its results."""
    if edge.from_port > 2 or edge.type > 1:
        raise broken("MANIFEST_UNKNOWN", "unknown kind of edge", where,
                     got=f"port {edge.from_port}, type {edge.type}")
    if (edge.from_port, edge.type) != (1, 1):
        raise unsupported(f"edge of type {edge.type} from port {edge.from_port}", where)
    source, sink = nodes[getattr(edge, "from")], nodes[edge.to]
    if source.kind != KERNEL or sink.kind != KERNEL:
        raise broken("GRAPH_REF", "programmatic edge between nodes that are not both kernels", where)
    _check_waits(sink.kernel_id, tables, where)


def _check_waits(kernel_id: int, tables: NodeTables, where: str) -> None:
    if kernel_id not in tables.waiting:
        raise broken("GRAPH_REF", "programmatic edge to a kernel that does not wait for it", where,
                     expected="waits_on_dependency in every variant", got=f"kernel id {kernel_id}")


def _check_chained(graph: GraphMessage, chained: set[int], tables: NodeTables, place: str) -> None:
    """A kernel that a bucket puts behind a programmatic edge waits as well."""
    for override in graph.overrides:
        if override.HasField("kernel_id") and override.node_id in chained:
            _check_waits(override.kernel_id, tables, f"override of node {override.node_id} of {place}")


def _peel(successors: Sequence[Sequence[int]], predecessors: list[int]) -> list[int]:
    """Take away nodes without predecessors until none is left; what stays lies on or behind a cycle."""
    ready = [index for index, count in enumerate(predecessors) if count == 0]
    while ready:
        for sink in successors[ready.pop()]:
            predecessors[sink] -= 1
            if predecessors[sink] == 0:
                ready.append(sink)
    return [index for index, count in enumerate(predecessors) if count]


def _expanded_nodes(templates: Mapping[int, Sequence[GraphNode]]) -> dict[int, int]:
    """Nodes of each template with all its children in place; raises when a template contains itself."""
    ids = list(templates)
    index_of = {template_id: index for index, template_id in enumerate(ids)}
    children = [[index_of[child] for child in _children(templates[template_id])] for template_id in ids]
    parents: list[list[int]] = [[] for _ in ids]
    for parent, members in enumerate(children):
        for child in set(members):
            parents[child].append(parent)
    waiting = [len(set(members)) for members in children]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    expanded: dict[int, int] = {}
    while ready:
        index = ready.pop()
        total = len(templates[ids[index]]) + sum(expanded[ids[child]] for child in children[index])
        _check_expansion(total, f"template {ids[index]}")
        expanded[ids[index]] = total
        for parent in parents[index]:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                ready.append(parent)
    for index, count in enumerate(waiting):
        if count:
            raise broken("GRAPH_CYCLE", "template contains itself", f"template {ids[index]}")
    return expanded


def _children(nodes: Sequence[GraphNode]) -> list[int]:
    return [node.child_template for node in nodes if node.kind == CHILD]


def _check_expansion(total: int, place: str) -> None:
    if total > MAX_NODES:
        raise broken("GRAPH_LIMIT", "nested templates expand to too many nodes", place,
                     expected=f"at most {MAX_NODES}", got=total)


def _check_overrides(
    overrides: Sequence[NodeOverride], nodes: Sequence[GraphNode], tables: NodeTables, templates: Iterable[int],
    place: str,
) -> None:
    """Each overridden node obeys the same rules as one written out."""
    unique((override.node_id for override in overrides), "GRAPH_REF", f"override in {place} of node")
    for override in overrides:
        where = f"override of node {override.node_id} of {place}"
        if override.node_id >= len(nodes):
            raise broken("GRAPH_REF", "override of an absent node", where, expected=f"below {len(nodes)}")
        _check_one(_overridden(nodes[override.node_id], override, tables, where), tables, templates, where)


def _overridden(node: GraphNode, override: NodeOverride, tables: NodeTables, where: str) -> GraphNode:
    """The node that a bucket launches in place of its template's."""
    result = GraphNode()
    result.CopyFrom(node)
    if override.HasField("grid"):
        result.grid.CopyFrom(override.grid)
    if override.HasField("dynamic_shared_bytes"):
        result.dynamic_shared_bytes = override.dynamic_shared_bytes
    if override.HasField("kernel_id"):
        result.kernel_id = override.kernel_id
    places = {(item.param_index, item.offset): item for item in result.relocations}
    unique((f"{item.param_index}+{item.offset}" for item in override.relocations), "RELOC_RANGE", "relocation")
    for relocation in override.relocations:
        replaced = places.get((relocation.param_index, relocation.offset))
        if replaced is None:
            raise broken("RELOC_RANGE", "override replaces no relocation of the template", where,
                         got=f"parameter {relocation.param_index}, offset {relocation.offset}")
        replaced.CopyFrom(relocation)
    params = bytearray(result.param_block)
    for patch in override.params:
        for layout in tables.layouts.get(result.kernel_id, ()):
            if patch.param_index >= len(layout.sizes) or len(patch.value) != layout.sizes[patch.param_index]:
                raise broken("RELOC_RANGE", "patch does not fit its parameter", where,
                             got=f"{len(patch.value)} bytes for parameter {patch.param_index}")
            start = layout.offsets[patch.param_index]
            params[start : start + len(patch.value)] = patch.value
    result.param_block = bytes(params)
    return result
