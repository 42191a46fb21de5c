"""Rules for a kernel module's bytes, before a driver sees them.

A cubin is an ELF64 file for the CUDA machine and the architecture that the manifest states, and holds each entry that
kernels name exactly once. A PTX module is text for that architecture with each entry once.
Source: the ELF-64 object file format; `e_flags` of CUDA files as LLVM's BinaryFormat/ELF.h names them.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_core.errors import FormatError
from dflash_core.v1.graph_pb2 import CPU_REGISTRY, PTX, KernelModule

from .structure_rules import broken, inside

_EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB = 2
_SHT_NOBITS = 8
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10
_PTX_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+(sm_[0-9]+[af]?)", re.MULTILINE)
_PTX_ENTRY = re.compile(rb"\.entry[ \t\r\n]+([A-Za-z_$%][A-Za-z0-9_$]*)")


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    nbytes: int
    link: int


def check_module(data: bytes, module: KernelModule, symbols: Sequence[str]) -> None:
    """Check that `data` is the kind of image that `module` states and holds each of `symbols` once.

    Args:
        data: verified bytes of the module's file; empty for a CPU registry, which has none.
        symbols: the entry points that kernel variants name in this module.
    Raises:
        FormatError: KERNEL_IMAGE.
    """
    place = f"module {module.module_id}, {module.target}"
    if module.kind == CPU_REGISTRY:
        if data:
            raise _bad("a CPU registry has no bytes", place, got=f"{len(data)} bytes")
        return
    if module.kind == PTX:
        target, entries = _read_ptx(data, place)
    else:
        target, entries = _read_cubin(data, place)
    # A family build ("f") is marked like a plain one in the image.
    if target != module.target.removesuffix("f"):
        raise _bad("image is for another architecture", place, expected=module.target, got=target)
    for symbol in symbols:
        if entries[symbol] != 1:
            raise _bad(f"image must hold entry {symbol} once", place, expected=1, got=entries[symbol])


def _read_ptx(data: bytes, place: str) -> tuple[str, Counter[str]]:
    targets = _PTX_TARGET.findall(data)
    if len(targets) != 1 or b"\0" in data:
        raise _bad("not a PTX module", place, expected="one .target line", got=f"{len(targets)} in {data[:16]!r}")
    return targets[0].decode().removesuffix("f"), Counter(name.decode() for name in _PTX_ENTRY.findall(data))


def _read_cubin(data: bytes, place: str) -> tuple[str, Counter[str]]:
    """Architecture and kernel entries of a cubin."""
    if len(data) < _HEADER.size or data[:7] != b"\x7fELF\x02\x01\x01":
        raise _bad("not an ELF64 file", place, expected="7f454c46 020101", got=data[:7].hex())
    header = _HEADER.unpack_from(data)
    machine, flags = header[2], header[7]
    if machine != _EM_CUDA:
        raise _bad("not for the CUDA machine", place, expected=_EM_CUDA, got=machine)
    _check_segments(data, header, place)
    sections = _sections(data, header, place)
    return _architecture(data[8], flags), Counter(_entries(data, sections, place))


def _architecture(abi_version: int, flags: int) -> str:
    """From `e_flags`: ABI 8 moved the number to bits 8 to 15 and the "a" mark to bit 3."""
    if abi_version >= 8:
        number, accelerated = flags >> 8 & 0xFF, flags & 0x8
    else:
        number, accelerated = flags & 0xFF, flags & 0x800
    return f"sm_{number}{'a' if accelerated else ''}"


def _sections(data: bytes, header: tuple[int, ...], place: str) -> list[_Section]:
    """Every section, after checking that its bytes are in the file."""
    table_offset, entry_bytes, count = header[6], header[11], header[12]
    if entry_bytes != _SECTION.size or not inside(table_offset, count * _SECTION.size, len(data)):
        raise _bad("section table leaves the file", place, expected=f"within {len(data)} bytes",
                   got=f"{count} sections of {entry_bytes} bytes at {table_offset}")
    sections = []
    for index in range(count):
        _, kind, _, _, offset, nbytes, link, *_ = _SECTION.unpack_from(data, table_offset + index * _SECTION.size)
        if kind not in (0, _SHT_NOBITS) and not inside(offset, nbytes, len(data)):
            raise _bad(f"section {index} leaves the file", place, expected=f"within {len(data)} bytes",
                       got=f"{nbytes} bytes at {offset}")
        sections.append(_Section(kind, offset, nbytes, link))
    return sections


def _check_segments(data: bytes, header: tuple[int, ...], place: str) -> None:
    """The program headers, which assemblers write last, and what they load are in the file."""
    table_offset, entry_bytes, count = header[5], header[9], header[10]
    if count and (entry_bytes != _SEGMENT.size or not inside(table_offset, count * _SEGMENT.size, len(data))):
        raise _bad("segment table leaves the file", place, expected=f"within {len(data)} bytes",
                   got=f"{count} segments of {entry_bytes} bytes at {table_offset}")
    for index in range(count):
        _, _, offset, _, _, nbytes, *_ = _SEGMENT.unpack_from(data, table_offset + index * _SEGMENT.size)
        if not inside(offset, nbytes, len(data)):
            raise _bad(f"segment {index} leaves the file", place, expected=f"within {len(data)} bytes",
                       got=f"{nbytes} bytes at {offset}")


def _entries(data: bytes, sections: Sequence[_Section], place: str) -> Iterator[str]:
    """Names of the defined kernel entries in every symbol table."""
    for table in sections:
        if table.kind != _SHT_SYMTAB:
            continue
        if table.nbytes % _SYMBOL.size or table.link >= len(sections) or sections[table.link].kind == _SHT_NOBITS:
            raise _bad("symbol table is malformed", place, got=f"{table.nbytes} bytes, names in section {table.link}")
        names = sections[table.link]
        for at in range(table.offset, table.offset + table.nbytes, _SYMBOL.size):
            name, info, other, section, _, _ = _SYMBOL.unpack_from(data, at)
            if info & 0xF == _STT_FUNC and other & _STO_CUDA_ENTRY and section:
                yield _name(data, names, name, place)


def _name(data: bytes, names: _Section, start: int, place: str) -> str:
    end = data.find(b"\0", names.offset + start, names.offset + names.nbytes) if start < names.nbytes else -1
    if end < 0:
        raise _bad("symbol name leaves its table", place, expected=f"below {names.nbytes}", got=start)
    return data[names.offset + start : end].decode("utf-8", "backslashreplace")


def _bad(what: str, place: str, *, expected: object = None, got: object = None) -> FormatError:
    return broken("KERNEL_IMAGE", what, place, expected=expected, got=got)
