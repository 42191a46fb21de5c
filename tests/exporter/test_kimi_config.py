"""Kimi configs in every published spelling, and what is refused by name; and which tensors their graphs read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_core.errors import CaptureError, CheckpointError, DflashError
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from exporter.checkpoint import open_checkpoint
from exporter.draft_config import read_draft_config
from exporter.draft_tensors import check_draft_tensors
from exporter.export import ExportRequest, export
from exporter.kernels.lower import ALONE
from exporter.kimi_config import KimiConfig, KimiFamily, is_kimi, read_kimi_config
from runtime.keys import generate_key, load_private_key
from tests.exporter.small_checkpoints import checkpoint_of, without
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, TAPS, write_target
from tests.oracles.zlab_pair import DraftKind, PairSpec, draft_class, draft_json, save_draft


def read(config: dict[str, Any]) -> KimiConfig:
    return read_kimi_config(checkpoint_of(config))


def linear(**changes: Any) -> dict[str, Any]:
    return {**KIMI_LINEAR, **changes}


def attn(**changes: Any) -> dict[str, Any]:
    return linear(linear_attn_config={**KIMI_LINEAR["linear_attn_config"], **changes})


def test_flat_config_is_kimi_linear() -> None:
    found = read(KIMI_LINEAR)

    assert (found.family, found.architecture) == (KimiFamily.KIMI_LINEAR, "KimiLinearForCausalLM")
    assert (found.kda_layers, found.mla_layers, found.moe_layers) == ({0, 1, 2, 4}, (3, 5), {1, 2, 3, 4, 5})
    assert (found.kda.lower_bound, found.kda.full_rank_gate, found.kda.width) == (None, False, 128)
    assert (found.mla.q_rank, found.mla.output_gate) == (None, False)
    assert (found.mla.latent_eps, found.mla.row_width) == (1e-6, 40)
    assert (found.situ_beta, found.residual_block, found.max_position_embeddings) == (0.0, None, 4096)
    assert (found.moe.latent, found.moe.scale, found.eos_token_ids) == (None, 2.446, ())


def test_nested_config_is_kimi_k3_though_its_text_names_the_older_class() -> None:
    config = {**K3, "eos_token_id": 7}
    found = read(config)

    assert is_kimi(checkpoint_of(config))
    assert (found.family, found.architecture) == (KimiFamily.KIMI_K3, "KimiK3ForConditionalGeneration")
    assert (found.situ_beta, found.situ_linear_beta, found.residual_block) == (4.0, 25.0, 2)
    assert (found.kda.lower_bound, found.kda.full_rank_gate, found.mla.output_gate) == (-5.0, True, True)
    assert (found.mla.q_rank, found.moe.latent, found.moe.latent_norm) == (32, 32, True)
    assert found.eos_token_ids == (7,), "the top level names it where the text does not"
    assert found.notices == ()


def test_published_sizes_of_kimi_linear_48b() -> None:
    mla = [4, 8, 12, 16, 20, 24, 27]
    found = read(linear(
        hidden_size=2304, num_hidden_layers=27, num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, num_experts=256, num_experts_per_token=8, vocab_size=163840,
        model_max_length=1048576,
        linear_attn_config={"kda_layers": [n for n in range(1, 28) if n not in mla], "full_attn_layers": mla,
                            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}))

    assert (len(found.kda_layers), found.mla_layers) == (20, (3, 7, 11, 15, 19, 23, 26))
    assert (found.mla.row_width, found.kda.width, found.max_position_embeddings) == (576, 4096, 1048576)


ALIASES = [
    ("num_experts_per_token", "num_experts_per_tok"), ("num_experts", "n_routed_experts"),
    ("num_experts", "num_local_experts"), ("num_shared_experts", "n_shared_experts"), ("num_expert_group", "n_group"),
    ("moe_renormalize", "norm_topk_prob"), ("model_max_length", "max_position_embeddings"),
]


@pytest.mark.parametrize(("name", "alias"), ALIASES, ids=[row[1] for row in ALIASES])
def test_alias_is_read_as_the_name(name: str, alias: str) -> None:
    config = linear(num_expert_group=2, moe_renormalize=False, model_max_length=123)

    assert read({**without(config, name), alias: config[name]}) == read(config)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("rotated", linear(mla_use_nope=False), "UNSUPPORTED_FIELD", "mla_use_nope false"),
    ("rotated by default", without(KIMI_LINEAR, "mla_use_nope"), "UNSUPPORTED_FIELD", "mla_use_nope"),
    ("tied", linear(tie_word_embeddings=True), "UNSUPPORTED_FIELD", "tie_word_embeddings true"),
    ("prediction layers", linear(num_nextn_predict_layers=1), "UNSUPPORTED_FIELD", "num_nextn_predict_layers 1"),
    ("activation", linear(hidden_act="gelu"), "UNSUPPORTED_FIELD", 'hidden_act "gelu"'),
    ("router", linear(moe_router_activation_func="softmax"), "UNSUPPORTED_FIELD", "moe_router_activation_func"),
    ("no experts", without(KIMI_LINEAR, "num_experts"), "FIELD_MISSING", "num_experts or n_routed_experts"),
    ("model type", linear(model_type="llama"), "TARGET_CONTRADICTION", "expected kimi_linear"),
    ("layer twice", attn(full_attn_layers=[4, 5, 6]), "LAYER_TYPES", "1 to 6"),
    ("layer missing", attn(full_attn_layers=[4]), "LAYER_TYPES", "[1, 2, 3, 5] and [4]"),
    ("layers from 0", attn(kda_layers=[0, 1, 2, 4], full_attn_layers=[3, 5]), "LAYER_TYPES", "1 to 6"),
    ("no list", attn(kda_layers="all"), "FIELD_VALUE", "kda_layers"),
    ("bound of 0", attn(gate_lower_bound=0), "FIELD_VALUE", "gate_lower_bound"),
    ("bound too low", attn(gate_lower_bound=-5.5), "FIELD_VALUE", "gate_lower_bound"),
    ("no window", attn(short_conv_kernel_size=1), "FIELD_VALUE", "short_conv_kernel_size"),
    ("groups", linear(num_expert_group=3), "EXPERTS", "8 experts, 2 chosen in 1 of 3 groups"),
    ("more than there are", linear(num_experts_per_token=9), "EXPERTS", "9 chosen"),
    ("huge", linear(hidden_size="64"), "FIELD_VALUE", "hidden_size"),
    ("no ranks", without(KIMI_LINEAR, "kv_lora_rank"), "FIELD_MISSING", "kv_lora_rank"),
]


@pytest.mark.parametrize(("config", "code", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_config_that_would_run_wrong_is_refused(config: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)

    assert caught.value.code == code
    assert words in str(caught.value)


# Tensors.


def test_experts_whose_global_scales_mean_two_things_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target", KIMI_LINEAR, experts="nvfp4-modelopt")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.1.block_sparse_moe.experts.3.w2"
    tensors[f"{expert}.weight_packed"] = tensors.pop(f"{expert}.weight")
    tensors[f"{expert}.weight_global_scale"] = 1 / tensors.pop(f"{expert}.weight_scale_2")
    del tensors[f"{expert}.input_scale"]
    save_file(tensors, file)

    error = _refusal(ExportRequest(target=tmp_path / "target", out=tmp_path / "core"), tmp_path)

    assert (error.code, error.where) == ("EXPERT_FORMAT", "layers.1.experts.down")
    assert error.got == "a global scale that divides and a global scale that multiplies and nvfp4 as published"


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        del tensors[name]

    return change


def both_queries(tensors: dict[str, Any]) -> None:
    for layer in (3, 5):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = tensors[
            f"model.layers.{layer}.self_attn.q_b_proj.weight"].new_zeros(96, 64)


def half_precision_experts(tensors: dict[str, Any]) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name] = tensors[name].bfloat16()


CHANGED = [
    ("query matrix missing", drop("model.layers.3.self_attn.q_b_proj.weight"), "TENSORS",
     "missing: layers.3.self_attn.q_b_proj.weight"),
    ("two kinds of query", both_queries, "TENSORS", "read by no graph: model.layers.3.self_attn.q_proj.weight"),
    ("experts of two kinds", half_precision_experts, "EXPERT_FORMAT", "bf16 and f32"),
    ("norm missing", drop("model.norm.weight"), "TENSORS_UNMATCHED", "missing: norm.weight"),
]


@pytest.mark.parametrize(("change", "code", "words"), [row[1:] for row in CHANGED], ids=[row[0] for row in CHANGED])
def test_checkpoint_that_is_not_its_config_is_refused_and_nothing_is_written(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], code: str, words: str,
) -> None:
    write_target(tmp_path / "target", linear(q_lora_rank=24))
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "target" / "model.safetensors")

    error = _refusal(ExportRequest(target=tmp_path / "target", out=tmp_path / "core"), tmp_path)

    assert error.code == code
    assert words in str(error).replace("got ", "")


def test_gpu_target_is_refused_by_the_name_of_the_op_that_no_kernel_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(ALONE, "dflash.route/1")
    write_target(tmp_path / "target", KIMI_LINEAR, dtype=torch.bfloat16)
    assert is_kimi(open_checkpoint(tmp_path / "target"))
    request = ExportRequest(target=tmp_path / "target", out=tmp_path / "core")

    error = _refusal(replace(request, capability=90), tmp_path)

    assert isinstance(error, CaptureError)
    assert (error.code, error.got) == ("GPU_OP", "dflash.route/1")


def _refusal(request: ExportRequest, folder: Path) -> DflashError:
    generate_key(folder / "keys")
    with pytest.raises(DflashError) as caught:
        export(request, load_private_key(folder / "keys" / "key.pem"))
    assert sorted(path.name for path in folder.iterdir()) == ["keys", "target"]
    return caught.value


def test_draft_may_carry_copies_of_the_nested_tables_and_no_others(tmp_path: Path) -> None:
    weights = write_target(tmp_path / "target", K3)
    make_draft(tmp_path / "draft", weights["embed_tokens.weight"], weights["lm_head.weight"])
    target = open_checkpoint(tmp_path / "target")
    draft = open_checkpoint(tmp_path / "draft")
    config = read_draft_config(draft, read_kimi_config(target))

    names = check_draft_tensors(draft, config, target)
    assert "embed_tokens.weight" in draft.tensors and "embed_tokens.weight" not in names

    make_draft(tmp_path / "other", weights["embed_tokens.weight"] + 1, weights["lm_head.weight"])
    with pytest.raises(CheckpointError, match="not a copy of the target's"):
        check_draft_tensors(open_checkpoint(tmp_path / "other"), config, target)


def make_draft(folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
    """A random draft with tables of its own."""
    config = draft_json(PairSpec(block_size=4), target_layers=6, taps=TAPS)
    draft = draft_class(DraftKind.DFLASH2)(Qwen3Config(**config))
    save_draft(draft, config, folder)
    path = folder / "model.safetensors"
    save_file({**load_file(path), "embed_tokens.weight": embedding, "lm_head.weight": head.clone()}, path)
