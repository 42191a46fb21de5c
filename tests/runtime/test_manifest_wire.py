"""A manifest is measured in its bytes, before a parser spends memory on it."""

from __future__ import annotations

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1.manifest_pb2 import RebuildManifest
from google.protobuf.message import DecodeError

from runtime.manifest_wire import SMALL_BYTES, check_manifest_bytes
from runtime.verify import parse_manifest
from tests.attacks.limits import refused
from tests.runtime.sound_core import sound_manifest

PADDING = b"\x8a\x7d" + b"\x80\x80\x40" + bytes(SMALL_BYTES)
"""An unknown field of a MiB, so that a small manifest is walked too."""


def delimited(number: int, body: bytes) -> bytes:
    """Field `number` with these bytes as its content."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def table_of_views(count: int) -> bytes:
    manifest = RebuildManifest()
    for index in range(count):
        manifest.tensor_views.add(
            name=f"model.layers.{index}.mlp.experts.12.gate_proj.weight", blob_id=3, offset_bytes=256 * index,
            size_bytes=256, dtype="f8e4m3", shape=[2048, 7168], format="mxfp8-e4m3-ue8m0-k32", sha256=bytes(32),
            scale_view=f"model.layers.{index}.mlp.experts.12.gate_proj.block_scale",
            source_tensors=[f"model.layers.{index}.mlp.experts.12.gate_proj.weight"],
        )
    return manifest.SerializeToString()


@pytest.mark.parametrize("data", [
    pytest.param(sound_manifest().SerializeToString(), id="a sound manifest"),
    pytest.param(sound_manifest().SerializeToString() + PADDING, id="a sound manifest and a MiB"),
    pytest.param(table_of_views(20_000), id="20,000 views"),
    pytest.param(b"\xa3\x1f\x08\x01\xa4\x1f" + PADDING, id="an unknown group"),
    pytest.param(b"\xa3\x1f" * 90 + b"\xa4\x1f" * 90 + PADDING, id="90 groups, one in another"),
    pytest.param(b"\xa1\x1f" + bytes(8) + b"\xa5\x1f" + bytes(4) + PADDING, id="fixed-size fields"),
    pytest.param(b"\x9a\x01\x00" * 300_000, id="300,000 empty components in less than a MiB"),
    pytest.param(b"\x9a\x01\x00" * 1_000_000, id="a million empty components"),
])
def test_accepts(data: bytes) -> None:
    check_manifest_bytes(data)
    RebuildManifest.FromString(data)


@pytest.mark.parametrize("data", [
    pytest.param(b"\x9a\x01\x00" * (20 << 20), id="empty components"),
    pytest.param(b"\x52\x00" * (30 << 20), id="empty views"),
    pytest.param(b"\xb2\x01\x00" * (20 << 20), id="empty strings"),
    pytest.param(b"\x08\x01" * (30 << 20), id="one number again and again"),
    pytest.param(delimited(17, delimited(9, delimited(5, bytes(60 << 20)))), id="numbers in one list"),
    pytest.param(delimited(13, delimited(3, b"\x1a\x00" * (30 << 20))), id="parameters of one kernel"),
    pytest.param(delimited(12, delimited(5, b"\x22\x00" * (30 << 20))), id="options of one toolchain"),
    pytest.param(delimited(16, b"\x18\x01" * (30 << 20)), id="numbers one by one"),
])
def test_refuses_what_would_take_too_much_memory(data: bytes) -> None:
    with refused("MANIFEST_LIMIT"):
        parse_manifest(data)


@pytest.mark.parametrize("data", [
    pytest.param(PADDING + b"\x08", id="a number cut off"),
    pytest.param(PADDING + b"\x52\x05\x0a", id="a length past the end"),
    pytest.param(PADDING + b"\x52\x02\x0a\x05", id="an inner length past the end"),
    pytest.param(PADDING + b"\xa3\x1f", id="a group without an end"),
    pytest.param(PADDING + b"\xa4\x1f", id="an end without a group"),
    pytest.param(PADDING + b"\xa3\x1f\xac\x1f", id="the end of another group"),
    pytest.param(PADDING + b"\xa3\x1f" * 101 + b"\xa4\x1f" * 101, id="101 groups, one in another"),
    pytest.param(PADDING + b"\x0f", id="wire type 7"),
    pytest.param(PADDING + b"\x08" + b"\xff" * 10 + b"\x01", id="a number of eleven bytes"),
    pytest.param(PADDING + b"\xa1\x1f" + bytes(7), id="a fixed-size field cut off"),
])
def test_refuses_what_is_no_protobuf(data: bytes) -> None:
    with pytest.raises(DflashError) as caught:
        check_manifest_bytes(data)

    assert caught.value.code == "MANIFEST_MALFORMED"
    with pytest.raises(DecodeError):
        RebuildManifest.FromString(data)
