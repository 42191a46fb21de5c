"""Target configs of both families are read with transformers' defaults; what would be lost is refused by name."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from dflash_core.errors import CheckpointError, ExitCode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from exporter.checkpoint import open_checkpoint
from exporter.rope import RopeParameters, RopeType
from exporter.target_config import (
    TargetFamily,
    check_target_tensors,
    head_tensor_name,
    read_target_config,
    target_tensor_shapes,
)
from tests.exporter.small_checkpoints import (
    DFLASH1,
    DRAFT,
    EXAMPLES,
    LLAMA,
    QWEN3,
    bf16,
    checkpoint_of,
    target_config,
    without,
    write_single,
)


def shapes_of(config):
    return target_tensor_shapes(read_target_config(checkpoint_of(config)))


def refused(action, code, *words):
    with pytest.raises(CheckpointError) as caught:
        action()
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_reads_the_example_target():
    config = json.loads((EXAMPLES / "smollm2-135m" / "config.json").read_bytes())
    listed = [line.split("  ") for line in (EXAMPLES / "smollm2-135m" / "tensors.sha256").read_text().splitlines()]

    target = read_target_config(checkpoint_of(config))

    assert target.family is TargetFamily.LLAMA
    assert (target.hidden_size, target.intermediate_size, target.num_layers) == (576, 1536, 30)
    assert (target.num_heads, target.num_kv_heads, target.head_dim, target.vocab_size) == (9, 3, 64, 49152)
    assert target.rope == RopeParameters(RopeType.DEFAULT, 100000.0)
    assert (target.rms_norm_eps, target.max_position_embeddings) == (1e-5, 8192)
    assert (target.tie_word_embeddings, target.qk_norm, target.dtype) == (True, False, "bfloat16")
    assert (target.eos_token_ids, target.notices) == ((2,), ())
    assert target_tensor_shapes(target) == {name: tuple(json.loads(shape)) for _, name, _, shape in listed}
    assert sum(prod(shape) for shape in target_tensor_shapes(target).values()) == 134515008


def tiny_llama():
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=[2, 5],
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ))  # fmt: skip


def tiny_qwen3():
    return Qwen3ForCausalLM(Qwen3Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=96, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("build", "size", "family", "head_dim", "eos", "rope_type", "count"),
    [
        pytest.param(tiny_llama, "1GB", TargetFamily.LLAMA, 12, (2, 5), RopeType.LLAMA3, 20, id="llama, tied"),
        pytest.param(tiny_qwen3, "20KB", TargetFamily.QWEN3, 16, (7,), RopeType.DEFAULT, 25, id="qwen3, sharded"),
    ],
)
def test_reads_what_transformers_saves(tmp_path, build, size, family, head_dim, eos, rope_type, count):
    torch.manual_seed(0)
    model = build().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=size)

    checkpoint = open_checkpoint(tmp_path)
    target = read_target_config(checkpoint)

    assert (target.family, target.head_dim, target.eos_token_ids) == (family, head_dim, eos)
    assert (target.rope.type, target.dtype, target.notices) == (rope_type, "bfloat16", ())
    assert check_target_tensors(checkpoint, target) == ()
    assert len(checkpoint.tensors) == count
    assert (len(checkpoint.shards) > 1) == (size == "20KB")


VALUES = [
    pytest.param(LLAMA, {"head_dim": 16, "num_kv_heads": 2, "rms_norm_eps": 1e-5}, id="llama head_dim is H/n"),
    pytest.param({**LLAMA, "head_dim": 40}, {"head_dim": 40}, id="head_dim given"),
    pytest.param({**LLAMA, "head_dim": None}, {"head_dim": 16}, id="null is absent"),
    pytest.param(without(LLAMA, "num_key_value_heads"), {"num_kv_heads": 4}, id="llama without kv heads"),
    pytest.param(without(LLAMA, "rms_norm_eps"), {"rms_norm_eps": 1e-6}, id="default eps"),
    pytest.param(without(LLAMA, "tie_word_embeddings"), {"tie_word_embeddings": False}, id="untied by default"),
    pytest.param(
        without(LLAMA, "rope_theta"), {"rope": RopeParameters(RopeType.DEFAULT, 10000.0)}, id="llama default theta",
    ),
    pytest.param(
        {**LLAMA, "rope_parameters": {"rope_theta": 2e4}},
        {"rope": RopeParameters(RopeType.DEFAULT, 20000.0),
         "notices": ("rope_theta is 10000.0 and in the rope parameters 20000.0: using 20000.0",)},
        id="nested theta wins, with a notice",
    ),
    pytest.param(without(QWEN3, "head_dim"), {"head_dim": 128, "qk_norm": True}, id="qwen3 default head_dim"),
    pytest.param({**QWEN3, "use_sliding_window": False, "sliding_window": 4096}, {"qk_norm": True}, id="window unused"),
    pytest.param({**QWEN3, "layer_types": ["full_attention"] * 8}, {"num_layers": 8}, id="full layers listed"),
    pytest.param({**LLAMA, "eos_token_id": [5, 2, 5]}, {"eos_token_ids": (5, 2)}, id="several stop tokens"),
    pytest.param(without(LLAMA, "eos_token_id"), {"eos_token_ids": ()}, id="no stop token"),
    pytest.param({**LLAMA, "torch_dtype": "float32"}, {"dtype": "float32"}, id="old dtype key"),
    pytest.param({**LLAMA, "dtype": "torch.float16"}, {"dtype": "float16"}, id="new dtype key wins"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), VALUES)
def test_fills_in_the_defaults_of_the_family(config, expected):
    target = read_target_config(checkpoint_of(config))

    assert {name: getattr(target, name) for name in expected} == expected


def test_takes_the_dtype_of_the_embedding_when_the_config_is_silent():
    checkpoint = checkpoint_of(without(LLAMA, "torch_dtype"), {"model.embed_tokens.weight": (128, 64)}, dtype="F16")

    assert read_target_config(checkpoint).dtype == "float16"


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        pytest.param({"eos_token_id": [7, 9]}, (7, 9), id="generation config wins"),
        pytest.param({"eos_token_id": 0}, (0,), id="token zero is a token"),
        pytest.param({"temperature": 1}, (2,), id="config when the other is silent"),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(tmp_path, generation, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))

    assert read_target_config(checkpoint_of(LLAMA, path=tmp_path)).eos_token_ids == expected


REFUSALS = [
    pytest.param(DRAFT, "TARGET_IS_DRAFT", ["a draft was passed as the target", "DFlash2DraftModel"], id="DFlash2"),
    pytest.param(DFLASH1, "TARGET_IS_DRAFT", ["DFlashDraftModel", "--draft"], id="DFlash"),
    pytest.param({**DRAFT, "architectures": ["DSparkDraftModel"]}, "TARGET_IS_DRAFT", ["DSpark"], id="DSpark"),
    pytest.param({**LLAMA, "dflash_config": {}}, "TARGET_IS_DRAFT", ["dflash_config"], id="draft section"),
    pytest.param({**LLAMA, "speculators_model_type": "eagle3"}, "TARGET_IS_DRAFT", ["speculators"], id="speculators"),
    pytest.param(
        {**LLAMA, "architectures": ["MistralForCausalLM"]}, "TARGET_UNSUPPORTED",
        ["one of LlamaForCausalLM Qwen3ForCausalLM", "got MistralForCausalLM", "hint: choose a model of one of these"],
        id="unknown architecture",
    ),
    pytest.param(without(LLAMA, "architectures"), "TARGET_UNSUPPORTED", ["none named"], id="no architecture"),
    pytest.param(
        {**LLAMA, "architectures": ["A", "B"]}, "ARCHITECTURES", ["a list of one string", "hint: download"],
        id="two classes",
    ),
    pytest.param(
        {**LLAMA, "model_type": "qwen3"}, "TARGET_CONTRADICTION",
        ["LlamaForCausalLM", "expected llama", "one of the two is of another model"],
        id="model_type contradicts",
    ),
    pytest.param(
        {**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "TARGET_QUANTIZED", ["quantization_config", "fp8"],
        id="quantized",
    ),
    pytest.param({**LLAMA, "attention_bias": True}, "UNSUPPORTED_FIELD", ["attention_bias true"], id="attention_bias"),
    pytest.param(
        {**LLAMA, "mlp_bias": True}, "UNSUPPORTED_FIELD", ["mlp_bias true", "hint: choose a model without it"],
        id="mlp_bias",
    ),
    pytest.param({**LLAMA, "hidden_act": "gelu"}, "UNSUPPORTED_FIELD", ['hidden_act "gelu"', "only silu"], id="gelu"),
    pytest.param(
        {**QWEN3, "use_sliding_window": True, "sliding_window": 64}, "UNSUPPORTED_FIELD", ["use_sliding_window true"],
        id="sliding window",
    ),
    pytest.param(
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "UNSUPPORTED_FIELD", ["layer_types"],
        id="sliding layers",
    ),
    pytest.param(
        {**LLAMA, "partial_rotary_factor": 0.5}, "UNSUPPORTED_FIELD", ["partial_rotary_factor 0.5"], id="partial rope",
    ),
    pytest.param(
        {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "ROPE_TYPE", ['"dynamic"'], id="dynamic rope",
    ),
    pytest.param(without(QWEN3, "rope_theta"), "FIELD_MISSING", ["rope_theta"], id="qwen3 without theta"),
    pytest.param(without(QWEN3, "num_key_value_heads"), "FIELD_MISSING", ["num_key_value_heads"], id="qwen3 kv heads"),
    pytest.param(
        without(LLAMA, "hidden_size"), "FIELD_MISSING", ["config has no hidden_size", "hint: download"],
        id="no hidden_size",
    ),
    pytest.param(
        {**LLAMA, "vocab_size": "128"}, "FIELD_VALUE", ["vocab_size", "integer ≥ 1", '"128"', "hint: download"],
        id="string",
    ),
    pytest.param({**LLAMA, "num_hidden_layers": 0}, "FIELD_VALUE", ["num_hidden_layers", "got 0"], id="no layers"),
    pytest.param({**LLAMA, "num_hidden_layers": True}, "FIELD_VALUE", ["num_hidden_layers", "true"], id="boolean"),
    pytest.param({**LLAMA, "rms_norm_eps": 0}, "FIELD_VALUE", ["rms_norm_eps", "> 0"], id="eps of zero"),
    pytest.param({**LLAMA, "tie_word_embeddings": 1}, "FIELD_VALUE", ["tie_word_embeddings", "true or"], id="one"),
    pytest.param(
        {**LLAMA, "num_key_value_heads": 3}, "HEADS", ["num_attention_heads 4", "got 3", "hint: download"],
        id="kv groups",
    ),
    pytest.param(
        {**LLAMA, "hidden_size": 66}, "HEADS", ["hidden_size 66", "head_dim is absent", "hint: add the head_dim"],
        id="heads",
    ),
    pytest.param({**LLAMA, "eos_token_id": 128}, "FIELD_VALUE", ["eos_token_id", "below vocab_size 128"], id="eos"),
    pytest.param({**LLAMA, "torch_dtype": "float64"}, "FIELD_VALUE", ["torch_dtype", "bfloat16"], id="dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "code", "words"), REFUSALS)
def test_refuses_target_that_it_would_get_wrong(config, code, words):
    refused(lambda: read_target_config(checkpoint_of(config)), code, *words)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        pytest.param(LLAMA, 75, id="llama"),
        pytest.param({**LLAMA, "tie_word_embeddings": True}, 74, id="llama, tied"),
        pytest.param(QWEN3, 91, id="qwen3"),
    ],
)
def test_claims_every_tensor_of_the_family(config, count):
    shapes = shapes_of(config)

    assert len(shapes) == count
    assert check_target_tensors(checkpoint_of(config, shapes), read_target_config(checkpoint_of(config))) == ()


def test_names_all_that_is_wrong_with_the_tensors_in_one_error():
    shapes = without(shapes_of(LLAMA), "model.norm.weight", "model.layers.3.mlp.up_proj.weight")
    shapes |= {"model.layers.0.self_attn.q_proj.bias": (64,), "model.layers.2.mlp.down_proj.weight": (64, 95)}
    checkpoint = checkpoint_of(LLAMA, shapes)

    refused(
        lambda: check_target_tensors(checkpoint, target_config()), "TENSORS",
        "expected 75 tensors, got 74", "missing: model.layers.3.mlp.up_proj.weight, model.norm.weight",
        "unclaimed: model.layers.0.self_attn.q_proj.bias",
        "wrong shape: model.layers.2.mlp.down_proj.weight in model.safetensors: expected [64, 96], got [64, 95]",
    )  # fmt: skip


def test_shortens_a_long_list_of_missing_tensors():
    refused(
        lambda: check_target_tensors(checkpoint_of(LLAMA, {}), target_config()), "TENSORS", "and 63 more", "got 0",
    )  # fmt: skip


def test_refuses_weights_in_a_quantized_dtype():
    checkpoint = checkpoint_of(LLAMA, shapes_of(LLAMA), dtype="F8_E4M3")

    refused(
        lambda: check_target_tensors(checkpoint, target_config()), "TENSORS", "wrong dtype: model.embed_tokens.weight",
        "expected BF16 F16 F32, got F8_E4M3",
    )  # fmt: skip


def test_tied_model_may_carry_a_copy_of_its_head():
    tied = {**LLAMA, "tie_word_embeddings": True}
    checkpoint = checkpoint_of(tied, {**shapes_of(tied), "lm_head.weight": (128, 64)})

    notices = check_target_tensors(checkpoint, read_target_config(checkpoint))

    assert notices == (
        "lm_head.weight is left out: tie_word_embeddings makes model.embed_tokens.weight the output head",
    )


def test_refuses_tied_head_of_another_shape():
    tied = {**LLAMA, "tie_word_embeddings": True}
    checkpoint = checkpoint_of(tied, {**shapes_of(tied), "lm_head.weight": (120, 64)})

    refused(
        lambda: check_target_tensors(checkpoint, read_target_config(checkpoint)), "TENSORS",
        "lm_head.weight in model.safetensors: expected [128, 64], got [120, 64]",
    )  # fmt: skip


def test_ignores_stored_rope_frequencies():
    shapes = {**shapes_of(LLAMA), "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}

    assert check_target_tensors(checkpoint_of(LLAMA, shapes), target_config()) == ()


@pytest.mark.parametrize(
    ("tied", "has_head", "expected"),
    [
        pytest.param(False, True, "lm_head.weight", id="untied"),
        pytest.param(True, True, "model.embed_tokens.weight", id="tied with a copy"),
        pytest.param(True, False, "model.embed_tokens.weight", id="tied"),
    ],
)
def test_names_the_output_head(tmp_path, tied, has_head, expected):
    tensors = {"model.embed_tokens.weight": bf16((4, 2))} | ({"lm_head.weight": bf16((4, 2))} if has_head else {})
    checkpoint = open_checkpoint(write_single(tmp_path, {"tie_word_embeddings": tied}, tensors))

    assert head_tensor_name(checkpoint) == expected
