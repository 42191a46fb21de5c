"""Parameters of a node, byte for byte: relocations written, overrides applied, nothing else touched."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as g

from runtime.gpu.nodes import Addresses, ParamLayout, expand, parameters

ADDRESSES = Addresses(buffers={3: 0x7000_0000_1000, 4: 0x7000_0000_2000}, symbols={5: 40})
LAYOUT = ParamLayout.of((8, 4, 8, 4))


def node(*relocations: g.Relocation) -> g.GraphNode:
    return g.GraphNode(node_id=0, kind=g.KERNEL, kernel_id=0, grid=g.Dim3(x=2, y=1, z=1),
                       param_block=struct.pack("<QiQi", 0, 11, 0, 0), relocations=relocations)


def address(index: int, buffer_id: int, addend: int = 0, **fields: Any) -> g.Relocation:
    return g.Relocation(kind=g.BUFFER_ADDRESS, param_index=index, buffer_id=buffer_id, addend=addend, **fields)


def symbol(index: int, width: int, addend: int = 0) -> g.Relocation:
    return g.Relocation(kind=g.SYMBOL_VALUE, param_index=index, symbol_id=5, width=width, addend=addend)


def test_parameters_follow_each_other_without_padding() -> None:
    assert LAYOUT.offsets == (0, 8, 12, 20)


@pytest.mark.parametrize(
    ("relocations", "expected"),
    [
        pytest.param((address(0, 3),), (0x7000_0000_1000, 11, 0, 0), id="address"),
        pytest.param((address(2, 4, 256),), (0, 11, 0x7000_0000_2100, 0), id="address and addend"),
        pytest.param((symbol(3, 4),), (0, 11, 0, 40), id="symbol of four bytes"),
        pytest.param((symbol(2, 8, -41),), (0, 11, 2**64 - 1, 0), id="symbol of eight bytes below zero"),
        pytest.param((g.Relocation(kind=g.RANK_VALUE, param_index=3, width=4, addend=2),), (0, 11, 0, 2), id="rank"),
        pytest.param((address(0, 3), address(2, 4), symbol(3, 4, 1)),
                     (0x7000_0000_1000, 11, 0x7000_0000_2000, 41), id="all"),
    ],
)
def test_relocation_writes_its_bytes_and_no_others(
    relocations: tuple[g.Relocation, ...], expected: tuple[int, ...]
) -> None:
    assert struct.unpack("<QiQi", parameters(node(*relocations), LAYOUT, ADDRESSES, "n")) == expected


def test_offset_of_a_relocation_counts_inside_its_parameter() -> None:
    message = node(address(1, 3, offset=8))
    message.param_block = bytes(32)

    block = parameters(message, ParamLayout.of((8, 24)), ADDRESSES, "n")

    assert bytes(block) == bytes(16) + struct.pack("<Q", 0x7000_0000_1000) + bytes(8)


def test_refuses_a_relocation_that_this_runtime_does_not_write() -> None:
    with pytest.raises(CompatibilityError) as refused:
        parameters(node(g.Relocation(kind=g.TENSOR_MAP_ADDRESS, param_index=0)), LAYOUT, ADDRESSES, "graph g node 0")

    assert (refused.value.code, refused.value.where) == ("FEATURE_UNSUPPORTED", "graph g node 0")
    assert "TENSOR_MAP_ADDRESS" in refused.value.what


def test_graph_without_a_template_is_its_own_nodes() -> None:
    graph = g.Graph(name="g", nodes=[node()], edges=[g.GraphEdge(to=0)])

    nodes, edges = expand(graph, {}, lambda _: LAYOUT)

    assert (list(nodes), list(edges)) == ([node()], [g.GraphEdge(to=0)])


def test_overrides_change_what_they_name_and_leave_the_template() -> None:
    template = g.GraphTemplate(template_id=1, nodes=[node(address(0, 3), address(2, 3)), node()])
    before = template.SerializeToString()
    override = g.NodeOverride(node_id=0, grid=g.Dim3(x=9, y=2, z=1), dynamic_shared_bytes=64, kernel_id=6,
                              params=[g.ParamPatch(param_index=1, value=struct.pack("<i", 77))],
                              relocations=[address(2, 4, 8)])

    (first, second), _ = expand(g.Graph(name="g", template_id=1, overrides=[override]), {1: template}, lambda _: LAYOUT)

    assert (first.grid.x, first.grid.y, first.dynamic_shared_bytes, first.kernel_id) == (9, 2, 64, 6)
    assert struct.unpack("<QiQi", first.param_block) == (0, 77, 0, 0)
    assert list(first.relocations) == [address(0, 3), address(2, 4, 8)]
    assert second == node()
    assert template.SerializeToString() == before
