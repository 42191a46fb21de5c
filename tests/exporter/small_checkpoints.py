"""Checkpoints for tests: safetensors files written byte by byte, and checkpoints that exist in memory alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from exporter.checkpoint import Checkpoint
from exporter.safetensors_header import TensorEntry
from exporter.target_config import TargetConfig, read_target_config

FIXTURES = Path(__file__).parent / "fixtures"
EXAMPLES = Path(__file__).parents[2] / "examples"
NBYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}


def shard_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Any = None) -> bytes:
    """A safetensors file of `name: (dtype, shape, data)`, in the order given."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return raw_shard(header, data)


def raw_shard(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with `header` (bytes, or a value for JSON) and `data` as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def bf16(shape: tuple[int, ...], byte: int = 1) -> tuple[str, tuple[int, ...], bytes]:
    """A BF16 tensor whose bytes all equal `byte`."""
    return "BF16", shape, bytes([byte]) * (2 * prod(shape))


def write_single(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A checkpoint folder with config.json and one model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(shard_bytes(tensors))
    return path


def write_sharded(path: Path, shards: Mapping[str, Mapping[str, Any]], weight_map: Any = None) -> Path:
    """A checkpoint folder with an index; `weight_map` replaces the one that tells the truth."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, tensors in shards.items():
        (path / name).write_bytes(shard_bytes(tensors))
    truth = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": truth if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def checkpoint_of(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    path: Path = Path("nowhere"),
    dtype: str = "BF16",
) -> Checkpoint:
    """A checkpoint with a config and tensor entries, and no file behind them."""
    tensors, offset = {}, 0
    for name, shape in (shapes or {}).items():
        nbytes = NBYTES[dtype] * prod(shape)
        tensors[name] = TensorEntry(name, dtype, tuple(shape), "model.safetensors", offset, nbytes)
        offset += nbytes
    return Checkpoint(path, dict(config), json.dumps(config).encode(), tensors, ())


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """`values` less some keys."""
    return {key: value for key, value in values.items() if key not in keys}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
DRAFT: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_target_layers": 8,
    "dflash_config": {
        "block_size": 8, "mask_token_id": 127, "target_layer_ids": [1, 3, 4], "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4,
    },
}  # fmt: skip
DFLASH1: dict[str, Any] = {
    **DRAFT, "architectures": ["DFlashDraftModel"],
    "dflash_config": {"block_size": 8, "mask_token_id": 127, "target_layer_ids": [1, 3, 4]},
}  # fmt: skip

LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (96, 64), "self_attn.k_proj.weight": (48, 64), "self_attn.v_proj.weight": (48, 64),
    "self_attn.o_proj.weight": (64, 96), "self_attn.q_norm.weight": (24,), "self_attn.k_norm.weight": (24,),
    "mlp.gate_proj.weight": (80, 64), "mlp.up_proj.weight": (80, 64), "mlp.down_proj.weight": (64, 80),
}  # fmt: skip
CONV_SHAPES: dict[str, tuple[int, ...]] = {
    "attention_conv.base_kernel": (2, 2, 64), "attention_conv.kernel_projection.weight": (16, 64),
    "mlp_conv.base_kernel": (2, 2, 64), "mlp_conv.kernel_projection.weight": (16, 64),
}  # fmt: skip
DFLASH1_SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (64, 192), "hidden_norm.weight": (64,), "norm.weight": (64,),
    **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in LAYER_SHAPES.items()},
}  # fmt: skip
DRAFT_SHAPES: dict[str, tuple[int, ...]] = {
    **DFLASH1_SHAPES,
    **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in CONV_SHAPES.items()},
    "candidate_selector.predecessor_codebook": (128, 8), "candidate_selector.successor_codebook": (128, 8),
    "candidate_selector.hidden_projection.weight": (8, 64),
}  # fmt: skip


def target_config(**changes: Any) -> TargetConfig:
    """The small llama target's config, with some fields changed."""
    return read_target_config(checkpoint_of({**LLAMA, **changes}))


def nest(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A draft config with fields inside `dflash_config` changed."""
    return {**config, "dflash_config": {**config["dflash_config"], **changes}}
