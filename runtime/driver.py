"""The one file that calls CUDA: a call returns a value, or raises DriverError with CUDA's own name for what failed.

    driver = open_driver()
    context = driver.retain_context(driver.device(0))
    driver.use(context)
    address = driver.allocate(1 << 20)
    driver.free(address)

The bindings are imported by `open_driver` and nowhere else, so a machine without a GPU pays nothing for them. Device
addresses and host addresses are ints; every other handle is opaque. A context belongs to the threads that `use` it.
Source: CUDA driver API reference, 13.0; the calls used exist since 12.4.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType

from dflash_core.errors import DriverError

MIN_DRIVER = 12040
_SUCCESS = 0
_INVALID_VALUE = 1
_NOT_READY = 600

DeviceHandle = NewType("DeviceHandle", object)
Context = NewType("Context", object)
Stream = NewType("Stream", object)
Event = NewType("Event", object)
Library = NewType("Library", object)
Function = NewType("Function", object)
GraphHandle = NewType("GraphHandle", object)
NodeHandle = NewType("NodeHandle", object)
GraphExec = NewType("GraphExec", object)
Dims = tuple[int, int, int]


class DeviceAttribute(Enum):
    """What a device says of itself; the value is CUDA's name."""

    MAJOR = "COMPUTE_CAPABILITY_MAJOR"
    MINOR = "COMPUTE_CAPABILITY_MINOR"
    SM_COUNT = "MULTIPROCESSOR_COUNT"
    SHARED_OPTIN = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
    COMPUTE_MODE = "COMPUTE_MODE"
    VIRTUAL_MEMORY = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    MAP_HOST_MEMORY = "CAN_MAP_HOST_MEMORY"
    CLOCK_RATE = "CLOCK_RATE"
    MEMORY_CLOCK_RATE = "MEMORY_CLOCK_RATE"


class FunctionAttribute(Enum):
    """What a loaded kernel needs; the value is CUDA's name."""

    MAX_THREADS = "MAX_THREADS_PER_BLOCK"
    STATIC_SHARED = "SHARED_SIZE_BYTES"
    MAX_DYNAMIC_SHARED = "MAX_DYNAMIC_SHARED_SIZE_BYTES"
    LOCAL_BYTES = "LOCAL_SIZE_BYTES"
    REGISTERS = "NUM_REGS"


COMPUTE_MODE_PROHIBITED = 2

# After a kernel faulted, every call on that device fails in this process, a new context included (driver 580, H200).
_LOST = "the GPU is lost to this process: start it again, and report the core whose kernel faulted"
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or use a smaller core",
    "CUDA_ERROR_NO_DEVICE": "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "reboot, or reload the kernel module that fits the driver library",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the NVIDIA driver",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "export the core for this GPU's architecture",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _LOST,
}


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel node as the driver takes it.

    Attributes:
        params: address of an array of 64-bit pointers, one to each parameter's value; read while the node is added.
    """

    function: Function
    grid: Dims
    block: Dims
    shared_bytes: int
    params: int


@dataclass(frozen=True, slots=True)
class DriverEdge:
    """A dependency between two nodes. `programmatic`: the second starts when every block of the first has let it, and
    waits for the first itself; otherwise it starts when the first is complete."""

    before: NodeHandle
    after: NodeHandle
    programmatic: bool


@dataclass(frozen=True, slots=True)
class DriverGraph:
    """A graph as read back from the driver: node kinds and handles in the driver's order, edges between handles."""

    nodes: tuple[tuple[NodeHandle, str], ...]
    edges: tuple[DriverEdge, ...]


