"""Draft configs are read in every spelling and checked against their target; what would be lost is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
from dflash_core.errors import CheckpointError, ExitCode

from exporter.checkpoint import open_checkpoint
from exporter.draft_config import DraftLayer, default_taps, read_draft_config
from exporter.draft_kind import DraftMethod
from exporter.draft_tensors import draft_tensor_shapes
from exporter.rope import RopeParameters, RopeType
from exporter.target_config import read_target_config
from tests.exporter.small_checkpoints import (
    DFLASH1,
    DFLASH1_SHAPES,
    DRAFT,
    DRAFT_SHAPES,
    EXAMPLES,
    FIXTURES,
    checkpoint_of,
    nest,
    target_config,
    without,
)

TARGET = target_config()
ADMITTED = "DFlash2 draft: convolutions and candidate selector are used"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
# Signs of a DFlash2 draft, for configs whose shapes do not matter.
SIGNS = {"fc.weight": (1, 1), "layers.0.mlp_conv.base_kernel": (1, 1)}


def read(config, shapes=None, target=TARGET):
    is_dflash2 = config.get("architectures") == ["DFlash2DraftModel"]
    return read_draft_config(checkpoint_of(config, shapes or (DRAFT_SHAPES if is_dflash2 else DFLASH1_SHAPES)), target)


def fixture(name):
    return json.loads((FIXTURES / name).read_bytes())


def target_for(draft):
    """A synthetic target that a published draft was made for, as far as the draft can tell."""
    return replace(
        TARGET, hidden_size=draft["hidden_size"], vocab_size=draft["vocab_size"], num_layers=draft["num_target_layers"],
    )  # fmt: skip


def refused(action, code, *words):
    with pytest.raises(CheckpointError) as caught:
        action()
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_reads_the_example_draft():
    target = read_target_config(checkpoint_of(json.loads((EXAMPLES / "smollm2-135m/config.json").read_bytes())))

    draft = read_draft_config(open_checkpoint(EXAMPLES / "smollm2-135m-dflash2"), target)

    assert draft.method is DraftMethod.DFLASH2
    assert (draft.hidden_size, draft.intermediate_size, draft.num_layers) == (576, 1536, 3)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.vocab_size) == (9, 3, 64, 49152)
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 0, (1, 8, 14, 20, 27))
    assert (draft.conv_kernel_size, draft.conv_group_size) == (2, 16)
    assert (draft.selector_rank, draft.selector_top_k) == (32, 16)
    assert draft.rope == RopeParameters(RopeType.DEFAULT, 100000.0)
    assert draft.layers == (DraftLayer(causal=False, window=None),) * 3
    assert (draft.input_embedding_scale, draft.output_multiplier, draft.final_logit_softcapping) == (1.0, 1.0, None)
    assert (draft.has_own_quantization, draft.notices) == (False, (ADMITTED,))


def test_reads_qwen38_27b_dflash2_rebuilt_from_its_published_values():
    config = fixture("qwen3.8-27b-dflash2.json")

    draft = read(config, SIGNS, target_for(config))

    assert draft.method is DraftMethod.DFLASH2
    assert (draft.hidden_size, draft.intermediate_size, draft.num_layers) == (5120, 17408, 5)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim) == (32, 8, 128)
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 248070, (5, 19, 33, 47, 61))
    assert (draft.conv_kernel_size, draft.conv_group_size) == (2, 16)
    assert (draft.selector_rank, draft.selector_top_k) == (256, 16)
    assert draft.layers == (DraftLayer(causal=False, window=2048),) * 5
    assert draft.rope == RopeParameters(RopeType.DEFAULT, 1e7)
    assert (draft.rms_norm_eps, draft.vocab_size) == (1e-6, 248320)
    assert (draft.output_multiplier, draft.final_logit_softcapping) == (1.0, None)
    assert draft.notices == (ADMITTED,)


def test_reads_muse_glimmer_30b_dflash2_rebuilt_from_its_published_values():
    config = fixture("muse-glimmer-30b-dflash2.json")

    draft = read(config, SIGNS, target_for(config))

    assert (draft.hidden_size, draft.intermediate_size, draft.num_layers) == (6656, 19968, 5)
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (16, 201818, (1, 13, 25, 37, 49))
    assert draft.layers == (DraftLayer(causal=False, window=2048),) * 5
    assert draft.rope == RopeParameters(RopeType.DEFAULT, 5e5)
    assert (draft.rms_norm_eps, draft.vocab_size) == (1e-5, 202048)
    assert (draft.output_multiplier, draft.final_logit_softcapping) == (0.19611613513818404, 20.0)


def test_refuses_mimo_for_its_attention_sinks():
    config = fixture("mimo-v2.5-pro-fp4-dflash.json")

    refused(
        lambda: read(config, {"fc.weight": (1, 1)}, target_for(config)), "UNSUPPORTED_FIELD",
        "attention_sink_bias (or dflash_config.attention_sink_bias) true", "sink of every head's softmax would be lost",
    )  # fmt: skip


def test_reads_mimo_layers_once_its_unsupported_fields_are_gone():
    config = nest(without(fixture("mimo-v2.5-pro-fp4-dflash.json"), "attention_value_scale"), attention_sink_bias=False)

    draft = read(config, {"fc.weight": (1, 1)}, target_for(config))

    assert draft.method is DraftMethod.DFLASH
    assert draft.layers == (DraftLayer(causal=False, window=1024),) * 5
    assert draft.rope == RopeParameters(RopeType.DEFAULT, 10000.0, 0.5)
    assert (draft.conv_kernel_size, draft.selector_rank) == (None, None)
    assert draft.notices == ("the last layer is tapped: its output is taken before the target's final norm",)


SPELLINGS = [
    *(
        pytest.param(key, flat, nested, id=key)
        for key, flat, nested in (
            ("block_size", 4, 5), ("mask_token_id", 0, 9), ("conv_kernel_size", 3, 1), ("conv_group_size", 8, 4),
            ("selector_rank", 5, 6), ("selector_top_k", 3, 2), ("input_embedding_scale", 2.5, 1.5),
            ("output_multiplier", 0.5, 0.25), ("final_logit_softcapping", 20.0, 30.0),
        )
    )
]  # fmt: skip


@pytest.mark.parametrize(("key", "flat", "nested"), SPELLINGS)
def test_flat_spelling_wins_over_nested_with_a_notice(key, flat, nested):
    both = read(nest({**DRAFT, key: flat}, **{key: nested}))
    only_nested = read(nest({**DRAFT, key: None}, **{key: nested}))
    only_flat = read(nest({**DRAFT, key: flat}, **{key: None}))

    assert (getattr(both, key), getattr(only_nested, key), getattr(only_flat, key)) == (flat, nested, flat)
    assert both.notices == (ADMITTED, f"{key} is {flat} and dflash_config.{key} is {nested}: using {flat}")
    assert only_nested.notices == only_flat.notices == (ADMITTED,)


def test_equal_spellings_give_no_notice():
    assert read({**DRAFT, "block_size": 8}).notices == (ADMITTED,)


TAPS = [
    pytest.param({"target_layer_ids": [5, 2]}, {}, (5, 2), [], id="flat, order kept"),
    pytest.param({}, {"target_layer_ids": [0, 6]}, (0, 6), [], id="nested"),
    pytest.param({"aux_hidden_state_layer_ids": [2, 4]}, {}, (1, 3), [], id="speculators counts from one"),
    pytest.param({"eagle_aux_hidden_state_layer_ids": [2, 4]}, {}, (1, 3), [], id="vLLM counts from one"),
    pytest.param({"layer_ids": [2, 4]}, {}, (2, 4), [], id="layer_ids"),
    pytest.param({}, {"layer_ids": [2, 4]}, (2, 4), [], id="nested layer_ids"),
    pytest.param({"target_layer_ids": [1, 3], "aux_hidden_state_layer_ids": [2, 4]}, {}, (1, 3), [], id="two agree"),
    pytest.param(
        {"target_layer_ids": [1, 3], "aux_hidden_state_layer_ids": [1, 3]}, {}, (1, 3),
        ["target_layer_ids means layers [1, 3] and aux_hidden_state_layer_ids means [0, 2]: using target_layer_ids"],
        id="two disagree",
    ),
    pytest.param(
        {"target_layer_ids": [1, 3]}, {"target_layer_ids": [1, 4]}, (1, 3),
        ["target_layer_ids is [1, 3] and dflash_config.target_layer_ids is [1, 4]: using [1, 3]"],
        id="flat wins over nested",
    ),
    pytest.param(
        {"target_layer_ids": [1, 7]}, {}, (1, 7),
        ["the last layer is tapped: its output is taken before the target's final norm"], id="last layer",
    ),
    pytest.param(
        {}, {}, (1, 5), ["draft names no target_layer_ids: using the default taps [1, 5]"], id="default taps",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flat", "nested", "expected", "notices"), TAPS)
def test_reads_taps_in_every_spelling(flat, nested, expected, notices):
    draft = read(nest({**DFLASH1, **flat}, **{"target_layer_ids": None, **nested}))

    assert draft.target_layer_ids == expected
    assert draft.notices == tuple(notices)


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        pytest.param(36, 5, (1, 9, 17, 25, 33), id="Qwen3-8B"),
        pytest.param(36, 1, (18,), id="one layer"),
        pytest.param(30, 3, (1, 14, 27), id="three layers"),
        pytest.param(9, 3, (1, 4, 6), id="halves go to even, up"),
        pytest.param(7, 3, (1, 2, 4), id="halves go to even, down"),
    ],
)
def test_default_taps_are_spread_as_the_authors_spread_them(num_target_layers, num_draft_layers, expected):
    assert default_taps(num_target_layers, num_draft_layers) == expected


FULL_LAYER, WIDE = DraftLayer(False, None), DraftLayer(False, 12)
CAUSAL_FULL, CAUSAL_WIDE = DraftLayer(True, None), DraftLayer(True, 12)
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
SWA = {"use_swa": True, "sliding_window": 12}
SPECULATOR = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
LAYERS = [
    pytest.param({}, {}, [FULL_LAYER, FULL_LAYER], id="no layer_types: full, non-causal"),
    pytest.param({"layer_types": None, "sliding_window": 12}, {}, [FULL_LAYER, FULL_LAYER], id="unused window"),
    pytest.param(SLIDING, {}, [CAUSAL_WIDE, CAUSAL_WIDE], id="sliding is causal by default"),
    pytest.param(MIXED, {}, [CAUSAL_WIDE, FULL_LAYER], id="mixed: full stays non-causal"),
    pytest.param({**MIXED, "is_causal": False}, {}, [WIDE, FULL_LAYER], id="is_causal false"),
    pytest.param({**MIXED, "is_causal": True}, {}, [CAUSAL_WIDE, CAUSAL_FULL], id="is_causal true"),
    pytest.param({**MIXED, "is_causal": 0}, {}, [WIDE, FULL_LAYER], id="is_causal 0"),
    pytest.param({**MIXED, "is_causal": 1}, {}, [CAUSAL_WIDE, CAUSAL_FULL], id="is_causal 1"),
    pytest.param(MIXED, {"causal": False}, [WIDE, FULL_LAYER], id="nested causal"),
    pytest.param({**MIXED, "is_causal": None}, {"causal": True}, [CAUSAL_WIDE, CAUSAL_FULL], id="null gives way"),
    pytest.param(SWA, {}, [WIDE, WIDE], id="use_swa: all sliding, non-causal"),
    pytest.param({"sliding_window": 12}, {"use_swa": True}, [WIDE, WIDE], id="nested use_swa"),
    pytest.param({**SWA, "is_causal": True}, {}, [CAUSAL_WIDE, CAUSAL_WIDE], id="use_swa with is_causal"),
    pytest.param(SLIDING, {"swa_window_size": 6}, [DraftLayer(True, 6)] * 2, id="nested window wins"),
    pytest.param({**SLIDING, "use_sliding_window": True, "max_window_layers": 0}, {}, [CAUSAL_WIDE] * 2, id="used"),
    pytest.param({**SLIDING, **SPECULATOR}, {}, [CAUSAL_WIDE] * 2, id="speculators dflash"),
    pytest.param(
        {**SLIDING, **SPECULATOR, "sliding_window_non_causal": True}, {}, [WIDE, WIDE], id="speculators non-causal",
    ),
    pytest.param(
        {**SLIDING, "architectures": ["MuseGlimmerAssistantModel"]}, {}, [WIDE, WIDE], id="Muse assistant non-causal",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flat", "nested", "expected"), LAYERS)
def test_says_what_each_layer_sees(flat, nested, expected):
    assert read(nest({**DFLASH1, **flat}, **nested)).layers == tuple(expected)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        pytest.param({}, (WIDE, WIDE), id="default"),
        pytest.param({"sliding_window_non_causal": False}, (CAUSAL_WIDE, CAUSAL_WIDE), id="false"),
        pytest.param({"sliding_window_non_causal": False, "is_causal": False}, (WIDE, WIDE), id="is_causal wins"),
    ],
)
def test_speculators_dflash2_slides_non_causally_by_default(flag, expected):
    config = {**without(DRAFT, "architectures"), **SLIDING, "speculators_model_type": "dflash2", **flag}

    assert read(config, DRAFT_SHAPES).layers == expected


LAYER_NOTICES = [
    pytest.param(
        {**SLIDING, "sliding_window": 12}, {"swa_window_size": 6},
        "sliding_window is 12 and swa_window_size is 6: using 6", id="two windows",
    ),
    pytest.param(
        {"layer_types": ["full_attention"] * 2, "use_swa": True}, {},
        "layer_types lists full layers alone and use_swa is true: using layer_types", id="use_swa unused",
    ),
    pytest.param(
        {"architectures": ["MuseGlimmerAssistantModel"]}, {},
        "MuseGlimmerAssistantModel gives no is_causal: using false", id="Muse assistant",
    ),
    pytest.param(
        {"rope_parameters": {"rope_theta": 5.0}}, {},
        "rope_theta is 10000.0 and in the rope parameters 5.0: using 10000.0", id="flat theta wins",
    ),
    pytest.param(
        {"is_causal": True}, {"causal": False}, "is_causal is true and dflash_config.causal is false: using true",
        id="flat is_causal wins",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flat", "nested", "notice"), LAYER_NOTICES)
def test_disagreement_is_noticed(flat, nested, notice):
    assert read(nest({**DFLASH1, **flat}, **nested)).notices == (notice,)


def test_reads_speculators_layout():
    body_keys = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "rms_norm_eps", "rope_theta",
    )  # fmt: skip
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8,
        "mask_token_id": 127, "aux_hidden_state_layer_ids": [2, 4, 5], "draft_vocab_size": 128,
        "sample_from_anchor": False,
        "transformer_layer_config": {"model_type": "qwen3", **{key: DRAFT[key] for key in body_keys}},
    }  # fmt: skip

    assert read(config) == read(DFLASH1)


VALUES = [
    pytest.param(without(DRAFT, "head_dim"), {"head_dim": 16}, id="head_dim is H/n"),
    pytest.param({**DRAFT, "head_dim": None}, {"head_dim": 16}, id="null is absent"),
    pytest.param(without(DRAFT, "rms_norm_eps"), {"rms_norm_eps": 1e-6}, id="default eps"),
    pytest.param(nest(DRAFT, final_logit_softcapping=0), {"final_logit_softcapping": None}, id="cap of zero is off"),
    pytest.param(nest(DRAFT, final_logit_softcapping=-1.0), {"final_logit_softcapping": None}, id="cap below zero"),
    pytest.param({**DRAFT, "quantization_config": {"bits": 8}}, {"has_own_quantization": True}, id="own quantization"),
    pytest.param({**DRAFT, "target_hidden_size": 64}, {"target_hidden_size": 64}, id="target_hidden_size"),
    pytest.param(nest(DRAFT, attention_value_scale=1.0), {"block_size": 8}, id="value scale of one"),
    pytest.param({**DRAFT, "is_neox_style": True, "attention_mode": "gqa"}, {"block_size": 8}, id="supported words"),
    pytest.param({**DRAFT, "tie_word_embeddings": True, "unknown": 1}, {"block_size": 8}, id="ignored keys"),
    pytest.param(without(DRAFT, "num_target_layers"), {"num_layers": 2}, id="num_target_layers absent"),
]


@pytest.mark.parametrize(("config", "expected"), VALUES)
def test_fills_in_defaults(config, expected):
    draft = read(config)

    assert {name: getattr(draft, name) for name in expected} == expected


REFUSALS = [
    pytest.param(nest(DRAFT, attention_sink_bias=True), "UNSUPPORTED_FIELD", ["sink_bias"], id="nested sinks"),
    pytest.param({**DRAFT, "attention_sink_bias": 1}, "UNSUPPORTED_FIELD", ["attention_sink_bias", "lost"], id="sinks"),
    pytest.param(
        {**DRAFT, "attention_value_scale": 0.612}, "UNSUPPORTED_FIELD", ["attention_value_scale", "0.612"], id="scale",
    ),
    pytest.param(
        {**DRAFT, "use_gemma_norm": True}, "UNSUPPORTED_FIELD",
        ["use_gemma_norm", "true", "hint: take a draft without"],
        id="gemma norm",
    ),
    pytest.param(nest(DRAFT, fc_norm=True), "UNSUPPORTED_FIELD", ["fc_norm", "norm of the tap"], id="fc_norm"),
    pytest.param({**DRAFT, "attention_bias": True}, "UNSUPPORTED_FIELD", ["attention_bias true", "biases"], id="bias"),
    pytest.param({**DRAFT, "is_neox_style": False}, "UNSUPPORTED_FIELD", ["is_neox_style false"], id="interleaved"),
    pytest.param(
        {**DRAFT, "rope_is_neox_style": False}, "UNSUPPORTED_FIELD", ["rope_is_neox_style false"], id="old interleaved",
    ),
    pytest.param({**DRAFT, "hidden_act": "gelu"}, "UNSUPPORTED_FIELD", ['hidden_act "gelu"'], id="gelu"),
    pytest.param(nest(DRAFT, projector_type="domino"), "DRAFT_DOMINO", ["this is a Domino draft"], id="Domino"),
    pytest.param(nest(DRAFT, projector_type="mlp"), "UNSUPPORTED_FIELD", ["projector_type", '"mlp"'], id="projector"),
    pytest.param(nest(DRAFT, attention_mode="mla"), "FIELD_MISSING", ["qk_rope_head_dim"], id="mla without sizes"),
    pytest.param(
        nest(DRAFT, attention_mode="mla", qk_rope_head_dim=7), "FIELD_VALUE", ["an even number", "7"], id="odd half",
    ),
    pytest.param(nest(DRAFT, attention_mode="MLA"), "UNSUPPORTED_FIELD", ["attention_mode", '"MLA"'], id="shouted mla"),
    pytest.param(nest(DRAFT, attention_mode="nsa"), "UNSUPPORTED_FIELD", ["attention_mode", '"nsa"'], id="nsa"),
    pytest.param(
        {**DRAFT, "hidden_size": 96}, "DRAFT_HIDDEN_SIZE", ["hidden_size", "expected 64, got 96"], id="hidden size",
    ),
    pytest.param(
        {**DRAFT, "target_hidden_size": 96}, "DRAFT_HIDDEN_SIZE", ["target_hidden_size", "got 96"], id="target width",
    ),
    pytest.param(
        {**DRAFT, "hidden_size": 96, "target_hidden_size": 64}, "DRAFT_HIDDEN_SIZE", ["embedding and head", "got 96"],
        id="own width",
    ),
    pytest.param(
        {**DRAFT, "vocab_size": 130}, "DRAFT_VOCABULARY", ["draft's vocab_size is not", "expected 128, got 130"],
        id="vocabulary",
    ),
    pytest.param({**DRAFT, "draft_vocab_size": 64}, "DRAFT_VOCABULARY", ["draft_vocab_size", "got 64"], id="own vocab"),
    pytest.param(
        {**DRAFT, "num_target_layers": 30}, "DRAFT_NUM_LAYERS", ["num_target_layers", "expected 8, got 30"], id="depth",
    ),
    pytest.param(
        nest(DRAFT, target_layer_ids=[1, 8]), "DRAFT_TAPS", ["from 0 to 7", "[1, 8]", "hint: pass the target"],
        id="tap out of range",
    ),
    pytest.param(nest(DRAFT, target_layer_ids=[1, 1]), "DRAFT_TAPS", ["distinct", "[1, 1]"], id="tap twice"),
    pytest.param(nest(DRAFT, target_layer_ids=[-1]), "DRAFT_TAPS", ["[-1]"], id="negative tap"),
    pytest.param(nest(DRAFT, target_layer_ids=[]), "FIELD_VALUE", ["target_layer_ids", "a list"], id="no tap"),
    pytest.param(nest(DRAFT, target_layer_ids=[1.0]), "FIELD_VALUE", ["target_layer_ids", "[1.0]"], id="float tap"),
    pytest.param(
        nest(DRAFT, mask_token_id=None), "FIELD_MISSING", ["mask_token_id (or dflash_config.mask_token_id)"], id="mask",
    ),
    pytest.param(nest(DRAFT, mask_token_id=128), "FIELD_VALUE", ["mask_token_id", "below 128"], id="mask out of range"),
    pytest.param(nest(DRAFT, mask_token_id=-1), "FIELD_VALUE", ["mask_token_id", "≥ 0"], id="negative mask"),
    pytest.param(
        nest(DRAFT, block_size=None), "FIELD_MISSING", ["block_size (or dflash_config.block_size)"], id="no block_size",
    ),
    pytest.param(nest(DRAFT, block_size=1), "FIELD_VALUE", ["block_size", "≥ 2"], id="block of one"),
    *(
        pytest.param(without(DRAFT, key), "FIELD_MISSING", [f"config has no {key}"], id=f"no {key}")
        for key in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size",
        )
    ),
    pytest.param(without(DRAFT, "rope_theta"), "FIELD_MISSING", ["or rope_parameters.rope_theta"], id="theta"),
    pytest.param({**DRAFT, "num_key_value_heads": 3}, "HEADS", ["got 3"], id="kv groups"),
    pytest.param({**DRAFT, "num_attention_heads": 6, "head_dim": None}, "HEADS", ["head_dim is absent"], id="heads"),
    pytest.param({**DRAFT, "is_causal": "no"}, "FIELD_VALUE", ["is_causal", '"no"'], id="is_causal string"),
    pytest.param({**DRAFT, "is_causal": 2}, "FIELD_VALUE", ["is_causal", "got 2"], id="is_causal 2"),
    pytest.param({**DRAFT, "is_causal": 1.0}, "FIELD_VALUE", ["is_causal", "got 1.0"], id="is_causal float"),
    pytest.param(nest(DRAFT, causal=[]), "FIELD_VALUE", ["is_causal", "[]"], id="causal list"),
    pytest.param(
        {**DRAFT, "layer_types": ["sliding_attention"], "sliding_window": 12}, "DRAFT_LAYERS", ["2 times"], id="short",
    ),
    pytest.param(
        {**DRAFT, "layer_types": ["full_attention", "linear"]}, "DRAFT_LAYERS", ["full_attention or"], id="other type",
    ),
    pytest.param(
        {**DRAFT, **SLIDING, "sliding_window": None}, "DRAFT_LAYERS", ["no window", "swa_window_size"], id="no window",
    ),
    pytest.param({**DRAFT, "use_swa": True}, "DRAFT_LAYERS", ["sliding layers and no window"], id="use_swa, no window"),
    pytest.param(
        {**DRAFT, **SLIDING, "use_sliding_window": False}, "DRAFT_LAYERS", ["use_sliding_window is false"],
        id="window contradicted",
    ),
    pytest.param(nest(DRAFT, conv_kernel_size=9), "DRAFT_CONV", ["block_size 8", "kernel_size 9"], id="long conv"),
    pytest.param(nest(DRAFT, conv_group_size=24), "DRAFT_CONV", ["divisible", "conv_group_size 24"], id="conv groups"),
    pytest.param(nest(DRAFT, selector_top_k=129), "FIELD_VALUE", ["at most vocab_size 128"], id="top_k"),
    pytest.param(nest(DRAFT, output_multiplier=0), "FIELD_VALUE", ["output_multiplier", "> 0"], id="multiplier"),
    pytest.param({**DRAFT, "dflash_config": 1}, "DRAFT_CONTRADICTION", ["no conv_kernel_size"], id="no section"),
    pytest.param({**DFLASH1, "dflash_config": 1}, "FIELD_VALUE", ["dflash_config", "an object"], id="section, DFlash"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "code", "words"), REFUSALS)
def test_refuses_draft_that_it_would_get_wrong(config, code, words):
    refused(lambda: read(config), code, *words)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        pytest.param("layers.1.self_attn.attention_sink_bias", "sink", id="sinks"),
        pytest.param("mask_hidden", "the mask slots' own input", id="mask_hidden"),
        pytest.param("d2t", "vocabulary", id="d2t"),
        pytest.param("model.d2t", "vocabulary", id="prefixed d2t"),
    ],
)
def test_refuses_tensor_that_would_be_lost(name, lost):
    refused(lambda: read(DRAFT, {**DRAFT_SHAPES, name: (4,)}), "UNSUPPORTED_TENSOR", f"tensor {name}", lost)


def test_refuses_mask_embedding_of_its_own(tmp_path):
    (tmp_path / "mask_embedding.pt").write_bytes(b"\x80")
    draft = checkpoint_of(DRAFT, DRAFT_SHAPES, path=tmp_path)

    refused(lambda: read_draft_config(draft, TARGET), "UNSUPPORTED_FILE", "mask_embedding.pt", "mask row would be lost")


def test_refuses_the_target_in_place_of_the_draft():
    target = checkpoint_of({"architectures": ["LlamaForCausalLM"]}, {"model.embed_tokens.weight": (128, 64)})

    refused(lambda: read_draft_config(target, TARGET), "DRAFT_IS_TARGET", "the target was passed as the draft")


@pytest.mark.parametrize(
    ("name", "count", "nbytes"),
    [
        pytest.param("qwen3.8-27b-dflash2.json", 81, 3848808960, id="Qwen3.8-27B"),
        pytest.param("muse-glimmer-30b-dflash2.json", 81, 5544319488, id="Muse-Glimmer-30B"),
    ],
)
def test_tensor_bytes_add_up_to_the_published_files(name, count, nbytes):
    config = fixture(name)

    shapes = draft_tensor_shapes(read(config, SIGNS, target_for(config)))

    assert len(shapes) == count
    assert sum(2 * prod(shape) for shape in shapes.values()) == nbytes
