"""Count the nodes and edges of a graph file in its bytes, before a parser spends fifty bytes of memory on each.

An empty edge takes two bytes in a file and fifty in memory, so the limits of `structure_graph` come too late for a
file that was made to exhaust memory. What nodes and overrides hold in turn, relocations above all, is bounded for the
file as a whole: each node is parsed alone, counted and dropped.

Nothing that a parser would go on reading may end the count: bytes that are no
protobuf are refused here, and so are groups, which no writer of graph files makes.
Source: the protobuf wire format.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.errors import FormatError
from dflash_core.v1.graph_pb2 import GraphNode, NodeOverride
from google.protobuf.message import DecodeError

from .structure_rules import MAX_EDGES, MAX_GRAPHS, MAX_NODES, broken

MAX_OBJECTS = 1 << 21
"""Messages in a file at any depth; a larger file may hold one more for each 16 bytes."""
MAX_NODE_BYTES = 1 << 20

_SMALL_BYTES = 1 << 20
_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = 0, 1, 2, 3, 4, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A message of a graph set that holds nodes and edges: its name, and the numbers of those two fields."""

    name: str
    nodes: int
    edges: int
    overrides: int = 0


_TEMPLATES, _GRAPHS = 2, 3
_KINDS = {_TEMPLATES: _Kind("template", nodes=2, edges=3), _GRAPHS: _Kind("graph", nodes=5, edges=6, overrides=7)}


def check_graph_bytes(data: bytes, where: str = "graphs/") -> None:
    """Refuse a graph file with more graphs, nodes or edges than the limits allow; stops at the first one too many.

    Args:
        where: the file's name, for messages.

    Raises:
        FormatError: GRAPH_LIMIT; MANIFEST_MALFORMED for bytes that are no protobuf; MANIFEST_UNKNOWN for a group.
    """
    at, seen = 0, {_TEMPLATES: 0, _GRAPHS: 0}
    reader = _Reader(data, where)
    while at < len(data):
        number, start, at = reader.field(at, len(data))
        kind = _KINDS.get(number)
        if kind is None:
            continue
        seen[number] += 1
        place = f"{kind.name} {seen[number]} of the file"
        if seen[_GRAPHS] > MAX_GRAPHS:
            raise broken("GRAPH_LIMIT", "too many graphs", place, expected=f"at most {MAX_GRAPHS}")
        reader.objects += 1 + _count(reader, start, at, kind, place)
        most = MAX_OBJECTS + len(data) // 16
        if reader.objects > most:
            raise broken("GRAPH_LIMIT", "the graphs would take too much memory", place,
                         expected=f"at most {most} messages in the file")


def _count(reader: _Reader, at: int, end: int, kind: _Kind, place: str) -> int:
    """Messages in one graph or template."""
    nodes = edges = others = 0
    data = reader.data
    while at < end:
        tag, nbytes = data[at], data[at + 1] if at + 1 < end else 0x80
        if tag < 0x80 and tag & 7 == _BYTES and nbytes < 0x80 and at + 2 + nbytes <= end:
            number, start = tag >> 3, at + 2  # a million edges come this way: a short field of a low number
            at = start + nbytes
        else:
            number, start, at = reader.field(at, end)
        if number == kind.nodes:
            nodes += 1
            others += reader.inside_node(start, at, place)
            if nodes > MAX_NODES:
                raise broken("GRAPH_LIMIT", "too many nodes", place, expected=f"at most {MAX_NODES}")
        elif number == kind.edges:
            edges += 1
            if edges > MAX_EDGES:
                raise broken("GRAPH_LIMIT", "too many edges", place, expected=f"at most {MAX_EDGES}")
        elif number == kind.overrides and number:
            others += 1 + reader.inside_override(start, at, place)
        else:
            others += 1 + (at - start) // 16
    return nodes + edges + others


@dataclass(slots=True)
class _Reader:
    """The bytes of a graph file, and how many messages were counted in them."""

    data: bytes
    where: str
    objects: int = 0

    def field(self, at: int, end: int) -> tuple[int, int, int]:
        """The field at `at`: its number if it can be a message, else 0; where it starts, and where the next one is."""
        tag, start = self.varint(at, end)
        wire = tag & 7
        if wire == _BYTES:
            nbytes, start = self.varint(start, end)
            stop = start + nbytes
        elif wire == _VARINT:
            _, stop = self.varint(start, end)
        elif wire in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire]
        elif wire in (_START_GROUP, _END_GROUP):
            raise broken("MANIFEST_UNKNOWN", "unknown field where launches are described",
                         f"byte {at} of {self.where}", got="a group")
        else:
            raise self.malformed(at)
        if stop > end:
            raise self.malformed(at)
        return tag >> 3 if wire == _BYTES else 0, start, stop

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at `at`, and where it ends."""
        value = shift = 0
        first = at
        while at < end and shift < 70:
            byte = self.data[at]
            value |= (byte & 0x7F) << shift
            at += 1
            if byte < 0x80:
                return value, at
            shift += 7
        raise self.malformed(first)

    def inside_node(self, start: int, stop: int, place: str) -> int:
        """Messages within a node. Not counted in a small file, whose every byte may be one."""
        if len(self.data) <= _SMALL_BYTES or start == stop:
            return 0
        node = GraphNode()
        self._parse(node, start, stop, place)
        return len(node.relocations) + len(node.accesses) + len(node.attributes)

    def inside_override(self, start: int, stop: int, place: str) -> int:
        """Messages within an override, counted likewise."""
        if len(self.data) <= _SMALL_BYTES or start == stop:
            return 0
        override = NodeOverride()
        self._parse(override, start, stop, place)
        return len(override.relocations) + len(override.params)

    def _parse(self, message: GraphNode | NodeOverride, start: int, stop: int, place: str) -> None:
        if stop - start > MAX_NODE_BYTES:
            raise broken("GRAPH_LIMIT", "a node is too large", place, expected=f"at most {MAX_NODE_BYTES} bytes",
                         got=stop - start)
        try:
            message.ParseFromString(self.data[start:stop])
        except DecodeError as err:
            raise self.malformed(start) from err

    def malformed(self, at: int) -> FormatError:
        return broken("MANIFEST_MALFORMED", "not a GraphSet", f"byte {at} of {self.where}")
