"""The image tower of a tiny Kimi K3: as a checkpoint folder, and as a recorded program with memory of its own.

    tower = TinyVision.record(buckets=(16, 64))
    core = tower.load(seed=1)                   # a LoadedCore, without files or signatures
    weights_of(seed=1)                          # what the oracle computes with
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dflash_core.compat import CPU
from dflash_core.formats import Format
from dflash_core.v1 import graph_pb2, manifest_pb2, weights_pb2

from exporter.config_fields import Fields
from exporter.export import stored_weights
from exporter.models import moonvit
from exporter.models.moonvit import VisionConfig
from exporter.program.builder import Program
from exporter.program.vision import RecordedVision, Vision, record_vision, vision_bindings, vision_buffers
from exporter.weights import WeightLayout, layout_weights
from runtime.instantiate import instantiate
from runtime.ops import REGISTRY_NAME, REGISTRY_VERSION, DType
from runtime.run import LoadedCore
from runtime.vision.settings import ImageSettings
from tests.exporter.small_checkpoints import shard_bytes
from tests.tiny_pair import mapped_core

VISION: dict[str, Any] = {
    "patch_size": 14, "vt_hidden_size": 32, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2,
    "qkv_hidden_size": 64, "vt_intermediate_size": 64, "init_pos_emb_height": 8, "init_pos_emb_width": 8,
    "init_pos_emb_time": 4, "merge_kernel_size": [2, 2], "text_hidden_size": 64,
}  # fmt: skip
HIDDEN, PLACEHOLDER, CHUNK_TOKENS = 64, 250, 16
CONFIG = {"model_type": "kimi_k3", "media_placeholder_token_id": PLACEHOLDER, "vision_config": VISION}


def vision_config(**changes: Any) -> VisionConfig:
    return moonvit.read_vision_config(Fields({**VISION, **changes}, "config.json: vision_config"), HIDDEN)


def weights_of(seed: int, act: DType = DType.F32, **changes: Any) -> dict[str, np.ndarray]:
    """Weights by checkpoint name: large enough for every path to matter, norms around 1."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in moonvit.vision_tensor_shapes(vision_config(**changes)).items():
        spread = 0.1 if len(shape) == 1 else 1.0 if "pos_emb" in name else 2 / np.sqrt(np.prod(shape[1:]))
        made[name] = (rng.normal(size=shape) * spread + (len(shape) == 1)).astype(np.float32).astype(act.numpy)
    return made


def write_tower(folder: Path, seed: int) -> None:
    """Write config, preprocessor config and bf16 weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {"in_patch_limit": 4096}}))
    tensors = {name: ("BF16", value.shape, value.tobytes()) for name, value in weights_of(seed, DType.BF16).items()}
    (folder / "model.safetensors").write_bytes(shard_bytes(tensors))


@dataclass(frozen=True, slots=True)
class TinyVision:
    """The vision graphs, the layout of their weights, and the manifest that describes both."""

    recorded: RecordedVision
    layout: WeightLayout
    act: DType
    changes: Mapping[str, Any]
    manifest: manifest_pb2.RebuildManifest

    @classmethod
    def record(cls, *, buckets: Sequence[int] = (64,), act: DType = DType.F32, **changes: Any) -> TinyVision:
        """The tower of VISION with `changes`."""
        config, fmt = vision_config(**changes), Format.F32 if act is DType.F32 else Format.BF16
        formats = dict.fromkeys(moonvit.vision_tensor_shapes(config), fmt)
        layout, program = layout_weights(moonvit.weight_specs(config, formats, ImageSettings())), Program()
        weights = stored_weights(program, layout)
        vision = Vision(config, tuple(buckets))
        buffers = vision_buffers(program, vision, CHUNK_TOKENS, act)
        recorded = record_vision(program, vision, weights, buffers, act)
        return cls(recorded, layout, act, changes, _manifest(program, recorded, layout, buckets))

    def memory(self, weights: Mapping[str, np.ndarray], scratch: int = 0) -> dict[int, Any]:
        """Memory for every buffer; scratch is filled with one byte, as if it had been used before."""
        memory = {}
        for buffer in self.manifest.buffers:
            raw = np.zeros(buffer.fixed_bytes + 256, np.uint8)
            start = -raw.__array_interface__["data"][0] % 256
            memory[buffer.buffer_id] = raw[start:start + buffer.fixed_bytes]
            if buffer.buffer_class == graph_pb2.SCRATCH:
                memory[buffer.buffer_id][:] = scratch
        (blob,) = self.layout.blobs
        held = memory[next(b.buffer_id for b in self.manifest.buffers if b.HasField("blob_id"))]
        for placed in blob.weights:
            (view,), spec = placed.views, placed.spec
            data = weights[spec.sources[0]] if spec.data is None else spec.data.numpy()
            held[view.offset_bytes:view.offset_bytes + view.size_bytes] = (
                np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        return memory

    def load(self, seed: int = 1, scratch: int = 0) -> LoadedCore:
        memory = self.memory(weights_of(seed, self.act, **self.changes), scratch)
        mapped = mapped_core(self.manifest, self.recorded.graphs, memory)
        core = instantiate(mapped)
        mapped.checked.verified.small_file = lambda ref: json.dumps(CONFIG).encode()
        return core


def _manifest(program: Program, recorded: RecordedVision, layout: WeightLayout,
              buckets: Sequence[int]) -> manifest_pb2.RebuildManifest:
    config = json.dumps(CONFIG).encode()
    digest = hashlib.sha256(config).digest()
    ref = weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=digest, size_bytes=len(config))
    return manifest_pb2.RebuildManifest(
        format_version=1, core_name="tiny-vision", release=1, buffers=program.buffers, kernels=program.kernels,
        weight_blobs=[weights_pb2.WeightBlob(blob_id=b.blob_id, alignment=256,
                                             file=weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=bytes(32),
                                                                      size_bytes=b.size_bytes)) for b in layout.blobs],
        modules=[graph_pb2.KernelModule(module_id=0, kind=graph_pb2.CPU_REGISTRY, target=CPU, registry=REGISTRY_NAME,
                                        registry_version=REGISTRY_VERSION)],
        device_targets=[graph_pb2.DeviceTarget(target_id=0, name=CPU, module_ids=[0])],
        graph_files=[graph_pb2.GraphFile(target_id=0, graph_names=[g.name for g in recorded.graphs])],
        files=[weights_pb2.FileEntry(ref=ref, path=f"config/{digest.hex()}", role="config")],
        target=manifest_pb2.ModelIdentity(files=[
            manifest_pb2.SourceFile(path="config.json", size_bytes=len(config), sha256=digest)]),
        vision=manifest_pb2.VisionIdentity(max_image_tokens=buckets[-1] // 4),
        contract=manifest_pb2.ServingContract(max_batch=1, max_query_tokens=CHUNK_TOKENS,
                                              io=vision_bindings(recorded.buffers)))
