"""Tiny Kimi-Linear and Kimi K3 checkpoints in the published form, and a DFlash2 draft fitted to one; nothing of ours.

Shapes and names are those of the family's tensor table. Weights are random and lively: norms, gates, biases and
convolutions are far from the values that would hide a mistake.

    weights = write_target(tmp_path / "target", K3)
    pair = make_pair(tmp_path, K3, PairSpec(block_size=8), write, body=DraftBody.LATENT)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from tests.oracles.kimi_numpy import Kimi
from tests.oracles.mla_draft_numpy import mla_json
from tests.oracles.mla_draft_torch import MlaDraftModel
from tests.oracles.zlab_pair import (
    HIDDEN,
    MASK_TOKEN,
    VOCAB,
    PairSpec,
    draft_class,
    draft_json,
    fit_draft,
    init_draft,
    save_draft,
)

TAPS = (0, 2, 5)
Shapes = dict[str, tuple[int, ...]]

_LINEAR: dict[str, Any] = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6], "num_heads": 4, "head_dim": 32,
                           "short_conv_kernel_size": 4}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "mla_use_nope": True, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8,
    "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 32, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "linear_attn_config": _LINEAR,
}
KIMI_LINEAR: dict[str, Any] = {
    **_TEXT, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "float32",
    "model_max_length": 4096, "rope_theta": 10000.0, "rope_scaling": None,
}
K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "media_placeholder_token_id": 90,
    "dtype": "float32",
    "text_config": {
        **_TEXT, "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "mla_use_output_gate": True, "num_shared_experts": 2, "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True, "routed_scaling_factor": 1.0, "attn_res_block_size": 2,
        "max_position_embeddings": 4096,
        "linear_attn_config": {**_LINEAR, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
    },
    "vision_config": {
        "patch_size": 14, "vt_hidden_size": 32, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2,
        "qkv_hidden_size": 64, "vt_intermediate_size": 64, "init_pos_emb_height": 8, "init_pos_emb_width": 8,
        "init_pos_emb_time": 4, "merge_kernel_size": [2, 2], "text_hidden_size": HIDDEN,
    },
}


class DraftBody(Enum):
    """What a draft's layers attend with; the value is its `attention_mode`."""

    GROUPED_QUERY = None
    LATENT = "mla"


@dataclass(frozen=True, slots=True)
class KimiPair:
    """A pair on disk, its target in float64, and the prompt that its draft was fitted for."""

    target_path: Path
    draft_path: Path
    model: Kimi
    prompt: tuple[int, ...]


