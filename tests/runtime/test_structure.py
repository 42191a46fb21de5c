"""Every rule for a manifest: one change to a sound one breaks it, with its code."""

from __future__ import annotations

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1 import graph_pb2, weights_pb2
from dflash_core.v1.weights_pb2 import FileEntry, TensorView

from runtime.structure import check_manifest_structure
from tests.runtime.sound_core import file_ref, sound_manifest, sound_sizes

# An unknown field, as bytes to merge: number 500, varint 1.
UNKNOWN = b"\xa0\x1f\x01"

ROWS = [
    # files
    ("a file that the manifest does not list", "sizes['weights/c.bin'] = 5", "MANIFEST_TABLE"),
    ("a listed file that the core lacks", "del sizes['config/c']", "MANIFEST_TABLE"),
    ("one path twice", "m.files.add().CopyFrom(m.files[3])", "MANIFEST_TABLE"),
    ("a file of another size", "sizes['config/c'] = 13", "FILE_SIZE"),
    ("a digest of 31 bytes", "m.files[6].ref.digest = bytes(31)", "MANIFEST_TABLE"),
    ("an unknown digest algorithm", "m.files[3].ref.algorithm = 99", "MANIFEST_UNKNOWN"),
    ("no digest algorithm", "m.files[3].ref.algorithm = 0", "MANIFEST_UNKNOWN"),
    ("the reserved BLAKE3", "m.files[3].ref.algorithm = weights_pb2.BLAKE3_256", "MANIFEST_UNKNOWN"),
    ("an unknown role", "m.files[3].role = 'extra'", "MANIFEST_TABLE"),
    ("a role of another folder", "m.files[3].role = 'module'", "MANIFEST_TABLE"),
    ("a file above 2^40 bytes", "m.files[3].ref.size_bytes = sizes['config/c'] = 2**40 + 1", "MANIFEST_LIMIT"),
    ("4097 files", "m.files.extend([FileEntry(path=f'config/{i}') for i in range(4089)])", "MANIFEST_LIMIT"),
    ("chunk list one entry short", "m.files[1].chunk_digests = bytes(32)", "MANIFEST_TABLE"),
    ("chunk list one entry long", "m.files[1].chunk_digests = bytes(96)", "MANIFEST_TABLE"),
    ("chunk list of 33 bytes", "m.files[1].chunk_digests = bytes(33)", "MANIFEST_TABLE"),
    ("no chunk list", "m.files[1].ClearField('chunk_digests')", "MANIFEST_TABLE"),
    ("no chunk size", "m.files[1].ClearField('chunk_bytes')", "MANIFEST_TABLE"),
    ("chunk size 0", "m.files[1].chunk_bytes = 0", "MANIFEST_TABLE"),
    ("chunk size 1", "m.files[1].chunk_bytes = 1", "MANIFEST_TABLE"),
    ("chunk size 2^32 - 1", "m.files[1].chunk_bytes = 2**32 - 1", "MANIFEST_TABLE"),
    ("a chunk size for a small file", "m.files[0].chunk_bytes = 4194304", "MANIFEST_TABLE"),
    ("a chunk list for a small file", "m.files[0].chunk_digests = bytes(32)", "MANIFEST_TABLE"),
    ("an entry without a reference", "m.files[0].ClearField('ref')", "MANIFEST_TABLE"),
    # blobs
    ("two blobs of one id", "m.weight_blobs[1].blob_id = 1", "MANIFEST_TABLE"),
    ("a blob whose file is a module", "m.weight_blobs[0].file.CopyFrom(file_ref('modules/m.cubin'))", "MANIFEST_TABLE"),
    ("a blob of an absent file", "m.weight_blobs[0].file.digest = bytes(32)", "MANIFEST_TABLE"),
    ("a blob of another size", "m.weight_blobs[1].file.size_bytes += 1", "MANIFEST_TABLE"),
    ("a blob aligned to 128", "m.weight_blobs[0].alignment = 128", "MANIFEST_TABLE"),
    ("a blob aligned to 768", "m.weight_blobs[0].alignment = 768", "MANIFEST_TABLE"),
    # views
    ("one name twice", "m.tensor_views[1].name = 'norm'", "MANIFEST_TABLE"),
    ("an unknown blob", "m.tensor_views[0].blob_id = 3", "MANIFEST_TABLE"),
    ("a view one byte past its blob", "m.tensor_views[5].size_bytes += 1", "VIEW_RANGE"),
    ("a view that starts past its blob", "m.tensor_views[2].offset_bytes = 1024", "VIEW_RANGE"),
    ("offset 2^64 - 256", "m.tensor_views[2].offset_bytes = 2**64 - 256", "VIEW_RANGE"),
    ("a misaligned view", "m.tensor_views[4].offset_bytes = 772", "VIEW_RANGE"),
    ("nine dimensions", "m.tensor_views[2].shape.extend([1] * 8)", "VIEW_SHAPE"),
    ("an empty dimension", "m.tensor_views[2].shape[0] = m.tensor_views[2].size_bytes = 0", "VIEW_SHAPE"),
    ("shape [2^32, 2^32]", "m.tensor_views[0].shape[:] = [2**32, 2**32]", "VIEW_SHAPE"),
    ("1000 x 1000 floats over 4 bytes", "m.tensor_views[2].shape[:] = [1000, 1000]", "VIEW_SHAPE"),
    ("an unknown dtype", "m.tensor_views[0].dtype = 'q4'", "VIEW_SHAPE"),
    ("a negative stride", "m.tensor_views[0].strides[:] = [8, -1]", "VIEW_SHAPE"),
    ("a stride per dimension too few", "m.tensor_views[0].strides[:] = [8]", "VIEW_SHAPE"),
    ("strides that leave the view", "m.tensor_views[0].strides[:] = [9, 1]", "VIEW_SHAPE"),
    ("a shard past its count", "m.tensor_views[4].shard.index = 2", "VIEW_SHAPE"),
    ("a shard of an absent axis", "m.tensor_views[4].shard.axis = 2", "VIEW_SHAPE"),
    ("an unknown format", "m.tensor_views[3].format = 'mxfp6'", "VIEW_SHAPE"),
    ("a format over another dtype", "m.tensor_views[3].dtype = 'u8'", "VIEW_SHAPE"),
    ("a row that is no whole block", "m.tensor_views[3].shape[:] = [8, 16]", "VIEW_SHAPE"),
    (
        "a format without dimensions",
        "m.tensor_views[3].ClearField('shape'); m.tensor_views[3].size_bytes = 1",
        "VIEW_SHAPE",
    ),
    ("no block scales", "m.tensor_views[3].ClearField('scale_view')", "MANIFEST_TABLE"),
    ("block scales of another size", "m.tensor_views[3].scale_view = 'norm'", "VIEW_SHAPE"),
    ("two views of another dtype in one range", "m.tensor_views[1].dtype = 'f16'", "VIEW_OVERLAP"),
    (
        "two views that overlap by one byte",
        "m.tensor_views[2].shape[:] = [257]; m.tensor_views[2].dtype = 'u8'; m.tensor_views[2].size_bytes = 257",
        "VIEW_OVERLAP",
    ),
    ("a hole of 256 bytes", "del m.tensor_views[2]", "VIEW_OVERLAP"),
    ("a blob that no view reads", "del m.tensor_views[5]", "VIEW_OVERLAP"),
    (
        "a tail of 256 bytes",
        "m.tensor_views[5].size_bytes = m.tensor_views[5].shape[0] = 4194304",
        "VIEW_OVERLAP",
    ),
    # symbols and buffers
    ("two symbols of one id", "m.symbols.add(symbol_id=1, width=4)", "GRAPH_REF"),
    ("a symbol of three bytes", "m.symbols[0].width = 3", "RELOC_RANGE"),
    ("a negative symbol", "m.symbols[0].minimum = -1", "RELOC_RANGE"),
    ("a symbol too large for its width", "m.symbols[0].maximum = 2**31", "RELOC_RANGE"),
    ("a default above the maximum", "m.symbols[0].default_value = 1001", "RELOC_RANGE"),
    ("two buffers of one id", "m.buffers[5].buffer_id = 5", "GRAPH_REF"),
    ("an unknown buffer class", "m.buffers[5].buffer_class = 99", "MANIFEST_UNKNOWN"),
    ("no buffer class", "m.buffers[5].buffer_class = 0", "MANIFEST_UNKNOWN"),
    ("a symmetric buffer", "m.buffers[5].buffer_class = graph_pb2.SYMMETRIC", "FEATURE_UNSUPPORTED"),
    ("a buffer aligned to 16", "m.buffers[5].alignment = 16", "MANIFEST_TABLE"),
    ("weights without a blob", "m.buffers[0].ClearField('blob_id')", "MANIFEST_TABLE"),
    ("weights of an unknown blob", "m.buffers[0].blob_id = 9", "MANIFEST_TABLE"),
    ("weights larger than their blob", "m.buffers[0].fixed_bytes = 801", "MANIFEST_TABLE"),
    ("scratch that maps a blob", "m.buffers[4].blob_id = 1", "MANIFEST_TABLE"),
    ("scratch that grows", "m.buffers[4].size_terms.add(symbol_id=1, bytes=1)", "MANIFEST_TABLE"),
    ("a size from an unknown symbol", "m.buffers[2].size_terms[0].symbol_id = 2", "GRAPH_REF"),
    ("first contents of I/O", "m.buffers[5].initial.CopyFrom(file_ref('state/s.bin'))", "MANIFEST_TABLE"),
    ("first contents in a config file", "m.buffers[3].initial.CopyFrom(file_ref('config/c'))", "MANIFEST_TABLE"),
    ("first contents larger than the buffer", "m.buffers[3].fixed_bytes = 63", "MANIFEST_TABLE"),
    ("an alias group of state", "m.buffers[3].alias_group = 1", "MANIFEST_TABLE"),
    ("host-mapped scratch", "m.buffers[4].host_mapped = True", "MANIFEST_TABLE"),
    ("a buffer of an unknown target", "m.buffers[6].device_target = 7", "GRAPH_REF"),
    ("pointers in state", "m.buffers[3].data_relocations.add(buffer_id=1)", "MANIFEST_TABLE"),
    ("a pointer past its table", "m.buffers[6].data_relocations[1].offset = 57", "RELOC_RANGE"),
    ("two pointers over one slot", "m.buffers[6].data_relocations[1].offset = 7", "RELOC_RANGE"),
    ("a pointer to an unknown buffer", "m.buffers[6].data_relocations[1].buffer_id = 9", "GRAPH_REF"),
    ("a pointer past its buffer", "m.buffers[6].data_relocations[0].addend = 8193", "RELOC_RANGE"),
    ("a negative pointer", "m.buffers[6].data_relocations[0].addend = -1", "RELOC_RANGE"),
    # modules and kernels
    ("65,537 modules", "m.modules.extend([m.modules[0]] * 65535)", "MANIFEST_LIMIT"),
    ("two modules of one id", "m.modules[1].module_id = 1", "GRAPH_REF"),
    ("an unknown module kind", "m.modules[1].kind = 99", "MANIFEST_UNKNOWN"),
    ("a cubin without a file", "m.modules[1].ClearField('file')", "MANIFEST_TABLE"),
    ("a cubin in a weight file", "m.modules[1].file.CopyFrom(file_ref('weights/a.bin'))", "MANIFEST_TABLE"),
    ("a registry with a file", "m.modules[0].file.CopyFrom(file_ref('modules/m.cubin'))", "MANIFEST_TABLE"),
    ("a registry without a name", "m.modules[0].registry = ''", "MANIFEST_TABLE"),
    ("a registry without a version", "m.modules[0].ClearField('registry_version')", "MANIFEST_TABLE"),
    ("two kernels of one id", "m.kernels[1].kernel_id = 1", "GRAPH_REF"),
    ("a kernel without variants", "m.kernels[1].ClearField('variants')", "GRAPH_REF"),
    ("two variants in one module", "m.kernels[0].variants[0].module_id = 2", "GRAPH_REF"),
    ("a variant in an unknown module", "m.kernels[1].variants[0].module_id = 3", "GRAPH_REF"),
    ("a variant without an entry", "m.kernels[1].variants[0].symbol = ''", "GRAPH_REF"),
    ("an unknown parameter type", "m.kernels[1].variants[0].params[1].type = 99", "MANIFEST_UNKNOWN"),
    ("a pointer of four bytes", "m.kernels[0].variants[0].params[0].size = 4", "RELOC_RANGE"),
    ("a parameter of no bytes", "m.kernels[0].variants[0].params[2].size = 0", "RELOC_RANGE"),
    ("32,765 parameter bytes", "m.kernels[0].variants[0].params[2].size = 32765 - 16", "GRAPH_LIMIT"),
    # device targets, graph files and the rest
    ("two targets of one id", "m.device_targets[1].target_id = 0", "GRAPH_REF"),
    ("a target with an unknown module", "m.device_targets[1].module_ids.append(3)", "GRAPH_REF"),
    ("a graph file of an unknown target", "m.graph_files[1].target_id = 2", "GRAPH_REF"),
    ("a graph file that is a config", "m.graph_files[1].file.CopyFrom(file_ref('config/c'))", "MANIFEST_TABLE"),
    ("one graph name twice", "m.graph_files[1].graph_names.append('decode')", "GRAPH_REF"),
    ("1025 graphs", "m.graph_files[1].graph_names[:] = [str(i) for i in range(1025)]", "GRAPH_LIMIT"),
    ("a config that is a module", "m.target.config.CopyFrom(file_ref('modules/m.cubin'))", "MANIFEST_TABLE"),
    ("a draft tokenizer that is absent", "m.speculation.draft.tokenizer.size_bytes = 1", "MANIFEST_UNKNOWN"),
    ("a component that is a config", "m.components[0].manifest.CopyFrom(file_ref('config/c'))", "MANIFEST_TABLE"),
    ("a signature that is a config", "m.components[0].signatures.append(file_ref('config/c'))", "MANIFEST_TABLE"),
    ("two components of one id", "m.components.append(m.components[0])", "GRAPH_REF"),
    ("a parent without a digest", "m.provenance.parents.add(size_bytes=1)", "MANIFEST_UNKNOWN"),
    ("a binding to an unknown buffer", "m.contract.io[0].buffer_id = 9", "GRAPH_REF"),
    ("a binding one byte past its buffer", "m.contract.io[0].offset = 257", "RELOC_RANGE"),
    ("a binding of an unknown dtype", "m.contract.io[0].dtype = 'int'", "MANIFEST_UNKNOWN"),
    ("a binding of nine dimensions", "m.contract.io[0].shape.extend([1] * 8)", "VIEW_SHAPE"),
    # unknown fields
    ("unknown field in a file entry", "m.files[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a file reference", "m.files[0].ref.MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a config reference", "m.target.config.MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a blob", "m.weight_blobs[1].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a view", "m.tensor_views[1].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a shard", "m.tensor_views[4].shard.MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a size term", "m.buffers[2].size_terms[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a toolchain", "m.modules[1].toolchain.MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a slot", "m.kernels[1].variants[0].params[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
]


def test_accepts_a_sound_manifest():
    check_manifest_structure(sound_manifest(), sound_sizes())


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_refuses_a_manifest_with(change: str, code: str):
    manifest, sizes = sound_manifest(), sound_sizes()
    exec(change, {  # a statement reads better in the table than a lambda
        "m": manifest, "sizes": sizes, "UNKNOWN": UNKNOWN, "file_ref": file_ref, "FileEntry": FileEntry,
        "weights_pb2": weights_pb2, "graph_pb2": graph_pb2,
    })

    with pytest.raises(DflashError) as caught:
        check_manifest_structure(manifest, sizes)

    assert caught.value.code == code
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        "m.MergeFromString(UNKNOWN)",
        "m.contract.MergeFromString(UNKNOWN)",
        "m.symbols[0].MergeFromString(UNKNOWN)",
        "m.tensor_views[0].strides[:] = [1, 4]",
        "m.tensor_views[0].strides[:] = [0, 0]",
        "m.tensor_views[2].ClearField('shape')",
        "m.buffers[0].fixed_bytes = 0",
        "m.buffers[6].data_relocations[0].addend = 0",
        "m.contract.io[0].shape[0] = 1",
    ],
    ids=lambda change: change,
)
def test_accepts_a_manifest_with(change: str):
    manifest = sound_manifest()
    exec(change, {"m": manifest, "UNKNOWN": UNKNOWN})

    check_manifest_structure(manifest, sound_sizes())


def test_says_which_view_leaves_which_blob_and_by_how_much():
    manifest = sound_manifest()
    manifest.tensor_views[2].offset_bytes = 1024

    with pytest.raises(DflashError) as caught:
        check_manifest_structure(manifest, sound_sizes())

    assert str(caught.value) == (
        "view leaves its blob: expected within 800 bytes, got 4 bytes at 1024\n"
        "   at: view head.global_scale, blob 1\n"
        " hint: report this core to whoever built it; it is signed but not well formed"
    )


def test_counts_views_before_it_looks_at_them():
    manifest = sound_manifest()
    manifest.tensor_views.extend([TensorView()] * (2**20 - 5))

    with pytest.raises(DflashError) as caught:
        check_manifest_structure(manifest, sound_sizes())

    assert caught.value.code == "MANIFEST_LIMIT"
