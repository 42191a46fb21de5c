"""Every tensor of a Kimi K3 checkpoint by name and shape, written down from its description, not from our recipe.

Source: the tensor names and sizes that engines which serve Kimi K3 read; totals agree with a published inventory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from exporter.safetensors_header import TensorEntry

TEXT = "language_model.model."


@dataclass(frozen=True)
class Inventory:
    """Config and tensor entries, as planning reads them."""

    config: dict[str, Any]
    tensors: dict[str, TensorEntry]


def kimi_k3(num_layers: int = 93, num_experts: int = 896, *, experts: str = "bf16") -> Inventory:
    """Published sizes; fewer layers and experts make a slice. Routed experts are bf16, mxfp4 or (ModelOpt's) nvfp4."""
    mla = [number for number in range(1, num_layers + 1) if number % 4 == 0 or number == num_layers]
    config = k3_config(num_layers, num_experts, mla)
    shapes: dict[str, tuple[int, ...]] = {
        f"{TEXT}embed_tokens.weight": (163840, 7168), "language_model.lm_head.weight": (163840, 7168),
        f"{TEXT}norm.weight": (7168,), f"{TEXT}output_attn_res_norm.weight": (7168,),
        f"{TEXT}output_attn_res_proj.weight": (1, 7168),
    }
    for layer in range(num_layers):
        at = f"{TEXT}layers.{layer}."
        mixer = MLA if layer + 1 in mla else KDA
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"{at}{name}": shape for name, shape in (DENSE if layer == 0 else moe(num_experts)).items()}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            shapes[f"{at}{name}.weight"] = (7168,)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            shapes[f"{at}{name}.weight"] = (1, 7168)
        if layer > 0:
            each = f"{at}block_sparse_moe.experts."
            for expert in range(num_experts):
                shapes |= {f"{each}{expert}.w1.weight": (3072, 3584), f"{each}{expert}.w2.weight": (3584, 3072),
                           f"{each}{expert}.w3.weight": (3072, 3584)}
    for block in range(27):
        shapes |= {f"vision_tower.encoder.blocks.{block}.{name}.weight": shape for name, shape in VISION_BLOCK.items()}
    shapes |= VISION
    tensors: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        if ".experts." not in name or experts == "bf16":
            add(tensors, name, "BF16", shape)
            continue
        stem, (rows, cols) = name.removesuffix("weight"), shape
        if experts == "mxfp4":
            add(tensors, f"{stem}weight_packed", "U8", (rows, cols // 2))
            add(tensors, f"{stem}weight_scale", "U8", (rows, cols // 32))
        else:
            add(tensors, f"{stem}weight", "U8", (rows, cols // 2))
            add(tensors, f"{stem}weight_scale", "F8_E4M3", (rows, cols // 16))
            add(tensors, f"{stem}weight_scale_2", "F32", ())
            add(tensors, f"{stem}input_scale", "F32", ())
    return Inventory(config, tensors)


def add(tensors: dict[str, TensorEntry], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    element_nbytes = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
    tensors[name] = TensorEntry(name, dtype, shape, "model.safetensors", 0, prod(shape) * element_nbytes)


def k3_config(num_layers: int, num_experts: int, mla: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
        "text_config": {
            "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": num_layers, "intermediate_size": 33792,
            "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": num_experts, "num_shared_experts": 2,
            "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "linear_attn_config": {
                "kda_layers": [number for number in range(1, num_layers + 1) if number not in mla],
                "full_attn_layers": mla, "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
            },
        },
        "vision_config": {
            "patch_size": 14, "vt_hidden_size": 1024, "vt_num_hidden_layers": 27, "qkv_hidden_size": 1536,
            "vt_intermediate_size": 4096, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        },
    }


KDA: dict[str, tuple[int, ...]] = {
    "q_proj.weight": (12288, 7168), "k_proj.weight": (12288, 7168), "v_proj.weight": (12288, 7168),
    "g_proj.weight": (12288, 7168), "f_a_proj.weight": (128, 7168), "b_proj.weight": (96, 7168),
    "f_b_proj.weight": (12288, 128), "q_conv1d.weight": (12288, 1, 4), "k_conv1d.weight": (12288, 1, 4),
    "v_conv1d.weight": (12288, 1, 4), "A_log": (128,), "dt_bias": (12288,), "o_norm.weight": (128,),
    "o_proj.weight": (7168, 12288),
}
MLA: dict[str, tuple[int, ...]] = {
    "q_a_proj.weight": (1536, 7168), "q_a_layernorm.weight": (1536,), "q_b_proj.weight": (18432, 1536),
    "kv_a_proj_with_mqa.weight": (576, 7168), "kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (24576, 512),
    "g_proj.weight": (12288, 7168), "o_proj.weight": (7168, 12288),
}
DENSE: dict[str, tuple[int, ...]] = {
    "mlp.gate_proj.weight": (33792, 7168), "mlp.up_proj.weight": (33792, 7168), "mlp.down_proj.weight": (7168, 33792),
}
VISION_BLOCK: dict[str, tuple[int, ...]] = {
    "norm0": (1024,), "norm1": (1024,), "wqkv": (4608, 1024), "wo": (1024, 1536), "mlp.fc0": (4096, 1024),
    "mlp.fc1": (1024, 4096),
}
VISION: dict[str, tuple[int, ...]] = {
    "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
    "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
    "vision_tower.encoder.final_layernorm.weight": (1024,), "mm_projector.proj.0.weight": (4096, 4096),
    "mm_projector.proj.2.weight": (7168, 4096), "mm_projector.post_norm.weight": (7168,),
}


def moe(num_experts: int) -> dict[str, tuple[int, ...]]:
    at = "block_sparse_moe."
    return {
        f"{at}gate.weight": (num_experts, 7168), f"{at}gate.e_score_correction_bias": (num_experts,),
        f"{at}shared_experts.gate_proj.weight": (6144, 7168), f"{at}shared_experts.up_proj.weight": (6144, 7168),
        f"{at}shared_experts.down_proj.weight": (7168, 6144), f"{at}routed_expert_down_proj.weight": (3584, 7168),
        f"{at}routed_expert_up_proj.weight": (7168, 3584), f"{at}routed_expert_norm.weight": (3584,),
    }
