"""A draft's tensors are found under every published name; what is missing, extra or not the target's is named."""

from __future__ import annotations

import json

import pytest
from dflash_core.errors import CheckpointError, ExitCode

from exporter.checkpoint import open_checkpoint
from exporter.draft_config import read_draft_config
from exporter.draft_tensors import canonical_name, check_draft_tensors, draft_tensor_names, draft_tensor_shapes
from exporter.target_config import read_target_config
from tests.exporter.small_checkpoints import (
    DFLASH1,
    DFLASH1_SHAPES,
    DRAFT,
    DRAFT_SHAPES,
    EXAMPLES,
    LLAMA,
    bf16,
    checkpoint_of,
    target_config,
    without,
    write_single,
)

TARGET = checkpoint_of(LLAMA)


def check(shapes, config=DRAFT, dtype="BF16"):
    declared = DFLASH1_SHAPES if config["architectures"] == ["DFlashDraftModel"] else DRAFT_SHAPES
    draft = read_draft_config(checkpoint_of(config, declared), target_config())
    return check_draft_tensors(checkpoint_of(config, shapes, dtype=dtype), draft, TARGET)


def refused(action, code, *words):
    with pytest.raises(CheckpointError) as caught:
        action()
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    for word in words:
        assert word in str(caught.value), str(caught.value)


def renamed(old, new):
    return {name.replace(old, new): shape for name, shape in DRAFT_SHAPES.items()}


def test_finds_the_tensors_of_the_example_draft():
    config = json.loads((EXAMPLES / "smollm2-135m" / "config.json").read_bytes())
    draft = open_checkpoint(EXAMPLES / "smollm2-135m-dflash2")
    draft_config = read_draft_config(draft, read_target_config(checkpoint_of(config)))

    names = check_draft_tensors(draft, draft_config, checkpoint_of(config))

    assert len(names) == 51
    assert all(canonical == name for canonical, name in names.items())


@pytest.mark.parametrize(
    ("config", "shapes", "count"),
    [
        pytest.param(DFLASH1, DFLASH1_SHAPES, 25, id="dflash: 11 L + 3"),
        pytest.param(DRAFT, DRAFT_SHAPES, 36, id="dflash2: 15 L + 6"),
    ],
)
def test_every_method_has_its_own_tensors(config, shapes, count):
    draft = read_draft_config(checkpoint_of(config, shapes), target_config())

    assert draft_tensor_shapes(draft) == shapes
    assert len(draft_tensor_names(draft)) == count


