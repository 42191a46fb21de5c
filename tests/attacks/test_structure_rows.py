"""A trusted key signs a core that is not well formed: each mutation is refused by the rule it breaks.

The toy core has blob 0 (two chunks, one view), blob 1 (1024 bytes, one view), a state, and one CPU graph of two kernel
nodes that copy buffer 1 to 2 and 2 to 3.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileEntry, TensorView

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.edit_core import add_file, edit_graphs, replace_graph_bytes
from tests.runtime.test_kernel_image import cubin
from tests.toy_core import CHUNK, ToyCore

UNKNOWN = b"\xa0\x1f\x01"
CUBIN_HEADER = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(9) + b"\xbe\0" + bytes(44)


def entry_of(toy: ToyCore, manifest: RebuildManifest, name: str) -> FileEntry:
    return next(entry for entry in manifest.files if entry.path == getattr(toy, name))


# Statements on m, the manifest; toy; and the functions above. The number is the row of the list of attacks.
MANIFEST_ROWS = [
    ("27 unknown field in a view", "m.tensor_views[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("27 unknown buffer class", "m.buffers[3].buffer_class = 77", "MANIFEST_UNKNOWN"),
    ("27 unknown digest algorithm", "m.files[0].ref.algorithm = 77", "MANIFEST_UNKNOWN"),
    ("29 files lacks one resource", "m.files.remove(entry_of(toy, m, 'config'))", "MANIFEST_TABLE"),
    ("29 files adds one", "m.files.add().CopyFrom(m.files[0]); m.files[-1].path = 'weights/x'", "MANIFEST_TABLE"),
    ("29 another digest", "entry_of(toy, m, 'config').ref.digest = bytes(32)", "MANIFEST_TABLE"),
    ("29 another size", "entry_of(toy, m, 'config').ref.size_bytes += 1", "FILE_SIZE"),
    ("29 one path twice", "m.files.add().CopyFrom(m.files[0])", "MANIFEST_TABLE"),
    ("30 chunk list one entry short", "entry_of(toy, m, 'big').chunk_digests = bytes(32)", "MANIFEST_TABLE"),
    ("30 chunk list one entry long", "entry_of(toy, m, 'big').chunk_digests += bytes(32)", "MANIFEST_TABLE"),
    ("30 chunk list of 33 bytes", "entry_of(toy, m, 'big').chunk_digests = bytes(33)", "MANIFEST_TABLE"),
    ("30 no chunk list", "entry_of(toy, m, 'big').ClearField('chunk_digests')", "MANIFEST_TABLE"),
    ("30 chunk bytes 0", "entry_of(toy, m, 'big').chunk_bytes = 0", "MANIFEST_TABLE"),
    ("30 chunk bytes 1", "entry_of(toy, m, 'big').chunk_bytes = 1", "MANIFEST_TABLE"),
    ("30 chunk bytes 2^32 - 1", "entry_of(toy, m, 'big').chunk_bytes = 2**32 - 1", "MANIFEST_TABLE"),
    ("31 view one byte past its blob", "m.tensor_views[1].size_bytes += 1", "VIEW_RANGE"),
    ("31 offset past the end", "m.tensor_views[1].offset_bytes = 1280", "VIEW_RANGE"),
    ("31 unknown blob", "m.tensor_views[1].blob_id = 9", "MANIFEST_TABLE"),
    (
        "31 a blob whose file is a module",
        "m.weight_blobs[1].file.CopyFrom(add_file(toy, m, 'module', 'modules/m', b'x'))",
        "MANIFEST_TABLE",
    ),
    ("32 shape 2^32 by 2^32", "m.tensor_views[1].shape[:] = [2**32, 2**32]", "VIEW_SHAPE"),
    ("32 shape 0", "m.tensor_views[1].shape[:] = [0]", "VIEW_SHAPE"),
    ("32 nine dimensions", "m.tensor_views[1].shape.extend([1] * 8)", "VIEW_SHAPE"),
    (
        "32 1000 by 1000 floats over 4 bytes",
        "m.tensor_views[1].shape[:] = [1000, 1000]; m.tensor_views[1].dtype = 'f32'; m.tensor_views[1].size_bytes = 4",
        "VIEW_SHAPE",
    ),
    ("32 a negative stride", "m.tensor_views[1].strides[:] = [-1]", "VIEW_SHAPE"),
    ("32 misaligned", "m.tensor_views[1].offset_bytes = 1", "VIEW_RANGE"),
    (
        "33 two views overlap by one byte",
        "m.tensor_views[1].shape[:] = [257]; m.tensor_views[1].dtype = 'u8'; m.tensor_views[1].size_bytes = 257; "
        "m.tensor_views.add(name='b', blob_id=1, offset_bytes=256, size_bytes=768, dtype='u8', shape=[768])",
        "VIEW_OVERLAP",
    ),
    (
        "33 k and v share a range under different dtypes",
        "m.tensor_views.add().CopyFrom(m.tensor_views[1]); m.tensor_views[2].name = 'v'; "
        "m.tensor_views[2].dtype = 'f16'",
        "VIEW_OVERLAP",
    ),
    (
        "33 a gap of a MiB",
        "m.tensor_views[0].size_bytes -= 2**20; m.tensor_views[0].shape[0] -= 2**19",
        "VIEW_OVERLAP",
    ),
    ("36 a pointer of a table past its buffer", "point(m, addend=1025)", "RELOC_RANGE"),
    ("36 a pointer of a table before its buffer", "point(m, addend=-1)", "RELOC_RANGE"),
    ("37 PTX text as a cubin", "add_module(toy, m, b'.version 8.7\\n.target sm_90a\\n')", "KERNEL_IMAGE"),
    ("37 a fatbin", "add_module(toy, m, b'\\x50\\xed\\x55\\xba' + bytes(96))", "KERNEL_IMAGE"),
    ("37 a host library", "add_module(toy, m, CUBIN_HEADER.replace(b'\\xbe', b'\\x3e'))", "KERNEL_IMAGE"),
    ("37 a truncated ELF", "add_module(toy, m, CUBIN_HEADER)", "KERNEL_IMAGE"),
    ("37 another architecture", "add_module(toy, m, cubin(flags=0x500550))", "KERNEL_IMAGE"),
    (
        "37 an absent entry",
        "add_module(toy, m, cubin()); m.kernels[0].variants.add(module_id=1, symbol='other')",
        "KERNEL_IMAGE",
    ),
]

# Statements on s, the graph set, and d, its graph.
GRAPH_ROWS = [
    ("27 unknown node kind", "d.nodes[0].kind = 77", "MANIFEST_UNKNOWN"),
    ("27 unknown field in a node", "d.nodes[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("34 an edge to an absent node", "d.edges[0].to = 2", "GRAPH_REF"),
    ("34 an edge to itself", "d.edges[0].to = 0", "GRAPH_CYCLE"),
    ("34 a cycle of two", "d.edges.add(**{'from': 1}, to=0)", "GRAPH_CYCLE"),
    (
        "34 a template whose child is itself",
        "s.templates.add(template_id=1, nodes=[g.GraphNode(node_id=0, kind=g.CHILD, child_template=1)])",
        "GRAPH_CYCLE",
    ),
    ("35 2^18 + 1 nodes", "d.nodes.extend([g.GraphNode(kind=g.EMPTY)] * (2**18 - 1))", "GRAPH_LIMIT"),
    ("35 a parameter block of a MiB", "d.nodes[0].param_block = bytes(2**20)", "GRAPH_LIMIT"),
    (
        "35 nested templates that expand to 2^40 nodes",
        "s.templates.extend([g.GraphTemplate(template_id=i, nodes=[g.GraphNode(node_id=k, kind=g.CHILD if i else"
        " g.EMPTY, child_template=i - 1 if i else None) for k in (0, 1)]) for i in range(40)])",
        "GRAPH_LIMIT",
    ),
    ("36 a relocation past its parameter", "d.nodes[0].relocations[0].offset = 1", "RELOC_RANGE"),
    ("36 an addend past its buffer", "d.nodes[0].relocations[0].addend = 1025", "RELOC_RANGE"),
    ("36 a negative addend", "d.nodes[0].relocations[0].addend = -1", "RELOC_RANGE"),
    ("36 two relocations over one slot", "d.nodes[0].relocations[1].param_index = 0", "RELOC_RANGE"),
]


def point(manifest: RebuildManifest, addend: int) -> None:
    manifest.buffers.append(g.Buffer(
        buffer_id=9, name="table", buffer_class=g.POINTER_TABLE, fixed_bytes=64, alignment=256,
        data_relocations=[g.DataRelocation(offset=0, buffer_id=1, addend=addend)],
    ))


def add_module(toy: ToyCore, manifest: RebuildManifest, data: bytes) -> None:
    ref = add_file(toy, manifest, "module", "modules/m.cubin", data)
    manifest.modules.append(g.KernelModule(module_id=1, kind=g.CUBIN, target="sm_90a", file=ref))


def list_chunks(entry: FileEntry, data: bytes) -> None:
    entry.chunk_bytes = CHUNK
    entry.chunk_digests = b"".join(hashlib.sha256(data[at : at + CHUNK]).digest() for at in range(0, len(data), CHUNK))


def nested_groups(depth: int) -> bytes:
    """Field 500 as a group within a group, `depth` times."""
    return b"\xa3\x1f" * depth + b"\xa4\x1f" * depth


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in MANIFEST_ROWS], ids=[row[0] for row in MANIFEST_ROWS])
def test_refuses_a_signed_manifest_with(change: str, code: str, toy: ToyCore, trust: TrustPolicy):
    toy.edit_manifest(lambda manifest: exec(change, {
        "m": manifest, "toy": toy, "UNKNOWN": UNKNOWN, "CUBIN_HEADER": CUBIN_HEADER, "add_file": add_file,
        "entry_of": entry_of, "point": point, "add_module": add_module, "TensorView": TensorView,
        "cubin": cubin,
    }))

    with refused(code):
        verify(toy.path, trust)


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in GRAPH_ROWS], ids=[row[0] for row in GRAPH_ROWS])
def test_refuses_a_signed_graph_file_with(change: str, code: str, toy: ToyCore, trust: TrustPolicy):
    edit_graphs(toy, lambda graphs: exec(change, {"s": graphs, "d": graphs.graphs[0], "g": g, "UNKNOWN": UNKNOWN}))

    with refused(code):
        verify(toy.path, trust)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (lambda manifest: manifest + b"\x12\x80\x80\x80\x21" + bytes(65 << 20), "MANIFEST_LIMIT"),
        (lambda manifest: manifest + nested_groups(200), "MANIFEST_MALFORMED"),
        (lambda manifest: manifest + b"\x08\xff", "MANIFEST_MALFORMED"),
        (lambda manifest: manifest + b"\x12\x02\xff\xfe", "MANIFEST_MALFORMED"),
    ],
    ids=["38 65 MiB", "38 unknown groups 200 deep", "38 a truncated varint", "38 invalid UTF-8 in a string"],
)
def test_refuses_signed_bytes_that_are_no_manifest(
    data: Callable[[bytes], bytes], code: str, toy: ToyCore, trust: TrustPolicy
):
    (toy.path / "manifest.pb").write_bytes(data((toy.path / "manifest.pb").read_bytes()))
    toy.sign()

    with refused(code):
        verify(toy.path, trust)


def test_refuses_a_signed_graph_file_of_ten_million_edges(toy: ToyCore, trust: TrustPolicy):
    """35: forty MB in the file, half a GB once parsed."""
    edges = b"\x32\x02\x10\x01" * 10**7
    data = b"\x08\x01\x1a" + varint(len(edges)) + edges
    replace_graph_bytes(toy, data)
    toy.edit_manifest(lambda manifest: list_chunks(entry_of(toy, manifest, "graph"), data))

    with refused("GRAPH_LIMIT"):
        verify(toy.path, trust)


def test_refuses_a_signed_manifest_of_empty_messages(toy: ToyCore, trust: TrustPolicy):
    """38: twenty MB in the file, a GB and more once parsed."""
    (toy.path / "manifest.pb").write_bytes((toy.path / "manifest.pb").read_bytes() + b"\x9a\x01\x00" * 7_000_000)
    toy.sign()

    with refused("MANIFEST_LIMIT"):
        verify(toy.path, trust)


def test_refuses_small_files_that_are_large_together(
    toy: ToyCore, trust: TrustPolicy, monkeypatch: pytest.MonkeyPatch
):
    whole = [toy.graph, toy.config]
    verify_module = importlib.import_module("runtime.verify")  # the package's attribute is the function
    nbytes = sum((toy.path / name).stat().st_size for name in whole)
    monkeypatch.setattr(verify_module, "MAX_EAGER_BYTES", nbytes)
    verify(toy.path, trust).close()
    monkeypatch.setattr(verify_module, "MAX_EAGER_BYTES", nbytes - 1)

    with refused("MANIFEST_LIMIT"):
        verify(toy.path, trust)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_the_edits_themselves_leave_a_core_that_loads(toy: ToyCore, trust: TrustPolicy, tmp_path: Path):
    toy.edit_manifest(lambda manifest: point(manifest, addend=1024))
    edit_graphs(toy, lambda graphs: graphs.graphs[0].nodes[0].accesses.pop())

    with verify(toy.path, trust) as core:
        assert core.manifest.buffers[4].name == "table"
