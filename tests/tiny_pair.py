"""A tiny random target and DFlash2 draft: as folders to export, and as a recorded program with memory of its own.

    write_pair(tmp_path, seed=1)                     # tmp_path / "target" and tmp_path / "draft"
    program = TinyProgram.record(batches=(1, 2))
    core = program.load(seed=1)                      # a LoadedCore, without files or signatures
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from dflash_core.compat import CPU, Device
from dflash_core.formats import Format
from dflash_core.v1 import graph_pb2, manifest_pb2, weights_pb2

from exporter.draft_config import DraftConfig, read_draft_config
from exporter.draft_tensors import draft_tensor_shapes
from exporter.export import stored_weights
from exporter.models import dense, dflash2
from exporter.program.builder import Program
from exporter.program.graphs import Draft, RecordedProgram, record_program
from exporter.program.serving import ServingShape, bindings
from exporter.target_config import TargetConfig, read_target_config, target_tensor_shapes
from exporter.weights import WeightLayout, layout_weights
from runtime.check import CheckedCore
from runtime.instantiate import instantiate
from runtime.mapping import MappedCore
from runtime.ops import REGISTRY_NAME, REGISTRY_VERSION, DType
from runtime.run import LoadedCore
from tests.exporter.small_checkpoints import DRAFT, DRAFT_SHAPES, LLAMA, checkpoint_of, nest, shard_bytes

TARGET_CONFIG: dict[str, Any] = {**LLAMA, "num_hidden_layers": 3, "max_position_embeddings": 256}
DRAFT_CONFIG: dict[str, Any] = nest({**DRAFT, "num_target_layers": 3, "intermediate_size": 96}, block_size=4,
                                    target_layer_ids=[0, 2])
DEPTH, VOCAB, PAGE_TOKENS, CHUNK_TOKENS, CONTEXT = 3, 128, 8, 16, 64


def _configs(draft_head_dim: int | None = None) -> tuple[TargetConfig, DraftConfig]:
    target = read_target_config(checkpoint_of(TARGET_CONFIG))
    shapes = {**DRAFT_SHAPES, "fc.weight": (64, 128)}
    return target, read_draft_config(checkpoint_of(_draft_config(draft_head_dim), shapes), target)


def _draft_config(head_dim: int | None) -> dict[str, Any]:
    """The draft's config; GPU kernels need a head size that is a power of two, which its own is not."""
    return DRAFT_CONFIG if head_dim is None else {**DRAFT_CONFIG, "head_dim": head_dim}