NAMES = [
    pytest.param("model.fc.weight", "fc.weight", id="prefix"),
    pytest.param("model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", id="prefixed layer"),
    pytest.param("midlayer.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight", id="midlayer"),
    pytest.param("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", id="prefixed midlayer"),
    pytest.param("encoder.fc.weight", "fc.weight", id="encoder fc"),
    pytest.param("encoder.output_norm_enc.weight", "hidden_norm.weight", id="encoder norm"),
    pytest.param(
        "candidate_selector.successor_codebook.weight", "candidate_selector.successor_codebook", id="successor",
    ),
    pytest.param(
        "candidate_selector.predecessor_codebook.weight", "candidate_selector.predecessor_codebook", id="predecessor",
    ),
    pytest.param("layers.0.mlp_conv.base_kernel", "layers.0.mlp_conv.base_kernel", id="as published"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_undoes_alternative_names(name, expected):
    assert canonical_name(name) == expected


@pytest.mark.parametrize(
    ("shapes", "canonical", "name"),
    [
        pytest.param(
            {f"model.{name}": shape for name, shape in DRAFT_SHAPES.items()}, "norm.weight", "model.norm.weight",
            id="prefixed",
        ),
        pytest.param(
            renamed("_codebook", "_codebook.weight"), "candidate_selector.successor_codebook",
            "candidate_selector.successor_codebook.weight", id="codebooks with .weight",
        ),
        pytest.param(
            renamed("layers.0.", "midlayer."), "layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight",
            id="midlayer",
        ),
        pytest.param(
            {**DRAFT_SHAPES, "rotary_emb.inv_freq": (12,), "layers.0.self_attn.rotary_emb.inv_freq": (12,), "t2d": ()},
            "fc.weight", "fc.weight", id="ignored tensors",
        ),
    ],
)  # fmt: skip
def test_maps_canonical_names_to_the_names_in_the_file(shapes, canonical, name):
    names = check(shapes)

    assert list(names) == list(check(DRAFT_SHAPES))
    assert names[canonical] == name


REFUSALS = [
    pytest.param(
        without(DRAFT_SHAPES, "layers.1.mlp_conv.base_kernel", "hidden_norm.weight") | {"layers.2.x": (1,)}, "TENSORS",
        ["missing: hidden_norm.weight, layers.1.mlp_conv.base_kernel", "unclaimed: layers.2.x", "expected 36"],
        id="missing and unclaimed in one error",
    ),
    pytest.param(
        {**DRAFT_SHAPES, "fc.weight": (64, 128)}, "TENSORS",
        ["wrong shape: fc.weight in model.safetensors: expected [64, 192], got [64, 128]"], id="another count of taps",
    ),
    pytest.param(
        {**DRAFT_SHAPES, "candidate_selector.successor_codebook": (120, 8)}, "TENSORS",
        ["expected [128, 8], got [120, 8]"], id="codebook of another vocabulary",
    ),
    pytest.param(
        {**DRAFT_SHAPES, "model.fc.weight": (64, 192)}, "TENSORS", ["given twice: fc.weight and model.fc.weight"],
        id="one tensor under two names",
    ),
    pytest.param(
        {**DRAFT_SHAPES, "layers.0.self_attn.q_proj.bias": (96,)}, "TENSORS",
        ["unclaimed: layers.0.self_attn.q_proj.bias"], id="bias",
    ),
    pytest.param(
        without(DRAFT_SHAPES, "layers.0.self_attn.q_proj.weight") | {"layers.0.self_attn.qkv_proj.weight": (192, 64)},
        "DRAFT_FUSED", ["fused projections", "layers.0.self_attn.qkv_proj.weight", "by rows"], id="fused qkv",
    ),
    pytest.param(
        {**DRAFT_SHAPES, "layers.0.mlp.gate_up_proj.weight": (160, 64)}, "DRAFT_FUSED", ["gate_up_proj"],
        id="fused gate and up",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "code", "words"), REFUSALS)
def test_refuses_tensors_that_are_not_the_drafts(shapes, code, words):
    refused(lambda: check(shapes), code, *words)


def test_refuses_dflash2_tensors_in_a_dflash_draft():
    shapes = {**DFLASH1_SHAPES, "layers.0.mlp_conv.base_kernel": (2, 2, 64)}

    refused(lambda: check(shapes, DFLASH1), "TENSORS", "unclaimed: layers.0.mlp_conv.base_kernel")


def test_refuses_quantized_draft():
    config = {**DRAFT, "quantization_config": {"quant_method": "fp8"}}

    refused(lambda: check(DRAFT_SHAPES, config), "DRAFT_QUANTIZED", "quantized already", "--draft-body-quantization")


def test_refuses_weights_in_a_quantized_dtype():
    refused(lambda: check(DRAFT_SHAPES, dtype="F8_E4M3"), "TENSORS", "wrong dtype: fc.weight", "got F8_E4M3")


EMBEDDING, HEAD = bf16((128, 64), 1), bf16((128, 64), 2)


def check_copy(tmp_path, copies, tied):
    config = {**LLAMA, "tie_word_embeddings": tied}
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    target = open_checkpoint(write_single(tmp_path / "target", config, tensors))
    body = {name: bf16(shape) for name, shape in DRAFT_SHAPES.items()}
    draft = open_checkpoint(write_single(tmp_path / "draft", DRAFT, {**body, **copies}))
    return check_draft_tensors(draft, read_draft_config(draft, target_config()), target)


@pytest.mark.parametrize(
    ("copies", "tied"),
    [
        pytest.param({"embed_tokens.weight": EMBEDDING}, False, id="embedding"),
        pytest.param({"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}, False, id="embedding and head"),
        pytest.param({"lm_head.weight": EMBEDDING}, True, id="head of a tied target is its embedding"),
    ],
)
def test_skips_copies_of_the_targets_tables(tmp_path, copies, tied):
    names = check_copy(tmp_path, copies, tied)

    assert sorted(names) == sorted(DRAFT_SHAPES)


@pytest.mark.parametrize(
    ("copies", "tied", "word"),
    [
        pytest.param({"embed_tokens.weight": HEAD}, False, "model.embed_tokens.weight", id="embedding"),
        pytest.param({"lm_head.weight": EMBEDDING}, False, "the bytes of lm_head.weight", id="head"),
        pytest.param({"lm_head.weight": HEAD}, True, "the bytes of model.embed_tokens.weight", id="head, tied target"),
        pytest.param({"embed_tokens.weight": bf16((120, 64))}, False, "embed_tokens.weight", id="another shape"),
    ],
)
def test_refuses_tables_of_the_drafts_own(tmp_path, copies, tied, word):
    refused(lambda: check_copy(tmp_path, copies, tied), "DRAFT_OWN_TABLE", "is not a copy of the target's", word)
