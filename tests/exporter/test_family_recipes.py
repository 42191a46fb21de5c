"""The Kimi family, and families whose forward pass is not there yet: every published tensor is described."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_core.errors import CheckpointError, PlanError, RecipeError
from dflash_core.formats import Format

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.convert.packed import PackedFormat
from exporter.plan import PrecisionPlan, PrecisionSettings, plan_precision, plan_table
from exporter.recipe import Recipe, find_recipe, known_recipes, load_recipe
from exporter.recipe_layers import layers_by_type
from exporter.recipe_match import config_symbols, match_tensors
from exporter.safetensors_header import TensorEntry
from tests.exporter.kimi_inventory import TEXT, Inventory, add, kimi_k3

K3 = load_recipe("kimi-k3")
KDA_INPUT, ALL = PrecisionSettings(online_mxfp8_scope="kda-input"), PrecisionSettings(online_mxfp8_scope="all")


def plan(of: Inventory, settings: PrecisionSettings = KDA_INPUT, recipe: Recipe = K3) -> PrecisionPlan:
    return plan_precision(of, recipe, None, None, settings)


def converted(planned: PrecisionPlan) -> set[str]:
    return {tensor.name for tensor in planned.target if tensor.format is Format.MXFP8}


# Kimi K3, whole.


def test_kimi_k3_is_planned_from_names_and_shapes() -> None:
    """`make bench-kimi` times it."""
    planned = plan(kimi_k3())

    weights = [tensor for tensor in planned.target if tensor.name.endswith(".weight")]
    assert (len(planned.target), len(weights)) == (249_924, 249_694)
    rows = {row.group: (row.num_tensors, row.nbytes_before, row.nbytes_after) for row in plan_table(planned)}
    assert rows == {
        "embedding": (1, 2_348_810_240, 2_348_810_240),
        "head": (1, 2_348_810_240, 2_348_810_240),
        "normalization": (396, 3_456_256, 3_456_256),
        "kda-input": (414, 48_841_949_184, 25_184_130_048),
        "kda-up": (69, 217_055_232, 217_055_232),
        "convolution": (207, 20_348_928, 20_348_928),
        "decay": (138, 1_713_408, 1_713_408),
        "attn-out": (93, 16_382_951_424, 16_382_951_424),
        "mla": (96, 6_313_476_096, 6_313_476_096),
        "mla-absorbed": (24, 603_979_776, 603_979_776),
        "dense-mlp": (3, 1_453_326_336, 1_453_326_336),
        "router": (184, 1_181_910_016, 1_181_910_016),
        "shared": (276, 24_310_185_984, 24_310_185_984),
        "latent": (184, 9_453_961_216, 9_453_961_216),
        "routed": (247_296, 5_445_481_660_416, 5_445_481_660_416),
        "attnres": (374, 5_361_664, 5_361_664),
        "vision": (165, 802_428_928, 802_428_928),
        "projector": (3, 92_289_024, 92_289_024),
    }
    counts = {
        "experts": sum(".experts." in tensor.name for tensor in weights),
        "self_attn": sum(".self_attn." in tensor.name for tensor in weights),
        "shared": sum(".shared_experts." in tensor.name for tensor in weights),
        "vision": sum(tensor.name.startswith(("vision_tower", "mm_projector")) for tensor in weights),
        "dense and head": sum(t.role.startswith(("dense-mlp", "head")) for t in weights),
    }
    assert counts == {"experts": 247_296, "self_attn": 1_020, "shared": 276, "vision": 168, "dense and head": 4}
    assert len(weights) - sum(counts.values()) == 930


# Kimi K3, a slice: five layers of which the fourth and the last are MLA.

SLICE = kimi_k3(5, 2)


def names(layers: tuple[int, ...], *projections: str) -> set[str]:
    return {f"{TEXT}layers.{layer}.{name}.weight" for layer in layers for name in projections}


INPUTS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g", "f_a", "b"))


def test_kda_input_converts_what_feeds_kda_layers_alone() -> None:
    assert converted(plan(SLICE)) == names((0, 1, 2), *INPUTS)


def test_scope_all_adds_attention_shared_experts_and_latent_projections() -> None:
    assert converted(plan(SLICE, ALL)) == (
        names((0, 1, 2), *INPUTS, "self_attn.o_proj")
        | names((3, 4), *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj",
                                                          "o_proj")))
        | names((1, 2, 3, 4), *(f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
                "block_sparse_moe.routed_expert_down_proj", "block_sparse_moe.routed_expert_up_proj")
    )


def test_g_proj_belongs_to_kda_input_in_a_kda_layer_and_to_all_in_an_mla_layer() -> None:
    rows = {row.layer_type: row for row in K3.rows if row.pattern.endswith("g_proj.weight")}
    swapped = replace(K3, rows=tuple(
        replace(row, layer_type="mla" if row.layer_type == "kda" else "kda") if row in rows.values() else row
        for row in K3.rows))
    of_kda, of_mla = f"{TEXT}layers.2.self_attn.g_proj.weight", f"{TEXT}layers.3.self_attn.g_proj.weight"

    right, wrong = (converted(plan(SLICE, recipe=recipe)) for recipe in (K3, swapped))

    assert SLICE.tensors[of_kda].shape == SLICE.tensors[of_mla].shape, "so that the shape cannot tell them apart"
    assert (of_kda in right, of_mla in right) == (True, False)
    assert (of_kda in wrong, of_mla in wrong) == (False, True)


def test_swapped_layer_lists_describe_another_model() -> None:
    linear = SLICE.config["text_config"]["linear_attn_config"]
    lists = {"kda_layers": linear["full_attn_layers"], "full_attn_layers": linear["kda_layers"]}
    text = {**SLICE.config["text_config"], "linear_attn_config": {**linear, **lists}}

    with pytest.raises(RecipeError, match=r"matches no row: .*layers\.0\.self_attn\.q_proj\.weight"):
        plan(Inventory({**SLICE.config, "text_config": text}, SLICE.tensors))


def test_what_a_scope_covers_and_leaves_is_listed_with_its_reason() -> None:
    skipped = Counter((tensor.role, tensor.reason) for tensor in plan(SLICE, ALL).skipped)

    assert skipped == {
        ("mla-absorbed_kv_b", "absorbed key/value"): 2,
        ("kda-up_f_b", "low-rank up projection of decay and gate"): 3,
        ("router_gate", "router"): 4,
    }
    assert plan(SLICE).skipped == (), "kda-input covers none of them"


def test_dense_layer_may_be_spelled_like_a_mixture_but_not_both() -> None:
    plain, mixture = f"{TEXT}layers.0.mlp.", f"{TEXT}layers.0.block_sparse_moe."
    spelled = {name.replace(plain, mixture): entry for name, entry in SLICE.tensors.items()}

    assert len(plan(Inventory(SLICE.config, spelled)).target) == len(SLICE.tensors)
    with pytest.raises(RecipeError, match=r"given twice: .*layers\.0\.block_sparse_moe\.gate_proj\.weight"):
        plan(Inventory(SLICE.config, SLICE.tensors | spelled))


@pytest.mark.parametrize("inner", ["language_model.model.", "language_model."])
def test_inner_prefix_may_be_left_out(inner: str) -> None:
    tensors = {name.replace("language_model.model.", inner): entry for name, entry in SLICE.tensors.items()}

    assert len(plan(Inventory(SLICE.config, tensors)).target) == len(SLICE.tensors)


def test_decay_may_be_padded_to_any_length_but_stays_a_vector() -> None:
    name = f"{TEXT}layers.0.self_attn.A_log"
    padded, square = dict(SLICE.tensors), dict(SLICE.tensors)
    add(padded, name, "BF16", (96,))
    add(square, name, "BF16", (1, 96))

    assert len(plan(Inventory(SLICE.config, padded)).target) == len(SLICE.tensors)
    with pytest.raises(RecipeError, match=r"A_log: expected \[\*\], got \[1, 96\]"):
        plan(Inventory(SLICE.config, square))


# Layer types.

BAD_LISTS = [
    ("zero", [0, 1, 2], "different layers of 1 to 5, got 0"),
    ("beyond", [1, 6], "got 6"),
    ("twice", [1, 1], "got one twice"),
    ("text", [1, "2"], "got '2'"),
    ("boolean", [True], "got True"),
    ("no-list", 3, "expected a list, got 3"),
    ("names-of-too-few", ["kda"] * 4, "expected the types of 5 layers, got 4"),
]


@pytest.mark.parametrize(("kda", "message"), [row[1:] for row in BAD_LISTS], ids=[row[0] for row in BAD_LISTS])
def test_list_that_does_not_name_layers_is_refused(kda: Any, message: str) -> None:
    text = SLICE.config["text_config"]
    config = {"text_config": {**text, "linear_attn_config": {**text["linear_attn_config"], "kda_layers": kda}}}

    with pytest.raises(RecipeError) as caught:
        layers_by_type(K3, config, {"layers": 5, "first_moe": 1, "moe_every": 1})

    assert caught.value.code == "LAYER_TYPES"
    assert message in str(caught.value)
    assert "text_config/linear_attn_config/kda_layers in config.json" in str(caught.value)
    assert caught.value.hint == "download config.json again, or mend the layer type in the recipe"


EVERY = [("each", 1, 1, {1, 2, 3, 4, 5, 6, 7}), ("from-the-first", 0, 2, {0, 2, 4, 6}),
         ("by-number-not-distance", 3, 2, {4, 6})]


@pytest.mark.parametrize(("first", "every", "moe"), [row[1:] for row in EVERY], ids=[row[0] for row in EVERY])
def test_mixture_layers_follow_first_and_frequency(first: int, every: int, moe: set[int]) -> None:
    config = {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]}}

    found = layers_by_type(K3, config, {"layers": 8, "first_moe": first, "moe_every": every})

    assert set(found["moe"]) == moe and set(found["dense"]) == set(range(8)) - moe
    assert (set(found["kda"]), set(found["mla"])) == ({0, 1}, {2})


# Experts that come quantized.


def test_mxfp4_experts_pass_through_as_they_are() -> None:
    planned = plan(kimi_k3(2, 2, experts="mxfp4"), ALL)

    experts = [tensor for tensor in planned.target if tensor.role.startswith("routed")]
    assert [tensor.format for tensor in experts] == [PackedFormat.MXFP4] * 6
    assert experts[0].name == f"{TEXT}layers.1.block_sparse_moe.experts.0.w1.weight"
    assert (experts[0].shape, experts[0].source_dtype) == ((3072, 3584), "mxfp4")
    assert {(t.nbytes_before, t.nbytes_after) for t in experts} == {(3072 * 3584 // 32 * 17, 3072 * 3584 // 32 * 17)}
    row = next(row for row in plan_table(planned) if row.group == "routed")
    assert (row.bits_per_weight, row.formats, row.effective) == (4.25, ("mxfp4",), "checkpoint")


def test_nvfp4_experts_pass_through_without_the_scales_of_their_inputs() -> None:
    planned = plan(kimi_k3(2, 2, experts="nvfp4"), ALL)

    experts = [tensor for tensor in planned.target if tensor.role.startswith("routed")]
    assert [tensor.format for tensor in experts] == [PackedFormat.NVFP4] * 6
    assert (experts[0].shape, experts[0].source_dtype) == ((3072, 3584), "nvfp4 as published")
    stored = 3072 * 3584 // 16 * 9 + 4
    assert {(t.nbytes_before, t.nbytes_after) for t in experts} == {(stored + 4, stored)}
    row = next(row for row in plan_table(planned) if row.group == "routed")
    assert (row.formats, row.effective) == (("nvfp4 as published",), "checkpoint")


def test_quantized_tensor_that_is_no_expert_is_refused_by_name() -> None:
    tensors = dict(SLICE.tensors)
    name = f"{TEXT}layers.1.block_sparse_moe.routed_expert_down_proj"
    del tensors[f"{name}.weight"]
    add(tensors, f"{name}.weight_packed", "U8", (3584, 3584))
    add(tensors, f"{name}.weight_scale", "U8", (3584, 224))

    with pytest.raises(PlanError) as caught:
        plan(Inventory(SLICE.config, tensors))

    assert (caught.value.code, caught.value.got) == ("TENSOR_QUANTIZED", "mxfp4")
    assert name in str(caught.value)


def test_format_that_is_not_read_is_refused_by_name() -> None:
    tensors = dict(SLICE.tensors)
    stem = f"{TEXT}layers.1.block_sparse_moe.experts.1.w2"
    del tensors[f"{stem}.weight"]
    tensors[f"{stem}.weight_packed"] = TensorEntry(f"{stem}.weight_packed", "I32", (3584, 384), "s", 0, 4)
    tensors[f"{stem}.weight_scale"] = TensorEntry(f"{stem}.weight_scale", "BF16", (3584, 96), "s", 0, 4)

    with pytest.raises(CheckpointError) as caught:
        plan(Inventory(SLICE.config, tensors))

    assert caught.value.code == "PACKED_UNKNOWN"
    assert caught.value.got == ".weight_packed I32 [3584, 384], .weight_scale BF16 [3584, 96]"
    assert stem in caught.value.where


# Families that transformers has: it writes the checkpoint, we describe it.

TINY_TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "bos_token_id": 1, "eos_token_id": 2,
}


def qwen_model() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**TINY_TEXT, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    vision = {"depth": 2, "hidden_size": 48, "intermediate_size": 80, "num_heads": 3, "out_hidden_size": 64,
              "patch_size": 14, "num_position_embeddings": 16}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


def muse_model() -> Any:
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    vision = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3,
              "pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64}
    return MuseGlimmerForConditionalGeneration(MuseGlimmerConfig(
        text_config=TINY_TEXT, vision_config=vision, out_hidden_size=192, projector_hidden_size=72, image_token_id=5,
        video_token_id=6))


def kimi_model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "kimi_linear", vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, mla_use_nope=True, first_k_dense_replace=1, moe_layer_freq=1, num_experts=8,
        num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, architectures=["KimiLinearForCausalLM"],
        linear_attn_config={"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32,
                            "short_conv_kernel_size": 4})
    return AutoModelForCausalLM.from_config(config)


WRITTEN = [
    ("qwen3.5-hybrid", qwen_model, 89, {
        "linear_attn.in_proj_qkv": 3, "linear_attn.in_proj_z": 3, "linear_attn.out_proj": 3, "self_attn.q_proj": 1,
        "self_attn.k_proj": 1, "self_attn.v_proj": 1, "self_attn.o_proj": 1, "mlp.gate_proj": 4, "mlp.up_proj": 4,
        "mlp.down_proj": 4}),
    ("muse-glimmer", muse_model, 92, {
        "self_attn.q_proj": 4, "self_attn.k_proj": 4, "self_attn.v_proj": 4, "self_attn.gate_proj": 4,
        "self_attn.o_proj": 4, "mlp.gate_proj": 4, "mlp.up_proj": 4, "mlp.down_proj": 4}),
    ("kimi-linear", kimi_model, 197, {
        "self_attn.q_proj": 5, "self_attn.k_proj": 4, "self_attn.v_proj": 4, "self_attn.g_a_proj": 4,
        "self_attn.f_a_proj": 4, "self_attn.b_proj": 4, "self_attn.o_proj": 5, "self_attn.kv_a_proj_with_mqa": 1,
        "shared_experts.gate_proj": 4, "shared_experts.up_proj": 4, "shared_experts.down_proj": 4}),
]


@pytest.mark.parametrize(
    ("name", "model", "count", "under_all"), WRITTEN,
    ids=[row[0] for row in WRITTEN],
)
def test_checkpoint_that_transformers_writes_is_described(
    tmp_path: Path, name: str, model: Any, count: int, under_all: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model().save_pretrained(tmp_path)
    checkpoint: Checkpoint = open_checkpoint(tmp_path)
    recipe = find_recipe(checkpoint.config["architectures"][0])

    assert recipe is not None and recipe.name == name
    assert len(match_tensors(recipe, checkpoint.tensors, checkpoint.config)) == count
    planned = plan_precision(checkpoint, recipe, None, None, ALL)
    kinds = Counter(".".join(tensor.name.split(".")[-3:-1]) for tensor in planned.target
                    if tensor.format is Format.MXFP8)
    assert kinds == under_all


def test_every_architecture_leads_to_one_recipe() -> None:
    recipes = [load_recipe(name) for name in known_recipes()]
    architectures = [architecture for recipe in recipes for architecture in recipe.architectures]

    assert len(set(architectures)) == len(architectures)
    assert find_recipe("GptNeoXForCausalLM") is None
    assert find_recipe("DFlash2DraftModel") is None, "a draft is no target"
    assert [recipe.name for recipe in recipes if not recipe.forward_implemented] == [
        "muse-glimmer", "qwen3.5-hybrid"
    ]


def test_published_sizes_of_qwen_give_its_projections() -> None:
    config = json.loads("""{"text_config": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
      "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
      "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
      "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}}""")

    assert config_symbols(load_recipe("qwen3.5-hybrid"), config)["linear_rows"] == 10240
