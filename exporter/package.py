"""Lay out a core's files, digest them, and write the manifest that lists them all.

Nothing here depends on where the export ran: equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.v1 import graph_pb2, manifest_pb2, weights_pb2

import exporter
from exporter.capture.target import GpuTarget
from exporter.checkpoint import Checkpoint, SourceFile, read_side_file
from exporter.convert.stream import ConvertedWeights
from exporter.program.graphs import RecordedProgram
from exporter.program.serving import ServingShape, bindings
from exporter.program.vision import vision_bindings, vision_identity
from exporter.staging import writing
from runtime.ops import REGISTRY_NAME, REGISTRY_VERSION
from runtime.sign import file_entry

FORMAT_VERSION = 1
CPU_TARGET, GPU_TARGET = 0, 1
CPU_MODULE, FIRST_GPU_MODULE = 0, 1
# Model files that a core carries byte for byte, so that it can be served without the checkpoint.
CARRIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
           "special_tokens_map.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A checkpoint, its files as hashed, and what a person says about where it came from."""

    checkpoint: Checkpoint
    files: tuple[SourceFile, ...]
    architecture: str
    repository: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class CoreIdentity:
    """What the manifest says of the core as a whole."""

    core_name: str
    release: int
    target: SourceModel
    draft: SourceModel | None
    speculation: manifest_pb2.RebuildSpeculation | None
    online_quantization: str | None
    online_mxfp8_scope: str | None
    tuning_identity: bytes
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnsignedCore:
    """A folder that holds every file of a core but its signatures."""

    path: Path
    manifest: manifest_pb2.RebuildManifest


def write_core(staging: Path, identity: CoreIdentity, weights: ConvertedWeights, recorded: RecordedProgram,
               shape: ServingShape, gpu: GpuTarget | None = None) -> UnsignedCore:
    """Write configs, graphs, modules and the manifest beside the weights that are already in `staging`.

    Args:
        gpu: a second device target beside the CPU's; weights, buffers and contract are shared.
    Raises:
        ResourceError: NO_SPACE, NOT_WRITABLE or WRITE_FAILED, with the file.
    """
    graph_files = [_write_graphs(staging, CPU_TARGET, recorded.graphs)]
    targets = [graph_pb2.DeviceTarget(target_id=CPU_TARGET, name="cpu", module_ids=[CPU_MODULE])]
    if gpu is not None:
        graph_files.append(_write_graphs(staging, GPU_TARGET, gpu.graphs))
        targets.append(graph_pb2.DeviceTarget(target_id=GPU_TARGET, name=gpu.name,
                                              module_ids=[module.module_id for module, _ in gpu.modules],
                                              device_features=gpu.features, min_shared_optin_bytes=gpu.shared_bytes))
        for _, cubin in gpu.modules:
            _write_digest_named(staging, "modules", ".cubin", cubin)
    manifest = manifest_pb2.RebuildManifest(
        format_version=FORMAT_VERSION, core_name=identity.core_name, release=identity.release,
        target=_model(staging, identity.target), weight_blobs=_blobs(weights), tensor_views=weights.views,
        buffers=recorded.program.buffers, symbols=recorded.program.symbols,
        kernels=[*recorded.program.kernels, *(gpu.kernels if gpu else ())],
        modules=[_registry_module(), *(module for module, _ in (gpu.modules if gpu else ()))],
        device_targets=targets, graph_files=graph_files, contract=_contract(recorded, shape),
        tuning_identity=identity.tuning_identity,
        provenance=manifest_pb2.Provenance(exporter_version=exporter.__version__, arguments=identity.arguments))
    if gpu is not None and gpu.captured_on is not None:
        manifest.provenance.export_device, manifest.provenance.export_driver = gpu.captured_on
    if identity.online_quantization:
        manifest.online_quantization = identity.online_quantization
    if identity.online_mxfp8_scope:
        manifest.online_mxfp8_scope = identity.online_mxfp8_scope
    if identity.speculation is not None and identity.draft is not None:
        manifest.speculation.CopyFrom(identity.speculation)
        manifest.speculation.draft.CopyFrom(_model(staging, identity.draft))
    if recorded.vision is not None:
        manifest.contract.io.extend(vision_bindings(recorded.vision.buffers))
        manifest.vision.CopyFrom(vision_identity(manifest.target, identity.target.checkpoint, recorded.vision.vision))
    manifest.files.extend(_entries(staging, weights))
    _write(staging / "manifest.pb", manifest.SerializeToString(deterministic=True))
    return UnsignedCore(staging, manifest)


