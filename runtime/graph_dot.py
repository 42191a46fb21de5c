"""A graph of a core as Graphviz text, to be looked at: one row for each layer, coloured by what a node computes.

    dflash-run inspect core --dot verify.b1 | dot -Tsvg > verify.svg

Nodes run from left to right and rows from top to bottom. Dashed edges are programmatic: the second kernel starts while
the first still runs. Edges that a path of others implies are not in the core, so none is left out here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dflash_core.v1.graph_pb2 import KERNEL, Graph, GraphEdge, GraphNode, GraphTemplate, NodeKind
from dflash_core.v1.manifest_pb2 import RebuildManifest

from .instantiate import graph_nodes

_COLOURS = (("attention", "#f4d58d"), ("linear", "#bcd7f5"), ("norm", "#d9ead3"), ("rope", "#d9ead3"),
            ("conv", "#e6d5f2"), ("sampl", "#f5c6c1"), ("accept", "#f5c6c1"), ("decide", "#f5c6c1"),
            ("candidates", "#f5c6c1"), ("selector", "#f5c6c1"), ("best_", "#f5c6c1"))
_PLAIN = "#eeeeee"
_LAYER = re.compile(r"^(?P<layer>\w+\.layers\.\w+)")
EDGE_ROOM = 0.35
"""Inches between rows."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A node as it is drawn: its row, what it computes, and its id and label."""

    node_id: int
    row: str
    kind: str
    label: str


def graph_dot(graph: Graph, templates: Mapping[int, GraphTemplate], manifest: RebuildManifest, target: str) -> str:
    """Graphviz text of a graph of a device target."""
    nodes, edges = graph_nodes(graph, dict(templates))
    kernels = {kernel.kernel_id: kernel.name for kernel in manifest.kernels}
    drawn = [_drawn(node, kernels) for node in nodes]
    bucket = f"batch {graph.bucket.batch}, {graph.bucket.query_tokens} tokens"
    title = f"{manifest.core_name}: {graph.name} on {target}, {bucket}, {len(nodes)} nodes, {len(edges)} edges"
    lines = [
        "digraph {", f"  label={_quoted(title)}; labelloc=t; fontname=Helvetica; fontsize=20;",
        f"  rankdir=TB; ranksep={EDGE_ROOM}; nodesep=0.15; newrank=true;",
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=10, margin="0.08,0.04"];',
        '  edge [arrowsize=0.5, color="#555555"];']
    rows = [list(row) for _, row in groupby(drawn, key=lambda d: d.row)]
    for index, row in enumerate(rows):
        lines += _row(index, row)
    lines += [f"  head{index} -> head{index + 1} [style=invis, weight=100];" for index in range(len(rows) - 1)]
    row_of = {node.node_id: index for index, row in enumerate(rows) for node in row}
    lines += [_edge(edge, row_of) for edge in edges]
    return "\n".join([*lines, "}", ""])


def _drawn(node: GraphNode, kernels: Mapping[int, str]) -> _Drawn:
    kind = kernels[node.kernel_id] if node.kind == KERNEL else NodeKind.Name(node.kind).lower()
    label = re.sub(r" *\[[\d ]*\]$", "", node.debug_name)
    found = _LAYER.match(label)
    return _Drawn(node.node_id, found["layer"] if found else "", re.sub(r"\.\d+$", "", kind), label)


def _row(index: int, row: Sequence[_Drawn]) -> Iterable[str]:
    """One row, behind its heading."""
    heading = row[0].row or "step"
    yield (f"  {{ rank=same; head{index} [label={_quoted(heading)}, shape=plaintext, style=solid, fontsize=12, "
           "group=head];")
    for column, node in enumerate(row):
        colour = next((c for word, c in _COLOURS if word in node.kind), _PLAIN)
        rest = node.label.removeprefix(node.row).strip(".") or ("" if node.row else node.label)
        text = f"{node.node_id}  {node.kind}" + (f"\n{rest}" if rest and rest != node.kind else "")
        yield f"    n{node.node_id} [label={_quoted(text)}, fillcolor={_quoted(colour)}, group=c{column}];"
    yield f"    head{index} -> n{row[0].node_id} [style=invis];"
    yield "  }"


def _edge(edge: GraphEdge, row_of: Mapping[int, int]) -> str:
    """An edge; those between rows do not move nodes."""
    source = getattr(edge, "from")
    style = ["style=dashed"] if edge.type else []
    if row_of[source] != row_of[edge.to]:
        style.append("constraint=false")
    return f"  n{source} -> n{edge.to}" + (f" [{', '.join(style)}];" if style else ";")


def _quoted(text: str) -> str:
    """A Graphviz string; control characters other than line ends are replaced."""
    safe = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return '"' + safe.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
