"""Read the parameter slots of a kernel out of a cubin: what the assembler laid out, not what we expect it to be.

A cubin is an ELF file. Section `.nv.info.<entry>` holds records; those with attribute 0x17 (KPARAM_INFO) give each
parameter's index, offset and size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dflash_core.errors import CaptureError

KPARAM_INFO = 0x17
SIZED_RECORD = 0x04


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter as the assembler placed it, in bytes."""

    index: int
    offset: int
    size: int


def sections(cubin: bytes) -> dict[str, bytes]:
    """Section name to contents."""
    table, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = rows[names][4]
    found = {}
    for name, _, _, _, offset, length in rows:
        end = cubin.index(b"\0", strings + name)
        found[cubin[strings + name:end].decode()] = cubin[offset:offset + length]
    return found


def param_slots(cubin: bytes, entry: str) -> tuple[ParamInfo, ...]:
    """Parameters of an entry, by index.

    Raises:
        CaptureError: CUBIN_ENTRY; the cubin has no such entry.
    """
    info = sections(cubin).get(f".nv.info.{entry}")
    if info is None:
        raise CaptureError("CUBIN_ENTRY", "the cubin does not describe its kernel", where=entry)
    found, at = [], 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != SIZED_RECORD:
            continue
        if attribute == KPARAM_INFO:
            _, index, offset, packed = struct.unpack_from("<IHHI", info, at)
            found.append(ParamInfo(index, offset, packed >> 18 & 0x3FFF))
        at += length
    return tuple(sorted(found, key=lambda p: p.index))