def _write_graphs(staging: Path, target_id: int, graphs: Sequence[graph_pb2.Graph]) -> graph_pb2.GraphFile:
    graph_set = graph_pb2.GraphSet(format_version=FORMAT_VERSION, graphs=graphs)
    ref = _write_digest_named(staging, "graphs", ".pb", graph_set.SerializeToString(deterministic=True))
    return graph_pb2.GraphFile(target_id=target_id, file=ref, graph_names=[g.name for g in graphs])


def _registry_module() -> graph_pb2.KernelModule:
    return graph_pb2.KernelModule(module_id=CPU_MODULE, kind=graph_pb2.CPU_REGISTRY, target="cpu",
                                  registry=REGISTRY_NAME, registry_version=REGISTRY_VERSION)


def _contract(recorded: RecordedProgram, shape: ServingShape) -> manifest_pb2.ServingContract:
    return manifest_pb2.ServingContract(
        max_batch=shape.max_batch, max_query_tokens=max(shape.chunk_tokens, shape.block_rows),
        max_context=shape.max_context, vocab_size=shape.vocab, page_tokens=shape.page_tokens,
        kv_bytes_per_page=recorded.kv_bytes_per_page, state_bytes_per_slot=recorded.state_bytes_per_slot,
        sampling_modes=["greedy", "temperature", "top_k", "top_p"], io=bindings(recorded.buffers))


def _model(staging: Path, model: SourceModel) -> manifest_pb2.ModelIdentity:
    identity = manifest_pb2.ModelIdentity(
        repository=model.repository, revision=model.revision, architecture=model.architecture,
        files=[manifest_pb2.SourceFile(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256) for f in model.files])
    dtypes = {t.dtype for t in model.checkpoint.tensors.values()}
    if len(dtypes) == 1:
        identity.checkpoint_dtype = dtypes.pop().lower()
    for name in CARRIED:
        data = read_side_file(model.checkpoint, name)
        if data is None:
            continue
        ref = _write_digest_named(staging, "config", "", data)
        if name == "config.json":
            identity.config.CopyFrom(ref)
        if name == "tokenizer.json":
            identity.tokenizer.CopyFrom(ref)
    return identity


def _blobs(weights: ConvertedWeights) -> Iterable[weights_pb2.WeightBlob]:
    for blob in weights.blobs:
        ref = weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=blob.sha256, size_bytes=blob.size_bytes)
        yield weights_pb2.WeightBlob(blob_id=blob.blob_id, file=ref, alignment=256)


def _entries(staging: Path, weights: ConvertedWeights) -> list[weights_pb2.FileEntry]:
    """An entry for every file; weights were digested as they were written and are not read again."""
    entries = {b.path: _weight_entry(b.path, b.sha256, b.size_bytes, b.chunk_bytes, b.chunk_digests)
               for b in weights.blobs}
    for folder, role in (("config", "config"), ("graphs", "graph"), ("modules", "module")):
        for path in sorted((staging / folder).glob("*")):
            name = f"{folder}/{path.name}"
            entries[name] = file_entry(path, name, role)
    return [entries[name] for name in sorted(entries)]


def _weight_entry(path: str, digest: bytes, size: int, chunk_bytes: int, chunks: bytes) -> weights_pb2.FileEntry:
    ref = weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=digest, size_bytes=size)
    entry = weights_pb2.FileEntry(ref=ref, path=path, role="weights")
    if size > chunk_bytes:
        entry.chunk_bytes, entry.chunk_digests = chunk_bytes, chunks
    return entry


def _write_digest_named(staging: Path, folder: str, suffix: str, data: bytes) -> weights_pb2.FileRef:
    digest = hashlib.sha256(data)
    with writing(staging / folder):
        (staging / folder).mkdir(exist_ok=True)
    _write(staging / folder / f"{digest.hexdigest()}{suffix}", data)
    return weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=digest.digest(), size_bytes=len(data))


def _write(path: Path, data: bytes) -> None:
    with writing(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
