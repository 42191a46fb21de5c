"""Does a verified core fit this device? Answered before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dflash_core.compat import CPU, Device, Requirement, fit_symbols, requirements, select_target, unmet
from dflash_core.errors import CompatibilityError, FormatError, ResourceError
from dflash_core.v1 import graph_pb2

from runtime.verify import VerifiedCore


@dataclass(frozen=True, slots=True)
class CheckedCore:
    """A verified core, and the device target and graphs that will be used."""

    verified: VerifiedCore
    device: Device
    target: graph_pb2.DeviceTarget
    graphs: tuple[graph_pb2.Graph, ...]
    templates: dict[int, graph_pb2.GraphTemplate]
    symbols: dict[int, int]


def query_device(name: str = CPU) -> Device:
    """What this machine offers under the name of a device target.

    Raises:
        CompatibilityError: DEVICE_UNKNOWN; this runtime drives no such device.
    """
    if name != CPU:
        raise CompatibilityError("DEVICE_UNKNOWN", "this is no device of this machine's processor", where="device",
                                 expected=CPU, got=name, hint="a GPU is asked for as cuda or cuda:N")
    return Device(name=CPU, driver=None, free_bytes=available_bytes())


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be allocated without swapping: free memory and the page cache that the kernel gives back.

    Linux counts them as MemAvailable; elsewhere only the free pages are known.
    """
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(verified: VerifiedCore, device: Device) -> CheckedCore:
    """Choose the device target and its graphs, and compare what they need with the device.

    Raises:
        CompatibilityError: DEVICE_TARGET, or RANKS for a core of several ranks.
        ResourceError: MEMORY; the weights and the smallest K/V cache do not fit.
        FormatError: GRAPH_REF; the core has no graphs for its target.
    """
    manifest = verified.manifest
    target = select_target(manifest, device)
    for requirement in unmet(requirements(manifest, device)):
        _refuse(requirement, manifest.core_name)
    files = [f for f in manifest.graph_files if f.target_id == target.target_id]
    if len(files) != 1:
        raise FormatError("GRAPH_REF", "a device target needs one graph file for this rank", where=target.name,
                          expected=1, got=len(files))
    graphs = verified.graph_set(files[0])
    return CheckedCore(verified, device, target, tuple(graphs.graphs), {t.template_id: t for t in graphs.templates},
                       fit_symbols(manifest, target.target_id, device.free_bytes))


def _refuse(requirement: Requirement, core_name: str) -> None:
    if requirement.name == "memory":
        raise ResourceError("MEMORY", "the core does not fit in memory", where=core_name, expected=requirement.expected,
                            got=requirement.found, hint="free memory, or use a smaller core")
    raise CompatibilityError(requirement.name.upper(), f"the core needs another {requirement.name.replace('_', ' ')}",
                             where=core_name, expected=requirement.expected, got=requirement.found,
                             hint="use a core exported for this machine")
