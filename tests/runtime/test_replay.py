"""Replaying node by node: a device that agrees, one that errs in a node, and one that names no CPU nodes.

The device is a second CPU core behind the few methods that replay uses; a fault is put into one node's result.
"""

from __future__ import annotations

import pytest
from dflash_core.errors import FormatError
from dflash_core.v1 import graph_pb2

from runtime.engine import Engine, Request
from runtime.replay import replay
from tests.tiny_pair import TinyProgram


class Twin:
    """Answers as a GPU core would, from a CPU core of the same program whose nodes name themselves."""

    def __init__(self, program, *, fault=None, named=True):
        self.core = program.load(seed=1)
        self.manifest = self.core.manifest
        self.fault, self.named = fault, named

    def recorded(self, name):
        graph = graph_pb2.Graph(name=name)
        for bound in self.core.graphs[name].bound:
            node = graph.nodes.add()
            node.CopyFrom(bound.node)
            node.debug_name = f"part [{node.node_id}]" if self.named else "part"
        return graph

    def run_node(self, name, index):
        self.core.graphs[name].steps[index]()
        if index == self.fault:
            access = next(a for a in self.core.graphs[name].bound[index].node.accesses if a.write)
            self.core.memory[access.buffer_id][access.offset + 1] ^= 0x40

    def read_buffer(self, buffer_id, offset, nbytes):
        return bytearray(self.core.memory[buffer_id][offset:offset + nbytes].tobytes())

    def write_buffer(self, buffer_id, offset, data):
        self.core.memory[buffer_id][offset:offset + len(data)] = memoryview(data)


@pytest.fixture(scope="module")
def program():
    return TinyProgram.record(batches=(1,))


def prefilled(program):
    """A CPU core with one sequence in mid-air."""
    core = program.load(seed=1)
    engine = Engine(core)
    engine.add([3, 1, 4, 1, 5, 9, 2, 6], Request(max_tokens=16))
    engine.step()
    engine.step()
    return core


@pytest.mark.parametrize("graph", ["prefill.c16", "draft.b1", "verify.b1", "decode.b1"])
def test_a_device_that_agrees_has_every_node_within_tolerance(program, graph):
    reports = replay(Twin(program), prefilled(program), graph)

    assert len(reports) == len(program.load(seed=1).graphs[graph].steps)
    assert all(r.within and r.equal == 1.0 and r.max_abs == 0 for r in reports)


@pytest.mark.parametrize("fault", [0, 4, 7])
def test_a_fault_is_found_in_its_node_and_spreads_to_no_other(program, fault):
    reports = replay(Twin(program, fault=fault), prefilled(program), "verify.b1")

    assert [r.node_id for r in reports if not r.within] == [fault]


def test_a_device_node_must_name_the_cpu_nodes_that_it_computes(program):
    with pytest.raises(FormatError) as caught:
        replay(Twin(program, named=False), prefilled(program), "decode.b1")

    assert (caught.value.code, caught.value.got) == ("REPLAY_NAMES", "part")