def text_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of the text model by bare name."""
    text = config.get("text_config", config)
    e, layers = text["hidden_size"], text["num_hidden_layers"]
    shapes: Shapes = {"embed_tokens.weight": (text["vocab_size"], e)}
    for i in range(layers):
        kda = i + 1 in text["linear_attn_config"]["kda_layers"]
        moe = i >= text["first_k_dense_replace"] and i % text["moe_layer_freq"] == 0
        layer = {"input_layernorm.weight": (e,), "post_attention_layernorm.weight": (e,)}
        layer |= {f"self_attn.{n}": s for n, s in (_kda if kda else _mla)(text).items()}
        layer |= {f"block_sparse_moe.{n}": s for n, s in _moe(text).items()} if moe else {
            f"mlp.{n}": s for n, s in _mlp(e, text["intermediate_size"]).items()}
        if text.get("attn_res_block_size"):
            layer |= {f"{side}_res_{n}.weight": s for side in ("self_attention", "mlp")
                      for n, s in (("norm", (e,)), ("proj", (1, e)))}
        shapes |= {f"layers.{i}.{n}": s for n, s in layer.items()}
    if text.get("attn_res_block_size"):
        shapes |= {"output_attn_res_norm.weight": (e,), "output_attn_res_proj.weight": (1, e)}
    return shapes | {"norm.weight": (e,), "lm_head.weight": (text["vocab_size"], e)}


def _kda(text: Mapping[str, Any]) -> Shapes:
    linear, e = text["linear_attn_config"], text["hidden_size"]
    heads, dim, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    p = heads * dim
    full = linear.get("use_full_rank_gate", False)
    gate: Shapes = {"g_proj.weight": (p, e)} if full else {"g_a_proj.weight": (dim, e), "g_b_proj.weight": (p, dim)}
    return {**{f"{n}_proj.weight": (p, e) for n in "qkv"}, **{f"{n}_conv1d.weight": (p, 1, taps) for n in "qkv"},
            "f_a_proj.weight": (dim, e), "f_b_proj.weight": (p, dim), "b_proj.weight": (heads, e), **gate,
            "A_log": (heads + 4,) if full else (1, 1, heads, 1), "dt_bias": (p,), "o_norm.weight": (dim,),
            "o_proj.weight": (e, p)}


def _mla(text: Mapping[str, Any]) -> Shapes:
    e, heads, nope, rope, v, rank, q_rank = (text[k] for k in (
        "hidden_size", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank",
        "q_lora_rank"))
    q = heads * (nope + rope)
    query: Shapes = {"q_proj.weight": (q, e)} if q_rank is None else {
        "q_a_proj.weight": (q_rank, e), "q_a_layernorm.weight": (q_rank,), "q_b_proj.weight": (q, q_rank)}
    gate: Shapes = {"g_proj.weight": (heads * v, e)} if text.get("mla_use_output_gate") else {}
    return {**query, "kv_a_proj_with_mqa.weight": (rank + rope, e), "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (heads * (nope + v), rank), **gate, "o_proj.weight": (e, heads * v)}


def _mlp(e: int, inner: int) -> Shapes:
    return {"gate_proj.weight": (inner, e), "up_proj.weight": (inner, e), "down_proj.weight": (e, inner)}


def _moe(text: Mapping[str, Any]) -> Shapes:
    e, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    z = text.get("routed_expert_hidden_size")
    shapes: Shapes = {"gate.weight": (count, e), "gate.e_score_correction_bias": (count,)}
    shapes |= {f"shared_experts.{n}": s for n, s in _mlp(e, inner * text["num_shared_experts"]).items()}
    for i in range(count):
        shapes |= {f"experts.{i}.w1.weight": (inner, z or e), f"experts.{i}.w2.weight": (z or e, inner),
                   f"experts.{i}.w3.weight": (inner, z or e)}
    if z:
        shapes |= {"routed_expert_down_proj.weight": (z, e), "routed_expert_up_proj.weight": (e, z),
                   "routed_expert_norm.weight": (z,)}
    return shapes


def vision_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of tower and projector, by published name."""
    v = config["vision_config"]
    w, qkv, inner, e = v["vt_hidden_size"], v["qkv_hidden_size"], v["vt_intermediate_size"], v["text_hidden_size"]
    block: Shapes = {"norm0": (w,), "norm1": (w,), "wqkv": (3 * qkv, w), "wo": (w, qkv), "mlp.fc0": (inner, w),
                     "mlp.fc1": (w, inner)}
    return {
        "vision_tower.patch_embed.proj.weight": (w, 3, v["patch_size"], v["patch_size"]),
        "vision_tower.patch_embed.pos_emb.weight": (v["init_pos_emb_height"], v["init_pos_emb_width"], w),
        **{f"vision_tower.encoder.blocks.{i}.{n}.weight": s for i in range(v["vt_num_hidden_layers"])
           for n, s in block.items()},
        "vision_tower.encoder.final_layernorm.weight": (w,), "mm_projector.proj.0.weight": (4 * w, 4 * w),
        "mm_projector.proj.2.weight": (e, 4 * w), "mm_projector.post_norm.weight": (e,)}


def published_name(config: Mapping[str, Any], bare: str) -> str:
    """A text tensor's name in the published checkpoint of its family."""
    prefix = "language_model." if "text_config" in config else ""
    return prefix + (bare if bare == "lm_head.weight" else f"model.{bare}")


def write_target(folder: Path, config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32,
                 a_log_dtype: torch.dtype = torch.float32, dense_spelling: str = "mlp",
                 experts: str = "plain") -> dict[str, torch.Tensor]:
    """Write a checkpoint and return its text weights by bare name.

    Args:
        dtype: of all but A_log, dt_bias, the router and its bias: the last three stay fp32.
        dense_spelling: how the dense layers' MLP is spelled: `mlp`, or `block_sparse_moe` as transformers writes it.
        experts: routed experts, `plain` or a key of EXPERT_FORMATS; what is returned are the decoded weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _values(name, shape, generator) for name, shape in text_shapes(config).items()}
    for name, value in weights.items():
        fp32 = name.endswith(("dt_bias", "block_sparse_moe.gate.weight", "e_score_correction_bias"))
        weights[name] = value.to(a_log_dtype if name.endswith("A_log") else torch.float32 if fp32 else dtype)
    named = {published_name(config, name): value for name, value in weights.items()}
    named = {name.replace(".mlp.", f".{dense_spelling}."): value for name, value in named.items()}
    if experts != "plain":
        for name in [n for n in weights if ".experts." in n]:
            parts, weights[name] = EXPERT_FORMATS[experts](tuple(weights[name].shape), generator)
            stem = published_name(config, name).removesuffix("weight")
            del named[f"{stem}weight"]
            named |= {stem + part: value for part, value in parts.items()}
    if "vision_config" in config:
        named |= {name: _values(name, shape, generator).to(dtype) for name, shape in vision_shapes(config).items()}
    folder.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in named.items()}, str(folder / "model.safetensors"),
              metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return weights


Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def _codes(shape: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, two a byte, low nibble first; and their values."""
    nibbles = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(nibbles & 7).long()]
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, torch.where(nibbles >= 8, -magnitude, magnitude)


