"""A core in one file: a stored ZIP of which every byte but the members' data follows from names, sizes and CRCs.

    with open_core(Path("demo.core.zip")) as files:         # a directory works as well
        manifest = files.read("manifest.pb", files.size("manifest.pb"))

The archive is a wrapper for transport and proves nothing. Readers of ZIP disagree about files that say things twice,
so this one takes name, size and CRC from the central directory, writes all headers anew from them, and demands that
the file holds those very bytes. What lies between the headers is then verified like the files of a directory, without
unpacking. Source: PKWARE APPNOTE 6.3.10 for the records.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import FormatError, VerificationError

from .bundle import MAX_FILES, is_name
from .corefiles import MAX_SIGNATURES, SIGNATURES, CoreFiles, OpenFile, open_root, read_exactly

ALIGNMENT = 4096
MAX_MEMBER_BYTES = 1 << 40
MAX_MEMBERS = MAX_FILES + 1 + MAX_SIGNATURES

_VERSION, _MADE_ON_UNIX, _FLAGS, _STORED, _TIME, _DATE, _MODE = 45, 3 << 8, 0x0800, 0, 0, 0x21, 0o100644 << 16
_IN_ZIP64_16, _IN_ZIP64_32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_FIELD, _PADDING_FIELD = 0x0001, 0xD935
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_ZIP64 = struct.Struct("<HHQQHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_CENTRAL_ZIP64 = struct.Struct("<HHQQQ")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size
_MAX_NAME_BYTES = 3 * 160 + 2


@dataclass(frozen=True, slots=True)
class Member:
    """What an archive says about one file: its name, its size in bytes, and its CRC-32, which proves nothing."""

    name: str
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Every byte of an archive but the members' data.

    Attributes:
        headers: per member, where its local header starts and the header's bytes; its data follows.
        central_offset: where the central directory starts.
        tail: the central directory and the end records; they end the file.
    """

    headers: tuple[tuple[int, bytes], ...]
    central_offset: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole archive."""
        return self.central_offset + len(self.tail)


def layout(members: Sequence[Member]) -> Layout:
    """The one way to lay out these members, which must be in the order of their names."""
    headers: list[tuple[int, bytes]] = []
    central: list[bytes] = []
    offset = 0
    for member in members:
        header = local_header(member, offset)
        headers.append((offset, header))
        name = member.name.encode("ascii")
        central.append(_CENTRAL.pack(
            0x02014B50, _MADE_ON_UNIX | _VERSION, _VERSION, _FLAGS, _STORED, _TIME, _DATE, member.crc, _IN_ZIP64_32,
            _IN_ZIP64_32, len(name), _CENTRAL_ZIP64.size, 0, 0, 0, _MODE, _IN_ZIP64_32,
        ) + name)
        central.append(_CENTRAL_ZIP64.pack(
            _ZIP64_FIELD, _CENTRAL_ZIP64.size - 4, member.size_bytes, member.size_bytes, offset))
        offset += len(header) + member.size_bytes
    directory = b"".join(central)
    count = len(members)
    return Layout(tuple(headers), offset, directory + _END64.pack(
        0x06064B50, _END64.size - 12, _MADE_ON_UNIX | _VERSION, _VERSION, 0, 0, count, count, len(directory), offset,
    ) + _LOCATOR.pack(0x07064B50, 0, offset + len(directory), 1) + _END.pack(
        0x06054B50, 0, 0, _IN_ZIP64_16, _IN_ZIP64_16, _IN_ZIP64_32, _IN_ZIP64_32, 0,
    ))


def local_header(member: Member, offset: int) -> bytes:
    """The header before a member's data, padded so that the data starts at a multiple of 4096."""
    name = member.name.encode("ascii")
    padding = -(offset + _LOCAL.size + len(name) + _LOCAL_ZIP64.size) % ALIGNMENT
    return _LOCAL.pack(
        0x04034B50, _VERSION, _FLAGS, _STORED, _TIME, _DATE, member.crc, _IN_ZIP64_32, _IN_ZIP64_32, len(name),
        _LOCAL_ZIP64.size + padding,
    ) + name + _LOCAL_ZIP64.pack(_ZIP64_FIELD, 16, member.size_bytes, member.size_bytes, _PADDING_FIELD, padding) \
        + bytes(padding)


