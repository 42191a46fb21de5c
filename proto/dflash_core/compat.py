"""Which device can run a core: requirements, and the one rule that compares them with a machine.

    device = Device(name="cpu", driver=None, free_bytes=24 << 30)
    target = select_target(manifest, device)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2, manifest_pb2

FORMAT_VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
CPU = "cpu"


FEATURES = ("tma", "cluster", "pdl", "conditional", "vmm")
"""Device features that a target may ask for and a device may have."""
_TARGET = re.compile(r"sm_(?P<major>[0-9]{1,2})(?P<minor>[0-9])(?P<suffix>[af]?)(?P<ptx>\+ptx)?")
# First driver that takes each PTX version. Source: release notes of the PTX ISA.
_PTX_DRIVERS = {
    78: 11080, 80: 12000, 81: 12010, 82: 12020, 83: 12030, 84: 12040, 85: 12050, 86: 12070, 87: 12080, 88: 12090,
    90: 13000, 91: 13010,
}


KV_PAGES, SNAPSHOTS = "kv_pages", "snapshots"
FILLED_SHARE = 0.95
"""Of the memory that is free: the rest is for what a driver needs beside buffers."""
SNAPSHOT_SHARE = 0.5
"""Of the memory that is left once everything else has its room."""


@dataclass(frozen=True, slots=True)
class Device:
    """A machine's side of the comparison.

    Attributes:
        name: "cpu", or the architecture of a GPU, such as "sm_90".
        driver: as cuDriverGetVersion gives it; None on a CPU.
        free_bytes: memory that a core may take.
        compute_capability: major and minor; None on a CPU.
        sm_count: multiprocessors of the device, or of the part of it that this process may use.
        shared_optin_bytes: most shared memory that one block may have.
        features: those of FEATURES that the device and its driver have.
        partition: the device is a part of a GPU (MIG).
    """

    name: str
    driver: int | None
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0
    shared_optin_bytes: int = 0
    features: frozenset[str] = frozenset()
    partition: bool = False


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that a core needs, and what the device has."""

    name: str
    expected: str
    found: str
    met: bool


def runs_on(target: str, device: Device) -> bool:
    """Whether code for a device target runs on a device, by architecture alone.

    "sm_90a" needs that exact compute capability; "sm_100f" and "sm_90" the same major and at least that minor (a family
    has one major); "+ptx" any capability that is not lower, since the driver compiles it there.
    Source: CUDA programming guide, compute capabilities and family-specific targets.
    """
    if device.compute_capability is None:
        return target == device.name
    match = _TARGET.fullmatch(target)
    if match is None:
        return False
    wanted, found = (int(match["major"]), int(match["minor"])), device.compute_capability
    if match["suffix"] == "a":
        return found == wanted
    if match["ptx"]:
        return found >= wanted
    return found[0] == wanted[0] and found[1] >= wanted[1]


def select_target(manifest: manifest_pb2.RebuildManifest, device: Device) -> graph_pb2.DeviceTarget:
    """The first device target of the core that this device can run.

    Raises:
        CompatibilityError: DEVICE_TARGET; none fits.
    """
    for target in manifest.device_targets:
        if runs_on(target.name, device):
            return target
    offered = ", ".join(t.name for t in manifest.device_targets) or "none"
    wanted = device.name if device.compute_capability is None else f"cuda:{device.name}"
    raise CompatibilityError("DEVICE_TARGET", "the core was not exported for this device", where=manifest.core_name,
                             expected=offered, got=device.name, hint=f"export it with `--device {wanted}`")


def buffer_bytes(buffer: graph_pb2.Buffer, blob_bytes: Mapping[int, int], symbols: Mapping[int, int]) -> int:
    """Bytes a buffer takes. A WEIGHTS buffer is as large as its blob.

    Args:
        blob_bytes: blob id to file size.
        symbols: symbol id to value.
    """
    if buffer.HasField("blob_id"):
        return blob_bytes[buffer.blob_id]
    return buffer.fixed_bytes + sum(symbols[t.symbol_id] * t.bytes for t in buffer.size_terms)


