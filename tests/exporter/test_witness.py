"""The witness's comparison, against captures packed here from the launches themselves; each field that can differ."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dflash_core.errors import CaptureError, DriverError, UsageError

from exporter.capture.record import record_gpu
from exporter.capture.witness import FIRST_ADDRESS, CapturedNode, Witness, compare
from exporter.export import ExportRequest, export
from exporter.program.builder import Symbol, Tensor
from runtime.gpu.nodes import Addresses
from tests.tiny_pair import TinyProgram


def packed(value, addresses):
    """A parameter as C passes it: a pointer, an int or a float."""
    if isinstance(value, Tensor):
        return struct.pack("<Q", addresses.buffers[value.buffer_id] + value.offset)
    if isinstance(value, Symbol):
        return struct.pack("<i", addresses.symbols[value.symbol_id])
    return struct.pack("<f" if isinstance(value, float) else "<i", value)


@pytest.fixture(scope="module", params=[90, 80], ids=["chained", "full edges"])
def capture(request):
    """A recorded decode graph, its launches, addresses, and what a driver would hold of them."""
    pair, seen = TinyProgram.record(batches=(1,), page_tokens=16).recorded, []
    decode = next((g, c) for g, c in zip(pair.graphs, pair.calls, strict=True) if g.role == "decode")
    record_gpu(pair.program, [decode], request.param, first_module_id=1,
               witness=lambda graph, launched: seen.append((graph, launched)))
    (graph, launched), = seen
    launched = [(launch, replace(compiled, launcher=SimpleNamespace(function=1000 + i)))
                for i, (launch, compiled) in enumerate(launched)]
    addresses = Addresses({b.buffer_id: FIRST_ADDRESS + (b.buffer_id << 38) for b in pair.program.buffers},
                          {s.symbol_id: s.default_value for s in pair.program.symbols})
    nodes = [CapturedNode(1000 + i, launch.grid, (32 * launch.kernel.num_warps, 1, 1), compiled.shared_bytes,
                          (1, 1, 1), 0, (*(packed(launch.arguments[a.name], addresses) for a in compiled.arguments),
                                         bytes(8), bytes(8)))
             for i, (launch, compiled) in enumerate(launched)]
    edges = [(i, i + 1, request.param == 90) for i in range(len(nodes) - 1)]
    return graph, launched, addresses, nodes, edges


def test_a_capture_of_the_launches_agrees_with_the_recording(capture):
    compare(*capture)


CHANGES = [
    ("function", lambda n: replace(n, function=7)),
    ("grid", lambda n: replace(n, grid=(n.grid[0] + 1, *n.grid[1:]))),
    ("block", lambda n: replace(n, block=(64 + n.block[0], 1, 1))),
    ("shared_bytes", lambda n: replace(n, shared_bytes=n.shared_bytes + 16)),
    ("cluster", lambda n: replace(n, cluster=(2, 1, 1))),
    ("cooperative", lambda n: replace(n, cooperative=1)),
    ("parameter ", lambda n: replace(n, values=(bytes(8), *n.values[1:]))),
    ("parameter profile_scratch", lambda n: replace(n, values=(*n.values[:-1], b"\1" + bytes(7)))),
]


@pytest.mark.parametrize(("field", "change"), CHANGES, ids=[c[0].strip() for c in CHANGES])
@pytest.mark.parametrize("index", [0, 3])
def test_any_difference_names_its_node(capture, field, change, index):
    graph, launched, addresses, nodes, edges = capture
    changed = [change(node) if i == index else node for i, node in enumerate(nodes)]

    with pytest.raises(CaptureError) as refused:
        compare(graph, launched, addresses, changed, edges)

    assert refused.value.code == "WITNESS"
    assert field in refused.value.what
    assert f"node {index} " in refused.value.where
    assert refused.value.expected is not None and refused.value.hint


def test_an_edge_of_another_kind_or_direction_is_a_difference(capture):
    graph, launched, addresses, nodes, edges = capture
    if edges[0][2]:
        wrong, recorded = [(*edges[0][:2], False), *edges[1:]], graph
    else:
        wrong, recorded = edges, type(graph).FromString(graph.SerializeToString())
        recorded.edges.add(to=0, **{"from": 2})

    with pytest.raises(CaptureError) as refused:
        compare(recorded, launched, addresses, nodes, wrong)

    assert refused.value.code == "WITNESS" and "edges" in refused.value.what


def test_a_witness_needs_a_gpu_target(tmp_path):
    request = ExportRequest(target=tmp_path, out=tmp_path / "core", witness=True)

    with pytest.raises(UsageError) as refused:
        export(request, None)

    assert (refused.value.code, refused.value.where) == ("WITNESS_DEVICE", "--witness")
    assert not (tmp_path / "core").exists()


def test_a_witness_needs_a_gpu(monkeypatch):
    def absent():
        raise DriverError("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected", where="cuInit")

    monkeypatch.setattr("runtime.gpu.device.open_driver", absent)

    with pytest.raises(DriverError):
        Witness.open(TinyProgram.record(batches=(1,)).recorded.program)


@pytest.mark.gpu
@pytest.mark.parametrize("batches", [(1,), (1, 4)])
def test_every_graph_of_a_pair_is_captured_as_it_is_recorded(batches):
    pair, seen = TinyProgram.record(batches=batches, page_tokens=16, draft_head_dim=32).recorded, []
    with Witness.open(pair.program) as witness:
        def check(graph, launched):
            witness.check(graph, launched)
            seen.append(graph.name)

        record_gpu(pair.program, zip(pair.graphs, pair.calls, strict=True), 90, first_module_id=1, witness=check)

    assert seen == [g.name for g in pair.graphs]
