"""What is fuzzed: each reader of bytes that an attacker may have written, as a function that must not be surprised.

    READERS["bundle"](data)         # returns, or raises AssertionError or something that no caller expects

A reader may accept or refuse with its typed error. When it accepts, what it read must hold together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from dflash_core.errors import (
    CheckpointError,
    CompatibilityError,
    DflashError,
    FormatError,
    ImageError,
    VerificationError,
)
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from exporter.safetensors_header import read_header
from runtime.archive import Member, layout, open_core
from runtime.bundle import encode_bundle, encode_statement, is_name, parse_bundle, parse_statement
from runtime.manifest_wire import SMALL_BYTES, check_manifest_bytes
from runtime.structure import check_graph_bytes, check_graph_set, check_manifest_structure
from runtime.verify import check_version, parse, parse_manifest
from runtime.vision.decode import ImageLimits, decode_image
from runtime.vision.preprocess import image_patches
from runtime.vision.settings import ImageSettings
from tests.runtime.sound_core import sound_manifest

Reader = Callable[[bytes], None]

_SOUND = sound_manifest()
PADDING = b"\x8a\x7d" + b"\x80\x80\x40" + bytes(SMALL_BYTES)
"""An unknown field of a MiB."""


def read_bundle(data: bytes) -> None:
    try:
        bundle = parse_bundle(data, "fuzz.sig")
    except VerificationError as err:
        assert err.code == "SIG_MALFORMED" and all(line.isprintable() for line in str(err).split("\n"))
        return
    assert parse_bundle(encode_bundle(bundle), "fuzz.sig") == bundle


def read_statement(data: bytes) -> None:
    try:
        statement = parse_statement(data, "fuzz.sig")
    except VerificationError as err:
        assert err.code in ("STMT_MALFORMED", "STMT_UNSUPPORTED", "STMT_NAME", "STMT_ROOT")
        return
    assert all(map(is_name, statement.digests))
    assert parse_statement(encode_statement("fuzz", statement.digests), "fuzz.sig") == statement


def read_manifest(data: bytes) -> None:
    if parses(RebuildManifest, data):
        # What a parser reads, the walk before it must not call malformed; below a MiB it does not walk.
        check_manifest_bytes(data + PADDING)
    try:
        manifest = parse_manifest(data)
        check_version(manifest)
        check_manifest_structure(manifest, {entry.path: entry.ref.size_bytes for entry in manifest.files})
    except (CompatibilityError, FormatError, VerificationError):
        return
    for view in manifest.tensor_views:
        blob = next(blob for blob in manifest.weight_blobs if blob.blob_id == view.blob_id)
        assert view.offset_bytes + view.size_bytes <= blob.file.size_bytes


def read_graphs(data: bytes) -> None:
    try:
        check_graph_bytes(data)
        graphs = parse(GraphSet, data, "graphs/fuzz.pb")
        check_graph_set(graphs, _SOUND, 0)
    except (CompatibilityError, FormatError) as err:
        assert err.code != "MANIFEST_MALFORMED" or not parses(GraphSet, data)
        return
    for graph in graphs.graphs:
        assert all(edge.to < len(graph.nodes) for edge in graph.edges)


def parses(kind: type[Message], data: bytes) -> bool:
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


def read_archive(data: bytes) -> None:
    with in_memory(data) as fd:
        try:
            files = open_core(Path(f"/proc/self/fd/{fd}"))
        except DflashError as err:
            assert err.code in ("BUNDLE_MALFORMED", "SIG_LIMIT")
            return
        with files:
            members = [Member(name, files.size(name), 0) for name in sorted(files.files)]
            spans = sorted((file.offset, file.offset + file.size_bytes) for file in files.files.values())
        assert layout(members).nbytes == len(data)
        assert all(left[1] <= right[0] for left, right in pairwise(spans))


def read_safetensors(data: bytes) -> None:
    with in_memory(data) as fd:
        try:
            entries = read_header(fd, len(data), "fuzz.safetensors")
        except CheckpointError:
            return
    assert sum(entry.nbytes for entry in entries) + 8 + int.from_bytes(data[:8], "little") == len(data)


def read_image(data: bytes) -> None:
    try:
        picture = decode_image(data, ImageLimits(max_pixels=1 << 12))
    except ImageError:
        return
    image = image_patches(picture, ImageSettings(max_patches=64), 8)
    assert image.levels.shape == (image.rows * image.cols, 588) and image.rows * image.cols == 4 * image.tokens <= 32


@contextmanager
def in_memory(data: bytes) -> Iterator[int]:
    """A file of these bytes that has no name; gives its descriptor."""
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


READERS: dict[str, Reader] = {
    "bundle": read_bundle, "statement": read_statement, "manifest": read_manifest, "graphs": read_graphs,
    "archive": read_archive, "safetensors": read_safetensors, "image": read_image,
}


def seeds() -> dict[str, dict[str, bytes]]:
    """What each reader accepts, to start from: reader -> name -> bytes. The committed corpus begins with these."""
    from tests.runtime.sound_core import cpu_graphs, gpu_graphs

    statement = encode_statement("fuzz", {"config/c": "11" * 32, "manifest.pb": "22" * 32})
    bundle = (b'{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json","verificationMaterial":{"publicKey":'
              b'{"hint":"' + b"ab" * 32 + b'"},"tlogEntries":[]},"dsseEnvelope":{"payload":"e30=",'
              b'"payloadType":"application/vnd.in-toto+json","signatures":[{"sig":"MAA=","keyid":""}]}}')
    members = [Member("config/c", 2, 0), Member("manifest.pb", 1, 0), Member("signatures/a.sig", 0, 0)]
    found = layout(members)
    archive = bytearray(found.nbytes)
    for at, part in (*found.headers, (found.central_offset, found.tail)):
        archive[at : at + len(part)] = part
    header = (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
              b'"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}')
    palette = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000003000000020803000000aaaa962800000009504c544500010203040506"
        "0708d98bbe6c0000000274524e5300809b2b4e180000001049444154789c63606064626062640000002000071d2b70a0"
        "0000000049454e44ae426082")
    minimal = text_format.Parse('format_version: 1 core_name: "fuzz"', type(_SOUND)())
    return {
        "bundle": {"sound": bundle},
        "statement": {"sound": statement},
        "manifest": {"sound": _SOUND.SerializeToString(), "minimal": minimal.SerializeToString()},
        "graphs": {"cpu": cpu_graphs().SerializeToString(), "gpu": gpu_graphs().SerializeToString()},
        "archive": {"sound": bytes(archive)},
        "safetensors": {"sound": len(header).to_bytes(8, "little") + header + bytes(9)},
        "image": {"palette": palette},
    }
