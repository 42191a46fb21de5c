"""Count the nodes and edges of a graph file in its bytes, before a parser spends fifty bytes of memory on each.

An empty edge takes two bytes in a file and fifty in memory, so the limits of `structure_graph` come too late for a
file that was made to exhaust memory. Nothing that a parser would go on reading may end the count: bytes that are no
protobuf are refused here, and so are groups, which no writer of graph files makes.
Source: the protobuf wire format.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.errors import FormatError

from .structure_rules import MAX_EDGES, MAX_GRAPHS, MAX_NODES, broken

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = 0, 1, 2, 3, 4, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A message of a graph set that holds nodes and edges: its name, and the numbers of those two fields."""

    name: str
    nodes: int
    edges: int


_TEMPLATES, _GRAPHS = 2, 3
_KINDS = {_TEMPLATES: _Kind("template", nodes=2, edges=3), _GRAPHS: _Kind("graph", nodes=5, edges=6)}


def check_graph_bytes(data: bytes) -> None:
    """Refuse a graph file with more graphs, nodes or edges than the limits allow; stops at the first one too many.

    Raises:
        FormatError: GRAPH_LIMIT; MANIFEST_MALFORMED for bytes that are no protobuf; MANIFEST_UNKNOWN for a group.
    """
    at, seen = 0, {_TEMPLATES: 0, _GRAPHS: 0}
    while at < len(data):
        number, start, at = _field(data, at, len(data))
        kind = _KINDS.get(number)
        if kind is None:
            continue
        seen[number] += 1
        place = f"{kind.name} {seen[number]} of the file"
        if seen[_GRAPHS] > MAX_GRAPHS:
            raise broken("GRAPH_LIMIT", "too many graphs", place, expected=f"at most {MAX_GRAPHS}")
        _count(data, start, at, kind, place)


def _count(data: bytes, at: int, end: int, kind: _Kind, place: str) -> None:
    nodes = edges = 0
    while at < end:
        number, _, at = _field(data, at, end)
        if number == kind.nodes:
            nodes += 1
            if nodes > MAX_NODES:
                raise broken("GRAPH_LIMIT", "too many nodes", place, expected=f"at most {MAX_NODES}")
        elif number == kind.edges:
            edges += 1
            if edges > MAX_EDGES:
                raise broken("GRAPH_LIMIT", "too many edges", place, expected=f"at most {MAX_EDGES}")


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """The field at `at`: its number if it can be a message, else 0; where it starts, and where the next field is."""
    tag, start = _varint(data, at, end)
    wire = tag & 7
    if wire == _BYTES:
        nbytes, start = _varint(data, start, end)
        stop = start + nbytes
    elif wire == _VARINT:
        _, stop = _varint(data, start, end)
    elif wire in _FIXED_BYTES:
        stop = start + _FIXED_BYTES[wire]
    elif wire in (_START_GROUP, _END_GROUP):
        raise broken("MANIFEST_UNKNOWN", "unknown field where launches are described", f"byte {at} of a graph file",
                     got="a group")
    else:
        raise _malformed(at)
    if stop > end:
        raise _malformed(at)
    return tag >> 3 if wire == _BYTES else 0, start, stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    first = at
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise _malformed(first)


def _malformed(at: int) -> FormatError:
    return broken("MANIFEST_MALFORMED", "not a GraphSet", f"byte {at} of a graph file")