class Driver:
    """Typed calls into one loaded CUDA driver."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def _call(self, name: str, *args: Any, where: str = "") -> Any:
        try:
            status, *values = getattr(self._api, name)(*args)
        except RuntimeError as err:  # the bindings cannot find the library, or the call in it
            raise DriverError("DRIVER_MISSING", f"the CUDA driver cannot be used: {err}", where=name,
                              hint="install an NVIDIA driver of release 580 or later, or use `--device cpu`") from err
        if status != _SUCCESS:
            raise self._error(name, status, where)
        return values[0] if len(values) == 1 else values

    def _error(self, name: str, status: Any, where: str) -> DriverError:
        code = getattr(status, "name", None) or f"CUDA_ERROR_{int(status)}"
        text = self._api.cuGetErrorString(status)[1]
        what = text.decode() if isinstance(text, bytes) else "a CUDA call failed"
        return DriverError(code, what, where=f"{name} {where}".rstrip(), hint=_HINTS.get(code, ""))

    # Devices and contexts

    def init(self) -> None:
        self._call("cuInit", 0)

    def version(self) -> int:
        """As cuDriverGetVersion gives it: 13000 is CUDA 13.0."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device(self, ordinal: int) -> DeviceHandle:
        return DeviceHandle(self._call("cuDeviceGet", ordinal, where=f"device {ordinal}"))

    def device_name(self, device: DeviceHandle) -> str:
        name: bytes = self._call("cuDeviceGetName", 128, device)
        return name.rstrip(b"\0").decode("utf-8", "replace")

    def device_attribute(self, device: DeviceHandle, attribute: DeviceAttribute) -> int:
        key = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute.value}")
        return int(self._call("cuDeviceGetAttribute", key, device, where=attribute.value))

    def retain_context(self, device: DeviceHandle) -> Context:
        """The device's primary context, made if nobody holds it; release it as often as it was retained."""
        return Context(self._call("cuDevicePrimaryCtxRetain", device))

    def release_context(self, device: DeviceHandle) -> None:
        self._call("cuDevicePrimaryCtxRelease", device)

    def use(self, context: Context) -> None:
        """Make a context current in this thread."""
        self._call("cuCtxSetCurrent", context)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current context's device."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Device memory; the address is a multiple of 256."""
        return int(self._call("cuMemAlloc", nbytes, where=f"{nbytes} bytes"))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_host(self, nbytes: int, *, mapped: bool = False) -> int:
        """Pinned host memory, for every context; `mapped`: kernels may use it, at `mapped_address`."""
        api = self._api
        flags = api.CU_MEMHOSTALLOC_PORTABLE | (api.CU_MEMHOSTALLOC_DEVICEMAP if mapped else 0)
        return int(self._call("cuMemHostAlloc", nbytes, flags, where=f"{nbytes} bytes"))

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def mapped_address(self, host: int) -> int:
        """The device's address of mapped host memory."""
        return int(self._call("cuMemHostGetDevicePointer", host, 0))

    def copy_in(self, device: int, host: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy from host to device; pinned memory must stay as it is until the stream has passed it."""
        self._call("cuMemcpyHtoDAsync", device, host, nbytes, stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy from device to host."""
        self._call("cuMemcpyDtoHAsync", host, device, nbytes, stream)

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy within the device."""
        self._call("cuMemcpyDtoDAsync", destination, source, nbytes, stream)

    def fill(self, device: int, value: int, nbytes: int, stream: Stream) -> None:
        """Enqueue setting `nbytes` bytes to `value`."""
        self._call("cuMemsetD8Async", device, value, nbytes, stream)

    # Streams and events

    def create_stream(self) -> Stream:
        return Stream(self._call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: Stream) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: Stream) -> None:
        """Wait until the stream is empty; a kernel that failed on it is reported here."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self, *, timing: bool = False) -> Event:
        flags = self._api.CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        return Event(self._call("cuEventCreate", kind))

    def destroy_event(self, event: Event) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, event: Event) -> None:
        """Block this thread until the event's last record has been reached; at once if it was never recorded."""
        self._call("cuEventSynchronize", event)

    def reached(self, event: Event) -> bool:
        """Whether the event's last record has been reached."""
        status = self._api.cuEventQuery(event)[0]
        if status not in (_SUCCESS, _NOT_READY):
            raise self._error("cuEventQuery", status, "")
        return bool(status == _SUCCESS)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    # Modules

    def load_library(self, image: bytes, where: str) -> Library:
        """Load a cubin or PTX text from memory."""
        data = image if image.endswith(b"\0") or image.startswith(b"\x7fELF") else image + b"\0"
        return Library(self._call("cuLibraryLoadData", data, [], [], 0, [], [], 0, where=where))

    def unload_library(self, library: Library) -> None:
        self._call("cuLibraryUnload", library)

    def function(self, library: Library, symbol: str) -> Function:
        """An entry of a library, in the current context. Raises DriverError CUDA_ERROR_NOT_FOUND."""
        kernel = self._call("cuLibraryGetKernel", library, symbol.encode(), where=symbol)
        return Function(self._call("cuKernelGetFunction", kernel, where=symbol))

    def function_attribute(self, function: Function, attribute: FunctionAttribute) -> int:
        return int(self._call("cuFuncGetAttribute", self._function_key(attribute), function, where=attribute.value))

    def set_max_dynamic_shared(self, function: Function, nbytes: int) -> None:
        """Let launches of a kernel ask for more than the 48 KiB of dynamic shared memory that are always allowed."""
        key = self._function_key(FunctionAttribute.MAX_DYNAMIC_SHARED)
        self._call("cuFuncSetAttribute", function, key, nbytes, where=f"{nbytes} bytes of shared memory")

    def _function_key(self, attribute: FunctionAttribute) -> Any:
        return getattr(self._api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute.value}")

    def param_sizes(self, function: Function) -> tuple[int, ...]:
        """Bytes of each parameter of a kernel, in order."""
        sizes: list[int] = []
        while True:
            status, *values = self._api.cuFuncGetParamInfo(function, len(sizes))
            if status == _INVALID_VALUE:
                return tuple(sizes)
            if status != _SUCCESS:
                raise self._error("cuFuncGetParamInfo", status, f"parameter {len(sizes)}")
            _, size = values
            sizes.append(int(size))

    # Graphs

    def create_graph(self) -> GraphHandle:
        return GraphHandle(self._call("cuGraphCreate", 0))

    def destroy_graph(self, graph: GraphHandle) -> None:
        self._call("cuGraphDestroy", graph)

    def add_kernel(self, graph: GraphHandle, launch: KernelLaunch, where: str) -> NodeHandle:
        """Add a kernel node without dependencies; parameter values are copied."""
        node = self._api.CUDA_KERNEL_NODE_PARAMS()
        node.func = launch.function
        node.gridDimX, node.gridDimY, node.gridDimZ = launch.grid
        node.blockDimX, node.blockDimY, node.blockDimZ = launch.block
        node.sharedMemBytes = launch.shared_bytes
        node.kernelParams = launch.params
        return NodeHandle(self._call("cuGraphAddKernelNode", graph, None, 0, node, where=where))

    def add_fill(self, graph: GraphHandle, context: Context, address: int, value: int, element_bytes: int, count: int,
                 where: str) -> NodeHandle:
        """Add a node that sets `count` elements of 1, 2 or 4 bytes."""
        node = self._api.CUDA_MEMSET_NODE_PARAMS()
        node.dst, node.pitch, node.value = address, 0, value
        node.elementSize, node.width, node.height = element_bytes, count, 1
        return NodeHandle(self._call("cuGraphAddMemsetNode", graph, None, 0, node, context, where=where))

    def add_copy(self, graph: GraphHandle, context: Context, destination: int, source: int, nbytes: int,
                 where: str) -> NodeHandle:
        """Add a node that copies within the device."""
        node = self._api.CUDA_MEMCPY3D()
        kind = self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        node.srcMemoryType = node.dstMemoryType = kind
        node.srcDevice, node.dstDevice = source, destination
        node.WidthInBytes, node.Height, node.Depth = nbytes, 1, 1
        return NodeHandle(self._call("cuGraphAddMemcpyNode", graph, None, 0, node, context, where=where))

    def add_empty(self, graph: GraphHandle, where: str) -> NodeHandle:
        return NodeHandle(self._call("cuGraphAddEmptyNode", graph, None, 0, where=where))

    def add_edges(self, graph: GraphHandle, edges: Sequence[DriverEdge], where: str) -> None:
        """Add dependencies, all in one call."""
        if edges:
            full, programmatic = self._api.CUgraphEdgeData(), self._api.CUgraphEdgeData()
            programmatic.type = self._programmatic()
            programmatic.from_port = int(self._api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
            data = [programmatic if e.programmatic else full for e in edges]
            self._call("cuGraphAddDependencies", graph, [e.before for e in edges], [e.after for e in edges], data,
                       len(edges), where=where)

    def _programmatic(self) -> int:
        return int(self._api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)

    def make_executable(self, graph: GraphHandle, where: str) -> GraphExec:
        return GraphExec(self._call("cuGraphInstantiate", graph, 0, where=where))

    def upload(self, executable: GraphExec, stream: Stream) -> None:
        """Put an executable graph on the device now, so that its first launch is as fast as the next."""
        self._call("cuGraphUpload", executable, stream)

    def launch(self, executable: GraphExec, stream: Stream, where: str) -> None:
        self._call("cuGraphLaunch", executable, stream, where=where)

    def destroy_executable(self, executable: GraphExec) -> None:
        self._call("cuGraphExecDestroy", executable)

    def begin_capture(self, stream: Stream) -> None:
        """Record what is enqueued on the stream as a graph, in place of running it."""
        self._call("cuStreamBeginCapture", stream, self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def end_capture(self, stream: Stream) -> GraphHandle:
        """The graph of what was enqueued since `begin_capture`; the caller destroys it."""
        return GraphHandle(self._call("cuStreamEndCapture", stream))

    def read_graph(self, graph: GraphHandle) -> DriverGraph:
        """Nodes and edges as the driver holds them; kinds are CUDA's names without prefix, such as "KERNEL"."""
        _, count = self._call("cuGraphGetNodes", graph, 0)
        handles = self._call("cuGraphGetNodes", graph, count)[0] if count else []
        kinds = [self._call("cuGraphNodeGetType", node) for node in handles]
        *_, edge_count = self._call("cuGraphGetEdges", graph, 0)
        before, after, data = self._call("cuGraphGetEdges", graph, edge_count)[:3] if edge_count else ([], [], [])
        programmatic = self._programmatic()
        return DriverGraph(
            tuple((NodeHandle(n), k.name.removeprefix("CU_GRAPH_NODE_TYPE_"))
                  for n, k in zip(handles, kinds, strict=True)),
            tuple(DriverEdge(NodeHandle(a), NodeHandle(b), int(d.type) == programmatic)
                  for a, b, d in zip(before[:edge_count], after[:edge_count], data[:edge_count], strict=True)))

    def read_kernel(self, node: NodeHandle) -> KernelLaunch:
        """A kernel node's launch; `params` points into the driver's own copy, valid while the graph is unchanged."""
        found = self._call("cuGraphKernelNodeGetParams", node)
        return KernelLaunch(
            Function(found.func), (int(found.gridDimX), int(found.gridDimY), int(found.gridDimZ)),
            (int(found.blockDimX), int(found.blockDimY), int(found.blockDimZ)), int(found.sharedMemBytes),
            int(found.kernelParams))


    def read_function(self, node: NodeHandle) -> int:
        """Handle of a kernel node's function, as a number."""
        found = self._call("cuGraphKernelNodeGetParams", node)
        return int(found.func)  # while `found`, whose memory it lies in, is alive

    def read_attributes(self, node: NodeHandle) -> dict[str, Any]:
        """Launch attributes of a kernel node: "cluster" as three sizes (zeros: none), "cooperative"."""
        names = self._api.CUlaunchAttributeID
        cluster = self._call("cuGraphKernelNodeGetAttribute", node, names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        cooperative = self._call("cuGraphKernelNodeGetAttribute", node, names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        found = cluster.clusterDim
        return {"cluster": (int(found.x), int(found.y), int(found.z)), "cooperative": int(cooperative.cooperative)}


def pointer_array(addresses: Sequence[int]) -> array[int]:
    """An array of pointers for `KernelLaunch.params`: pass `address_of(array)`, and keep it alive until then."""
    return array("Q", addresses)


def address_of(values: array[Any]) -> int:
    return values.buffer_info()[0]


def bindings() -> Any:
    """The CUDA bindings' driver module.

    Raises:
        DriverError: DRIVER_BINDINGS; they are not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as err:
        raise DriverError("DRIVER_BINDINGS", "the CUDA bindings are not installed", where="cuda.bindings",
                          hint="pip install 'dflash-cores[gpu]'") from err
    return driver


def open_driver() -> Driver:
    """The CUDA driver of this machine, initialized.

    Raises:
        DriverError: DRIVER_BINDINGS, DRIVER_MISSING; DRIVER_OLD, it lacks calls that this runtime makes; or what cuInit
            says, such as CUDA_ERROR_NO_DEVICE.
    """
    driver = Driver(bindings())
    version = driver.version()
    if version < MIN_DRIVER:
        raise DriverError("DRIVER_OLD", "the CUDA driver is too old for this runtime", where="cuDriverGetVersion",
                          expected=f"at least {MIN_DRIVER}", got=version, hint="update the NVIDIA driver")
    driver.init()
    return driver
