#!/usr/bin/env python3
"""Write a checkpoint of random weights with a real model's names and shapes, to try conversion at its size.

    python scripts/synth_checkpoint.py build/synth --model llama-8b              # 15 GB in shards of 2 GB
    python scripts/synth_checkpoint.py build/synth --model kimi-k3-slice --layers 4 --experts 4

The same arguments give the same bytes. Names and shapes are those of the family's recipe.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from exporter.recipe import load_recipe
from exporter.recipe_match import promised_tensors

SHARD_NBYTES = 2_000_000_000
POOL_WEIGHTS = 1 << 25  # random numbers that tensors take their weights from, each from a place of its own
SIZE = 0.02

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}
KIMI_K3: dict[str, Any] = {
    "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 93, "intermediate_size": 33792,
    "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_act": "situ",
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "mla_use_nope": True,
    "mla_use_output_gate": True, "attn_res_block_size": 12, "latent_moe_use_norm": True, "num_experts_per_token": 16,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0,
    "num_expert_group": 1, "topk_group": 1, "tie_word_embeddings": False, "num_key_value_heads": 96,
    "max_position_embeddings": 1048576,
}
DECAY_RATES = 128  # published with padding, beyond the 96 heads
KIMI_K3_VISION = {
    "patch_size": 14, "vt_hidden_size": 1024, "vt_num_hidden_layers": 27, "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
}


def config_of(model: str, layers: int | None, experts: int | None, vocab: int | None) -> tuple[str, dict[str, Any]]:
    """The family's recipe and the config of a model, or of a slice of it."""
    if model == "llama-8b":
        return "llama", {**LLAMA_8B, **_given(num_hidden_layers=layers, vocab_size=vocab)}
    text = {**KIMI_K3, **_given(num_hidden_layers=layers, num_experts=experts, vocab_size=vocab)}
    text["num_experts_per_token"] = min(text["num_experts_per_token"], text["num_experts"])
    count = text["num_hidden_layers"]
    mla = [number for number in range(1, count + 1) if number % 4 == 0 or number == count]
    text["linear_attn_config"] = {
        "kda_layers": [number for number in range(1, count + 1) if number not in mla], "full_attn_layers": mla,
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    }
    return "kimi-k3", {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
                       "text_config": text, "vision_config": KIMI_K3_VISION}


def write_checkpoint(out: Path, recipe: str, config: Mapping[str, Any], shard_nbytes: int = SHARD_NBYTES) -> int:
    """Write config, shards and index into the new folder `out`; returns the bytes of all weights."""
    shapes = promised_tensors(load_recipe(recipe), config)
    shapes |= {name: (DECAY_RATES,) for name in shapes if name.endswith(".A_log")}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    pool = (np.random.default_rng(0).standard_normal(POOL_WEIGHTS, np.float32) * SIZE).astype(ml_dtypes.bfloat16)
    shards = list(_shards(shapes, shard_nbytes))
    weight_map = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / shard, {name: shapes[name] for name in names}, pool)
        weight_map |= dict.fromkeys(names, shard)
    total = sum(2 * prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _given(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _shards(shapes: Mapping[str, tuple[int, ...]], shard_nbytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        if names and filled + 2 * prod(shape) > shard_nbytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += 2 * prod(shape)
    yield names


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], pool: np.ndarray) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, shape in enumerate(shapes.values()):
            left, at = prod(shape), number * 7919 % POOL_WEIGHTS
            while left:
                part = pool[at : at + left]
                file.write(part.view(np.uint8).data)
                left, at = left - part.size, 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of random weights with a model's real shapes.")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--model", choices=("llama-8b", "kimi-k3-slice"), default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--experts", type=int, help="fewer routed experts")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary")
    given = parser.parse_args()
    layers, experts = given.layers, given.experts
    if given.model == "kimi-k3-slice":
        layers, experts = layers or 4, experts or 4
    if given.out.exists():
        print(f"error: {given.out} exists", file=sys.stderr)
        return 2
    total = write_checkpoint(given.out, *config_of(given.model, layers, experts, given.vocab))
    print(f"{given.out}   {total / 1e9:.2f} GB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
