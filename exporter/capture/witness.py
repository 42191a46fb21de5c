"""The witness: on a GPU, Triton's own launcher runs every recorded launch into a captured stream, and the graph that
the driver made of it is compared with the recording, node by node.

The recording says what the loader will build; the capture is what the kernels' own toolchain does with the same
arguments. Nothing is executed, so buffers need addresses but no memory: each gets a range of its own, and a pointer
into a wrong buffer, or to a wrong place in it, shows.

    witness = Witness.open(program)
    record_gpu(program, graphs, 90, first_module_id=1, witness=witness.check)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import CaptureError
from dflash_core.v1 import graph_pb2 as pb

from exporter.capture.compile import HIDDEN_POINTERS, CompiledKernel
from exporter.kernels.launch import Launch
from exporter.program.builder import Program, Symbol, Tensor
from runtime.driver import DeviceHandle, Driver, GraphHandle, NodeHandle, Stream
from runtime.gpu.device import GpuDevice, open_device
from runtime.gpu.nodes import Addresses, ParamLayout, dims, parameters, place_of

FIRST_ADDRESS, ADDRESS_BITS = 1 << 45, 38
"""Of the ranges that stand for buffers: none is larger than 256 GiB, and all stay below 2**47."""

Launched = Sequence[tuple[Launch, CompiledKernel]]


@dataclass(frozen=True, slots=True)
class CapturedNode:
    """What the driver holds of one launch: `values` are its parameters' bytes, in order."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int]
    cooperative: int
    values: tuple[bytes, ...]


class Witness:
    """Captures launches on a device and compares them. Close it, or use it as a context manager.

    Attributes:
        driver, stream: where launches are captured.
        device_name, driver_version: of the device that captures.
    """

    def __init__(self, program: Program, device: GpuDevice) -> None:
        self.program, self._device = program, device
        self.driver: Driver = device.driver
        handle: DeviceHandle = self.driver.device(0)
        self.device_name, self.driver_version = self.driver.device_name(handle), self.driver.version()
        self.stream: Stream = self.driver.create_stream()

    @classmethod
    def open(cls, program: Program) -> Witness:
        """A witness on the first GPU.

        Raises:
            DriverError: there is no device or no driver.
            CaptureError: WITNESS_TRITON; Triton cannot launch here.
        """
        device = open_device("cuda")
        try:
            _check_triton()
            return cls(program, device)
        except BaseException:
            device.close()
            raise

    def __enter__(self) -> Witness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.driver.destroy_stream(self.stream)
        self._device.close()

    def check(self, graph: pb.Graph, launched: Launched) -> None:
        """Compare the recorded graph with a capture of its launches.

        Raises:
            CaptureError: WITNESS; names the first node that differs, and how.
        """
        addresses = Addresses(
            {b.buffer_id: FIRST_ADDRESS + (b.buffer_id << ADDRESS_BITS) for b in self.program.buffers},
            {s.symbol_id: s.default_value for s in self.program.symbols})
        handle = self.capture(launched, addresses)
        try:
            nodes, edges = self._read(handle, graph, launched)
        finally:
            self.driver.destroy_graph(handle)
        compare(graph, launched, addresses, nodes, edges)

    def capture(self, launched: Launched, addresses: Addresses) -> GraphHandle:
        """The driver's graph of these launches; the caller destroys it. Addresses are written down, never used."""
        for _, compiled in launched:
            load(compiled)  # nothing may be loaded while a stream is captured
        self.driver.begin_capture(self.stream)
        try:
            for launch, compiled in launched:
                run(launch, compiled, addresses, int(self.stream))
        finally:
            handle = self.driver.end_capture(self.stream)
        return handle

    def _read(self, handle: GraphHandle, graph: pb.Graph, launched: Launched,
              ) -> tuple[list[CapturedNode], list[tuple[int, int, bool]]]:
        """Captured nodes in the order of the stream, and the edges between their places in it."""
        read = self.driver.read_graph(handle)
        wrong = [kind for _, kind in read.nodes if kind != "KERNEL"]
        if wrong or len(read.nodes) != len(launched):
            raise _difference(graph.name, "nodes", f"{len(launched)} kernels",
                              f"{len(read.nodes)} nodes, of which {len(wrong)} no kernels")
        after = {_key(e.before): (_key(e.after), e.programmatic) for e in read.edges}
        handles = {_key(node): node for node, _ in read.nodes}
        firsts = handles.keys() - {key for key, _ in after.values()}
        if len(firsts) != 1 or len(read.edges) != len(launched) - 1 or len(after) != len(read.edges):
            raise _difference(graph.name, "edges", "one chain, as a stream is captured",
                              f"{len(read.edges)} edges, {len(firsts)} first nodes")
        place, (key,) = 0, firsts
        order, edges = [key], []
        while key in after:
            key, programmatic = after[key]
            edges.append((place, place + 1, programmatic))
            place += 1
            order.append(key)
        return [self._node(handles[key], compiled) for key, (_, compiled) in zip(order, launched, strict=True)], edges

    def _node(self, node: NodeHandle, compiled: CompiledKernel) -> CapturedNode:
        found = self.driver.read_kernel(node)
        sizes = [a.size for a in compiled.arguments] + [8] * len(HIDDEN_POINTERS)
        pointers = (ctypes.c_void_p * len(sizes)).from_address(found.params)
        values = tuple(ctypes.string_at(p or 0, size) for p, size in zip(pointers, sizes, strict=True))
        attributes = self.driver.read_attributes(node)
        cluster = attributes["cluster"] if any(attributes["cluster"]) else (1, 1, 1)
        return CapturedNode(self.driver.read_function(node), found.grid, found.block, found.shared_bytes, cluster,
                            attributes["cooperative"], values)


