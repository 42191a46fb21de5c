"""Drafts are recognised by exact names and borne out by their tensors; every other kind is refused by its own name."""

from __future__ import annotations

import pytest
from dflash_core.errors import CheckpointError, ExitCode

from exporter.checkpoint import open_checkpoint
from exporter.draft_kind import DraftMethod, draft_sign, recognise_draft
from tests.exporter.small_checkpoints import (
    DFLASH1,
    DFLASH1_SHAPES,
    DRAFT,
    DRAFT_SHAPES,
    EXAMPLES,
    LLAMA,
    checkpoint_of,
    nest,
    without,
)

LM_SHAPES = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)}


def named(architecture, base=DFLASH1):
    return {**base, "architectures": [architecture]}


def test_recognises_the_example_draft():
    assert recognise_draft(open_checkpoint(EXAMPLES / "smollm2-135m-dflash2")) is DraftMethod.DFLASH2


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        pytest.param(DRAFT, DRAFT_SHAPES, DraftMethod.DFLASH2, id="DFlash2DraftModel"),
        pytest.param(DFLASH1, DFLASH1_SHAPES, DraftMethod.DFLASH, id="DFlashDraftModel"),
        pytest.param(named("DFlashSpeculator"), DFLASH1_SHAPES, DraftMethod.DFLASH, id="DFlashSpeculator"),
        pytest.param(named("MuseGlimmerAssistantModel"), DFLASH1_SHAPES, DraftMethod.DFLASH, id="Muse assistant"),
        pytest.param(named("Qwen3DFlashDraftModel"), DFLASH1_SHAPES, DraftMethod.DFLASH, id="training name"),
        pytest.param(
            {**without(DRAFT, "architectures"), "speculators_model_type": "dflash2"}, DRAFT_SHAPES,
            DraftMethod.DFLASH2, id="speculators alone",
        ),
        pytest.param(
            {**named("DFlashSpeculator"), "speculators_model_type": "dflash"}, DFLASH1_SHAPES, DraftMethod.DFLASH,
            id="both agree",
        ),
        pytest.param(
            {**DRAFT, "sample_from_anchor": False, "markov_rank": None}, DRAFT_SHAPES, DraftMethod.DFLASH2,
            id="DSpark's keys switched off",
        ),
        pytest.param(
            DRAFT, {f"model.{name}": shape for name, shape in DRAFT_SHAPES.items()}, DraftMethod.DFLASH2,
            id="prefixed tensors",
        ),
    ],
)  # fmt: skip
def test_recognises_method(config, shapes, expected):
    assert recognise_draft(checkpoint_of(config, shapes)) is expected


DSPARK = "this is a DSpark draft"
REFUSALS = [
    *(
        pytest.param(named(name), DFLASH1_SHAPES, "DRAFT_DSPARK", [DSPARK, name, "shift every proposal"], id=name)
        for name in (
            "Qwen3DSparkModel", "DSparkDraftModel", "K3DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel",
            "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark", "DSparkSpeculator",
        )
    ),
    pytest.param(
        {**without(DFLASH1, "architectures"), "speculators_model_type": "dspark"}, DFLASH1_SHAPES, "DRAFT_DSPARK",
        [DSPARK, "speculators_model_type dspark"], id="speculators dspark",
    ),
    pytest.param(
        {**DFLASH1, "model_type": "k3_dspark"}, DFLASH1_SHAPES, "DRAFT_DSPARK", [DSPARK, "k3_dspark"], id="k3_dspark",
    ),
    pytest.param(
        {**named("Other"), "model_type": "k3_dspark"}, DFLASH1_SHAPES, "DRAFT_DSPARK", [DSPARK], id="k3_dspark class",
    ),
    pytest.param({**DFLASH1, "markov_rank": 256}, DFLASH1_SHAPES, "DRAFT_DSPARK", ["markov_rank 256"], id="rank"),
    pytest.param(
        {**DFLASH1, "markov_head_type": "low"}, DFLASH1_SHAPES, "DRAFT_DSPARK", ["markov_head_type"], id="head type",
    ),
    pytest.param(
        nest(DFLASH1, enable_confidence_head=True), DFLASH1_SHAPES, "DRAFT_DSPARK", ["enable_confidence_head true"],
        id="confidence head",
    ),
    pytest.param({**DFLASH1, "dspark_config": [1]}, DFLASH1_SHAPES, "DRAFT_DSPARK", ["dspark_config"], id="dspark_*"),
    pytest.param(
        {**DRAFT, "sample_from_anchor": True}, DRAFT_SHAPES, "DRAFT_DSPARK", ["sample_from_anchor true"], id="anchor",
    ),
    *(
        pytest.param(DFLASH1, {**DFLASH1_SHAPES, name: (8, 8)}, code, [what, f"tensor {name}"], id=name)
        for name, code, what in (
            ("markov_head.markov_w1", "DRAFT_DSPARK", DSPARK),
            ("confidence_head.proj.weight", "DRAFT_DSPARK", DSPARK),
            ("conf_proj.weight", "DRAFT_DSPARK", DSPARK),
            ("prefix_gru.weight_ih_l0", "DRAFT_DOMINO", "this is a Domino draft"),
            ("embed_proj.weight", "DRAFT_DOMINO", "this is a Domino draft"),
            ("layers.0.self_attn.g_proj.weight", "DRAFT_LAGUNA", "this is a Laguna draft"),
            ("aux_hidden_norms.0.weight", "DRAFT_LAGUNA", "this is a Laguna draft"),
            ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "DRAFT_MLA", "has latent attention and does not say so"),
        )
    ),
    pytest.param(named("DFlashLagunaForCausalLM"), DFLASH1_SHAPES, "DRAFT_LAGUNA", ["Laguna draft"], id="Laguna"),
    pytest.param(
        named("KimiK3DFlashDraftModel"), DFLASH1_SHAPES, "DRAFT_KIMI_K3", ["Kimi K3 draft", "not built yet"], id="Kimi",
    ),
    pytest.param(
        named("MiniMaxDFlash2DraftModel", DRAFT), DRAFT_SHAPES, "DRAFT_VARIANT", ["MiniMaxDFlash2DraftModel"],
        id="MiniMax",
    ),
    pytest.param(
        named("DFlash2BeamDraftModel", DRAFT), DRAFT_SHAPES, "DRAFT_VARIANT", ["DFlash2BeamDraftModel"], id="Beam",
    ),
    pytest.param(
        LLAMA, LM_SHAPES, "DRAFT_IS_TARGET", ["the target was passed as the draft", "hint: pass the target first"],
        id="target",
    ),
    pytest.param(
        named("Qwen3ForCausalLM"), LM_SHAPES, "DRAFT_IS_CAUSAL_LM",
        ["this is a target-style model", "no fc.weight", "hint: take a draft"],
        id="plain causal LM",
    ),
    pytest.param(
        named("DFlash2draftModel", DRAFT), DRAFT_SHAPES, "DRAFT_UNKNOWN", ["match exactly", "DFlash2draftModel"],
        id="almost the name",
    ),
    pytest.param(
        without(DRAFT, "architectures"), DRAFT_SHAPES, "DRAFT_UNKNOWN", ["architecture absent"], id="no architecture",
    ),
    pytest.param(
        {**without(DRAFT, "architectures"), "speculators_model_type": "eagle3"}, DRAFT_SHAPES, "DRAFT_UNKNOWN",
        ["speculators_model_type", '"eagle3"'], id="other speculator",
    ),
    pytest.param(
        {**DRAFT, "architectures": "DFlash2DraftModel"}, DRAFT_SHAPES, "ARCHITECTURES", ["a list of one string"],
        id="architectures is a string",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "shapes", "code", "words"), REFUSALS)