def _shapes(draft_head_dim: int | None = None) -> dict[str, dict[str, tuple[int, ...]]]:
    target, draft = _configs(draft_head_dim)
    return {"target": target_tensor_shapes(target), "draft": draft_tensor_shapes(draft)}


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Weights large enough for logits to differ, norms around 1."""
    values = rng.normal(size=shape) * (0.2 if len(shape) > 1 else 0.1) + (1.0 if name.endswith("norm.weight") else 0.0)
    return values.astype(ml_dtypes.bfloat16)


def write_pair(folder: Path, seed: int, *, draft_head_dim: int | None = None) -> None:
    """Write both checkpoints in bf16."""
    rng, shapes = np.random.default_rng(seed), _shapes(draft_head_dim)
    for name, config in (("target", TARGET_CONFIG), ("draft", _draft_config(draft_head_dim))):
        tensors = {key: ("BF16", shape, _values(key, shape, rng).tobytes()) for key, shape in shapes[name].items()}
        path = folder / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
        (path / "model.safetensors").write_bytes(shard_bytes(tensors))


@dataclass(frozen=True, slots=True)
class TinyProgram:
    """The pair's graphs, the layout of its weights, and the manifest that describes both."""

    recorded: RecordedProgram
    layout: WeightLayout
    shape: ServingShape
    manifest: manifest_pb2.RebuildManifest

    @classmethod
    def record(cls, *, batches: Sequence[int] = (1,), drafted: bool = True, act: DType = DType.BF16,
               page_tokens: int = PAGE_TOKENS, draft_head_dim: int | None = None) -> TinyProgram:
        """Record the target's graphs, and the draft's unless `drafted` is False. All weights are bf16."""
        target, draft = _configs(draft_head_dim)
        shapes = _shapes(draft_head_dim)
        specs = dense.weight_specs(target, dict.fromkeys(shapes["target"], Format.BF16), shapes["target"], CONTEXT)
        if drafted:
            specs += dflash2.weight_specs(draft, {name: name for name in shapes["draft"]},
                                          dict.fromkeys(shapes["draft"], Format.BF16), shapes["draft"], CONTEXT)
        layout, program = layout_weights(specs), Program()
        shape = ServingShape(max_batch=max(batches), max_context=CONTEXT, page_tokens=page_tokens,
                             chunk_tokens=CHUNK_TOKENS, depth=DEPTH if drafted else 0, candidates=4 if drafted else 0,
                             vocab=VOCAB)
        recorded = record_program(program, target, Draft(draft, "target.head") if drafted else None,
                                  stored_weights(program, layout), shape, batches, act)
        return cls(recorded, layout, shape, _manifest(recorded, layout, shape))

    def memory(self, seed: int, *, page: int = 0) -> dict[int, Any]:
        """Memory for every buffer, weights filled at random; buffers lie `page` bytes apart from where NumPy puts
        them, at a multiple of 256."""
        rng, sizes = np.random.default_rng(seed), {b.blob_id: b.size_bytes for b in self.layout.blobs}
        memory = {}
        for buffer in self.manifest.buffers:
            nbytes = sizes[buffer.blob_id] if buffer.HasField("blob_id") else buffer.fixed_bytes
            nbytes += sum(t.bytes * self.manifest.symbols[t.symbol_id].default_value for t in buffer.size_terms)
            raw = np.zeros(nbytes + 256 + page, np.uint8)
            start = -raw.__array_interface__["data"][0] % 256 + page
            memory[buffer.buffer_id] = raw[start:start + nbytes]
        for blob in self.layout.blobs:
            held = memory[next(b.buffer_id for b in self.manifest.buffers
                               if b.HasField("blob_id") and b.blob_id == blob.blob_id)]
            for weight in blob.weights:
                view, spec = weight.views[0], weight.spec
                data = (_values(f"{spec.name}.weight", spec.shape, rng) if spec.data is None
                        else spec.data.numpy())
                held[view.offset_bytes:view.offset_bytes + view.size_bytes] = (
                    np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        return memory

    def mapped(self, memory: dict[int, Any], graphs: Sequence[graph_pb2.Graph] | None = None) -> MappedCore:
        """The stage before instantiation, over this memory."""
        return mapped_core(self.manifest, self.recorded.graphs if graphs is None else graphs, memory)

    def load(self, seed: int = 0) -> LoadedCore:
        return instantiate(self.mapped(self.memory(seed)))


def mapped_core(manifest: manifest_pb2.RebuildManifest, graphs: Sequence[graph_pb2.Graph], memory: dict[int, Any],
                templates: Sequence[graph_pb2.GraphTemplate] = ()) -> MappedCore:
    """A mapped core that was read from no file: what verification would give is a stand-in."""
    verified: Any = SimpleNamespace(manifest=manifest, core_digest=bytes(32), close=lambda: None)
    symbols = {s.symbol_id: s.default_value for s in manifest.symbols}
    checked = CheckedCore(verified, Device(CPU, None, 1 << 40), manifest.device_targets[0], tuple(graphs),
                          {t.template_id: t for t in templates}, symbols)
    return MappedCore(checked, memory)


def _manifest(recorded: RecordedProgram, layout: WeightLayout,
              shape: ServingShape) -> manifest_pb2.RebuildManifest:
    blobs = [weights_pb2.WeightBlob(blob_id=b.blob_id, alignment=256,
                                    file=weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=bytes(32),
                                                             size_bytes=b.size_bytes)) for b in layout.blobs]
    assert all(prod(w.spec.shape) for b in layout.blobs for w in b.weights)
    return manifest_pb2.RebuildManifest(
        format_version=1, core_name="tiny", release=1, weight_blobs=blobs, buffers=recorded.program.buffers,
        symbols=recorded.program.symbols, kernels=recorded.program.kernels,
        modules=[graph_pb2.KernelModule(module_id=0, kind=graph_pb2.CPU_REGISTRY, target=CPU, registry=REGISTRY_NAME,
                                        registry_version=REGISTRY_VERSION)],
        device_targets=[graph_pb2.DeviceTarget(target_id=0, name=CPU, module_ids=[0])],
        graph_files=[graph_pb2.GraphFile(target_id=0, graph_names=[g.name for g in recorded.graphs])],
        contract=manifest_pb2.ServingContract(
            max_batch=shape.max_batch, max_query_tokens=shape.chunk_tokens, max_context=shape.max_context,
            vocab_size=shape.vocab, page_tokens=shape.page_tokens, io=bindings(recorded.buffers)))
