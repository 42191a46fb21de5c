"""Give every buffer of a core its memory, and fill it with verified bytes.

Weights are read straight into the memory that the ops use, and hashed there; nothing is mapped from a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from dflash_core.compat import buffer_bytes
from dflash_core.v1 import graph_pb2

from runtime.check import CheckedCore

ALIGNMENT = 256
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MappedCore:
    """A checked core with memory behind every buffer: buffer id to bytes."""

    checked: CheckedCore
    memory: dict[int, ByteArray]


def map_sections(
    checked: CheckedCore, *, threads: int = 2, on_bytes: Callable[[int], None] | None = None
) -> MappedCore:
    """Allocate all buffers and read weights and first contents into them.

    Args:
        threads: threads that read and hash.
        on_bytes: told the size of each verified chunk.
    Raises:
        VerificationError: CHUNK_MISMATCH or DIGEST_MISMATCH; nothing has run yet and the memory is released.
    """
    verified, manifest = checked.verified, checked.verified.manifest
    blobs = {b.blob_id: b.file for b in manifest.weight_blobs}
    sizes = {blob_id: ref.size_bytes for blob_id, ref in blobs.items()}
    memory: dict[int, ByteArray] = {}
    for buffer in manifest.buffers:
        if buffer.HasField("device_target") and buffer.device_target != checked.target.target_id:
            continue
        size = buffer_bytes(buffer, sizes, checked.symbols)
        array = _aligned(size, zero=buffer.buffer_class != graph_pb2.WEIGHTS)
        if buffer.HasField("blob_id"):
            path = verified.entry(blobs[buffer.blob_id]).path
            verified.read_into(path, array.data, threads=threads, on_bytes=on_bytes)
        elif buffer.HasField("initial"):
            first = np.frombuffer(verified.small_file(buffer.initial), np.uint8)
            array[:len(first)] = first
        memory[buffer.buffer_id] = array
    for buffer in manifest.buffers:
        for relocation in buffer.data_relocations if buffer.buffer_id in memory else ():
            address = memory[relocation.buffer_id].__array_interface__["data"][0] + relocation.addend
            memory[buffer.buffer_id][relocation.offset:relocation.offset + 8] = np.frombuffer(
                struct.pack("<Q", address), np.uint8)
    return MappedCore(checked, memory)


def _aligned(nbytes: int, *, zero: bool) -> ByteArray:
    """`nbytes` of memory that start at a multiple of ALIGNMENT; zeros are provided lazily by the system."""
    raw = (np.zeros if zero else np.empty)(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[skip:skip + nbytes]
