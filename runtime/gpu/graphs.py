"""Build a core's graphs in the driver: what serving needs first at once, the rest in the background.

Nodes are added without dependencies, then all edges of a graph in one call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError, DriverError
from dflash_core.v1 import graph_pb2 as pb

from runtime.check import CheckedCore
from runtime.driver import (
    DriverEdge,
    GraphExec,
    GraphHandle,
    KernelLaunch,
    NodeHandle,
    Stream,
    address_of,
    pointer_array,
)
from runtime.gpu.device import GpuDevice, Releases
from runtime.gpu.kernels import LoadedKernel, check_threads
from runtime.gpu.nodes import Addresses, ParamLayout, dims, expand, parameters, place_of, unsupported


@dataclass(frozen=True, slots=True)
class GraphBuilder:
    """Turns recorded graphs into graphs of the driver."""

    device: GpuDevice
    checked: CheckedCore
    kernels: dict[int, LoadedKernel]
    addresses: Addresses

    def build(self, graph: pb.Graph) -> GraphHandle:
        """A graph of the driver with the recorded nodes, parameters and edges; the caller destroys it.

        Raises:
            CompatibilityError: FEATURE_UNSUPPORTED, KERNEL_LIMIT.
            DriverError: the driver refuses a node or an edge.
        """
        driver = self.device.driver
        nodes, edges = expand(graph, self.checked.templates, self._layout)
        handle = driver.create_graph()
        try:
            added = self._add_nodes(handle, graph.name, nodes)
            joined = [DriverEdge(added[getattr(e, "from")], added[e.to], bool(e.type)) for e in edges]
            driver.add_edges(handle, joined, f"graph {graph.name}")
            self._check_built(handle, graph.name, len(nodes), len(edges))
        except BaseException:
            driver.destroy_graph(handle)
            raise
        return handle

    def executable(self, graph: pb.Graph, stream: Stream) -> GraphExec:
        """A graph ready to launch, already on the device; the caller destroys it."""
        driver, where = self.device.driver, f"graph {graph.name}"
        handle = self.build(graph)
        try:
            executable = driver.make_executable(handle, where)
        finally:
            driver.destroy_graph(handle)
        try:
            driver.upload(executable, stream)
        except BaseException:
            driver.destroy_executable(executable)
            raise
        return executable

    def _layout(self, kernel_id: int) -> ParamLayout:
        return self.kernels[kernel_id].layout

    def _add_nodes(self, handle: GraphHandle, name: str, nodes: Sequence[pb.GraphNode]) -> list[NodeHandle]:
        added = []
        for node in nodes:
            where = place_of(name, node)
            if node.kind == pb.KERNEL:
                added.append(self._add_kernel(handle, node, where))
            elif node.kind == pb.FILL:
                fill = node.fill
                added.append(self.device.driver.add_fill(
                    handle, self.device.context, self.addresses.of(fill.destination), fill.value, fill.element_bytes,
                    fill.count, where))
            elif node.kind == pb.COPY:
                copy = node.copy
                added.append(self.device.driver.add_copy(
                    handle, self.device.context, self.addresses.of(copy.destination), self.addresses.of(copy.source),
                    copy.bytes, where))
            elif node.kind == pb.EMPTY:
                added.append(self.device.driver.add_empty(handle, where))
            else:
                raise unsupported(f"node kind {pb.NodeKind.Name(node.kind)}", where)
        return added

    def _add_kernel(self, handle: GraphHandle, node: pb.GraphNode, where: str) -> NodeHandle:
        kernel = self.kernels[node.kernel_id]
        block = dims(node.block) if node.HasField("block") else kernel.block
        if block is None:
            raise CompatibilityError("KERNEL_LIMIT", "neither node nor kernel states a block", where=where)
        check_threads(block, kernel.max_threads, where)
        values = parameters(node, kernel.layout, self.addresses, where)
        memory = ctypes.c_char.from_buffer(values) if values else None
        base = ctypes.addressof(memory) if memory is not None else 0
        pointers = pointer_array([base + offset for offset in kernel.layout.offsets])
        launch = KernelLaunch(kernel.function, dims(node.grid), block, node.dynamic_shared_bytes, address_of(pointers))
        return self.device.driver.add_kernel(handle, launch, where)

    def _check_built(self, handle: GraphHandle, name: str, nodes: int, edges: int) -> None:
        """The driver holds as many nodes and edges as were recorded."""
        built = self.device.driver.read_graph(handle)
        if (len(built.nodes), len(built.edges)) != (nodes, edges):
            raise DriverError("GRAPH_READBACK", "the driver holds another graph than was built", where=f"graph {name}",
                              expected=f"{nodes} nodes, {edges} edges",
                              got=f"{len(built.nodes)} nodes, {len(built.edges)} edges", hint="report this")


def load_order(graphs: Sequence[pb.Graph]) -> tuple[list[pb.Graph], list[pb.Graph]]:
    """Graphs in the order in which to build them: the first of each role at once, and the others after them."""
    last = 1 << 32
    ordered = sorted(graphs, key=lambda g: g.load_priority if g.HasField("load_priority") else last)
    first: dict[str, str] = {}
    for graph in ordered:
        first.setdefault(graph.role, graph.name)
    return [g for g in ordered if first[g.role] == g.name], [g for g in ordered if first[g.role] != g.name]


class GraphPool:
    """Executable graphs by name; a graph that the background thread has yet to build is waited for."""

    def __init__(self, builder: GraphBuilder, stream: Stream, releases: Releases) -> None:
        self.builder, self._stream, self._releases = builder, stream, releases
        self._built: dict[str, GraphExec] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stop = False
        self._thread: threading.Thread | None = None

    def build(self, graphs: Sequence[pb.Graph]) -> None:
        """Build graphs now, in this thread."""
        for graph in graphs:
            if self._stop:
                return
            executable = self.builder.executable(graph, self._stream)
            with self._changed:
                self._releases.add(lambda executable=executable:  # type: ignore[misc]
                                   self.builder.device.driver.destroy_executable(executable))
                self._built[graph.name] = executable
                self._changed.notify_all()

    def build_later(self, graphs: Sequence[pb.Graph]) -> None:
        """Build graphs in a thread of their own."""
        def work() -> None:
            try:
                self.builder.device.use()
                self.build(graphs)
            except BaseException as err:
                with self._changed:
                    self._error = err
                    self._changed.notify_all()

        self._thread = threading.Thread(target=work, name="dflash-graphs", daemon=True)
        self._thread.start()

    def executable(self, name: str) -> GraphExec:
        """The executable of a graph, as soon as it is built; raises what kept it from being built."""
        with self._changed:
            while name not in self._built:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._built[name]

    def close(self) -> None:
        """Stop building. Executables are destroyed with the core's other resources."""
        self._stop = True
        if self._thread is not None:
            self._thread.join()