def open_core(path: Path) -> CoreFiles:
    """Open the files of a core: everything below a directory, or the members of an archive.

    Raises:
        VerificationError: as `CoreFiles.open`; SIG_LIMIT for an archive with more than 16 signatures.
        FormatError: BUNDLE_MALFORMED, the archive is not the one that its names, sizes and CRCs give.
        ResourceError: a file cannot be read.
    """
    root = open_root(path)
    keep = False
    try:
        status = os.fstat(root)
        if stat.S_ISDIR(status.st_mode):
            return CoreFiles.below(root, path)
        if not stat.S_ISREG(status.st_mode):
            raise VerificationError("FILE_TYPE", "neither a directory nor an archive", where=str(path),
                                    expected="a directory, or a regular file")
        files = _read_archive(root, status.st_size, (status.st_dev, status.st_ino), path)
        keep = True
        return files
    finally:
        if not keep:
            os.close(root)


def _read_archive(fd: int, size_bytes: int, identity: tuple[int, int], path: Path) -> CoreFiles:
    where = str(path)
    members = _members(fd, size_bytes, where)
    expected = layout(members)
    if expected.nbytes != size_bytes:
        raise _malformed("the archive is not as large as its members make it", where, expected=expected.nbytes,
                         got=size_bytes)
    if _bytes_at(fd, expected.central_offset, len(expected.tail), where) != expected.tail:
        raise _malformed("the central directory is not the canonical one", where)
    files: dict[str, OpenFile] = {}
    for member, (offset, header) in zip(members, expected.headers, strict=True):
        if _bytes_at(fd, offset, len(header), where) != header:
            raise _malformed("a member's header is not the canonical one", f"{where}, {member.name}")
        files[member.name] = OpenFile(fd, member.size_bytes, identity, offset + len(header))
    directories = {name.rpartition("/")[0] for name in files}
    directories |= {name.partition("/")[0] for name in directories}
    directories.discard("")
    for name in sorted(directories & files.keys()):
        raise _malformed("a member is a file and a directory", f"{where}, {name}")
    signatures = sum(name.startswith(f"{SIGNATURES}/") for name in files)
    if signatures > MAX_SIGNATURES:
        raise VerificationError("SIG_LIMIT", "too many signatures", where=where,
                                expected=f"at most {MAX_SIGNATURES} files", got=signatures)
    return CoreFiles(path, files, dict.fromkeys(directories, False))


def _members(fd: int, size_bytes: int, where: str) -> list[Member]:
    """What the central directory states, every number within bounds; nothing is compared yet."""
    if size_bytes < _TAIL_BYTES:
        raise _malformed("too short for an archive of a core", where, expected=f"at least {_TAIL_BYTES} bytes",
                         got=size_bytes)
    end = _END64.unpack_from(_bytes_at(fd, size_bytes - _TAIL_BYTES, _TAIL_BYTES, where))
    count, directory_bytes, start = end[6], end[8], end[9]
    entry_bytes = _CENTRAL.size + _CENTRAL_ZIP64.size
    if not 1 <= count <= MAX_MEMBERS or directory_bytes > count * (entry_bytes + _MAX_NAME_BYTES):
        raise _malformed("no archive of a core, or one of too many members", where,
                         expected=f"1 to {MAX_MEMBERS} members", got=count)
    if start + directory_bytes + _TAIL_BYTES != size_bytes:
        raise _malformed("the central directory does not end the archive", where,
                         expected=f"{size_bytes - _TAIL_BYTES - directory_bytes}", got=start)
    data = _bytes_at(fd, start, directory_bytes, where)
    members: list[Member] = []
    at = 0
    for index in range(count):
        if len(data) - at < entry_bytes:
            raise _malformed("the central directory is cut off", where, got=f"entry {index}")
        fields = _CENTRAL.unpack_from(data, at)
        name_bytes = fields[10]
        name = data[at + _CENTRAL.size : at + _CENTRAL.size + name_bytes].decode("ascii", "backslashreplace")
        extra = at + _CENTRAL.size + name_bytes
        if not is_name(name) or len(data) - extra < _CENTRAL_ZIP64.size:
            raise _malformed("a member's name is not allowed", where, got=ascii(name)[:200])
        if members and name <= members[-1].name:
            raise _malformed("members are not in the order of their names, each once", where, got=name)
        size = _CENTRAL_ZIP64.unpack_from(data, extra)[2]
        if size > MAX_MEMBER_BYTES:
            raise _malformed("a member is too large", f"{where}, {name}", expected=f"at most {MAX_MEMBER_BYTES}",
                             got=size)
        members.append(Member(name, size, fields[7]))
        at = extra + _CENTRAL_ZIP64.size
    return members


def _bytes_at(fd: int, offset: int, nbytes: int, where: str) -> bytes:
    data = bytearray(nbytes)
    read_exactly(fd, memoryview(data), offset, where)
    return bytes(data)


def _malformed(what: str, where: str, *, expected: object = None, got: object = None) -> FormatError:
    return FormatError("BUNDLE_MALFORMED", what, where=where, expected=expected, got=got,
                       hint="fetch the archive again; only `dflash-run pack` writes this form")
