"""A manifest and a graph set in which every structure rule has something to hold: tests change one thing in it."""

from __future__ import annotations

import hashlib

from dflash_core.v1.graph_pb2 import GraphNode, GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import SHA256, FileRef
from google.protobuf import text_format

_SIZES = {
    "weights/a.bin": 800,
    "weights/b.bin": 4_194_560,
    "graphs/g.pb": 300,
    "config/c": 12,
    "state/s.bin": 64,
    "modules/m.cubin": 5000,
    "golden/r.pb": 7,
    "components/p.pb": 90,
}
_ROLES = {"modules": "module", "graphs": "graph", "components": "component"}

_TABLES = """
format_version: 1
core_name: "sound"
tensor_views { name: "norm" blob_id: 1 offset_bytes: 0 size_bytes: 64 dtype: "bf16" shape: 4 shape: 8 strides: 8
  strides: 1 }
tensor_views { name: "norm.again" blob_id: 1 offset_bytes: 0 size_bytes: 64 dtype: "bf16" shape: 4 shape: 8 }
tensor_views { name: "head.global_scale" blob_id: 1 offset_bytes: 256 size_bytes: 4 dtype: "f32" shape: 1 }
tensor_views { name: "up" blob_id: 1 offset_bytes: 512 size_bytes: 128 dtype: "f8e4m3" shape: 2 shape: 64
  format: "mxfp8-e4m3-ue8m0-k32" scale_view: "up.block_scale" }
tensor_views { name: "up.block_scale" blob_id: 1 offset_bytes: 768 size_bytes: 4 dtype: "u8" shape: 2 shape: 2
  shard { axis: 1 index: 0 count: 2 } }
tensor_views { name: "embedding" blob_id: 2 offset_bytes: 0 size_bytes: 4194560 dtype: "u8" shape: 4194560 }
symbols { symbol_id: 1 name: "kv_pages" width: 4 minimum: 2 maximum: 1000 default_value: 8 }
buffers { buffer_id: 1 name: "weights.a" buffer_class: WEIGHTS fixed_bytes: 800 alignment: 256 blob_id: 1 }
buffers { buffer_id: 2 name: "weights.b" buffer_class: WEIGHTS alignment: 256 blob_id: 2 }
buffers { buffer_id: 3 name: "kv" buffer_class: KV_ARENA alignment: 256 size_terms { symbol_id: 1 bytes: 4096 } }
buffers { buffer_id: 4 name: "state" buffer_class: STATE fixed_bytes: 256 alignment: 256 }
buffers { buffer_id: 5 name: "scratch" buffer_class: SCRATCH fixed_bytes: 4096 alignment: 256 alias_group: 1 }
buffers { buffer_id: 6 name: "tokens" buffer_class: IO fixed_bytes: 512 alignment: 256 host_mapped: true }
buffers { buffer_id: 7 name: "table" buffer_class: POINTER_TABLE fixed_bytes: 64 alignment: 256 device_target: 0
  data_relocations { offset: 0 buffer_id: 3 addend: 8192 } data_relocations { offset: 8 buffer_id: 1 addend: 512 } }
modules { module_id: 1 kind: CPU_REGISTRY target: "cpu" registry: "dflash.cpu" registry_version: 1 }
modules { module_id: 2 kind: CUBIN target: "sm_90a" }
kernels { kernel_id: 1 name: "add"
  variants { module_id: 1 symbol: "dflash.add/1" params { size: 8 type: POINTER } params { size: 8 type: POINTER }
    params { size: 4 type: SCALAR } }
  variants { module_id: 2 symbol: "add" params { size: 8 type: POINTER } params { size: 8 type: POINTER }
    params { size: 4 type: SCALAR } block { x: 128 y: 1 z: 1 } max_dynamic_shared_bytes: 1024 } }
kernels { kernel_id: 2 name: "attend"
  variants { module_id: 2 symbol: "attend" params { size: 128 type: TENSOR_MAP } params { size: 24 type: STRUCT }
    params { size: 8 type: SCALAR } block { x: 256 y: 1 z: 1 } } }
device_targets { target_id: 0 name: "cpu" module_ids: 1 }
device_targets { target_id: 1 name: "sm_90a" module_ids: 2 }
graph_files { target_id: 0 graph_names: "decode" graph_names: "verify" }
graph_files { target_id: 1 graph_names: "decode" graph_names: "verify" graph_names: "attend" }
contract { io { name: "tokens" buffer_id: 6 offset: 256 dtype: "i32" shape: 64 } }
components { component_id: 1 core_name: "part" }
"""

