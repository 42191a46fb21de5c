"""Bound the memory that a manifest takes once parsed, from its bytes and before a parser spends any.

    check_manifest_bytes(data)

Two bytes of protobuf can stand for a message that takes 160 bytes in memory, so 64 MiB of them would take 5 GiB. This
walk adds up what messages, strings and numbers in lists will take, in units of 32 bytes, and stops at the first one too
many. It does not recurse, and its stack is as deep as the schema. Source: the protobuf wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from dflash_core.errors import FormatError
from dflash_core.v1.manifest_pb2 import RebuildManifest
from google.protobuf.descriptor import FieldDescriptor

from .structure_rules import broken

SMALL_BYTES = 1 << 20
"""Smaller manifests are not walked: 160 bytes in memory for each two of these are 80 MiB."""
MAX_UNITS = 1 << 22
MAX_FIELDS = 1 << 22
"""Bounds the time of the walk, whatever the fields hold."""
_UNIT_BYTES = 32
_UNITS_PER_MESSAGE = 4
_UNITS_PER_TEXT = 2
_NUMBERS_PER_UNIT = 4
_MAX_DEPTH = 100

_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = 0, 1, 2, 3, 4, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A message type: the numbers of its fields that take memory for each entry."""

    messages: dict[int, _Kind] = field(default_factory=dict)
    texts: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)


_UNKNOWN: Final = _Kind()
"""What a group holds: no schema names it, and a parser keeps its bytes as they are."""


def check_manifest_bytes(data: bytes) -> None:
    """Refuse a manifest that would take far more memory than it has bytes.

    Raises:
        FormatError: MANIFEST_LIMIT; MANIFEST_MALFORMED for bytes that are no protobuf.
    """
    if len(data) <= SMALL_BYTES:
        return
    budget = MAX_UNITS + len(data) // _UNIT_BYTES
    at, end, kind, group = 0, len(data), _MANIFEST, 0
    stack: list[tuple[int, _Kind, int]] = []
    units = fields = 0
    while True:
        while at == end and not group:
            if not stack:
                return
            end, kind, group = stack.pop()
        first = at
        tag, at = _varint(data, at, end)
        wire, number = tag & 7, tag >> 3
        if wire == _BYTES:
            nbytes, at = _varint(data, at, end)
            if nbytes > end - at:
                raise _malformed(first)
            child = kind.messages.get(number)
            if child is not None:
                units += _UNITS_PER_MESSAGE
                stack.append((end, kind, group))
                end, kind, group = at + nbytes, child, 0
            else:
                if number in kind.texts:
                    units += _UNITS_PER_TEXT
                elif number in kind.numbers:
                    units += 1 + nbytes // _NUMBERS_PER_UNIT
                at += nbytes
        elif wire == _VARINT:
            _, at = _varint(data, at, end)
            units += number in kind.numbers
        elif wire in _FIXED_BYTES:
            at += _FIXED_BYTES[wire]
            if at > end:
                raise _malformed(first)
        elif wire == _START_GROUP:
            stack.append((end, kind, group))
            kind, group = _UNKNOWN, number
        elif wire == _END_GROUP and group and group == number:
            _, kind, group = stack.pop()
        else:
            raise _malformed(first)
        fields += 1
        if units > budget or fields > MAX_FIELDS:
            raise broken("MANIFEST_LIMIT", "the manifest would take too much memory", f"manifest.pb, byte {first}",
                         expected=f"at most {budget * _UNIT_BYTES} bytes in {MAX_FIELDS} fields", got="more")
        if len(stack) > _MAX_DEPTH:
            raise _malformed(first)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    first = at
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise _malformed(first)


def _malformed(at: int) -> FormatError:
    return broken("MANIFEST_MALFORMED", "not a RebuildManifest", f"manifest.pb, byte {at}")


def _kind_of(message: Any, known: dict[str, _Kind]) -> _Kind:
    if message.full_name in known:
        return known[message.full_name]
    kind = known[message.full_name] = _Kind()
    for item in message.fields:
        if item.message_type is not None:
            kind.messages[item.number] = _kind_of(item.message_type, known)
        elif item.is_repeated:
            is_text = item.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
            (kind.texts if is_text else kind.numbers).add(item.number)
    return kind


_MANIFEST: Final = _kind_of(RebuildManifest.DESCRIPTOR, {})
