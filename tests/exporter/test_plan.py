"""Every tensor gets a format with an origin; settings that do not go together are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from dflash_core.effective import Origin, Role
from dflash_core.errors import PlanError
from dflash_core.formats import Format

from exporter.draft_kind import DraftMethod
from exporter.plan import PrecisionPlan, PrecisionSettings, plan_precision, plan_table
from exporter.recipe import Recipe, load_recipe
from exporter.safetensors_header import TensorEntry


@dataclass(frozen=True)
class ToyCheckpoint:
    """Config and tensor entries, as planning reads them."""

    config: dict[str, Any]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True)
class ToyDraft:
    """What planning asks of a draft's config."""

    method: Enum = DraftMethod.DFLASH2
    block_size: int = 8
    has_own_quantization: bool = False


class Foreign(Enum):
    DSPARK = "dspark"
    MEDUSA = "medusa"


def entry(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorEntry:
    return TensorEntry(name, dtype, shape, "model.safetensors", 0, prod(shape) * (4 if dtype == "F32" else 2))


def target(hidden: int = 64, inner: int = 96, *, tied: bool = False) -> ToyCheckpoint:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (64, hidden), f"{at}self_attn.k_proj.weight": (32, hidden),
            f"{at}self_attn.v_proj.weight": (32, hidden), f"{at}self_attn.o_proj.weight": (hidden, 64),
            f"{at}mlp.gate_proj.weight": (inner, hidden), f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    if not tied:
        shapes["lm_head.weight"] = (128, hidden)
    config = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    }
    return ToyCheckpoint(config, {name: entry(name, shape) for name, shape in shapes.items()})


def draft(
    hidden: int = 64, inner: int = 96, *, two: bool = True, dtypes: dict[str, str] | None = None
) -> ToyCheckpoint:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,), "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (64, hidden), "layers.0.self_attn.k_proj.weight": (32, hidden),
        "layers.0.self_attn.v_proj.weight": (32, hidden), "layers.0.self_attn.o_proj.weight": (hidden, 64),
        "layers.0.self_attn.q_norm.weight": (16,), "layers.0.self_attn.k_norm.weight": (16,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden), "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    if two:
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.0.{conv}.base_kernel"] = (2, 2, hidden)
            shapes[f"layers.0.{conv}.kernel_projection.weight"] = (4 * hidden // 16, hidden)
        shapes |= {
            "candidate_selector.predecessor_codebook": (128, 32), "candidate_selector.successor_codebook": (128, 32),
            "candidate_selector.hidden_projection.weight": (32, hidden),
        }
    config = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
        "dflash_config": {"target_layer_ids": [0, 1], "conv_kernel_size": 2, "conv_group_size": 16,
                          "selector_rank": 32},
    }
    dtypes = dtypes or {}
    return ToyCheckpoint(
        config, {name: entry(name, shape, dtypes.get(name, "BF16")) for name, shape in shapes.items()}
    )


