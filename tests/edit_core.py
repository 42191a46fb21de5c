"""Change what a toy core holds beside its manifest, and sign the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileEntry, FileRef

from tests.toy_core import ToyCore


def add_file(toy: ToyCore, manifest: RebuildManifest, role: str, name: str, data: bytes) -> FileRef:
    """Put a further small file into the core and the manifest."""
    path = toy.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    ref = FileRef(algorithm=1, digest=hashlib.sha256(data).digest(), size_bytes=len(data))
    manifest.files.append(FileEntry(path=name, role=role, ref=ref))
    return ref


def replace_graph_bytes(toy: ToyCore, data: bytes) -> None:
    """Put other bytes where the graph file was, and sign the result."""
    (toy.path / toy.graph).write_bytes(data)

    def adjust(manifest: RebuildManifest) -> None:
        for entry in manifest.files:
            if entry.path == toy.graph:
                entry.ref.digest, entry.ref.size_bytes = hashlib.sha256(data).digest(), len(data)
                manifest.graph_files[0].file.CopyFrom(entry.ref)

    toy.edit_manifest(adjust)


def edit_graphs(toy: ToyCore, edit: Callable[[GraphSet], object]) -> None:
    graphs = GraphSet.FromString((toy.path / toy.graph).read_bytes())
    edit(graphs)
    replace_graph_bytes(toy, graphs.SerializeToString())
