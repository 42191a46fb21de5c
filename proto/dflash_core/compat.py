"""Which device can run a core: requirements, and the one rule that compares them with a machine.

    device = Device(name="cpu", driver=None, free_bytes=24 << 30)
    target = select_target(manifest, device)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2, manifest_pb2

FORMAT_VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """A machine's side of the comparison.

    Attributes:
        name: "cpu", or the architecture of a GPU, such as "sm_90".
        driver: as cuDriverGetVersion gives it; None on a CPU.
        free_bytes: memory that a core may take.
    """

    name: str
    driver: int | None
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that a core needs, and what the device has."""

    name: str
    expected: str
    found: str
    met: bool


def select_target(manifest: manifest_pb2.RebuildManifest, device: Device) -> graph_pb2.DeviceTarget:
    """The first device target of the core that this device can run.

    Raises:
        CompatibilityError: DEVICE_TARGET; none fits.
    """
    for target in manifest.device_targets:
        if target.name == device.name:
            return target
    offered = ", ".join(t.name for t in manifest.device_targets) or "none"
    raise CompatibilityError("DEVICE_TARGET", "the core was not exported for this device", where=manifest.core_name,
                             expected=offered, got=device.name, hint=f"export it with `--device {device.name}`")


def buffer_bytes(buffer: graph_pb2.Buffer, blob_bytes: Mapping[int, int], symbols: Mapping[int, int]) -> int:
    """Bytes a buffer takes. A WEIGHTS buffer is as large as its blob.

    Args:
        blob_bytes: blob id to file size.
        symbols: symbol id to value.
    """
    if buffer.HasField("blob_id"):
        return blob_bytes[buffer.blob_id]
    return buffer.fixed_bytes + sum(symbols[t.symbol_id] * t.bytes for t in buffer.size_terms)


def memory_bytes(manifest: manifest_pb2.RebuildManifest, symbols: Mapping[int, int]) -> dict[str, int]:
    """Bytes by buffer class for these symbol values."""
    blobs = {b.blob_id: b.file.size_bytes for b in manifest.weight_blobs}
    total: dict[str, int] = {}
    for buffer in manifest.buffers:
        name = graph_pb2.BufferClass.Name(buffer.buffer_class)
        total[name] = total.get(name, 0) + buffer_bytes(buffer, blobs, symbols)
    return total


def requirements(manifest: manifest_pb2.RebuildManifest, device: Device) -> tuple[Requirement, ...]:
    """Everything the core needs of a device, compared with it; the target must exist."""
    least = sum(memory_bytes(manifest, {s.symbol_id: s.minimum for s in manifest.symbols}).values())
    world = manifest.parallelism.world_size if manifest.HasField("parallelism") else 1
    return (
        Requirement("ranks", "1", str(max(world, 1)), world <= 1),
        Requirement("memory", f"at least {least} bytes free", f"{device.free_bytes} bytes", least <= device.free_bytes),
    )


def unmet(found: Iterable[Requirement]) -> tuple[Requirement, ...]:
    return tuple(r for r in found if not r.met)