_CPU_GRAPHS = """
format_version: 1
templates { template_id: 1
  nodes { node_id: 0 kind: KERNEL kernel_id: 1 grid { x: 1 y: 1 z: 1 }
    relocations { kind: BUFFER_ADDRESS param_index: 0 buffer_id: 1 addend: 512 }
    relocations { kind: BUFFER_ADDRESS param_index: 1 buffer_id: 3 width: 8 }
    accesses { buffer_id: 1 offset: 512 bytes: 288 } accesses { buffer_id: 3 write: true } }
  nodes { node_id: 1 kind: COPY copy { source { kind: BUFFER_ADDRESS buffer_id: 6 addend: 256 }
    destination { kind: BUFFER_ADDRESS buffer_id: 5 } bytes: 256 } }
  nodes { node_id: 2 kind: FILL fill { destination { kind: BUFFER_ADDRESS buffer_id: 4 addend: 128 } value: 65535
    element_bytes: 2 count: 64 } }
  nodes { node_id: 3 kind: EMPTY }
  edges { from: 0 to: 1 } edges { from: 1 to: 2 } edges { from: 0 to: 3 } }
templates { template_id: 2 nodes { node_id: 0 kind: CHILD child_template: 1 } }
graphs { name: "decode" role: "decode" input_buffers: 6 output_buffers: 6 component_id: 1
  nodes { node_id: 0 kind: KERNEL kernel_id: 1
    relocations { kind: BUFFER_ADDRESS param_index: 0 buffer_id: 1 }
    relocations { kind: BUFFER_ADDRESS param_index: 1 buffer_id: 5 }
    relocations { kind: SYMBOL_VALUE param_index: 2 symbol_id: 1 width: 4 } }
  nodes { node_id: 1 kind: CHILD child_template: 2 }
  edges { from: 0 to: 1 } }
graphs { name: "verify" role: "verify" template_id: 1
  overrides { node_id: 0 params { param_index: 2 }
    relocations { kind: BUFFER_ADDRESS param_index: 0 buffer_id: 1 addend: 256 } } }
"""

_GPU_GRAPHS = """
format_version: 1
graphs { name: "attend" role: "verify"
  nodes { node_id: 0 kind: KERNEL kernel_id: 2 grid { x: 4 y: 2 z: 1 }
    relocations { kind: TENSOR_MAP_ADDRESS param_index: 0 buffer_id: 3 tensor_map { dtype: "bf16" dims: 64 dims: 1
      stride_bytes: 4096 box: 64 box: 1 element_strides: 1 element_strides: 1 dim_symbols { key: 1 value: 1 } } }
    relocations { kind: BUFFER_ADDRESS param_index: 1 offset: 8 buffer_id: 7 }
    relocations { kind: SYMBOL_VALUE param_index: 1 offset: 16 symbol_id: 1 }
    relocations { kind: RANK_VALUE param_index: 2 } }
  nodes { node_id: 1 kind: KERNEL kernel_id: 1 grid { x: 1 y: 1 z: 1 } dynamic_shared_bytes: 1024
    relocations { kind: BUFFER_ADDRESS param_index: 0 buffer_id: 1 }
    relocations { kind: BUFFER_ADDRESS param_index: 1 buffer_id: 5 } } }
"""


def sound_sizes() -> dict[str, int]:
    """Bytes of every file of the core, by path."""
    return dict(_SIZES)


def file_ref(path: str) -> FileRef:
    """The reference to one of the core's files; its digest is that of the path, since no test reads the bytes."""
    return FileRef(algorithm=SHA256, digest=hashlib.sha256(path.encode()).digest(), size_bytes=_SIZES[path])


def sound_manifest() -> RebuildManifest:
    """A manifest that breaks no rule."""
    manifest = text_format.Parse(_TABLES, RebuildManifest())
    for path in _SIZES:
        folder = path.split("/")[0]
        entry = manifest.files.add(ref=file_ref(path), path=path, role=_ROLES.get(folder, folder))
        if path == "weights/b.bin":
            entry.chunk_bytes, entry.chunk_digests = 4_194_304, bytes(64)
    for blob_id, path in ((1, "weights/a.bin"), (2, "weights/b.bin")):
        manifest.weight_blobs.add(blob_id=blob_id, file=file_ref(path), alignment=256)
    manifest.buffers[3].initial.CopyFrom(file_ref("state/s.bin"))
    manifest.modules[1].file.CopyFrom(file_ref("modules/m.cubin"))
    for graph_file in manifest.graph_files:
        graph_file.file.CopyFrom(file_ref("graphs/g.pb"))
    manifest.target.config.CopyFrom(file_ref("config/c"))
    manifest.components[0].manifest.CopyFrom(file_ref("components/p.pb"))
    return manifest


def cpu_graphs() -> GraphSet:
    """A graph set for the target `cpu` that breaks no rule."""
    graphs = text_format.Parse(_CPU_GRAPHS, GraphSet())
    graphs.templates[0].nodes[0].param_block = bytes(20)
    graphs.graphs[0].nodes[0].param_block = bytes(20)
    graphs.graphs[1].overrides[0].params[0].value = b"\x05\0\0\0"
    return graphs


def gpu_graphs() -> GraphSet:
    """A graph set for the target `sm_90a` that breaks no rule."""
    graphs = text_format.Parse(_GPU_GRAPHS, GraphSet())
    graphs.graphs[0].nodes[0].param_block = bytes(160)
    graphs.graphs[0].nodes[1].param_block = bytes(20)
    return graphs


def empty_nodes(count: int) -> list[GraphNode]:
    """`count` nodes that do nothing."""
    return [GraphNode(node_id=index, kind=4) for index in range(count)]