def _mxfp4(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    """Random codes with a power of two per 32 of a row, and the weights that they mean."""
    codes, values = _codes(shape, generator)
    scales = torch.randint(123, 126, (shape[0], shape[1] // 32), generator=generator, dtype=torch.uint8)
    return ({"weight_packed": codes, "weight_scale": scales},
            values * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1))


def _nvfp4(shape: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes and E4M3 scales per 16 of a row, and what they mean without a global scale."""
    codes, values = _codes(shape, generator)
    scales = (448 * torch.rand((shape[0], shape[1] // 16), generator=generator)).to(torch.float8_e4m3fn)
    return codes, scales, values * scales.float().repeat_interleave(16, dim=1)


def _nvfp4_compressed_tensors(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    codes, scales, values = _nvfp4(shape, generator)
    divisor = 1500 * (1 + torch.rand(1, generator=generator))
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}, values / divisor


def _nvfp4_modelopt(shape: tuple[int, int], generator: torch.Generator) -> Packed:
    codes, scales, values = _nvfp4(shape, generator)
    factor = (1 + torch.rand((), generator=generator)) / 3000
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.01)}, \
        values * factor


EXPERT_FORMATS: dict[str, Callable[[tuple[int, int], torch.Generator], Packed]] = {
    "mxfp4": _mxfp4, "nvfp4-compressed-tensors": _nvfp4_compressed_tensors, "nvfp4-modelopt": _nvfp4_modelopt,
}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        noise = noise.abs() * 0.7
        if len(shape) == 1:
            noise[-4:] = 0  # the padding
        return noise
    if name.endswith(("dt_bias", "e_score_correction_bias")):
        return noise * (1.0 if name.endswith("dt_bias") else 0.2)
    if len(shape) == 1:
        return 1 + 0.2 * noise
    if "conv1d" in name:
        return 0.6 * noise
    if name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight")):  # so small that the norm's epsilon is seen
        return noise * 0.1 * prod(shape[1:]) ** -0.5
    if "embed_tokens" in name:
        return noise
    return noise * 1.3 * prod(shape[1:]) ** -0.5


def make_pair(folder: Path, config: Mapping[str, Any], spec: PairSpec, write: Callable[[Path, list[int]], list[int]], *,
              dtype: torch.dtype = torch.float32, experts: str = "plain",
              body: DraftBody = DraftBody.GROUPED_QUERY) -> KimiPair:
    """Write a target and a DFlash2 draft, fitted to a text of the target's.

    Args:
        write: continues a prompt greedily, given the target's folder: whoever will verify, since another
            precision soon writes another text.
        experts: as in `write_target`.
    """
    weights = write_target(folder / "target", config, dtype=dtype, experts=experts)
    model = Kimi(config, {name: value.double().numpy() for name, value in weights.items()})
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, MASK_TOKEN, (spec.prompt_tokens,), generator=generator).tolist()
    text = [*prompt, *write(folder / "target", prompt)]
    draft, draft_config = _new_draft(spec, body)
    init_draft(draft)
    reads = model.forward(text).reads
    features = torch.from_numpy(np.concatenate([reads[tap + 1] for tap in TAPS], -1)).float()[None]
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data = weights["lm_head.weight"].float()
    embedding = weights["embed_tokens.weight"].float()
    fit_draft(draft, spec, torch.tensor([text]), features, embedding, head.requires_grad_(False))
    save_draft(draft.to(dtype), draft_config, folder / "draft")
    return KimiPair(folder / "target", folder / "draft", model, tuple(prompt))


def _new_draft(spec: PairSpec, body: DraftBody) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A draft whose parameters are still to be set, and its config.json."""
    if body is DraftBody.LATENT:
        config = mla_json(spec, target_layers=6, taps=TAPS)
        return MlaDraftModel(config), config
    config = draft_json(spec, target_layers=6, taps=TAPS)
    return draft_class(spec.kind)(Qwen3Config(**config)), config
