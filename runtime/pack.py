"""Write a core as one file, and take an archive apart into a directory of verified bytes.

    pack(Path("demo/core"), Path("demo.zip"))
    unpack(Path("demo.zip"), Path("again/core"), TrustPolicy.load(Path("trust.json")))

Both write beside the final name and rename, so that what has the name is whole. Equal cores give equal archives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import FormatError, ResourceError, UsageError

from .archive import Member, layout, local_header
from .bundle import is_name
from .corefiles import CoreFiles, OnBytes, mismatch
from .trust import TrustPolicy
from .verify import MANIFEST, check_listing, content_names, verify


def pack(core: Path, archive: Path, *, on_bytes: OnBytes | None = None) -> int:
    """Write the directory `core`, signatures included, as the archive file `archive`; nothing is verified.

    Args:
        on_bytes: told the size of each piece that was written.
    Returns:
        Bytes of the archive.
    Raises:
        UsageError: OUTPUT_EXISTS.
        VerificationError, FormatError: the directory is no core, or holds a name that a core may not have.
        ResourceError: ARCHIVE_UNWRITABLE or FILE_UNREADABLE; no file is left.
    """
    _refuse_existing(archive)
    partial = archive.with_name(f"{archive.name}.part")
    with CoreFiles.open(core) as files:
        check_listing(files, content_names(files))
        for name in sorted(files.files):
            if not is_name(name):
                raise FormatError("MANIFEST_TABLE", "a file name is not allowed in a core", where=ascii(name)[1:-1],
                                  expected="one to three parts of a-z 0-9 . _ - joined by /")
        try:
            with partial.open("wb") as stream:
                nbytes = _write_members(stream.fileno(), files, on_bytes)
                os.fsync(stream.fileno())
            partial.rename(archive)
        except OSError as err:
            raise _unwritable(err, archive) from err
        finally:
            partial.unlink(missing_ok=True)
    return nbytes


def unpack(archive: Path, core: Path, trust: TrustPolicy, *, on_bytes: OnBytes | None = None) -> str:
    """Verify a core, and write its files below the new directory `core`; each byte is written after it was compared.

    Args:
        archive: an archive; a directory is copied likewise.
        trust: whose signatures are accepted.
        on_bytes: told the size of each piece that was written.
    Returns:
        The core digest.
    Raises:
        UsageError: OUTPUT_EXISTS.
        PolicyError, VerificationError, FormatError, CompatibilityError: as `verify`; nothing is left.
        ResourceError: ARCHIVE_UNWRITABLE or FILE_UNREADABLE; nothing is left.
    """
    _refuse_existing(core)
    partial = core.with_name(f"{core.name}.part")
    with verify(archive, trust) as verified:
        digests = {entry.path: entry.ref.digest for entry in verified.manifest.files}
        digests[MANIFEST] = bytes.fromhex(verified.core_digest)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
            partial.mkdir()
            for name in verified.names:
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                _write_verified(target, name, verified.pieces(name), digests.get(name), on_bytes)
            partial.rename(core)
        except OSError as err:
            raise _unwritable(err, core) from err
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return verified.core_digest


def _write_members(fd: int, files: CoreFiles, on_bytes: OnBytes | None) -> int:
    members: list[Member] = []
    offset = 0
    for name in sorted(files.files):
        size = files.size(name)
        at = offset + len(local_header(Member(name, size, 0), offset))
        crc = 0
        for piece in files.pieces(name):
            crc = zlib.crc32(piece, crc)
            at += _write_at(fd, piece, at)
            if on_bytes is not None:
                on_bytes(len(piece))
        member = Member(name, size, crc)
        _write_at(fd, local_header(member, offset), offset)
        members.append(member)
        offset = at
    _write_at(fd, layout(members).tail, offset)
    return layout(members).nbytes


def _write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    return done


def _write_verified(
    target: Path, name: str, pieces: Iterator[memoryview], digest: bytes | None, on_bytes: OnBytes | None
) -> None:
    """Copy a file; `digest` is None for a signature, which whoever loads the copy checks anew."""
    found = hashlib.sha256()
    with target.open("xb") as stream:
        for piece in pieces:
            found.update(piece)
            stream.write(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        stream.flush()
        os.fsync(stream.fileno())
    if digest is not None and found.digest() != digest:
        raise mismatch(name, digest, found.digest())


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError("OUTPUT_EXISTS", "the output exists", where=str(path), hint="choose another name")


def _unwritable(err: OSError, path: Path) -> ResourceError:
    return ResourceError("ARCHIVE_UNWRITABLE", f"cannot write: {err.strerror}", where=str(path),
                         hint="free some space, or choose a directory that you can write")
