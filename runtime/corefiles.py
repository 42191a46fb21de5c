"""The files of a core, opened once and held by descriptor.

    with CoreFiles.open(Path("demo/core")) as files:
        manifest = files.read("manifest.pb", files.size("manifest.pb"))

A name is resolved once, one component at a time and never through a link, so that what was listed, what is verified
and what is used are the same file whatever happens to the directory meanwhile. Nothing is mapped: bytes are read into
memory of this process and hashed there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from dflash_core.errors import ResourceError, VerificationError
from dflash_core.v1.weights_pb2 import FileEntry

from .bundle import MAX_FILES

CHUNK_BYTES = 4 << 20
MAX_SIGNATURES = 16
MAX_LEVELS = 3
SIGNATURES = "signatures"

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SPARE_DESCRIPTORS = 256

OnBytes = Callable[[int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """The bytes of one file of a core: bytes [offset, offset + size_bytes) of a descriptor.

    Attributes:
        fd: an open regular file; the files of an archive share one.
        size_bytes: as it was when the core was opened.
        identity: device and inode of what `fd` has open.
        offset: where the file starts there; 0 but in an archive.
    """

    fd: int
    size_bytes: int
    identity: tuple[int, int]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of one file: of the whole, and of each 4 MiB of it (one entry per chunk, the last one shorter)."""

    sha256: bytes
    chunks: tuple[bytes, ...]


class CoreFiles:
    """Every file below a directory, by its name relative to it, signatures included.

    Attributes:
        path: the directory, for messages only.
        files: name -> open file. Names are as the file system has them and prove nothing.
        directories: name -> whether it holds nothing.
    """

    __slots__ = ("directories", "files", "path")

    def __init__(self, path: Path, files: Mapping[str, OpenFile], directories: Mapping[str, bool]) -> None:
        self.path = path
        self.files = dict(files)
        self.directories = dict(directories)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open everything below `path`; the descriptors stay open until `close`.

        Raises:
            VerificationError: FILE_MISSING when there is no such directory; FILE_TYPE for anything but regular files
                and directories, links included; FILE_EXTRA for more files or levels than a core may have; SIG_LIMIT
                for more than 16 signatures.
            ResourceError: a file cannot be opened for a reason of this machine.
        """
        root = open_root(path, os.O_DIRECTORY)
        try:
            return cls.below(root, path)
        finally:
            os.close(root)

    @classmethod
    def below(cls, root: int, path: Path) -> Self:
        """As `open`, for a directory that is open already; `root` stays the caller's."""
        walk = _Walk()
        try:
            walk.directory(root, "", 1)
        except BaseException:
            walk.close()
            raise
        return cls(path, walk.files, walk.directories)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor. Reading afterwards is an error; closing twice is not."""
        descriptors = {file.fd for file in self.files.values()}
        self.files.clear()
        for fd in descriptors:
            os.close(fd)

    def file(self, name: str) -> OpenFile:
        """The open file of that name, which must be one of `files`. Raises ValueError after `close`."""
        if not self.files:
            raise ValueError("the core is closed")
        return self.files[name]

    def size(self, name: str) -> int:
        """The file's size in bytes when it was opened."""
        return self.file(name).size_bytes

    def read(self, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of a file, in private memory. Raises FILE_SIZE when it has become shorter."""
        file = self.file(name)
        parts: list[bytes] = []
        done = 0
        while done < nbytes:  # one read gives it all, but for files that change and for sizes above 2 GiB
            try:
                part = os.pread(file.fd, nbytes - done, file.offset + done)
            except OSError as err:
                raise _unreadable(err, name) from err
            if not part:
                raise _shorter(name, nbytes, done)
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A file in pieces of at most 4 MiB, all in one buffer: use each before asking for the next."""
        file = self.file(name)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size_bytes)))
        for start in range(0, file.size_bytes, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, file.size_bytes - start)]
            read_exactly(file.fd, piece, file.offset + start, name)
            yield piece

    def digest(self, name: str, on_bytes: OnBytes | None = None) -> FileDigests:
        """Hash a whole file in bounded memory (two chunks)."""
        file = self.file(name)
        return digest_descriptor(file.fd, file.size_bytes, name, on_bytes, start=file.offset)


