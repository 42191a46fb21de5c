"""One flat view of a draft's config, whichever of its spellings the file uses.

DFlash fields stand flat, or inside `dflash_config`; speculators keeps the body inside `transformer_layer_config`. The
flat spelling is read first, the nested one is the fallback, and two that differ give a notice with both values.

    merged = merge_spellings(draft.config)
    block_size = merged.fields.count("block_size")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import CheckpointError

from exporter.checkpoint import CONFIG_NAME, Checkpoint
from exporter.config_fields import Fields, short
from exporter.draft_kind import DOMINO, Refusal

NESTED_KEY = "dflash_config"
SPECULATORS_BODY_KEY = "transformer_layer_config"
MASK_SIDECAR_NAME = "mask_embedding.pt"
WITHOUT_IT = "take a draft without it, or leave --draft out"

# Flat name -> name inside dflash_config.
NESTED_NAMES: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "block_size", "mask_token_id", "target_layer_ids", "layer_ids", "num_target_layers", "target_hidden_size",
            "use_swa", "attention_sink_bias", "attention_value_scale", "input_embedding_scale", "output_multiplier",
            "final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
            "projector_type", "use_gemma_norm", "fc_norm", "attention_mode", "draft_vocab_size", "swa_window_size",
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        )
    },
    "is_causal": "causal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MergedFields:
    """A draft's fields under their flat names, and a notice for each that was given twice and differs."""

    fields: Fields
    notices: tuple[str, ...]


def merge_spellings(config: Mapping[str, Any]) -> MergedFields:
    """Merge flat, nested and speculators' spellings; flat wins, then `dflash_config`, then the speculators body.

    Raises:
        CheckpointError: FIELD_VALUE when `dflash_config` or `transformer_layer_config` is no object.
    """
    top = Fields(config, CONFIG_NAME)
    nested, body = top.section(NESTED_KEY).values, top.section(SPECULATORS_BODY_KEY).values
    merged = {key: value for key, value in config.items() if value is not None}
    notices: list[str] = []
    fallbacks = [(flat, f"{NESTED_KEY}.{name}", nested.get(name)) for flat, name in NESTED_NAMES.items()]
    fallbacks += [(name, f"{SPECULATORS_BODY_KEY}.{name}", value) for name, value in body.items()]
    for flat, spelling, value in fallbacks:
        if value is None:
            continue
        used = merged.setdefault(flat, value)
        if used != value:
            notices.append(f"{flat} is {short(used)} and {spelling} is {short(value)}: using {short(used)}")
    spellings = {flat: f"{flat} (or {NESTED_KEY}.{name})" for flat, name in NESTED_NAMES.items()}
    return MergedFields(Fields(merged, CONFIG_NAME, spellings), tuple(notices))


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field whose value asks for something that would silently be lost."""

    key: str
    is_asked: Callable[[Any], bool]
    lost: str


INTERLEAVED_LOST = "rotary pairs are halves of the head here, and neighbours in this draft"
UNSUPPORTED: tuple[UnsupportedField, ...] = (
    UnsupportedField("attention_sink_bias", bool, "the learned sink of every head's softmax would be lost"),
    UnsupportedField("attention_value_scale", lambda value: value != 1, "attention values would lose their scale"),
    UnsupportedField("use_gemma_norm", bool, "norm weights would be read without the 1 that is added to them"),
    UnsupportedField("fc_norm", bool, "the norm of the tap features would be lost"),
    UnsupportedField("attention_bias", bool, "the biases of q, k, v and o would be lost"),
    UnsupportedField("is_neox_style", lambda value: value is not True, INTERLEAVED_LOST),
    UnsupportedField("rope_is_neox_style", lambda value: value is not True, INTERLEAVED_LOST),
    UnsupportedField("hidden_act", lambda value: value != "silu", "only silu is built"),
)
UNSUPPORTED_TENSORS: Mapping[str, str] = {
    "attention_sink_bias": "the learned sink of every head's softmax would be lost",
    "mask_hidden": "the mask slots' own input would be lost",
    "d2t": "the draft's vocabulary is another than the target's",
}


def refuse_unsupported(draft: Checkpoint, fields: Fields) -> None:
    """Refuse a draft that asks for something which running it as plain DFlash would lose.

    Raises:
        CheckpointError: DRAFT_DOMINO, or UNSUPPORTED_FIELD, UNSUPPORTED_TENSOR, UNSUPPORTED_FILE with the
            field, its value and what would be lost.
    """
    where = str(draft.path)
    for field in UNSUPPORTED:
        value = fields.get(field.key)
        if value is not None and field.is_asked(value):
            raise _unsupported(fields.name(field.key), value, field.lost, where)
    _refuse_choice(fields, "projector_type", (), {"domino": DOMINO}, where)
    _refuse_choice(fields, "attention_mode", ("gqa", "mha", "mla"), {}, where)
    for name in draft.tensors:
        lost = UNSUPPORTED_TENSORS.get(name.removesuffix(".weight").rsplit(".", 1)[-1])
        if lost is not None:
            raise CheckpointError(
                "UNSUPPORTED_TENSOR", f"draft with a tensor {name} is not supported: {lost}", where=where,
                hint=WITHOUT_IT,
            )
    if (draft.path / MASK_SIDECAR_NAME).exists():
        raise CheckpointError(
            "UNSUPPORTED_FILE", "draft with a mask embedding of its own is not supported: its mask row would be lost",
            where=str(draft.path / MASK_SIDECAR_NAME), hint=WITHOUT_IT,
        )


def _refuse_choice(
    fields: Fields, key: str, supported: tuple[str, ...], known: Mapping[str, Refusal], where: str
) -> None:
    value = fields.get(key)
    if value is None or value in supported:
        return
    refusal = known.get(value.lower()) if isinstance(value, str) else None
    if refusal is not None:
        raise CheckpointError(
            refusal.code, refusal.what, where=where, got=f"{fields.name(key)} {short(value)}", hint=refusal.hint
        )
    raise _unsupported(fields.name(key), value, "this kind is not known", where)


def _unsupported(name: str, value: Any, lost: str, where: str) -> CheckpointError:
    return CheckpointError(
        "UNSUPPORTED_FIELD", f"draft with {name} {short(value)} is not supported: {lost}", where=where, hint=WITHOUT_IT
    )
