"""A core's memory on a GPU: one device allocation, one pinned host allocation, and the way verified bytes get there.

Weights go from the file into pinned staging buffers, are hashed there, and are copied to the device from the same
memory. A staging buffer is used again only when its last copy has ended.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from dflash_core.v1 import graph_pb2 as pb

from runtime.check import CheckedCore
from runtime.corefiles import CHUNK_BYTES
from runtime.driver import Event, Stream
from runtime.gpu.device import GpuDevice, Releases
from runtime.gpu.layout import MemoryLayout, Space

MIN_BUFFERS = 4
MAX_THREADS = 16


def default_threads() -> int:
    """Threads that read and hash weights: one per processor, at most 16 (an H200's host hashes 1.1 GB/s in each)."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def host_bytes(address: int, nbytes: int) -> memoryview:
    """Host memory at an address, as writable bytes; the owner of the memory must outlive it."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


@dataclass(frozen=True, slots=True)
class CoreMemory:
    """The memory of one core. `buffers` leads from buffer id to the address that kernels use."""

    layout: MemoryLayout
    device_base: int
    host_base: int
    buffers: dict[int, int]


def allocate(device: GpuDevice, layout: MemoryLayout, releases: Releases) -> CoreMemory:
    """Reserve a core's device and host memory; host memory is zero, device memory undefined.

    Raises:
        DriverError: CUDA_ERROR_OUT_OF_MEMORY.
    """
    driver = device.driver
    device_base = driver.allocate(max(layout.device_bytes, 1))
    releases.add(lambda: driver.free(device_base))
    host_base = mapped_base = 0
    if layout.host_bytes:
        host_base = driver.allocate_host(layout.host_bytes, mapped=True)
        releases.add(lambda: driver.free_host(host_base))
        ctypes.memset(host_base, 0, layout.host_bytes)
        mapped_base = driver.mapped_address(host_base)
    bases = {Space.INPUT: device_base, Space.DEVICE: device_base, Space.MAPPED: mapped_base}
    return CoreMemory(layout, device_base, host_base,
                      {buffer_id: bases[place.space] + place.offset for buffer_id, place in layout.places.items()})


def staging_buffers(checked: CheckedCore, threads: int) -> int:
    """One for each thread to fill and some on their way, but no more than there are chunks."""
    chunks = sum(-(-b.file.size_bytes // CHUNK_BYTES) for b in checked.verified.manifest.weight_blobs)
    return max(MIN_BUFFERS, min(threads + MIN_BUFFERS, chunks))


class Staging:
    """Pinned buffers of one chunk each, which threads take, fill, and send to the device."""

    def __init__(self, device: GpuDevice, stream: Stream, buffers: int, releases: Releases) -> None:
        self._device, self._stream = device, stream
        self._free: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self._taken = threading.local()
        self._cancelled = False
        driver = device.driver
        base = driver.allocate_host(buffers * CHUNK_BYTES)
        releases.add(lambda: driver.free_host(base))
        for index in range(buffers):
            event = driver.create_event()
            releases.add(lambda event=event: driver.destroy_event(event))  # type: ignore[misc]
            self._free.put((base + index * CHUNK_BYTES, event))

    def cancel(self) -> None:
        """Let no thread take a further buffer."""
        self._cancelled = True

    def take(self, nbytes: int) -> memoryview:
        """A buffer whose last copy has ended; this thread must `send` it before it takes the next.

        Raises:
            InterruptedError: the upload was cancelled.
        """
        if self._cancelled:
            raise InterruptedError("the upload was cancelled")
        address, event = self._taken.held = self._free.get()
        self._device.use()
        self._device.driver.wait(event)
        return host_bytes(address, nbytes)

    def send(self, destination: int, nbytes: int) -> None:
        """Enqueue the copy of this thread's buffer to a device address, and let others have it after that."""
        address, event = self._taken.held
        driver = self._device.driver
        driver.copy_in(destination, address, nbytes, self._stream)
        driver.record(event, self._stream)
        self._free.put((address, event))


def fill(checked: CheckedCore, memory: CoreMemory, staging: Staging, device: GpuDevice, stream: Stream, *, threads: int,
         on_bytes: Callable[[int], None] | None = None) -> None:
    """Give every buffer its first contents: weights, state, pointer tables; zeros for the rest of STATE and IO.

    Copies are enqueued on `stream`; the caller synchronizes it before anything is launched.

    Args:
        on_bytes: told the size of each verified chunk of weights, one call at a time.
    Raises:
        VerificationError: CHUNK_MISMATCH or DIGEST_MISMATCH.
    """
    verified, driver = checked.verified, device.driver
    blobs = {b.blob_id: b.file for b in verified.manifest.weight_blobs}
    lock = threading.Lock()
    device.use()
    if memory.layout.input_bytes:
        driver.fill(memory.device_base, 0, memory.layout.input_bytes, stream)
    for buffer in verified.manifest.buffers:
        if buffer.buffer_id not in memory.buffers:
            continue
        address, place = memory.buffers[buffer.buffer_id], memory.layout.places[buffer.buffer_id]
        if buffer.HasField("blob_id"):
            def send(offset: int, part: memoryview, start: int = address) -> None:
                staging.send(start + offset, len(part))
                if on_bytes is not None:
                    with lock:
                        on_bytes(len(part))

            verified.read_chunks(verified.entry(blobs[buffer.blob_id]).path, lambda _, nbytes: staging.take(nbytes),
                                 send, threads=threads)
        elif buffer.buffer_class in (pb.STATE, pb.IO, pb.POINTER_TABLE) and place.space is Space.DEVICE:
            if place.nbytes:
                driver.fill(address, 0, place.nbytes, stream)
            _send_bytes(staging, address, _first_contents(checked, buffer, memory))


def _first_contents(checked: CheckedCore, buffer: pb.Buffer, memory: CoreMemory) -> bytes:
    """What a buffer starts with; addresses of other buffers are written into a pointer table."""
    data = bytearray(checked.verified.small_file(buffer.initial)) if buffer.HasField("initial") else bytearray()
    for relocation in buffer.data_relocations:
        data += bytes(max(relocation.offset + 8 - len(data), 0))
        struct.pack_into("<Q", data, relocation.offset, memory.buffers[relocation.buffer_id] + relocation.addend)
    return bytes(data)


def _send_bytes(staging: Staging, address: int, data: bytes) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        staging.take(len(part))[:] = part
        staging.send(address + start, len(part))
