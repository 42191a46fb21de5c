"""Rows 42 to 44: archives that other readers of ZIP take to hold something else."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.archive import Member, layout, open_core
from runtime.pack import pack
from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.attacks.tiny_core import make_tiny_core

TAIL = 98
"""Bytes of the three end records."""

Change = Callable[[bytes], bytes]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    pack(make_tiny_core(tmp_path / "core").path, tmp_path / "core.zip")
    return tmp_path / "core.zip"


def patched(at: int, value: bytes) -> Change:
    """Other bytes at an offset; negative ones count from the end."""
    def change(data: bytes) -> bytes:
        start = at if at >= 0 else len(data) + at
        return data[:start] + value + data[start + len(value) :]
    return change


def in_central(at: int, value: bytes) -> Change:
    """Other bytes at an offset into the central directory; its first entry is that of config/c."""
    return lambda data: patched(central_offset(data) + at, value)(data)


def central_offset(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data, len(data) - TAIL + 48)[0])


def in_both(local: int, central: int, value: bytes) -> Change:
    return lambda data: in_central(central, value)(patched(local, value)(data))


def moved_tail(data: bytes, inserted: bytes, at: int) -> bytes:
    """Bytes inserted before the central directory, and the end records told of it, as a careful forger would."""
    start = central_offset(data)
    body, central, tail = data[:start], data[start:-TAIL], bytearray(data[-TAIL:])
    struct.pack_into("<Q", tail, 48, start + len(inserted))
    struct.pack_into("<Q", tail, 64, start + len(inserted) + len(central))
    return body[:at] + inserted + body[at:] + central + bytes(tail)


def rebuilt(edit: Callable[[list[Member]], object]) -> Change:
    """The canonical headers of other members, over the same data."""
    def change(data: bytes) -> bytes:
        members = read_members(data)
        edit(members)
        found = layout(members)
        out = bytearray(max(found.nbytes, len(data)))
        out[: len(data)] = data
        for at, header in found.headers:
            out[at : at + len(header)] = header
        out[found.central_offset :] = found.tail
        return bytes(out)
    return change


def read_members(data: bytes) -> list[Member]:
    at, members = central_offset(data), []
    while data[at : at + 4] == b"PK\x01\x02":
        length = struct.unpack_from("<H", data, at + 28)[0]
        name = data[at + 46 : at + 46 + length].decode()
        members.append(Member(name, struct.unpack_from("<Q", data, at + 46 + length + 4)[0],
                              struct.unpack_from("<I", data, at + 16)[0]))
        at += 46 + length + 28
    return members


def same_name_twice(members: list[Member]) -> None:
    members[1] = Member(members[0].name, members[1].size_bytes, members[1].crc)


def unsorted(members: list[Member]) -> None:
    members[0], members[1] = members[1], members[0]


def file_and_directory(members: list[Member]) -> None:
    members[0] = Member("graphs", members[0].size_bytes, members[0].crc)


def forbidden_name(name: str) -> Callable[[list[Member]], None]:
    def edit(members: list[Member]) -> None:
        members[0] = Member(name, members[0].size_bytes, members[0].crc)
    return edit


LOCAL_FLAGS, LOCAL_METHOD, LOCAL_CRC, LOCAL_NAME = 6, 8, 14, 30
CENTRAL_FLAGS, CENTRAL_METHOD, CENTRAL_CRC, CENTRAL_NAME = 8, 10, 16, 46
SIZE_IN_CENTRAL = CENTRAL_NAME + len("config/c") + 4

ROWS: list[tuple[str, Change]] = [
    ("42 bytes before the first header", lambda data: b"#!/bin/sh\n" + data),
    ("42 a page before the first header", lambda data: bytes(4096) + data),
    ("42 bytes after the end", lambda data: data + b"x"),
    ("42 bytes between members", lambda data: moved_tail(data, bytes(4096), 4096 + 2)),
    ("42 bytes before the central directory", lambda data: moved_tail(data, b"x", central_offset(data))),
    ("42 a comment", lambda data: data[:-2] + b"\x03\x00abc"),
    ("42 a comment length alone", patched(-2, b"\x03\x00")),
    ("42 a comment of a member", in_central(32, b"\x01\x00")),
    ("43 a name twice", rebuilt(same_name_twice)),
    ("43 names out of order", rebuilt(unsorted)),
    ("43 another local name", patched(LOCAL_NAME, b"donfig/c")),
    ("43 another central name", in_central(CENTRAL_NAME, b"bonfig/c")),
    ("43 deflate", in_both(LOCAL_METHOD, CENTRAL_METHOD, b"\x08\x00")),
    ("43 deflate in one place", patched(LOCAL_METHOD, b"\x08\x00")),
    ("43 data descriptor", in_both(LOCAL_FLAGS, CENTRAL_FLAGS, b"\x08\x08")),
    ("43 encrypted", in_both(LOCAL_FLAGS, CENTRAL_FLAGS, b"\x01\x08")),
    ("43 encrypted in one place", in_central(CENTRAL_FLAGS, b"\x01\x08")),
    ("43 a file that is a directory too", rebuilt(file_and_directory)),
    ("43 a name upwards", rebuilt(forbidden_name("../x"))),
    ("43 an absolute name", rebuilt(forbidden_name("/x"))),
    ("43 an empty name", rebuilt(forbidden_name(""))),
    ("43 a link by its mode", in_central(38, struct.pack("<I", 0o120777 << 16))),
    ("44 members overlap", in_central(SIZE_IN_CENTRAL + 16, struct.pack("<Q", 4096))),
    ("44 size past the end", in_central(SIZE_IN_CENTRAL, struct.pack("<QQ", 1 << 30, 1 << 30))),
    ("44 size 2^63", in_central(SIZE_IN_CENTRAL, struct.pack("<QQ", 1 << 63, 1 << 63))),
    ("44 size 2^64 - 1", in_central(SIZE_IN_CENTRAL, b"\xff" * 16)),
    ("44 compressed size alone", in_central(SIZE_IN_CENTRAL + 8, struct.pack("<Q", 3))),
    ("44 wrong CRC in the local header", patched(LOCAL_CRC, b"\0\0\0\0")),
    ("44 wrong CRC in the central directory", in_central(CENTRAL_CRC, b"\0\0\0\0")),
    ("44 no member", patched(-TAIL + 24, bytes(16))),
    ("44 2^64 - 1 members", patched(-TAIL + 24, b"\xff" * 16)),
    ("44 a member more", patched(-TAIL + 24, struct.pack("<QQ", 8, 8))),
    ("44 a member fewer", patched(-TAIL + 24, struct.pack("<QQ", 6, 6))),
    ("44 a directory of 2^63 bytes", patched(-TAIL + 40, struct.pack("<Q", 1 << 63))),
    ("44 a directory at 2^63", patched(-TAIL + 48, struct.pack("<Q", 1 << 63))),
    ("44 a second disk", patched(-TAIL + 16, struct.pack("<I", 1))),
    ("44 the locator elsewhere", patched(-TAIL + 64, struct.pack("<Q", 0))),
    ("44 cut in the middle", lambda data: data[: len(data) // 2]),
    ("44 cut at the end", lambda data: data[:-1]),
    ("44 nothing", lambda data: b""),
]


@pytest.mark.parametrize("change", [row[1] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rejects_archive_with(archive: Path, trust: TrustPolicy, change: Change) -> None:
    data = archive.read_bytes()
    changed = change(data)
    assert changed != data
    archive.write_bytes(changed)

    with refused("BUNDLE_MALFORMED"):
        verify(archive, trust)


def test_rebuilding_the_same_members_gives_the_archive(archive: Path) -> None:
    assert rebuilt(lambda members: None)(archive.read_bytes()) == archive.read_bytes()


def test_rejects_archive_with_17_signatures(tmp_path: Path, trust: TrustPolicy) -> None:
    members = [Member("manifest.pb", 0, 0), *(Member(f"signatures/{i:02}.sig", 0, 0) for i in range(17))]
    found = layout(members)
    (tmp_path / "core.zip").write_bytes(b"".join(header for _, header in found.headers) + found.tail)

    with refused("SIG_LIMIT"):
        verify(tmp_path / "core.zip", trust)


def test_a_crc_proves_nothing(archive: Path, trust: TrustPolicy) -> None:
    """Changed bytes under a CRC that fits them: the archive opens, and what it holds does not verify."""
    with open_core(archive) as files:
        at, size = files.file("config/c").offset, files.size("config/c")
    data = patched(at, b"[]")(archive.read_bytes())
    crc = struct.pack("<I", zlib.crc32(data[at : at + size]))
    archive.write_bytes(in_both(LOCAL_CRC, CENTRAL_CRC, crc)(data))

    with refused("DIGEST_MISMATCH"):
        verify(archive, trust)
