"""What the structure rules share: limits, the three kinds of refusal, and how large a buffer is.

A signed core can still be wrong, so the rules of `runtime.structure` trust no number in it. Ranges are compared as
`offset <= size and nbytes <= size - offset` on Python's unbounded integers, and no stated number sizes an allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError, FormatError
from dflash_core.v1.graph_pb2 import WEIGHTS, Buffer, Symbol
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import SHA256, DigestAlgorithm, FileEntry, FileRef
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

CHUNK_BYTES = 4 << 20
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 40
MAX_VIEWS = 1 << 20
MAX_RANK = 8
MAX_MODULES = 65_536
MAX_GRAPHS = 1024
MAX_NODES = 1 << 18
MAX_EDGES = 1 << 20
MAX_PARAM_BYTES = 32_764
VIEW_ALIGNMENT = 256

DTYPE_BITS: dict[str, int] = {
    "f64": 64, "f32": 32, "f16": 16, "bf16": 16, "f8e4m3": 8, "f8e5m2": 8, "f8e8m0": 8, "f4e2m1": 4,
    "i64": 64, "i32": 32, "i16": 16, "i8": 8, "u64": 64, "u32": 32, "u16": 16, "u8": 8, "bool": 8,
}
"""Bits of one element of every `TensorView.dtype` that format 1 knows."""

_REPORT_HINT = "report this core to whoever built it; it is signed but not well formed"


def broken(code: str, what: str, where: str, *, expected: object = None, got: object = None) -> FormatError:
    """The error for a core that breaks a structure rule."""
    return FormatError(code, what, where=where, expected=expected, got=got, hint=_REPORT_HINT)


def unsupported(name: str, where: str) -> CompatibilityError:
    """The error for something that the schema names and this runtime does not implement."""
    return CompatibilityError(
        "FEATURE_UNSUPPORTED", f"{name} is not implemented by this runtime", where=where,
        hint="use a newer dflash, or export the core without it",
    )


def has_unknown_fields(message: Message) -> bool:
    """Whether `message`, at any depth, holds a field that the schema does not know (an unknown field has bytes)."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()  # type: ignore[attr-defined]  # the stubs lack it
    return known.ByteSize() != message.ByteSize()


def refuse_unknown_fields(message: Message, where: str) -> None:
    """Raise MANIFEST_UNKNOWN if `message` holds an unknown field at any depth."""
    if has_unknown_fields(message):
        raise broken("MANIFEST_UNKNOWN", "unknown field where bytes, addresses or launches are described", where)


def refuse_unknown_enum(enum: EnumTypeWrapper, value: int, where: str) -> None:
    """Raise MANIFEST_UNKNOWN if `value` is unspecified, or no value of `enum`."""
    if value == 0 or value not in enum.values():
        raise broken("MANIFEST_UNKNOWN", f"unknown {enum.DESCRIPTOR.name}", where, got=value)


def check_file_ref(ref: FileRef, where: str) -> None:
    """A reference names a file by SHA-256; format 1 knows no other digest."""
    refuse_unknown_fields(ref, where)
    if ref.ByteSize() == 0:
        raise broken("MANIFEST_TABLE", "file reference is absent", where)
    if ref.algorithm != SHA256:
        known = ref.algorithm in DigestAlgorithm.values()
        got = DigestAlgorithm.Name(ref.algorithm) if known else ref.algorithm
        raise broken("MANIFEST_UNKNOWN", "unknown digest algorithm", where, expected="SHA256", got=got)
    if len(ref.digest) != 32:
        raise broken("MANIFEST_TABLE", "digest has the wrong length", where, expected=32, got=len(ref.digest))
    if ref.size_bytes > MAX_FILE_BYTES:
        raise broken("MANIFEST_LIMIT", "file is larger than a core may hold", where,
                     expected=f"at most {MAX_FILE_BYTES}", got=ref.size_bytes)


def entry_of(ref: FileRef, role: str, entries: Mapping[bytes, list[FileEntry]], where: str) -> FileEntry:
    """The listed file of `role` that `ref` names, or MANIFEST_TABLE."""
    check_file_ref(ref, where)
    same = entries.get(ref.digest, [])
    for entry in same:
        if entry.role == role and entry.ref.size_bytes == ref.size_bytes:
            return entry
    got = ", ".join(f"role {e.role}, {e.ref.size_bytes} bytes" for e in same) or f"no file {ref.digest.hex()[:16]}…"
    raise broken("MANIFEST_TABLE", "reference names no listed file of its kind", where,
                 expected=f"role {role}, {ref.size_bytes} bytes", got=got)


def unique(ids: Iterable[int | str], code: str, what: str) -> None:
    """Raise `code` if an id occurs twice."""
    seen: set[int | str] = set()
    for value in ids:
        if value in seen:
            raise broken(code, f"{what} occurs twice", f"{what} {value}")
        seen.add(value)


def inside(offset: int, nbytes: int, size: int) -> bool:
    """Whether [offset, offset + nbytes) lies in [0, size)."""
    return 0 <= offset <= size and 0 <= nbytes <= size - offset


@dataclass(frozen=True, slots=True)
class BufferRange:
    """The smallest size that a buffer can have on any machine, in bytes, and whether a symbol makes it grow."""

    name: str
    nbytes: int
    grows: bool


def buffer_range(buffer: Buffer, blob_bytes: Mapping[int, int], symbols: Mapping[int, Symbol]) -> BufferRange:
    """Size of a buffer with every symbol at its minimum; a WEIGHTS buffer is as large as its blob."""
    if buffer.buffer_class == WEIGHTS:
        return BufferRange(buffer.name, blob_bytes[buffer.blob_id], False)
    terms = sum(symbols[term.symbol_id].minimum * term.bytes for term in buffer.size_terms)
    return BufferRange(buffer.name, buffer.fixed_bytes + terms, len(buffer.size_terms) > 0)


def buffer_ranges(manifest: RebuildManifest) -> dict[int, BufferRange]:
    """Every buffer's range by id, for a manifest that `check_manifest_structure` has passed."""
    blob_bytes = {blob.blob_id: blob.file.size_bytes for blob in manifest.weight_blobs}
    symbols = {symbol.symbol_id: symbol for symbol in manifest.symbols}
    return {buffer.buffer_id: buffer_range(buffer, blob_bytes, symbols) for buffer in manifest.buffers}
