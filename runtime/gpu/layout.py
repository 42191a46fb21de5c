"""Where each buffer of a core lies: one range of device memory, and one of pinned host memory that kernels may address.

    device:  [ host inputs | everything else ]
    host:    [ mirror of the host inputs | buffers that kernels write into host memory ]

Host inputs come first and alike on both sides, so that whatever the host changed since the last launch goes up in one
copy. Pure arithmetic; nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from dflash_core.compat import buffer_bytes, for_target
from dflash_core.v1.graph_pb2 import IO, Buffer
from dflash_core.v1.manifest_pb2 import RebuildManifest

ALIGNMENT = 256


class Space(Enum):
    """Which memory a buffer lies in."""

    INPUT = "device, with a mirror on the host at the same offset"
    DEVICE = "device"
    MAPPED = "host, at the device's address"


@dataclass(frozen=True, slots=True)
class Place:
    """A buffer's range of its memory, in bytes."""

    space: Space
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Places by buffer id, and the bytes of both ranges; the first `input_bytes` of each are the host inputs."""

    places: Mapping[int, Place]
    input_bytes: int
    device_bytes: int
    host_bytes: int


def lay_out(manifest: RebuildManifest, target_id: int, symbols: Mapping[int, int]) -> MemoryLayout:
    """Place every buffer of a device target.

    Args:
        symbols: symbol id to value.
    """
    blobs = {b.blob_id: b.file.size_bytes for b in manifest.weight_blobs}
    buffers = [b for b in manifest.buffers if for_target(b, target_id)]
    sizes = {b.buffer_id: buffer_bytes(b, blobs, symbols) for b in buffers}
    spaces = {b.buffer_id: _space(b, manifest) for b in buffers}
    places: dict[int, Place] = {}

    def place(space: Space, start: int) -> int:
        chosen = [b for b in buffers if spaces[b.buffer_id] is space]
        return _pack(places, chosen, sizes, space, start)

    input_bytes = place(Space.INPUT, 0)
    return MemoryLayout(places, input_bytes, place(Space.DEVICE, input_bytes), place(Space.MAPPED, input_bytes))


def _pack(places: dict[int, Place], buffers: Iterable[Buffer], sizes: Mapping[int, int], space: Space,
          start: int) -> int:
    end = start
    for buffer in buffers:
        alignment = max(buffer.alignment, ALIGNMENT)
        offset = -(-end // alignment) * alignment
        places[buffer.buffer_id] = Place(space, offset, sizes[buffer.buffer_id])
        end = offset + sizes[buffer.buffer_id]
    return -(-end // ALIGNMENT) * ALIGNMENT


def _space(buffer: Buffer, manifest: RebuildManifest) -> Space:
    """An IO buffer that no binding marks as output is written by the host alone, so a mirror of it is never stale."""
    if buffer.buffer_class != IO:
        return Space.DEVICE
    if buffer.host_mapped:
        return Space.MAPPED
    outputs = [binding.output for binding in manifest.contract.io if binding.buffer_id == buffer.buffer_id]
    return Space.INPUT if outputs and not any(outputs) else Space.DEVICE
