"""A CUDA driver in pure Python with the calls of `cuda.bindings.driver`, for machines without a GPU.

    fake = FakeDriver(kernels=[FakeKernel("add", params=(8, 8, 4), run=add)])
    monkeypatch.setattr(runtime.driver, "bindings", lambda: fake)

Device memory is bytes behind addresses that no host has; copies to it happen when the stream is synchronized, so that
a host buffer that is reused too early shows. Every handle is checked, every call is recorded, any call can be made to
fail, and what was not given back is counted. A launched graph runs its nodes in an order that its edges allow.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULE = 256


class Result(IntEnum):
    """The statuses that the fake can give."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719


class _Name(str):
    """An enum member of the bindings: what matters is its name."""

    @property
    def name(self) -> str:
        return str(self)


class _Names:
    """An enum of the bindings, of which every member exists."""

    def __getattr__(self, name: str) -> _Name:
        return _Name(name)


class Handle:
    """What the driver hands out; dead once it is destroyed."""

    def __init__(self, kind: str, **content: Any) -> None:
        self.kind, self.alive = kind, True
        self.__dict__.update(content)

    def __repr__(self) -> str:
        return f"<{self.kind}{'' if self.alive else ', destroyed'}>"


@dataclass(frozen=True)
class FakeKernel:
    """A kernel of the fake's modules.

    Attributes:
        params: bytes of each parameter.
        run: called with the driver and the parameter bytes of each launch; None does nothing.
    """

    symbol: str
    params: tuple[int, ...]
    run: Callable[[FakeDriver, tuple[bytes, ...]], None] | None = None
    max_threads: int = 1024
    static_shared: int = 0
    local_bytes: int = 0


@dataclass
class Range:
    """Memory behind an address: device memory, or pinned host memory (`mapped`: at this device address too)."""

    nbytes: int
    data: Any
    mapped: int = 0


