"""A signed core of some 3 kB with every kind of file, so that each of its bits can be flipped within a minute."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1 import weights_pb2 as w
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.runtime.test_kernel_image import cubin
from tests.toy_core import ToyCore

WEIGHTS, STATE, CONFIG, GRAPH, MODULE = "weights/w", "state/s", "config/c", "graphs/g", "modules/m"


def make_tiny_core(directory: Path) -> ToyCore:
    """Write and sign it: weights, a state, a config, a module and a graph that launches the module's one kernel."""
    files = {WEIGHTS: bytes(range(64)), STATE: b"state", CONFIG: b"{}", MODULE: cubin(names=("add",)),
             GRAPH: _graphs().SerializeToString(deterministic=True)}
    refs = {name: w.FileRef(algorithm=w.SHA256, digest=hashlib.sha256(data).digest(), size_bytes=len(data))
            for name, data in files.items()}
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_bytes(data)
    roles = {"modules": "module", "graphs": "graph"}
    pointer = g.ParamSlot(size=8, type=g.POINTER)
    manifest = RebuildManifest(
        format_version=1, core_name="tiny", release=1,
        files=[w.FileEntry(path=name, ref=refs[name], role=roles.get(name.split("/")[0], name.split("/")[0]))
               for name in files],
        target=ModelIdentity(config=refs[CONFIG]),
        weight_blobs=[w.WeightBlob(blob_id=0, file=refs[WEIGHTS], alignment=256)],
        tensor_views=[w.TensorView(name="w", blob_id=0, size_bytes=64, dtype="u8", shape=[64])],
        buffers=[
            g.Buffer(buffer_id=0, name="w", buffer_class=g.WEIGHTS, alignment=256, blob_id=0),
            g.Buffer(buffer_id=1, name="s", buffer_class=g.STATE, alignment=256, fixed_bytes=256,
                     initial=refs[STATE]),
        ],
        modules=[g.KernelModule(module_id=0, kind=g.CUBIN, target="sm_90a", file=refs[MODULE])],
        kernels=[g.Kernel(kernel_id=0, name="add", variants=[
            g.KernelVariant(module_id=0, symbol="add", params=[pointer, pointer], block=g.Dim3(x=32, y=1, z=1))])],
        device_targets=[g.DeviceTarget(target_id=0, name="sm_90a", module_ids=[0])],
        graph_files=[g.GraphFile(target_id=0, file=refs[GRAPH], graph_names=["d"])],
    )
    (directory / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    core = ToyCore(directory, WEIGHTS, WEIGHTS, CONFIG, GRAPH, STATE)
    core.sign()
    return core


def use_everything(path: Path, trust: TrustPolicy) -> None:
    """Read every file as a loader does: weights into memory, the others whole."""
    with verify(path, trust) as core:
        for entry in core.manifest.files:
            if entry.role == "weights":
                core.read_into(entry.path, memoryview(bytearray(entry.ref.size_bytes)), threads=1)
            else:
                core.small_file(entry.ref)


def _graphs() -> GraphSet:
    node = g.GraphNode(
        node_id=0, kind=g.KERNEL, kernel_id=0, grid=g.Dim3(x=1, y=1, z=1), param_block=bytes(16),
        relocations=[g.Relocation(kind=g.BUFFER_ADDRESS, param_index=index, buffer_id=index) for index in (0, 1)],
        accesses=[g.Access(buffer_id=0, bytes=64), g.Access(buffer_id=1, bytes=64, write=True)],
    )
    return GraphSet(format_version=1, graphs=[g.Graph(name="d", role="decode", nodes=[node])])