LLAMA = load_recipe("llama")
BODY = {
    "fc.weight", *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def plan(
    settings: PrecisionSettings, with_draft: ToyCheckpoint | None = None, facts: ToyDraft | None = None,
    recipe: Recipe = LLAMA, of: ToyCheckpoint | None = None,
) -> PrecisionPlan:
    with_draft = with_draft or draft()
    return plan_precision(of or target(), recipe, with_draft, facts or ToyDraft(), settings)


def formats(tensors: Any) -> dict[str, str]:
    return {tensor.name: tensor.format.value for tensor in tensors}


# What each setting converts.


def test_nothing_is_converted_when_nothing_is_asked() -> None:
    planned = plan(PrecisionSettings())

    assert set(formats((*planned.target, *planned.draft)).values()) == {"bf16"}
    assert {tensor.origin for tensor in (*planned.target, *planned.draft)} == {Origin.CHECKPOINT}
    assert planned.proposal_head is None and planned.skipped == ()
    assert planned.online_quantization is None and planned.recorded.online_mxfp8_scope is None
    assert (planned.recorded.method, planned.recorded.depth) == ("dflash2", 7)


def test_body_flag_converts_the_body_and_nothing_else() -> None:
    planned = plan(PrecisionSettings(draft_body="mxfp8"))

    assert {name for name, fmt in formats(planned.draft).items() if fmt == "mxfp8"} == BODY
    assert set(formats(planned.target).values()) == {"bf16"}
    assert {t.origin for t in planned.draft if t.name in BODY} == {Origin.FLAG}
    assert (planned.role(Role.DRAFT_BODY).value, planned.role(Role.DRAFT_BODY).origin) == ("mxfp8", Origin.FLAG)
    assert planned.recorded.draft_body_quantization == "mxfp8"


def test_scope_all_converts_target_projections_and_implies_the_body() -> None:
    planned = plan(PrecisionSettings(online_mxfp8_scope="all"))

    converted = {name for name, fmt in formats(planned.target).items() if fmt == "mxfp8"}
    assert converted == {
        f"model.layers.{layer}.{name}_proj.weight" for layer in (0, 1)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert {t.origin for t in planned.target if t.name in converted} == {Origin.FLAG}
    assert {name for name, fmt in formats(planned.draft).items() if fmt == "mxfp8"} == BODY
    assert {t.origin for t in planned.draft if t.name in BODY} == {Origin.SCOPE}
    assert planned.recorded.draft_body_quantization is None, "inherited is not recorded as asked for"
    assert (planned.online_quantization, planned.recorded.online_mxfp8_scope) == ("mxfp8", "all")


HEADS = [
    ("own-nvfp4", False, "nvfp4", "lm_head.weight", Format.NVFP4, 128 * 64 // 2 + 128 * 4 + 4),
    ("own-mxfp8", False, "mxfp8", "lm_head.weight", Format.MXFP8, 128 * 64 + 128 * 2),
    ("tied-nvfp4", True, "nvfp4", "model.embed_tokens.weight", Format.NVFP4, 128 * 64 // 2 + 128 * 4 + 4),
]


@pytest.mark.parametrize(
    ("tied", "asked", "source", "fmt", "nbytes"), [row[1:] for row in HEADS], ids=[row[0] for row in HEADS]
)
def test_head_flag_adds_a_copy_and_leaves_the_verifying_head(
    tied: bool, asked: str, source: str, fmt: Format, nbytes: int
) -> None:
    planned = plan(PrecisionSettings(draft_head=asked), of=target(tied=tied))

    head = planned.proposal_head
    assert head is not None
    assert (head.source, head.format, head.origin) == (source, fmt, Origin.FLAG)
    assert (head.nbytes_before, head.nbytes_after) == (0, nbytes)
    assert formats(planned.target)[source] == "bf16"
    assert planned.role(Role.VERIFY_HEAD).value == "checkpoint"
    assert set(formats(planned.draft).values()) == {"bf16"}


def test_draft_of_the_first_kind_inherits_nothing_from_scope_all() -> None:
    planned = plan(PrecisionSettings(online_mxfp8_scope="all"), draft(two=False), ToyDraft(DraftMethod.DFLASH))

    assert set(formats(planned.draft).values()) == {"bf16"}
    assert planned.role(Role.DRAFT_BODY).value == "checkpoint"


@pytest.mark.parametrize("settings", [PrecisionSettings(depth=0), PrecisionSettings(depth=0, online_mxfp8_scope="all")],
                         ids=["plain", "under-all"])
def test_depth_zero_plans_no_draft(settings: PrecisionSettings) -> None:
    planned = plan(settings)

    assert planned.draft == ()
    assert (planned.recorded.method, planned.recorded.depth) == (None, 0)
    assert planned.role(Role.DRAFT_BODY).text == "no draft"


def test_without_a_draft_only_the_target_is_planned() -> None:
    planned = plan_precision(target(), LLAMA, None, None, PrecisionSettings(online_mxfp8_scope="all"))

    assert planned.draft == () and planned.proposal_head is None
    assert planned.role(Role.DRAFT_BODY).text == "no draft"


def test_smaller_depth_is_kept() -> None:
    assert plan(PrecisionSettings(depth=3)).recorded.depth == 3


KDA = LLAMA.conversions | {"online_mxfp8": ("kda-input", "all")}


def kda_recipe() -> Recipe:
    """A family that declares kda-input, for q_proj, under its own default scope."""
    rows = tuple(
        replace(row, groups=(("online_mxfp8", "kda-input"), *row.groups)) if row.role == "attention_q" else row
        for row in LLAMA.rows
    )
    return replace(LLAMA, conversions=KDA, rows=rows)


KDA_ROWS = [
    ("default", PrecisionSettings(), "kda-input", Origin.DEFAULT, 2, "checkpoint"),
    ("asked", PrecisionSettings(online_mxfp8_scope="kda-input"), "kda-input", Origin.FLAG, 2, "checkpoint"),
    ("all", PrecisionSettings(online_mxfp8_scope="all"), "all", Origin.FLAG, 14, "mxfp8"),
]


@pytest.mark.parametrize(
    ("settings", "scope", "origin", "count", "body"), [row[1:] for row in KDA_ROWS], ids=[row[0] for row in KDA_ROWS]
)
def test_family_that_declares_kda_input_gets_it_by_default(
    settings: PrecisionSettings, scope: str, origin: Origin, count: int, body: str
) -> None:
    planned = plan(settings, recipe=kda_recipe())

    converted = [tensor for tensor in planned.target if tensor.format is Format.MXFP8]
    assert planned.recorded.online_mxfp8_scope == scope
    assert len(converted) == count and {tensor.origin for tensor in converted} == {origin}
    assert planned.role(Role.TARGET).origin is origin
    assert planned.role(Role.DRAFT_BODY).value == body


# Tensors that cannot be converted.


def test_covered_tensor_that_does_not_divide_is_skipped_with_its_reason() -> None:
    planned = plan_precision(target(inner=80), LLAMA, None, None, PrecisionSettings(online_mxfp8_scope="all"))

    assert [(tensor.name, tensor.reason, tensor.format) for tensor in planned.skipped] == [
        (f"model.layers.{layer}.mlp.down_proj.weight", "last dimension 80 is not divisible by 32", Format.BF16)
        for layer in (0, 1)
    ]
    assert {tensor.origin for tensor in planned.skipped} == {Origin.CHECKPOINT}


def test_covered_tensor_that_is_no_matrix_is_skipped_with_its_reason() -> None:
    rows = tuple(
        replace(row, keep_reason="", groups=(("online_mxfp8", "all"),)) if row.pattern == "model.norm.weight" else row
        for row in LLAMA.rows
    )

    planned = plan(ALL, recipe=replace(LLAMA, rows=rows))

    assert [(tensor.name, tensor.reason) for tensor in planned.skipped] == [("model.norm.weight", "it is no matrix")]


def test_reasons_are_given_for_what_is_kept_too() -> None:
    planned = plan(PrecisionSettings(draft_body="mxfp8"))

    reasons = {tensor.name: tensor.reason for tensor in (*planned.target, *planned.draft)}
    assert reasons["lm_head.weight"] == "target-head storage"
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "no setting asks for a conversion"
    assert reasons["layers.0.mlp_conv.base_kernel"] == "convolution"
    assert reasons["candidate_selector.hidden_projection.weight"] == "selector"
    assert reasons["fc.weight"] == "--draft-body-quantization mxfp8"


def test_plain_element_types_keep_theirs() -> None:
    planned = plan(PrecisionSettings(), draft(dtypes={"norm.weight": "F32", "fc.weight": "F16"}))

    assert formats(planned.draft)["norm.weight"] == "f32"
    assert formats(planned.draft)["fc.weight"] == "f16"
    norm = next(tensor for tensor in planned.draft if tensor.name == "norm.weight")
    assert (norm.source_dtype, norm.nbytes_before, norm.nbytes_after) == ("F32", 256, 256)


def test_draft_is_planned_under_its_canonical_names() -> None:
    plain = draft()
    shapes = {f"model.{name.replace('layers.0.', 'midlayer.')}": e.shape for name, e in plain.tensors.items()}
    spelled = ToyCheckpoint(plain.config, {name: entry(name, shape) for name, shape in shapes.items()})

    planned = plan(PrecisionSettings(draft_body="mxfp8"), spelled)

    assert {tensor.name for tensor in planned.draft} == set(plain.tensors)
    assert next(tensor for tensor in planned.draft if tensor.name == "layers.0.mlp.up_proj.weight").source == (
        "model.midlayer.mlp.up_proj.weight"
    )


def test_copies_are_claimed_and_not_stored() -> None:
    checkpoint = draft()
    tensors = checkpoint.tensors | {"embed_tokens.weight": entry("embed_tokens.weight", (128, 64))}

    planned = plan(PrecisionSettings(online_mxfp8_scope="all"), ToyCheckpoint(checkpoint.config, tensors))

    copy = planned.draft[-1]
    assert (copy.name, copy.format, copy.nbytes_before, copy.nbytes_after) == ("embed_tokens.weight", None, 16384, 0)


# Refusals.


def undeclared(group: str) -> Recipe:
    return replace(LLAMA, conversions={name: values for name, values in LLAMA.conversions.items() if name != group})


BODY_ASKED = PrecisionSettings(draft_body="mxfp8")
ALL = PrecisionSettings(online_mxfp8_scope="all")
Planning = Callable[[], PrecisionPlan]
REFUSALS: list[tuple[str, Planning, str, str]] = [
    ("speculation-off", lambda: plan_precision(target(), LLAMA, None, None, BODY_ASKED), "BODY_NO_DRAFT",
     "speculation is off: there is no draft body to convert\n   at: --draft-body-quantization mxfp8"),
    ("depth-zero", lambda: plan(PrecisionSettings(draft_body="mxfp8", depth=0)), "BODY_DEPTH_ZERO",
     "depth 0 turns speculation off: there is no draft body to convert"),
    ("dspark", lambda: plan(BODY_ASKED, facts=ToyDraft(Foreign.DSPARK)), "BODY_DSPARK",
     "a DSpark draft has no body conversion: expected method dflash2, got method dspark"),
    ("dflash1", lambda: plan(BODY_ASKED, draft(two=False), ToyDraft(DraftMethod.DFLASH)), "BODY_DFLASH1",
     "a DFlash draft of the first kind has no body conversion: expected method dflash2, got method dflash"),
    ("unknown-method", lambda: plan(BODY_ASKED, facts=ToyDraft(Foreign.MEDUSA)), "BODY_METHOD",
     "this method has no body conversion: expected method dflash2, got method medusa"),
    ("undeclared-by-target", lambda: plan(BODY_ASKED, recipe=undeclared("draft_body")), "BODY_UNDECLARED",
     "recipe llama does not declare the conversion draft_body: expected one of online_mxfp8, draft_head"),
    ("undeclared-by-draft", lambda: plan_precision(
        target(), LLAMA, draft(), ToyDraft(), BODY_ASKED, replace(load_recipe("dflash2"), conversions={})),
     "BODY_UNDECLARED", "recipe dflash2 does not declare the conversion draft_body: expected no conversion"),
    ("undeclared-by-draft-under-all", lambda: plan_precision(
        target(), LLAMA, draft(), ToyDraft(), ALL, replace(load_recipe("dflash2"), conversions={})),
     "BODY_UNDECLARED", "at: --online-mxfp8-scope all, which covers the draft body"),
    ("unknown-body-format", lambda: plan(PrecisionSettings(draft_body="mxfp6")), "BODY_FORMAT",
     "draft body cannot be stored in this format: expected mxfp8, got 'mxfp6'"),
    ("body-nvfp4", lambda: plan(PrecisionSettings(draft_body="nvfp4")), "BODY_FORMAT", "expected mxfp8, got 'nvfp4'"),
    ("own-quantization", lambda: plan(BODY_ASKED, facts=ToyDraft(has_own_quantization=True)), "BODY_OWN_QUANTIZATION",
     "a tensor is never converted twice: expected a draft in checkpoint precision, got a draft with a "
     "quantization_config of its own\n   at: --draft-body-quantization mxfp8"),
    ("own-quantization-under-all", lambda: plan(ALL, facts=ToyDraft(has_own_quantization=True)),
     "BODY_OWN_QUANTIZATION", "at: --online-mxfp8-scope all, which covers the draft body"),
    ("retained-quantized", lambda: plan(
        PrecisionSettings(), draft(dtypes={"layers.0.attention_conv.kernel_projection.weight": "F8_E4M3"})),
     "RETAINED_QUANTIZED", "tensor that always keeps checkpoint precision (convolution) is shipped quantized: expected "
     "BF16 F16 F32, got F8_E4M3\n   at: layers.0.attention_conv.kernel_projection.weight in model.safetensors"),
    ("selector-quantized", lambda: plan(
        BODY_ASKED, draft(dtypes={"candidate_selector.successor_codebook": "I8"})), "RETAINED_QUANTIZED",
     "keeps checkpoint precision (selector) is shipped quantized"),
    ("body-quantized", lambda: plan(PrecisionSettings(), draft(dtypes={"fc.weight": "F8_E4M3"})), "TENSOR_QUANTIZED",
     "tensor is not in an element type that can be planned: expected BF16 F16 F32, got F8_E4M3\n   at: fc.weight"),
    ("body-ineligible", lambda: plan(BODY_ASKED, draft(inner=80)), "BODY_INELIGIBLE",
     "draft body cannot be converted: last dimension 80 is not divisible by 32: expected rows of whole MXFP8 blocks"
     "\n   at: layers.0.mlp.down_proj.weight [64, 80]"),
    ("scope-undeclared", lambda: plan(PrecisionSettings(online_mxfp8_scope="kda-input")), "SCOPE_UNDECLARED",
     "recipe llama does not declare this scope of online MXFP8: expected all, got 'kda-input'"),
    ("scope-empty", lambda: plan(PrecisionSettings(online_mxfp8_scope="")), "SCOPE_UNDECLARED", "expected all, got ''"),
    ("no-scope-declared", lambda: plan(ALL, recipe=undeclared("online_mxfp8")), "SCOPE_UNDECLARED",
     "expected none, got 'all'"),
    ("head-without-draft", lambda: plan_precision(
        target(), LLAMA, None, None, PrecisionSettings(draft_head="nvfp4")), "HEAD_NO_DRAFT",
     "speculation is off: there is no proposal head\n   at: --draft-head-quantization nvfp4"),
    ("head-at-depth-zero", lambda: plan(PrecisionSettings(draft_head="nvfp4", depth=0)), "HEAD_DEPTH_ZERO",
     "depth 0 turns speculation off: there is no proposal head"),
    ("head-undeclared", lambda: plan(PrecisionSettings(draft_head="nvfp4"), recipe=undeclared("draft_head")),
     "HEAD_UNDECLARED", "recipe llama does not declare the conversion draft_head"),
    ("head-format", lambda: plan(PrecisionSettings(draft_head="int4")), "HEAD_FORMAT",
     "proposal head cannot be stored in this format: expected nvfp4 or mxfp8, got 'int4'"),
    ("head-ineligible", lambda: plan(
        PrecisionSettings(draft_head="mxfp8"), draft(hidden=48), of=target(hidden=48)), "HEAD_INELIGIBLE",
     "last dimension 48 is not divisible by 32: expected rows of whole MXFP8 blocks\n   at: lm_head.weight [128, 48]"),
    ("depth-too-large", lambda: plan(PrecisionSettings(depth=8)), "DEPTH_RANGE",
     "draft cannot propose this many tokens: expected 0 to 7, one less than its block, got 8"),
    ("depth-negative", lambda: plan(PrecisionSettings(depth=-1)), "DEPTH_RANGE", "got -1"),
    ("depth-without-draft", lambda: plan_precision(target(), LLAMA, None, None, PrecisionSettings(depth=3)),
     "DEPTH_NO_DRAFT", "there is no draft to propose tokens: got 3"),
]


@pytest.mark.parametrize(
    ("planning", "code", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_setting_that_cannot_be_applied_is_refused_by_name(planning: Planning, code: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        planning()

    assert caught.value.code == code
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert message in str(caught.value)


def test_tensor_under_two_names_is_refused() -> None:
    checkpoint = draft()
    tensors = checkpoint.tensors | {"model.fc.weight": entry("model.fc.weight", (64, 128))}

    with pytest.raises(PlanError, match=r"fc\.weight and model\.fc\.weight"):
        plan(PrecisionSettings(), ToyCheckpoint(checkpoint.config, tensors))


# The target does not see draft settings.


@pytest.mark.parametrize("scope", [None, "all"], ids=["off", "all"])
def test_no_draft_setting_changes_the_target_plan_or_its_tuning_identity(scope: str | None) -> None:
    alone = plan_precision(target(), LLAMA, None, None, PrecisionSettings(online_mxfp8_scope=scope))
    planned = refused = 0

    for body, head, depth in product((None, "mxfp8"), (None, "nvfp4", "mxfp8"), (None, 0, 1, 7)):
        try:
            made = plan(PrecisionSettings(scope, body, head, depth))
        except PlanError as error:
            assert error.code in ("BODY_DEPTH_ZERO", "HEAD_DEPTH_ZERO")
            refused += 1
            continue
        planned += 1
        assert made.target == alone.target
        assert made.tuning_identity == alone.tuning_identity

    assert (planned, refused) == (19, 5)


def test_tuning_identity_tells_target_plans_apart() -> None:
    identities = {
        "off": plan(PrecisionSettings()).tuning_identity,
        "all": plan(ALL).tuning_identity,
        "kda": plan(PrecisionSettings(), recipe=kda_recipe()).tuning_identity,
        "other-shape": plan(PrecisionSettings(), of=target(inner=128)).tuning_identity,
    }

    assert len(set(identities.values())) == 4
    assert all(len(identity) == 32 for identity in identities.values())


def test_tuning_identity_does_not_depend_on_the_order_of_tensors() -> None:
    plain = target()
    turned = ToyCheckpoint(plain.config, dict(reversed(plain.tensors.items())))

    assert plan(ALL, of=turned).tuning_identity == plan(ALL).tuning_identity


# The table.


def test_table_sums_up_by_group_with_effective_value_and_origin() -> None:
    planned = plan(PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4"))

    rows = [
        (row.part, row.group, row.num_tensors, row.nbytes_before, row.nbytes_after, row.bits_per_weight, row.formats,
         row.effective, row.origin.value)
        for row in plan_table(planned)
    ]
    assert rows == [
        ("target", "embedding", 1, 16384, 16384, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("target", "normalization", 5, 640, 640, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("target", "attention", 8, 49152, 49152, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("target", "mlp", 6, 73728, 73728, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("target", "head", 1, 16384, 16384, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("draft", "body", 8, 77824, 40128, 8.25, ("mxfp8",), "mxfp8", "flag"),
        ("draft", "normalization", 6, 576, 576, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("draft", "convolution", 4, 5120, 5120, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("draft", "selector", 3, 20480, 20480, 16.0, ("bf16",), "checkpoint", "checkpoint"),
        ("proposal head", "head", 1, 0, 4612, 4.50390625, ("nvfp4",), "nvfp4", "flag"),
    ]


def test_table_shows_the_scope_on_the_groups_it_reaches() -> None:
    rows = {(row.part, row.group): row for row in plan_table(plan(ALL, of=target(inner=80)))}

    assert (rows["target", "attention"].effective, rows["target", "attention"].origin) == ("mxfp8:all", Origin.FLAG)
    assert rows["target", "mlp"].formats == ("mxfp8", "bf16")
    assert rows["target", "embedding"].effective == "checkpoint"
    assert (rows["draft", "body"].effective, rows["draft", "body"].origin) == ("mxfp8", Origin.SCOPE)


def test_group_that_was_skipped_whole_still_shows_the_scope_that_covers_it() -> None:
    planned = plan_precision(target(hidden=48, inner=80), LLAMA, None, None, ALL)

    mlp = next(row for row in plan_table(planned) if row.group == "mlp")
    assert (mlp.formats, mlp.effective, mlp.origin) == (("bf16",), "mxfp8:all", Origin.FLAG)


def test_real_draft_is_planned_from_its_headers() -> None:
    from exporter.checkpoint import open_checkpoint

    example = open_checkpoint(Path(__file__).parents[2] / "examples" / "smollm2-135m-dflash2")

    planned = plan_precision(target(), LLAMA, example, ToyDraft(), BODY_ASKED)

    rows = {row.group: (row.num_tensors, row.nbytes_before, row.nbytes_after)
            for row in plan_table(planned) if row.part == "draft"}
    assert rows == {
        "body": (22, 24551424, 12659328), "selector": (3, 6328320, 6328320), "normalization": (14, 9984, 9984),
        "convolution": (12, 1022976, 1022976),
    }