def fit_symbols(manifest: manifest_pb2.RebuildManifest, target_id: int, free_bytes: int) -> dict[int, int]:
    """Value of every symbol on a device: the recorded default where memory allows it, less where it does not.

    Of `snapshots` there are as many as half of the memory that is left then holds, and no more than there are pages of
    K/V, each of which ends at one depth that a prompt can be taken up from.

    Args:
        free_bytes: memory that the core may take; where the smallest values do not fit, they are the answer.
    Returns:
        Symbol id to value.
    """
    target = [b for b in manifest.buffers if for_target(b, target_id)]
    unit = {s.symbol_id: sum(t.bytes for b in target for t in b.size_terms if t.symbol_id == s.symbol_id)
            for s in manifest.symbols}
    values = {s.symbol_id: s.minimum for s in manifest.symbols}
    left = int(free_bytes * FILLED_SHARE) - sum(memory_bytes(manifest, values, target_id).values())

    def grow(symbol: graph_pb2.Symbol, wanted: int, room: int) -> int:
        """Raise a symbol's value towards `wanted`; returns the bytes that takes."""
        nbytes = unit[symbol.symbol_id]
        more = max(0, wanted - symbol.minimum)
        more = min(more, max(0, room) // nbytes) if nbytes else more
        values[symbol.symbol_id] += more
        return more * nbytes

    for symbol in manifest.symbols:
        if symbol.name != SNAPSHOTS and symbol.HasField("default_value"):
            left -= grow(symbol, symbol.default_value, left)
    pages = max((values[s.symbol_id] for s in manifest.symbols if s.name == KV_PAGES), default=0)
    for symbol in manifest.symbols:
        if symbol.name == SNAPSHOTS:
            left -= grow(symbol, min(pages, symbol.maximum), int(left * SNAPSHOT_SHARE))
    return values


def memory_bytes(
    manifest: manifest_pb2.RebuildManifest, symbols: Mapping[int, int], target_id: int | None = None
) -> dict[str, int]:
    """Bytes by buffer class for these symbol values; of one device target's buffers, or of all."""
    blobs = {b.blob_id: b.file.size_bytes for b in manifest.weight_blobs}
    total: dict[str, int] = {}
    for buffer in manifest.buffers:
        if target_id is not None and not for_target(buffer, target_id):
            continue
        name = graph_pb2.BufferClass.Name(buffer.buffer_class)
        total[name] = total.get(name, 0) + buffer_bytes(buffer, blobs, symbols)
    return total


def for_target(buffer: graph_pb2.Buffer, target_id: int) -> bool:
    """Whether a device target has this buffer."""
    return not buffer.HasField("device_target") or buffer.device_target == target_id


def requirements(manifest: manifest_pb2.RebuildManifest, device: Device) -> tuple[Requirement, ...]:
    """Everything the core needs of a device, compared with it, in the order in which a loader checks.

    Raises:
        CompatibilityError: DEVICE_TARGET; the core has no target for the device.
    """
    target = select_target(manifest, device)
    world = manifest.parallelism.world_size if manifest.HasField("parallelism") else 1
    found = [Requirement("ranks", "1", str(max(world, 1)), world <= 1)]
    if device.compute_capability is not None:
        found += _gpu_requirements(manifest, target, device)
    least = sum(memory_bytes(manifest, {s.symbol_id: s.minimum for s in manifest.symbols}, target.target_id).values())
    found.append(Requirement("memory", f"at least {least} bytes free", f"{device.free_bytes} bytes",
                             least <= device.free_bytes))
    return tuple(found)


def _gpu_requirements(
    manifest: manifest_pb2.RebuildManifest, target: graph_pb2.DeviceTarget, device: Device
) -> list[Requirement]:
    modules = [m for m in manifest.modules if m.module_id in target.module_ids]
    driver = device.driver or 0
    part = " of a MIG partition" if device.partition else ""
    found = []
    least = max((m.min_driver for m in modules if m.HasField("min_driver")), default=None)
    if least is not None:
        found.append(Requirement("driver", f"at least {least}", str(driver), driver >= least))
    for version in sorted({m.ptx_version for m in modules if m.HasField("ptx_version")}):
        first = _PTX_DRIVERS.get(version)
        expected = f"a driver for PTX {version // 10}.{version % 10}" + (f", {first}" if first else ", unknown here")
        found.append(Requirement("ptx_version", expected, str(driver), first is not None and driver >= first))
    if target.HasField("exact_sm_count"):
        found.append(Requirement("sm_count", f"exactly {target.exact_sm_count}", f"{device.sm_count}{part}",
                                 device.sm_count == target.exact_sm_count))
    if target.HasField("min_sm_count"):
        found.append(Requirement("sm_count", f"at least {target.min_sm_count}", f"{device.sm_count}{part}",
                                 device.sm_count >= target.min_sm_count))
    if target.HasField("min_shared_optin_bytes"):
        found.append(Requirement("shared_memory", f"at least {target.min_shared_optin_bytes} bytes a block",
                                 f"{device.shared_optin_bytes} bytes",
                                 device.shared_optin_bytes >= target.min_shared_optin_bytes))
    found += [Requirement("device_feature", feature, ", ".join(sorted(device.features)) or "none",
                          feature in device.features) for feature in target.device_features]
    return found


def unmet(found: Iterable[Requirement]) -> tuple[Requirement, ...]:
    return tuple(r for r in found if not r.met)