@dataclass
class FakeDriver:
    """One device. Fields describe it; `calls` is what was called, in order."""

    kernels: Sequence[FakeKernel] = ()
    driver_version: int = 13000
    devices: int = 1
    name: str = "NVIDIA H200"
    total_bytes: int = 1 << 30
    attributes: dict[str, int] = field(default_factory=dict)
    fails: dict[str, tuple[Result | int, int]] = field(default_factory=dict)
    missing_library: bool = False
    base: int = 0x7F00_0000_0000
    calls: list[str] = field(default_factory=list)

    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CUdevice_attribute = CUfunction_attribute = CUstream_flags = CUevent_flags = CUmemorytype = _Names()

    def __post_init__(self) -> None:
        self.attributes = {
            "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448, "COMPUTE_MODE": 0,
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1, "CAN_MAP_HOST_MEMORY": 1, **self.attributes,
        }
        self.memory: dict[int, Range] = {}
        self.pinned: dict[int, Range] = {}
        self.handles: Counter[str] = Counter()
        self.contexts = 0
        self.sticky: Result | None = None
        self.shared_limits: dict[str, int] = {}
        self.launched: list[list[str]] = []
        self._next = self.base
        self._initialized = False
        self._current = threading.local()
        self._lock = threading.RLock()
        self._seen: Counter[str] = Counter()

    # What tests ask and arrange

    def fail(self, call: str, result: Result | int, at: int = 0) -> None:
        """Let the call of this name fail from its `at`-th time on (0: the next)."""
        self.fails[call] = (result, self._seen[call] + at)

    @property
    def held(self) -> dict[str, int]:
        """Everything that was taken and not given back."""
        found = {"device bytes": sum(r.nbytes for r in self.memory.values()),
                 "pinned bytes": sum(r.nbytes for r in self.pinned.values()), "contexts": self.contexts, **self.handles}
        return {kind: count for kind, count in found.items() if count}

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes at a device address, mapped host memory included."""
        view, at = self._find(address, nbytes)
        return bytes(view[at:at + nbytes])

    def write(self, address: int, data: bytes) -> None:
        view, at = self._find(address, len(data))
        view[at:at + len(data)] = data

    def _find(self, address: int, nbytes: int) -> tuple[Any, int]:
        for start, found in (*self.memory.items(), *((r.mapped, r) for r in self.pinned.values() if r.mapped)):
            if start <= address and address + nbytes <= start + found.nbytes:
                return found.data, address - start
        raise AddressError(f"{nbytes} bytes at {address:#x}")

    def __getattr__(self, name: str) -> Any:
        """cuX(...) calls the method X of `_Calls`, recorded, checked and failed as arranged."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        if self.missing_library:
            def absent(*_: Any) -> Any:
                raise RuntimeError("Failed to dlopen libcuda.so.1")
            return absent
        function = getattr(_Calls, name)

        def call(*args: Any) -> tuple[Any, ...]:
            with self._lock:
                self.calls.append(name)
                self._seen[name] += 1
                result, at = self.fails.get(name, (Result.CUDA_SUCCESS, 0))
                if result and self._seen[name] > at:
                    return result, *[None] * 4
                if self.sticky and name not in _AFTER_FAULT:
                    return self.sticky, *[None] * 4
                if not self._initialized and name not in _BEFORE_INIT:
                    return Result.CUDA_ERROR_NOT_INITIALIZED, *[None] * 4
                if name in _NEED_CONTEXT and not getattr(self._current, "context", None):
                    return Result.CUDA_ERROR_INVALID_CONTEXT, *[None] * 4
                try:
                    value = function(self, *args)
                except DriverRefusal as err:
                    return err.result, *[None] * 4
            if isinstance(value, tuple):
                return Result.CUDA_SUCCESS, *value
            return (Result.CUDA_SUCCESS,) if value is None else (Result.CUDA_SUCCESS, value)

        return call

    def live(self, handle: Any, kind: str) -> Any:
        """The handle, if it is one of this kind and alive."""
        if not isinstance(handle, Handle) or handle.kind != kind or not handle.alive:
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_HANDLE)
        return handle

    def make(self, kind: str, **content: Any) -> Handle:
        self.handles[kind] += 1
        return Handle(kind, **content)

    def destroy(self, handle: Any, kind: str) -> None:
        self.live(handle, kind).alive = False
        self.handles[kind] -= 1

    def drain(self, stream: Any) -> None:
        """Do what waits on a stream, in order."""
        work = self.live(stream, "stream").work
        while work:
            action = work.pop(0)
            try:
                action()
            except AddressError as err:
                self.sticky = Result.CUDA_ERROR_ILLEGAL_ADDRESS
                raise DriverRefusal(self.sticky) from err

    def reserve(self, nbytes: int) -> int:
        address = self._next
        self._next += -(-nbytes // GRANULE) * GRANULE + GRANULE
        return address


class AddressError(Exception):
    """A kernel or copy touched memory that is not there."""


class DriverRefusal(Exception):
    """A call returns a status other than success."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.name)
        self.result = result


_BEFORE_INIT = {"cuInit", "cuDriverGetVersion", "cuGetErrorString"}
_AFTER_FAULT = {"cuGetErrorString", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet",
                "cuDeviceGetAttribute", "cuDevicePrimaryCtxRelease"}
_NEED_CONTEXT = {"cuMemAlloc", "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD8Async",
                 "cuStreamCreate", "cuEventCreate", "cuLibraryLoadData", "cuKernelGetFunction", "cuGraphLaunch",
                 "cuGraphInstantiate", "cuGraphUpload", "cuMemGetInfo"}


class _Calls:
    """The driver's calls; each takes the fake and returns the values after the status."""

    @staticmethod
    def cuInit(fake: FakeDriver, _: int) -> None:
        if fake.devices == 0:
            raise DriverRefusal(Result.CUDA_ERROR_NO_DEVICE)
        fake._initialized = True

    @staticmethod
    def cuDriverGetVersion(fake: FakeDriver) -> int:
        return fake.driver_version

    @staticmethod
    def cuGetErrorString(_: FakeDriver, result: Result) -> bytes:
        if not isinstance(result, Result):
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)
        return result.name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    @staticmethod
    def cuDeviceGetCount(fake: FakeDriver) -> int:
        return fake.devices

    @staticmethod
    def cuDeviceGet(fake: FakeDriver, ordinal: int) -> int:
        return ordinal

    @staticmethod
    def cuDeviceGetName(fake: FakeDriver, length: int, _: int) -> bytes:
        return fake.name.encode().ljust(length, b"\0")

    @staticmethod
    def cuDeviceGetAttribute(fake: FakeDriver, attribute: str, _: int) -> int:
        return fake.attributes[attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    @staticmethod
    def cuDevicePrimaryCtxRetain(fake: FakeDriver, device: int) -> str:
        fake.contexts += 1
        return f"context {device}"

    @staticmethod
    def cuDevicePrimaryCtxRelease(fake: FakeDriver, _: int) -> None:
        if fake.contexts == 0:
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        fake.contexts -= 1

    @staticmethod
    def cuCtxSetCurrent(fake: FakeDriver, context: str) -> None:
        fake._current.context = context

    @staticmethod
    def cuMemGetInfo(fake: FakeDriver) -> tuple[int, int]:
        return fake.total_bytes - sum(r.nbytes for r in fake.memory.values()), fake.total_bytes

    @staticmethod
    def cuMemAlloc(fake: FakeDriver, nbytes: int) -> int:
        if nbytes > _Calls.cuMemGetInfo(fake)[0]:
            raise DriverRefusal(Result.CUDA_ERROR_OUT_OF_MEMORY)
        address = fake.reserve(nbytes)
        fake.memory[address] = Range(nbytes, bytearray(b"\xa5" * nbytes))
        return address

    @staticmethod
    def cuMemFree(fake: FakeDriver, address: int) -> None:
        if fake.memory.pop(address, None) is None:
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)

    @staticmethod
    def cuMemHostAlloc(fake: FakeDriver, nbytes: int, flags: int) -> int:
        data = (ctypes.c_ubyte * nbytes)(*b"\x5a" * min(nbytes, 4096))
        mapped = fake.reserve(nbytes) if flags & fake.CU_MEMHOSTALLOC_DEVICEMAP else 0
        fake.pinned[ctypes.addressof(data)] = Range(nbytes, _Pinned(data), mapped)
        return ctypes.addressof(data)

    @staticmethod
    def cuMemFreeHost(fake: FakeDriver, address: int) -> None:
        if fake.pinned.pop(address, None) is None:
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)

    @staticmethod
    def cuMemHostGetDevicePointer(fake: FakeDriver, address: int, _: int) -> int:
        found = fake.pinned.get(address)
        if found is None or not found.mapped:
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)
        return found.mapped

    @staticmethod
    def cuMemcpyHtoDAsync(fake: FakeDriver, device: int, host: int, nbytes: int, stream: Any) -> None:
        fake._find(device, nbytes)
        fake.live(stream, "stream").work.append(
            lambda: fake.write(device, ctypes.string_at(host, nbytes)))

    @staticmethod
    def cuMemcpyDtoHAsync(fake: FakeDriver, host: int, device: int, nbytes: int, stream: Any) -> None:
        fake.live(stream, "stream").work.append(
            lambda: ctypes.memmove(host, fake.read(device, nbytes), nbytes))

    @staticmethod
    def cuMemsetD8Async(fake: FakeDriver, device: int, value: int, nbytes: int, stream: Any) -> None:
        fake._find(device, nbytes)
        fake.live(stream, "stream").work.append(lambda: fake.write(device, bytes([value]) * nbytes))

    @staticmethod
    def cuStreamCreate(fake: FakeDriver, _: Any) -> Handle:
        return fake.make("stream", work=[])

    @staticmethod
    def cuStreamDestroy(fake: FakeDriver, stream: Any) -> None:
        fake.destroy(stream, "stream")

    @staticmethod
    def cuStreamSynchronize(fake: FakeDriver, stream: Any) -> None:
        fake.drain(stream)

    @staticmethod
    def cuEventCreate(fake: FakeDriver, _: Any) -> Handle:
        return fake.make("event", stream=None)

    @staticmethod
    def cuEventDestroy(fake: FakeDriver, event: Any) -> None:
        fake.destroy(event, "event")

    @staticmethod
    def cuEventRecord(fake: FakeDriver, event: Any, stream: Any) -> None:
        fake.live(event, "event").stream = fake.live(stream, "stream")

    @staticmethod
    def cuEventSynchronize(fake: FakeDriver, event: Any) -> None:
        """Everything before the record is done: more than that is done too, which no caller may rely on."""
        if fake.live(event, "event").stream is not None:
            fake.drain(event.stream)

    @staticmethod
    def cuEventQuery(fake: FakeDriver, event: Any) -> None:
        if fake.live(event, "event").stream is not None and event.stream.work:
            raise DriverRefusal(Result.CUDA_ERROR_NOT_READY)

    @staticmethod
    def cuEventElapsedTime(fake: FakeDriver, start: Any, end: Any) -> float:
        return 1.5

    @staticmethod
    def cuLibraryLoadData(fake: FakeDriver, image: bytes, *_: Any) -> Handle:
        if not image.startswith(b"\x7fELF") and not image.endswith(b"\0"):
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_IMAGE)
        return fake.make("library", image=image)

    @staticmethod
    def cuLibraryUnload(fake: FakeDriver, library: Any) -> None:
        fake.destroy(library, "library")

    @staticmethod
    def cuLibraryGetKernel(fake: FakeDriver, library: Any, symbol: bytes) -> FakeKernel:
        fake.live(library, "library")
        for kernel in fake.kernels:
            if kernel.symbol.encode() == symbol:
                return kernel
        raise DriverRefusal(Result.CUDA_ERROR_NOT_FOUND)

    @staticmethod
    def cuKernelGetFunction(_: FakeDriver, kernel: FakeKernel) -> FakeKernel:
        return kernel

    @staticmethod
    def cuFuncGetParamInfo(_: FakeDriver, kernel: FakeKernel, index: int) -> tuple[int, int]:
        if index >= len(kernel.params):
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)
        return sum(kernel.params[:index]), kernel.params[index]

    @staticmethod
    def cuFuncGetAttribute(fake: FakeDriver, attribute: str, kernel: FakeKernel) -> int:
        return {"MAX_THREADS_PER_BLOCK": kernel.max_threads, "SHARED_SIZE_BYTES": kernel.static_shared,
                "LOCAL_SIZE_BYTES": kernel.local_bytes, "NUM_REGS": 32,
                "MAX_DYNAMIC_SHARED_SIZE_BYTES": fake.shared_limits.get(kernel.symbol, 49_152),
                }[attribute.removeprefix("CU_FUNC_ATTRIBUTE_")]

    @staticmethod
    def cuFuncSetAttribute(fake: FakeDriver, kernel: FakeKernel, attribute: str, value: int) -> None:
        assert attribute == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        fake.shared_limits[kernel.symbol] = value

    @staticmethod
    def CUDA_KERNEL_NODE_PARAMS() -> SimpleNamespace:
        return SimpleNamespace()

    @staticmethod
    def cuGraphCreate(fake: FakeDriver, _: int) -> Handle:
        return fake.make("graph", nodes=[], edges=[])

    @staticmethod
    def cuGraphDestroy(fake: FakeDriver, graph: Any) -> None:
        fake.destroy(graph, "graph")

    @staticmethod
    def cuGraphAddKernelNode(fake: FakeDriver, graph: Any, before: None, count: int, node: Any) -> Handle:
        kernel = node.func
        if node.blockDimX * node.blockDimY * node.blockDimZ > kernel.max_threads or (
                node.sharedMemBytes > fake.shared_limits.get(kernel.symbol, 49_152)):
            raise DriverRefusal(Result.CUDA_ERROR_INVALID_VALUE)
        pointers = struct.unpack(f"{len(kernel.params)}Q", ctypes.string_at(node.kernelParams, 8 * len(kernel.params)))
        values = tuple(ctypes.string_at(p, size) for p, size in zip(pointers, kernel.params, strict=True))
        return _add(fake, graph, "KERNEL", values=values, kernel=kernel, launch=node,
                    action=lambda: kernel.run(fake, values) if kernel.run else None)

    @staticmethod
    def cuGraphAddMemsetNode(fake: FakeDriver, graph: Any, before: None, count: int, node: Any, context: str) -> Handle:
        data = node.value.to_bytes(node.elementSize, "little") * node.width
        return _add(fake, graph, "MEMSET", action=lambda: fake.write(node.dst, data))

    @staticmethod
    def cuGraphAddMemcpyNode(fake: FakeDriver, graph: Any, before: None, count: int, node: Any, context: str) -> Handle:
        return _add(fake, graph, "MEMCPY",
                    action=lambda: fake.write(node.dstDevice, fake.read(node.srcDevice, node.WidthInBytes)))

    @staticmethod
    def cuGraphAddEmptyNode(fake: FakeDriver, graph: Any, before: None, count: int) -> Handle:
        return _add(fake, graph, "EMPTY", action=lambda: None)

    @staticmethod
    def cuGraphAddDependencies(fake: FakeDriver, graph: Any, before: Any, after: Any, data: Any, count: int) -> None:
        fake.live(graph, "graph").edges.extend(zip(before, after, data, strict=True))

    @staticmethod
    def cuGraphGetNodes(fake: FakeDriver, graph: Any, count: int = 0) -> tuple[list[Handle], int]:
        nodes = fake.live(graph, "graph").nodes
        return nodes[:count], len(nodes)

    @staticmethod
    def cuGraphNodeGetType(_: FakeDriver, node: Handle) -> _Name:
        return _Name(f"CU_GRAPH_NODE_TYPE_{node.type}")

    @staticmethod
    def cuGraphGetEdges(
        fake: FakeDriver, graph: Any, count: int = 0
    ) -> tuple[list[Handle], list[Handle], list[SimpleNamespace], int]:
        edges = fake.live(graph, "graph").edges
        before, after, data = zip(*edges[:count], strict=True) if count else ((), (), ())
        return list(before), list(after), list(data), len(edges)

    @staticmethod
    def cuGraphKernelNodeGetParams(_: FakeDriver, node: Handle) -> SimpleNamespace:
        return node.launch

    @staticmethod
    def cuGraphInstantiate(fake: FakeDriver, graph: Any, _: int) -> Handle:
        fake.live(graph, "graph")
        return fake.make("executable", nodes=list(graph.nodes), edges=list(graph.edges), uploaded=False)

    @staticmethod
    def cuGraphExecDestroy(fake: FakeDriver, executable: Any) -> None:
        fake.destroy(executable, "executable")

    @staticmethod
    def cuGraphUpload(fake: FakeDriver, executable: Any, stream: Any) -> None:
        fake.live(stream, "stream")
        fake.live(executable, "executable").uploaded = True

    @staticmethod
    def cuGraphLaunch(fake: FakeDriver, executable: Any, stream: Any) -> None:
        nodes, edges = fake.live(executable, "executable").nodes, executable.edges
        fake.launched.append([n.type if n.type != "KERNEL" else n.kernel.symbol for n in nodes])
        work = fake.live(stream, "stream").work
        waiting = list(reversed(nodes))
        while waiting:
            node = next(n for n in waiting if not any(b is n and a in waiting for a, b, _ in edges))
            waiting.remove(node)
            work.append(node.action)


def _add(fake: FakeDriver, graph: Any, kind: str, **content: Any) -> Handle:
    node = Handle("node", type=kind, **content)
    fake.live(graph, "graph").nodes.append(node)
    return node


class _Pinned:
    """Slices of pinned memory as bytes, and back."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, at: slice) -> bytes:
        return bytes(memoryview(self.data).cast("B")[at])

    def __setitem__(self, at: slice, value: bytes) -> None:
        memoryview(self.data).cast("B")[at] = value


FakeDriver.CUgraphEdgeData = lambda _: SimpleNamespace(from_port=0, to_port=0, type=0)
FakeDriver.CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
FakeDriver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
FakeDriver.CUDA_KERNEL_NODE_PARAMS = FakeDriver.CUDA_MEMSET_NODE_PARAMS = FakeDriver.CUDA_MEMCPY3D = SimpleNamespace
