"""Every rule for a module's bytes, on a small cubin built here and on PTX text."""

from __future__ import annotations

import struct

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1.graph_pb2 import CPU_REGISTRY, CUBIN, PTX, KernelModule

from runtime.structure import check_module

SYMBOLS = 64 + 3 * 64
"""Where the symbol table of `cubin` starts; its entry 1, "add", is 24 bytes further."""
SEGMENT = len("\0add\0attend\0") + SYMBOLS + 3 * 24

PTX_TEXT = b".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry add(\n.param .u64 a)\n{ ret; }\n"


def cubin(
    flags: int = 0x5A0D5A, abi: int = 7, machine: int = 190, names: tuple[str, ...] = ("add", "attend")
) -> bytes:
    """An ELF64 file laid out as ptxas does: header, sections, symbols, their names, and one segment last; no code."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", strings.index(b"\0" + name.encode() + b"\0") + 1, 0x12, 0x10, 1, 0, 0) for name in names
    )
    at = SYMBOLS + len(symbols)
    header = struct.pack(
        "<7sBB7xHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 0x33, abi, 2, machine, 1, 0, at + len(strings), 64, flags, 64,
        56, 1, 64, 3, 2,
    )
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, SYMBOLS, len(symbols), 2, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at, len(strings), 0, 0, 1, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, SYMBOLS, 0, 0, len(symbols), len(symbols), 8)
    return header + sections + symbols + strings + segment


def patched(at: int, value: bytes, data: bytes | None = None) -> bytes:
    data = cubin() if data is None else data
    return data[:at] + value + data[at + len(value) :]


def module(kind: int = CUBIN, target: str = "sm_90a") -> KernelModule:
    return KernelModule(module_id=4, kind=kind, target=target)


ACCEPTED = [
    ("a cubin for sm_90a", cubin(), module()),
    ("a cubin for sm_80", cubin(flags=0x500550), module(target="sm_80")),
    ("a cubin for sm_100a in the old layout", cubin(flags=0x640D64), module(target="sm_100a")),
    ("a cubin for sm_100a in the new layout", cubin(flags=0x600640A, abi=8), module(target="sm_100a")),
    ("a cubin for the family sm_100f", cubin(flags=0x6006402, abi=8), module(target="sm_100f")),
    ("a cubin without segments", patched(54, bytes(4)), module()),
    ("a section that takes no bytes of the file", patched(64 + 4, b"\x08", patched(64 + 32, b"\xff" * 7)), module()),
    ("PTX", PTX_TEXT, module(PTX)),
    ("a CPU registry", b"", module(CPU_REGISTRY, "cpu")),
]

REFUSED = [
    ("PTX text as a cubin", PTX_TEXT, module()),
    ("a fatbin", b"\x50\xed\x55\xba" + cubin()[4:], module()),
    ("an empty file", b"", module()),
    ("a header alone", cubin()[:64], module()),
    ("a file cut by one byte", cubin()[:-1], module()),
    ("a 32-bit file", patched(4, b"\x01"), module()),
    ("a big-endian file", patched(5, b"\x02"), module()),
    ("a host library", cubin(machine=62), module()),
    ("a cubin for sm_90", cubin(flags=0x5A055A), module()),
    ("a cubin for sm_80", cubin(flags=0x500550), module()),
    ("a plain cubin for a target with an a", cubin(flags=0x6006402, abi=8), module(target="sm_100a")),
    ("an absent entry", cubin(names=("add",)), module()),
    ("an entry twice", cubin(names=("add", "attend", "add")), module()),
    ("an undefined entry", patched(SYMBOLS + 24 + 6, b"\0\0"), module()),
    ("a device function in place of an entry", patched(SYMBOLS + 24 + 5, b"\0"), module()),
    ("an object in place of a function", patched(SYMBOLS + 24 + 4, b"\x11"), module()),
    ("segments past the end", patched(32, (2**63).to_bytes(8, "little")), module()),
    ("segments of another size", patched(54, b"\x20\0"), module()),
    ("two segments where one fits", patched(56, b"\x02\0"), module()),
    ("a segment past the end", patched(SEGMENT + 8, b"\0\0\0\x7f"), module()),
    ("a segment one byte too long", patched(SEGMENT + 32, b"\xff\xff"), module()),
    ("sections past the end", patched(40, (2**63).to_bytes(8, "little")), module()),
    ("65,535 sections", patched(60, b"\xff\xff"), module()),
    ("no sections", patched(60, b"\0\0"), module()),
    ("sections of another size", patched(58, b"\x20\0"), module()),
    ("a symbol table past the end", patched(64 + 64 + 24, b"\0\0\0\x7f"), module()),
    ("a symbol table of 2^64 - 1 bytes", patched(64 + 64 + 32, b"\xff" * 8), module()),
    ("a symbol table of 71 bytes", patched(64 + 64 + 32, b"\x47"), module()),
    ("symbol names in an absent section", patched(64 + 64 + 40, b"\x03"), module()),
    ("symbol names without bytes", patched(64 + 128 + 4, b"\x08"), module()),
    ("a symbol name past its table", patched(SYMBOLS + 24, b"\xff\xff"), module()),
    ("a cubin as PTX", cubin(), module(PTX)),
    ("PTX for another architecture", PTX_TEXT, module(PTX, "sm_100a")),
    ("PTX with two targets", PTX_TEXT + b".target sm_80\n", module(PTX)),
    ("PTX without a target", PTX_TEXT.replace(b".target", b"//"), module(PTX)),
    ("PTX with a zero byte", PTX_TEXT + b"\0", module(PTX)),
    ("PTX without the entry", PTX_TEXT.replace(b" add(", b" sub("), module(PTX)),
    ("PTX with the entry twice", PTX_TEXT + b".entry add()", module(PTX)),
    ("bytes of a CPU registry", b"\x7fELF", module(CPU_REGISTRY, "cpu")),
]


def entries(stated: KernelModule) -> list[str]:
    return ["add", "attend"] if stated.kind == CUBIN else ["add"]


@pytest.mark.parametrize(("data", "stated"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_accepts(data: bytes, stated: KernelModule):
    check_module(data, stated, entries(stated))


@pytest.mark.parametrize(("data", "stated"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refuses(data: bytes, stated: KernelModule):
    with pytest.raises(DflashError) as caught:
        check_module(data, stated, entries(stated))

    assert caught.value.code == "KERNEL_IMAGE"
    assert caught.value.where == f"module 4, {stated.target}"


def test_refuses_every_truncation_of_a_cubin():
    data = cubin()

    for length in range(len(data)):
        with pytest.raises(DflashError, match=r"."):
            check_module(data[:length], module(), ["add", "attend"])


def test_says_which_entry_is_absent():
    with pytest.raises(DflashError) as caught:
        check_module(cubin(names=("add",)), module(), ["attend"])

    assert caught.value.what == "image must hold entry attend once"
    assert (caught.value.expected, caught.value.got) == ("1", "0")