def test_refuses_other_kinds_by_name(config, shapes, code, words):
    with pytest.raises(CheckpointError) as caught:
        recognise_draft(checkpoint_of(config, shapes), "LlamaForCausalLM")

    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value), str(caught.value)


CONTRADICTIONS = [
    pytest.param(
        DFLASH1, {**DFLASH1_SHAPES, "layers.0.mlp_conv.base_kernel": (2, 2, 64)}, "architecture DFlashDraftModel",
        "DFlash2's tensor layers.0.mlp_conv.base_kernel", id="DFlash with a convolution",
    ),
    pytest.param(
        DFLASH1, {**DFLASH1_SHAPES, "candidate_selector.successor_codebook": (8, 8)}, "architecture DFlashDraftModel",
        "DFlash2's tensor candidate_selector.successor_codebook", id="DFlash with a selector",
    ),
    pytest.param(
        nest(DFLASH1, selector_top_k=4), DFLASH1_SHAPES, "architecture DFlashDraftModel",
        "DFlash2's field selector_top_k", id="DFlash with a selector field",
    ),
    pytest.param(
        DRAFT, DFLASH1_SHAPES, "architecture DFlash2DraftModel", "no convolution or selector tensor",
        id="DFlash2 without its tensors",
    ),
    pytest.param(
        nest(DRAFT, conv_group_size=None), DRAFT_SHAPES, "architecture DFlash2DraftModel",
        "no conv_group_size (nor dflash_config.conv_group_size)", id="DFlash2 without a conv field",
    ),
    pytest.param(
        nest(DRAFT, selector_rank=None), DRAFT_SHAPES, "architecture DFlash2DraftModel",
        "no selector_rank (nor dflash_config.selector_rank)", id="DFlash2 without a selector field",
    ),
    pytest.param(
        {**DRAFT, "speculators_model_type": "dflash"}, DRAFT_SHAPES, "architecture DFlash2DraftModel",
        "speculators_model_type dflash", id="two claims",
    ),
]


@pytest.mark.parametrize(("config", "shapes", "first", "second"), CONTRADICTIONS)
def test_refuses_contradiction_with_both_facts(config, shapes, first, second):
    with pytest.raises(CheckpointError) as caught:
        recognise_draft(checkpoint_of(config, shapes))

    assert caught.value.code == "DRAFT_CONTRADICTION"
    assert caught.value.expected == first
    assert caught.value.got == second


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(DRAFT, "architecture DFlash2DraftModel", id="architecture"),
        pytest.param({"speculators_model_type": "dflash"}, "speculators_model_type", id="speculators"),
        pytest.param({"dflash_config": {}}, "dflash_config", id="section"),
        pytest.param(LLAMA, None, id="target"),
    ],
)
def test_says_what_marks_a_config_as_a_draft(config, expected):
    assert draft_sign(config) == expected