def open_root(path: Path, flags: int = 0) -> int:
    """Open what a core's path names; raises as `CoreFiles.open` does."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as err:
        hint = "a core is a directory with a manifest.pb in it, or an archive of one"
        raise _cannot_open(err, str(path), hint=hint) from err


def read_exactly(fd: int, destination: memoryview, offset: int, name: str) -> None:
    """Fill `destination` with the bytes of `fd` from `offset` on.

    Raises:
        VerificationError: FILE_SIZE, when the file ends before.
        ResourceError: FILE_UNREADABLE, when the machine cannot read it.
    """
    done, wanted = 0, len(destination)
    while done < wanted:
        try:
            count = os.preadv(fd, [destination[done:]], offset + done)
        except OSError as err:
            raise _unreadable(err, name) from err
        if count == 0:
            raise _shorter(name, offset + wanted, offset + done)
        done += count


def _unreadable(err: OSError, name: str) -> ResourceError:
    return ResourceError("FILE_UNREADABLE", f"cannot read a file: {err.strerror}", where=name)


def _shorter(name: str, wanted: int, got: int) -> VerificationError:
    return VerificationError("FILE_SIZE", "a file has become shorter since it was opened", where=name,
                             expected=f"at least {wanted} bytes", got=got)


def digest_descriptor(
    fd: int, size_bytes: int, name: str, on_bytes: OnBytes | None = None, *, start: int = 0
) -> FileDigests:
    """Hash `size_bytes` of `fd` from `start` on in one pass: the whole, and each chunk.

    Two threads share the work: one hashes a chunk into the whole while the other hashes it for itself and reads the
    next one. Memory: two chunks.
    """
    whole = hashlib.sha256()
    chunks: list[bytes] = []
    buffers = (bytearray(min(CHUNK_BYTES, size_bytes)), bytearray(min(CHUNK_BYTES, max(size_bytes - CHUNK_BYTES, 0))))
    helper: threading.Thread | None = None
    for index, offset in enumerate(range(0, size_bytes, CHUNK_BYTES)):
        view = memoryview(buffers[index % 2])[: min(CHUNK_BYTES, size_bytes - offset)]
        read_exactly(fd, view, start + offset, name)
        if helper is not None:
            helper.join()
        helper = threading.Thread(target=whole.update, args=(view,), daemon=True)
        helper.start()
        chunks.append(hashlib.sha256(view).digest())
        if on_bytes is not None:
            on_bytes(len(view))
    if helper is not None:
        helper.join()
    return FileDigests(whole.digest(), tuple(chunks))


def read_verified(
    file: OpenFile, entry: FileEntry, destination: memoryview, *, threads: int, on_bytes: OnBytes | None = None
) -> None:
    """Read a listed file straight into `destination`, and verify each chunk there.

    Args:
        entry: the manifest's entry; its chunk list must have passed the manifest checks.
        destination: writable bytes, exactly `entry.ref.size_bytes` of them. Holds unverified bytes when this raises.
        threads: how many threads read and hash, the caller's included.
        on_bytes: told the size of each chunk once it has verified; called by one thread at a time.
    Raises:
        VerificationError: CHUNK_MISMATCH, DIGEST_MISMATCH for a file without chunks, or FILE_SIZE.
    """
    view = destination.cast("B")
    if view.readonly or len(view) != entry.ref.size_bytes:
        raise ValueError(f"{entry.path} needs {entry.ref.size_bytes} writable bytes, got {len(view)}")
    lock = threading.Lock()

    def place(offset: int, nbytes: int) -> memoryview:
        return view[offset : offset + nbytes]

    def verified(_: int, part: memoryview) -> None:
        if on_bytes is not None:
            with lock:
                on_bytes(len(part))

    read_chunks(file, entry, place, verified, threads=threads)


def read_chunks(
    file: OpenFile, entry: FileEntry, place: Callable[[int, int], memoryview],
    verified: Callable[[int, memoryview], None], *, threads: int
) -> None:
    """Read a listed file chunk by chunk into memory that `place` gives, verify each there, and hand it on.

    Args:
        place: (offset, nbytes) -> `nbytes` writable bytes for the file's bytes from `offset`; at most CHUNK_BYTES. May
            block. Called by every thread.
        verified: told offset and memory of each chunk once its digest holds, by the thread that read it.
        threads: how many threads read and hash, the caller's included. All have ended when this returns or raises.
    Raises:
        VerificationError: as `read_verified`; and whatever `place` and `verified` raise.
    """
    chunked = entry.HasField("chunk_digests")
    digests = entry.chunk_digests if chunked else entry.ref.digest
    total = entry.ref.size_bytes
    step = CHUNK_BYTES if chunked else max(total, 1)
    count = len(digests) // 32
    lock = threading.Lock()
    errors: dict[int, BaseException] = {}
    next_index = 0

    def work() -> None:
        nonlocal next_index
        while True:
            with lock:
                index = next_index
                if errors or index >= count:
                    return
                next_index += 1
            try:
                part = place(index * step, min(step, total - index * step))
                read_exactly(file.fd, part, file.offset + index * step, entry.path)
                expected = digests[index * 32 : index * 32 + 32]
                if (got := hashlib.sha256(part).digest()) != expected:
                    raise mismatch(entry.path, expected, got, index if chunked else None)
                verified(index * step, part)
            except BaseException as err:
                errors[index] = err

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, count) - 1)]
    for helper in helpers:
        helper.start()
    try:
        work()
    except BaseException as err:  # an interrupt between two chunks: let the helpers leave the memory first
        errors[count] = err
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]


def mismatch(path: str, expected: bytes, got: bytes, chunk: int | None = None) -> VerificationError:
    """The error for bytes that differ from what was signed: of a chunk, or of a whole file."""
    hint = "fetch the core again; if it stays, it is not what was signed"
    if chunk is None:
        return VerificationError("DIGEST_MISMATCH", "a file is not what was signed", where=path,
                                 expected=expected.hex(), got=got.hex(), hint=hint)
    return VerificationError("CHUNK_MISMATCH", "a part of a file is not what was signed",
                             where=f"{path}, chunk {chunk} (bytes from {chunk * CHUNK_BYTES})",
                             expected=expected.hex(), got=got.hex(), hint=hint)


class _Walk:
    """Opens a tree and keeps what it opened."""

    def __init__(self) -> None:
        self.files: dict[str, OpenFile] = {}
        self.directories: dict[str, bool] = {}

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1].fd)

    def directory(self, fd: int, prefix: str, level: int) -> None:
        names: list[str] = []
        limit = MAX_FILES + 1 + MAX_SIGNATURES
        try:
            listing = _with_descriptors(lambda: os.scandir(fd))
        except OSError as err:
            raise _cannot_open(err, prefix or ".") from err
        with listing as entries:
            for entry in entries:
                names.append(entry.name)
                self._check_count(prefix, len(names), limit)
        if prefix:
            self.directories[prefix[:-1]] = not names
        for part in sorted(names):
            self._entry(fd, prefix, part, level)

    def _check_count(self, prefix: str, count: int, limit: int) -> None:
        if prefix == f"{SIGNATURES}/" and count > MAX_SIGNATURES:
            raise VerificationError("SIG_LIMIT", "too many signatures", where=SIGNATURES,
                                    expected=f"at most {MAX_SIGNATURES} files", got="more")
        if count + len(self.files) > limit or len(self.directories) > limit:
            raise VerificationError("FILE_EXTRA", "more files than a core may hold", where=prefix or ".",
                                    expected=f"at most {MAX_FILES}", got="more")

    def _entry(self, directory: int, prefix: str, part: str, level: int) -> None:
        name = prefix + part
        try:
            fd = _with_descriptors(lambda: os.open(part, _OPEN_FLAGS, dir_fd=directory))
        except OSError as err:
            raise _cannot_open(err, ascii(name)[1:-1]) from err
        keep = False
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                if name.startswith(f"{SIGNATURES}/"):
                    raise _wrong_type(name, "a directory")
                if level == MAX_LEVELS:
                    raise VerificationError("FILE_EXTRA", "a directory lies too deep", where=ascii(name)[1:-1],
                                            expected=f"at most {MAX_LEVELS} levels")
                self.directory(fd, f"{name}/", level + 1)
            elif stat.S_ISREG(status.st_mode):
                if name == SIGNATURES:
                    raise _wrong_type(name, "a file")
                self.files[name] = OpenFile(fd, status.st_size, (status.st_dev, status.st_ino))
                keep = True
            else:
                raise _wrong_type(name, "a pipe, socket or device")
        finally:
            if not keep:
                os.close(fd)


def _with_descriptors(open_one: Callable[[], T]) -> T:
    """Call `open_one`, once more with a higher limit if this process may open no further descriptor.

    A core may hold more files than the usual soft limit of 1024, and all of them stay open.
    """
    try:
        return open_one()
    except OSError as err:
        if err.errno != errno.EMFILE:
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES + MAX_SIGNATURES + _SPARE_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    return open_one()


def _wrong_type(name: str, got: str) -> VerificationError:
    return VerificationError("FILE_TYPE", "a core holds only regular files and directories", where=ascii(name)[1:-1],
                             expected="a regular file", got=got, hint="copy the core with its files, not with links")


def _cannot_open(err: OSError, where: str, hint: str = "") -> VerificationError | ResourceError:
    match err.errno:
        case errno.ENOENT:
            return VerificationError("FILE_MISSING", "there is no such file", where=where, hint=hint)
        case errno.ENOTDIR:
            return VerificationError("FILE_TYPE", "not a directory", where=where, hint=hint)
        case errno.ELOOP:
            return _wrong_type(where, "a symbolic link")
        case errno.ENXIO | errno.EOPNOTSUPP | errno.ENODEV:
            return _wrong_type(where, "a socket or device")
        case errno.EMFILE | errno.ENFILE:
            return ResourceError("TOO_MANY_OPEN_FILES", "the files of a core stay open, and the limit is reached",
                                 where=where, hint="raise the limit with `ulimit -n 8192`")
        case _:
            return ResourceError("FILE_UNREADABLE", f"cannot open a file: {err.strerror}", where=where)