def compare(graph: pb.Graph, launched: Launched, addresses: Addresses, nodes: Sequence[CapturedNode],
            edges: Sequence[tuple[int, int, bool]]) -> None:
    """Hold captured nodes, in the order of the stream, against recorded ones.

    A chain of programmatic edges must be captured as it is recorded. Full edges follow from what nodes touch, while a
    stream orders everything: then every recorded edge must lead forward in it.

    Raises:
        CaptureError: WITNESS.
    """
    for node, captured, (_, compiled) in zip(graph.nodes, nodes, launched, strict=True):
        where = place_of(graph.name, node)
        recorded = {
            "function": int(compiled.launcher.function), "grid": dims(node.grid),
            "block": (32 * compiled.num_warps, 1, 1), "shared_bytes": node.dynamic_shared_bytes, "cluster": (1, 1, 1),
            "cooperative": 0}
        for field, expected in recorded.items():
            if getattr(captured, field) != expected:
                raise _difference(where, field, expected, getattr(captured, field))
        _compare_values(node, compiled, addresses, captured, where)
    chained = [(getattr(e, "from"), e.to, bool(e.type)) for e in graph.edges]
    if any(programmatic for *_, programmatic in chained):
        if sorted(chained) != sorted(edges):
            first = next(iter(sorted(set(chained) ^ set(edges))))
            raise _difference(f"graph {graph.name} node {first[1]}", "edges", f"{len(chained)} recorded", first)
    else:
        for before, after, _ in chained:
            if before >= after:
                raise _difference(f"graph {graph.name} node {after}", "edges", "an edge from an earlier node", before)


def _compare_values(node: pb.GraphNode, compiled: CompiledKernel, addresses: Addresses, captured: CapturedNode,
                    where: str) -> None:
    """Visible parameters are equal in bytes. The two hidden pointers are scratch that no kernel here asks for, so
    Triton passes null where the recording names a buffer."""
    layout = ParamLayout.of([a.size for a in compiled.arguments] + [8] * len(HIDDEN_POINTERS))
    block = parameters(node, layout, addresses, where)
    for index, argument in enumerate(compiled.arguments):
        start = layout.offsets[index]
        expected = bytes(block[start:start + argument.size])
        if captured.values[index] != expected:
            raise _difference(where, f"parameter {argument.name}", expected.hex(), captured.values[index].hex())
    for index, name in enumerate(HIDDEN_POINTERS, len(compiled.arguments)):
        if captured.values[index] != bytes(8):
            raise _difference(where, f"parameter {name}", "null", captured.values[index].hex())


def load(compiled: CompiledKernel) -> None:
    """Load a kernel's module and launcher."""
    compiled.launcher._init_handles()


def run(launch: Launch, compiled: CompiledKernel, addresses: Addresses, stream: int) -> None:
    """Launch a kernel through Triton's launcher."""
    values = [_value(launch.arguments[name], addresses) if name in launch.arguments else launch.kernel.constants[name]
              for name in launch.kernel.function.arg_names]
    compiled.launcher[launch.grid](*values, stream=stream)


def _value(value: Tensor | int | float | Symbol, addresses: Addresses) -> int | float:
    if isinstance(value, Tensor):
        return addresses.buffers[value.buffer_id] + value.offset
    if isinstance(value, Symbol):
        return addresses.symbols[value.symbol_id]
    return value


def _key(node: NodeHandle) -> int:
    return int(node)


def _difference(where: str, field: str, expected: Any, got: Any) -> CaptureError:
    return CaptureError("WITNESS", f"the captured graph differs from the recorded one: {field}", where=where,
                        expected=expected, got=got, hint="report this, with the versions of triton and the driver")


def _check_triton() -> None:
    """Raises CaptureError WITNESS_TRITON when Triton finds no device to launch on."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as e:
        raise CaptureError("WITNESS_TRITON", "Triton cannot launch kernels here", where="--witness",
                           expected="a PyTorch build with CUDA", got=f"{type(e).__name__} {e}".splitlines()[0],
                           hint="install one, or leave out --witness: the export needs no GPU") from e
