"""A core on a GPU: its graphs, ready to launch, and the buffers that the host reads and writes.

    core.put("slots", 0, [0])
    core.graph("decode", 1).run()
    token = core.get("sampled", 0, 1)[0]

A step waits for the GPU once: at the first `get` after a launch. Host inputs have a pinned mirror, and what changed
since the last launch goes up with the next one in a single copy; buffers in mapped host memory are read where kernels
wrote them; everything else is copied when it is asked for.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, Self

from dflash_core.errors import DriverError, FormatError
from dflash_core.v1 import graph_pb2, manifest_pb2

from runtime.check import CheckedCore
from runtime.core import carried_file, smallest_bucket
from runtime.driver import Driver, GraphExec, Stream
from runtime.gpu.device import GpuDevice, Releases
from runtime.gpu.graphs import GraphPool
from runtime.gpu.layout import Space
from runtime.gpu.memory import CoreMemory, host_bytes

_log = logging.getLogger(__name__)
_CODES = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "f32": "f", "f64": "d", "i16": "h", "u16": "H", "i8": "b",
          "u8": "B", "bf16": "H"}
"""Element types that the host reads and writes, as codes of `array` and `struct`; bf16 is read alone, as its bits."""


@dataclass(frozen=True, slots=True)
class _Binding:
    """A binding of the serving contract; `view` holds its elements where the host has them, `start` is its byte offset
    in the host inputs, `address` the device's address of its first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    code: str
    itemsize: int
    space: Space
    view: memoryview | None
    start: int
    address: int


@dataclass(frozen=True, slots=True)
class GpuGraph:
    """One launchable graph."""

    core: GpuCore
    name: str
    role: str
    batch: int
    query_tokens: int
    executable: GraphExec

    def run(self) -> None:
        """Send up what the host changed, and launch; `GpuCore.get` waits for the result."""
        self.core.launch(self)


