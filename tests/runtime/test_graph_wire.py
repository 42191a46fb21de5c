"""A graph file is counted in its bytes, before it is parsed."""

from __future__ import annotations

import random

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1.graph_pb2 import Graph, GraphEdge, GraphNode, GraphSet, GraphTemplate
from google.protobuf.message import DecodeError

from runtime.structure import check_graph_bytes
from tests.attacks.limits import refused
from tests.runtime.sound_core import cpu_graphs, gpu_graphs

NODES_AT_LIMIT = [GraphNode()] * 2**18
EDGES_AT_LIMIT = [GraphEdge()] * 2**20


def length_prefixed(tag: bytes, body: bytes) -> bytes:
    size, prefix = len(body), b""
    while size > 127:
        prefix += bytes([size & 127 | 128])
        size >>= 7
    return tag + prefix + bytes([size]) + body


@pytest.mark.parametrize(
    "graphs",
    [
        GraphSet(), cpu_graphs(), gpu_graphs(), GraphSet(graphs=[Graph()] * 1024),
        GraphSet(graphs=[Graph(nodes=NODES_AT_LIMIT), Graph(edges=EDGES_AT_LIMIT)]),
        GraphSet(templates=[GraphTemplate(nodes=NODES_AT_LIMIT)]),
    ],
    ids=["empty", "cpu", "gpu", "1024 graphs", "graphs at the limits", "a template at the limit"],
)
def test_accepts(graphs: GraphSet):
    check_graph_bytes(graphs.SerializeToString())


@pytest.mark.parametrize(
    ("graphs", "what"),
    [
        (GraphSet(graphs=[Graph()] * 1025), "too many graphs"),
        (GraphSet(graphs=[Graph(nodes=[*NODES_AT_LIMIT, GraphNode()])]), "too many nodes"),
        (GraphSet(graphs=[Graph(edges=[*EDGES_AT_LIMIT, GraphEdge()])]), "too many edges"),
        (GraphSet(templates=[GraphTemplate(nodes=[*NODES_AT_LIMIT, GraphNode()])]), "too many nodes"),
        (GraphSet(templates=[GraphTemplate(edges=[*EDGES_AT_LIMIT, GraphEdge()])]), "too many edges"),
    ],
    ids=["1025 graphs", "2^18 + 1 nodes", "2^20 + 1 edges", "template of 2^18 + 1 nodes", "template of 2^20 + 1 edges"],
)
def test_refuses(graphs: GraphSet, what: str):
    with pytest.raises(DflashError) as caught:
        check_graph_bytes(graphs.SerializeToString())

    assert (caught.value.code, caught.value.what) == ("GRAPH_LIMIT", what)


def test_refuses_ten_million_edges_without_the_memory_of_parsing_them():
    data = b"\x08\x01" + length_prefixed(b"\x1a", b"\x32\x02\x10\x01" * 10**7)

    with refused("GRAPH_LIMIT"):
        check_graph_bytes(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x1a", "MANIFEST_MALFORMED"), (b"\x1a\xff", "MANIFEST_MALFORMED"), (b"\x1a\x05\x32", "MANIFEST_MALFORMED"),
        (b"\x09\x00", "MANIFEST_MALFORMED"), (b"\x0d\x00\x00\x00", "MANIFEST_MALFORMED"),
        (b"\xff" * 30, "MANIFEST_MALFORMED"), (b"\x1a" + b"\xff" * 9 + b"\x01", "MANIFEST_MALFORMED"),
        (b"\x1a\x03\x32\x7f\x00", "MANIFEST_MALFORMED"), (b"\x0e", "MANIFEST_MALFORMED"),
        (b"\x1b\x1c", "MANIFEST_UNKNOWN"), (b"\x1a\x02\x1b\x1c", "MANIFEST_UNKNOWN"),
    ],
    ids=["no length", "half a length", "past the file", "half a fixed64", "half a fixed32", "endless varint",
         "length 2^64", "past its message", "wire type 6", "a group", "a group in a graph"],
)
def test_a_count_never_ends_early(data: bytes, code: str):
    with pytest.raises(DflashError) as caught:
        check_graph_bytes(data)

    assert caught.value.code == code


def test_accepts_what_the_parser_accepts_and_refuses_what_it_refuses():
    source = random.Random(3)
    sound = cpu_graphs().SerializeToString()

    for _ in range(3000):
        data = bytearray(sound)
        data[source.randrange(len(data))] = source.randrange(256)
        try:
            GraphSet.FromString(bytes(data))
        except DecodeError:
            continue  # both may refuse; the parser also looks into nodes
        try:
            check_graph_bytes(bytes(data))
        except DflashError as err:
            assert err.code == "MANIFEST_UNKNOWN", data.hex()


@pytest.mark.parametrize("inner", [b"\x4a\x00", b"\x82\x01\x00"], ids=["relocations", "accesses"])
def test_refuses_a_node_that_holds_millions_of_messages(inner: bytes):
    node = length_prefixed(b"\x2a", inner * 100_000)
    data = b"\x08\x01" + length_prefixed(b"\x1a", node * 40)

    with refused("GRAPH_LIMIT"):
        check_graph_bytes(data)


def test_refuses_a_node_larger_than_any_launch():
    data = b"\x08\x01" + length_prefixed(b"\x1a", length_prefixed(b"\x2a", length_prefixed(b"\x42", bytes(2**20 + 1))))

    with refused("GRAPH_LIMIT"):
        check_graph_bytes(data)


def test_refuses_a_file_of_many_graphs_that_each_keep_the_limit():
    data = b"\x08\x01" + length_prefixed(b"\x1a", b"\x32\x00" * 2**20) * 3

    with refused("GRAPH_LIMIT"):
        check_graph_bytes(data)
