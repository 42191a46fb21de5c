"""Load a core's kernel modules and compare each kernel that graphs use with what the manifest says of it.

The driver loads what it is given; a kernel whose parameters differ from the recorded ones would read past them. So
nothing is launched, and no memory for the core is reserved, before every kernel fits its record and this device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError, DriverError, FormatError
from dflash_core.v1 import graph_pb2 as pb

from runtime.check import CheckedCore
from runtime.driver import Function, FunctionAttribute
from runtime.gpu.device import GpuDevice, Releases
from runtime.gpu.nodes import Dims, ParamLayout, dims, place_of, unsupported

DEFAULT_SHARED_BYTES = 48 << 10
"""Dynamic and static shared memory that a block may have without asking for it."""


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that fits its record; `block` is None when its nodes state one."""

    name: str
    function: Function
    layout: ParamLayout
    block: Dims | None
    max_threads: int


def load_kernels(checked: CheckedCore, device: GpuDevice, releases: Releases) -> dict[int, LoadedKernel]:
    """Load the modules of the device target, and check every kernel that its graphs use.

    Args:
        releases: takes what unloads the modules.
    Returns:
        Kernel id to loaded kernel.
    Raises:
        DriverError: the driver refuses a module; CUDA_ERROR_NO_BINARY_FOR_GPU for one of another architecture.
        FormatError: KERNEL_SYMBOL, KERNEL_PARAMS, KERNEL_RECORD, MODULE_KIND, GRAPH_REF.
        CompatibilityError: KERNEL_LIMIT, more threads or shared memory than this device gives a block.
    """
    manifest, target = checked.verified.manifest, checked.target
    modules = {m.module_id: m for m in manifest.modules}
    libraries = {}
    for module_id in target.module_ids:
        module = modules[module_id]
        where = f"module {module_id}, {module.target}"
        if module.kind not in (pb.CUBIN, pb.PTX):
            raise FormatError("MODULE_KIND", "a GPU target uses a module that is no GPU code", where=where,
                              expected="CUBIN or PTX", got=pb.ModuleKind.Name(module.kind))
        library = device.driver.load_library(checked.verified.small_file(module.file), where)
        releases.add(lambda library=library: device.driver.unload_library(library))  # type: ignore[misc]
        libraries[module_id] = library
    shared = _shared_by_kernel(checked)
    kernels = {k.kernel_id: k for k in manifest.kernels}
    loaded = {}
    for kernel_id in sorted(shared):
        variant = choose_variant(kernels[kernel_id], target.module_ids)
        where = f"kernel {kernels[kernel_id].name}, {variant.symbol} of module {variant.module_id}"
        try:
            function = device.driver.function(libraries[variant.module_id], variant.symbol)
        except DriverError as err:
            if err.code != "CUDA_ERROR_NOT_FOUND":
                raise
            raise FormatError("KERNEL_SYMBOL", "the module has no such kernel", where=where) from err
        loaded[kernel_id] = _checked(device, function, variant, shared[kernel_id], where)
    return loaded


def choose_variant(kernel: pb.Kernel, module_ids: Iterable[int]) -> pb.KernelVariant:
    """The variant in the first of a device target's modules that has one. Raises GRAPH_REF when none has."""
    variants = {v.module_id: v for v in kernel.variants}
    for module_id in module_ids:
        if module_id in variants:
            return variants[module_id]
    raise FormatError("GRAPH_REF", "the device target has no variant of a kernel", where=f"kernel {kernel.name}")


def _shared_by_kernel(checked: CheckedCore) -> dict[int, int]:
    """Kernel id to the most dynamic shared memory that any node asks for it."""
    most: dict[int, int] = {}

    def note(kernel_id: int, nbytes: int) -> None:
        most[kernel_id] = max(most.get(kernel_id, 0), nbytes)

    def note_nodes(nodes: Iterable[pb.GraphNode], place: str) -> None:
        for node in nodes:
            if node.kind == pb.KERNEL:
                if node.attributes or (node.HasField("cluster") and dims(node.cluster) != (1, 1, 1)):
                    raise unsupported("launch attributes and clusters", place_of(place, node))
                note(node.kernel_id, node.dynamic_shared_bytes)

    for template in checked.templates.values():
        note_nodes(template.nodes, f"template {template.template_id}")
    for graph in checked.graphs:
        note_nodes(graph.nodes, graph.name)
        for override in graph.overrides:
            node = checked.templates[graph.template_id].nodes[override.node_id]
            if node.kind == pb.KERNEL:
                has_bytes = override.HasField("dynamic_shared_bytes")
                note(override.kernel_id if override.HasField("kernel_id") else node.kernel_id,
                     override.dynamic_shared_bytes if has_bytes else node.dynamic_shared_bytes)
    return most


def _checked(
    device: GpuDevice, function: Function, variant: pb.KernelVariant, dynamic_shared: int, where: str
) -> LoadedKernel:
    driver = device.driver
    recorded, found = tuple(slot.size for slot in variant.params), driver.param_sizes(function)
    if recorded != found:
        raise FormatError("KERNEL_PARAMS", "a kernel takes other parameters than recorded", where=where,
                          expected=_listed(recorded), got=_listed(found))
    if variant.HasField("required_cluster") and dims(variant.required_cluster) != (1, 1, 1):
        raise unsupported("clusters", where)
    values = {a: driver.function_attribute(function, a) for a in FunctionAttribute}
    _check_record(variant, values, where)
    block = dims(variant.block) if variant.HasField("block") else None
    max_threads = values[FunctionAttribute.MAX_THREADS]
    check_threads(block, max_threads, where)
    static = values[FunctionAttribute.STATIC_SHARED]
    if static + dynamic_shared > device.facts.shared_optin_bytes:
        raise CompatibilityError("KERNEL_LIMIT", "a kernel needs more shared memory than a block can have", where=where,
                                 expected=f"at most {device.facts.shared_optin_bytes} bytes",
                                 got=f"{static} + {dynamic_shared}", hint="use a core exported for this device")
    if static + dynamic_shared > DEFAULT_SHARED_BYTES:
        driver.set_max_dynamic_shared(function, dynamic_shared)
    return LoadedKernel(where, function, ParamLayout.of(recorded), block, max_threads)


def check_threads(block: Dims | None, max_threads: int, where: str) -> None:
    """A block of this shape can be launched. Raises KERNEL_LIMIT."""
    if block is not None and block[0] * block[1] * block[2] > max_threads:
        raise CompatibilityError("KERNEL_LIMIT", "a kernel cannot have so many threads in a block on this device",
                                 where=where, expected=f"at most {max_threads}", got=block[0] * block[1] * block[2],
                                 hint="use a core exported for this device")


def _check_record(variant: pb.KernelVariant, values: Mapping[FunctionAttribute, int], where: str) -> None:
    """What the exporter recorded of the compiled kernel is what the driver finds."""
    for field, attribute in (("static_shared_bytes", FunctionAttribute.STATIC_SHARED),
                             ("local_bytes", FunctionAttribute.LOCAL_BYTES)):
        if variant.HasField(field) and getattr(variant, field) != values[attribute]:
            raise FormatError("KERNEL_RECORD", f"a kernel's {field} are not the recorded ones", where=where,
                              expected=getattr(variant, field), got=values[attribute])


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{len(sizes)} of {', '.join(map(str, sizes)) or 'no'} bytes"