class GpuCore:
    """A core on a GPU; `runtime.load` makes it. Close it, or use it as a context manager. One thread at a time.

    Attributes:
        phases: seconds of each phase of the load, in order, and their "total".
    """

    def __init__(self, checked: CheckedCore, device: GpuDevice, memory: CoreMemory, pool: GraphPool, stream: Stream,
                 releases: Releases, phases: Mapping[str, float]) -> None:
        self.manifest: manifest_pb2.RebuildManifest = checked.verified.manifest
        self.core_digest = checked.verified.core_digest
        self.symbols = {s.name: checked.symbols[s.symbol_id] for s in self.manifest.symbols}
        self.phases = dict(phases)
        self._checked, self._device, self._memory, self._pool = checked, device, memory, pool
        self._driver: Driver = device.driver
        self._stream, self._releases = stream, releases
        self._graphs: dict[tuple[str, int, int], GpuGraph] = {}
        self._recorded: tuple[graph_pb2.Graph, ...] = checked.graphs
        self._host = host_bytes(memory.host_base, memory.layout.host_bytes) if memory.layout.host_bytes else None
        self._bindings = {b.name: self._bound(b) for b in self.manifest.contract.io}
        self._dirty_start, self._dirty_end = memory.layout.input_bytes, 0
        self._busy = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back memory, graphs, modules and files; never raises, also after a kernel has faulted."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        self._graphs.clear()
        self._bindings.clear()
        self._host = None
        self._checked.verified.close()
        release_all(self._device, self._releases)

    def put(self, name: str, offset: int, values: Sequence[int] | Sequence[float]) -> None:
        """Write consecutive elements of a binding, counted from its first; the next launch sees them.

        Waits for running launches where they may still read what is replaced.
        """
        binding = self._bindings[name]
        fresh = array(binding.code, values)
        nbytes = len(fresh) * binding.itemsize
        self._check_range(binding, offset, len(fresh))
        if binding.view is None:
            self.synchronize()
            self._driver.copy_in(binding.address + offset * binding.itemsize, fresh.buffer_info()[0], nbytes,
                                 self._stream)
            self._busy = True
            self.synchronize()
            return
        place = binding.view[offset:offset + len(fresh)]
        if place == fresh:
            return
        if self._busy:
            self.synchronize()
        place[:] = memoryview(fresh)
        if binding.space is Space.INPUT:
            start = binding.start + offset * binding.itemsize
            self._dirty_start = min(self._dirty_start, start)
            self._dirty_end = max(self._dirty_end, start + nbytes)

    def get(self, name: str, offset: int, count: int) -> list[Any]:
        """Read consecutive elements of a binding, as the launches so far left them."""
        binding = self._bindings[name]
        self._check_range(binding, offset, count)
        if binding.space is not Space.INPUT and self._busy:
            self.synchronize()
        if binding.view is not None:
            return _values(binding, binding.view[offset:offset + count].tolist())
        found = array(binding.code, bytes(count * binding.itemsize))
        if count:
            self._device.use()
            self._driver.copy_out(found.buffer_info()[0], binding.address + offset * binding.itemsize,
                                  count * binding.itemsize, self._stream)
            self._driver.synchronize(self._stream)
        return _values(binding, found.tolist())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a binding; KeyError when the core has none of that name."""
        return self._bindings[name].shape

    def file(self, path: str) -> bytes | None:
        """The bytes of a model file that the core carries as published ("tokenizer.json"), or None."""
        return carried_file(self._checked.verified, path)

    def graph(self, role: str, batch: int, query_tokens: int = 1) -> GpuGraph:
        """The smallest graph of this role that serves a batch of so many rows each; waits for one that is still being
        built.

        Raises:
            CompatibilityError: NO_GRAPH; the core has no bucket of this size.
            DriverError: the graph could not be built.
        """
        known = self._graphs.get((role, batch, query_tokens))
        if known is not None:
            return known
        of_role = [g for g in self._recorded if g.role == role]
        found = smallest_bucket((g.bucket for g in of_role), role, batch, query_tokens, self.manifest.core_name)
        name = next(g.name for g in of_role if g.bucket == found)
        graph = GpuGraph(self, name, role, found.batch, found.query_tokens, self._pool.executable(name))
        self._graphs[role, batch, query_tokens] = graph
        return graph

    def launch(self, graph: GpuGraph) -> None:
        """Send up what the host changed, and launch a graph behind what is already running."""
        self._device.use()
        start, end = self._dirty_start, self._dirty_end
        if start < end:
            memory = self._memory
            self._driver.copy_in(memory.device_base + start, memory.host_base + start, end - start, self._stream)
            self._dirty_start, self._dirty_end = memory.layout.input_bytes, 0
        self._busy = True
        self._driver.launch(graph.executable, self._stream, f"graph {graph.name}")

    def synchronize(self) -> None:
        """Wait for everything that was launched. Raises DriverError when a kernel failed."""
        self._device.use()
        self._driver.synchronize(self._stream)
        self._busy = False

    def recorded(self, graph_name: str) -> graph_pb2.Graph:
        """A graph as the core records it."""
        return next(g for g in self._recorded if g.name == graph_name)

    def run_node(self, graph_name: str, index: int) -> None:
        """Run one node of a graph by itself and wait for it: for comparing node by node, not for serving."""
        source = self.recorded(graph_name)
        alone = graph_pb2.Graph(name=source.name, role=source.role)
        alone.nodes.append(source.nodes[index])
        self._device.use()
        executable = self._pool.builder.executable(alone, self._stream)
        try:
            self._driver.launch(executable, self._stream, f"graph {graph_name} node {index}")
            self._driver.synchronize(self._stream)
        finally:
            self._driver.destroy_executable(executable)

    def read_buffer(self, buffer_id: int, offset: int, nbytes: int) -> bytearray:
        """Bytes of a buffer as the device holds them."""
        found = bytearray(nbytes)
        if nbytes:
            self.synchronize()
            self._driver.copy_out(address_of_bytes(found), self._memory.buffers[buffer_id] + offset, nbytes,
                                  self._stream)
            self._driver.synchronize(self._stream)
        return found

    def write_buffer(self, buffer_id: int, offset: int, data: bytearray) -> None:
        """Replace bytes of a buffer on the device."""
        if data:
            self.synchronize()
            self._driver.copy_in(self._memory.buffers[buffer_id] + offset, address_of_bytes(data), len(data),
                                 self._stream)
            self._driver.synchronize(self._stream)

    def _bound(self, binding: manifest_pb2.IoBinding) -> _Binding:
        place = self._memory.layout.places[binding.buffer_id]
        code = _CODES.get(binding.dtype)
        if code is None:
            raise FormatError("BINDING_DTYPE", "the host cannot read or write a binding of this type",
                              where=f"binding {binding.name}", expected=", ".join(_CODES), got=binding.dtype)
        itemsize = array(code).itemsize
        start = place.offset + binding.offset
        view = None
        if place.space is not Space.DEVICE:
            host: Any = self._host
            view = host[start:start + prod(binding.shape) * itemsize].cast(code)
        return _Binding(binding.name, tuple(binding.shape), binding.dtype, code, itemsize, place.space, view, start,
                        self._memory.buffers[binding.buffer_id] + binding.offset)

    def _check_range(self, binding: _Binding, offset: int, count: int) -> None:
        size = prod(binding.shape)
        if not 0 <= offset <= offset + count <= size:
            raise IndexError(f"{binding.name} has {size} elements, not {offset} to {offset + count}")


def _values(binding: _Binding, elements: list[Any]) -> list[Any]:
    """What the elements mean: a bf16 is the upper half of an fp32."""
    if binding.dtype != "bf16":
        return elements
    return array("f", array("I", [bits << 16 for bits in elements]).tobytes()).tolist()


def address_of_bytes(data: bytearray) -> int:
    """Address of a byte array's memory; the array must not be resized while it is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def release_all(device: GpuDevice, releases: Releases) -> None:
    """Give back all that a core took on a device, the context last.

    After a kernel faulted the driver refuses every call and has taken everything back by itself; that is logged.
    """
    releases.add(device.use)
    errors = releases.close()
    try:
        device.close()
    except DriverError as err:
        errors = (*errors, err)
    if errors:
        _log.warning("the device did not take everything back: %s", errors[0])
