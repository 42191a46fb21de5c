"""One weight file, written front to back and digested as it grows; its name is its digest once it is whole.

    with open_blob(folder, "target", kept_nbytes=0, on_bytes=progress.advance) as blob:
        digest = blob.write_view(view, tensors)
        path = blob.finish()
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from dflash_core.errors import ResourceError
from torch import Tensor

from exporter.weights import PlacedView

DIGEST_CHUNK_NBYTES = 4 << 20
PARTIAL_SUFFIX = ".partial"
SYNC_NBYTES = 32 << 20  # how much may be written before the disk is asked to catch up
_READ_NBYTES = 4 << 20


class BlobFile:
    """Appends views to a file, digesting views, chunks and the whole; gaps before a view are zeros."""

    def __init__(self, file: BinaryIO, path: Path, disk: Executor, on_bytes: Callable[[int], None]) -> None:
        self.offset = 0
        self._file = file
        self._path = path
        self._disk = disk
        self._syncs: list[Future[None]] = []
        self._synced = 0
        self._on_bytes = on_bytes
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunk_digests = bytearray()

    def write_view(self, view: PlacedView, tensors: Iterator[Tensor]) -> bytes:
        """Write a view's tensors one after another at its offset; returns the SHA-256 of its bytes.

        Raises:
            ResourceError: NO_SPACE, NOT_WRITABLE or WRITE_FAILED.
        """
        self._append(memoryview(bytes(view.offset_bytes - self.offset)))
        digest = hashlib.sha256()
        for tensor in tensors:
            payload = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            digest.update(payload)
            self._append(payload)
        assert self.offset == view.offset_bytes + view.size_bytes, (view, self.offset)
        return digest.digest()

    def take_over(self, views: tuple[PlacedView, ...], digests: list[bytes]) -> bool:
        """Go over a weight that an earlier run wrote here; False, and nothing moved, when its bytes are others."""
        state = self.offset, self._whole.copy(), self._chunk.copy(), bytearray(self._chunk_digests)
        self._file.seek(self.offset)
        for view, expected in zip(views, digests, strict=True):
            gap = view.offset_bytes - self.offset
            if self._read(gap) != bytes(gap) or self._digest(view.size_bytes) != expected:
                self.offset, self._whole, self._chunk, self._chunk_digests = state
                self._file.seek(self.offset)
                return False
        self._on_bytes(self.offset - state[0])
        return True

    def cut(self) -> None:
        """Drop whatever an earlier run wrote beyond this point."""
        with writing(self._path):
            self._file.truncate(self.offset)
            self._file.seek(self.offset)

    def finish(self) -> tuple[Path, bytes, bytes]:
        """Force the file to the disk and name it; returns path, SHA-256, and the digests of its chunks."""
        with writing(self._path):
            for sync in self._syncs:
                sync.result()
            os.fsync(self._file.fileno())
        if self.offset % DIGEST_CHUNK_NBYTES:
            self._chunk_digests += self._chunk.digest()
        path = self._path.with_name(f"{self._whole.hexdigest()}.bin")
        with writing(path):
            self._path.replace(path)
            _sync_folder(path.parent)
        return path, self._whole.digest(), bytes(self._chunk_digests)

    def _append(self, payload: memoryview) -> None:
        while payload:
            part = payload[: DIGEST_CHUNK_NBYTES - self.offset % DIGEST_CHUNK_NBYTES]
            with writing(self._path):
                count = self._file.write(part)
            self._advance(part[:count])
            payload = payload[count:]
            self._on_bytes(count)
        self._sync_behind()

    def _sync_behind(self) -> None:
        """Have what is written go to the disk while more is made, so that `finish` has little to wait for."""
        if self.offset - self._synced >= SYNC_NBYTES and all(sync.done() for sync in self._syncs[-1:]):
            self._synced = self.offset
            self._syncs.append(self._disk.submit(os.fdatasync, self._file.fileno()))

    def _digest(self, nbytes: int) -> bytes:
        digest = hashlib.sha256()
        for start in range(0, nbytes, _READ_NBYTES):
            digest.update(self._read(min(_READ_NBYTES, nbytes - start)))
        return digest.digest()

    def _read(self, nbytes: int) -> bytearray:
        """The next bytes, or fewer where the file ends."""
        data = bytearray()
        while len(data) < nbytes and (more := self._file.read(nbytes - len(data))):
            data += more
        rest = memoryview(data)
        while rest:
            part = rest[: DIGEST_CHUNK_NBYTES - self.offset % DIGEST_CHUNK_NBYTES]
            self._advance(part)
            rest = rest[len(part):]
        return data

    def _advance(self, part: memoryview) -> None:
        self._whole.update(part)
        self._chunk.update(part)
        self.offset += len(part)
        if self.offset % DIGEST_CHUNK_NBYTES == 0:
            self._chunk_digests += self._chunk.digest()
            self._chunk = hashlib.sha256()


@contextmanager
def open_blob(folder: Path, key: str, *, resume: bool, on_bytes: Callable[[int], None]) -> Iterator[BlobFile]:
    """The file of one blob, under the name that it has until it is whole; removed when the block does not end well.

    Args:
        resume: keep what an earlier run wrote; the caller takes it over, then cuts the rest.
    Raises:
        ResourceError: NO_SPACE, NOT_WRITABLE or WRITE_FAILED.
    """
    partial = folder / f"{key}{PARTIAL_SUFFIX}"
    try:
        with writing(partial):
            file = partial.open("r+b" if resume else "wb", buffering=0)
        with file, ThreadPoolExecutor(1, "sync") as disk:
            yield BlobFile(file, partial, disk, on_bytes)
    finally:
        with suppress(OSError):  # renamed away on success; on failure the error under way matters more
            partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into a ResourceError that names the path."""
    try:
        yield
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError("NO_SPACE", "no space left for the weights", where=str(path),
                                hint="free some space, or write the core to another disk") from cause
        if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ResourceError("NOT_WRITABLE", "weights may not be written here", where=str(path),
                                hint="choose a folder that you may write to") from cause
        raise ResourceError("WRITE_FAILED", f"weights cannot be written ({cause.strerror})", where=str(path),
                            hint="free space on the disk, or choose another --out") from cause


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
