"""What a DFlash or DFlash2 draft is: sizes, taps, block and visibility, read from config.json against its target.

    draft = open_checkpoint(path)
    config = read_draft_config(draft, target_config)
    names = check_draft_tensors(draft, config, target)       # in draft_tensors.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from dflash_core.errors import CheckpointError

from exporter.checkpoint import CONFIG_NAME, Checkpoint
from exporter.config_fields import Fields, short
from exporter.draft_kind import MUSE_ASSISTANT, DraftMethod, read_architecture, recognise_draft
from exporter.draft_spellings import NESTED_KEY, merge_spellings, refuse_unsupported
from exporter.rope import RopeParameters, RopeSpelling, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
# Spelling of the taps -> what it adds to a decoder layer's number; the first that is there wins.
TAP_SPELLINGS: Mapping[str, int] = {
    "target_layer_ids": 0, "aux_hidden_state_layer_ids": 1, "eagle_aux_hidden_state_layer_ids": 1, "layer_ids": 0,
}  # fmt: skip


class DraftedTarget(Protocol):
    """What a draft's config is held against; every family's target config has it."""

    @property
    def architecture(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """What one draft layer sees.

    Attributes:
        causal: a slot sees no slot after it; otherwise the whole block.
        window: keys at distance < window are visible; None: all are.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DraftMla:
    """Latent attention of a draft: ranks of query and key/value, and the parts of a head, of which rope_dim rotate."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def row_width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft that fits its target, with every default filled in.

    Attributes:
        method: DFlash, or DFlash2 with convolutions and a selector.
        num_heads, num_kv_heads, head_dim: num_heads · head_dim need not equal hidden_size.
        mla: latent attention in place of grouped-query attention; None: the latter. head_dim is then that of a query.
        block_size: rows of a block: the anchor and block_size - 1 proposals.
        mask_token_id: row of the target's embedding table that stands in for a token to propose.
        target_layer_ids: decoder layers of the target whose output is tapped, from 0, in the order of fc's inputs.
        target_hidden_size: width of one tap.
        layers: what each layer sees, first layer first.
        input_embedding_scale: multiplies every embedding row of the block.
        output_multiplier: multiplies the head's logits, before the cap.
        final_logit_softcapping: logits become cap · tanh(logit / cap); None: no cap.
        conv_kernel_size, conv_group_size: taps of the block convolution, and channels that share its dynamic part.
        selector_rank, selector_top_k: width of the selector's codebooks, and candidates per slot.
        has_own_quantization: the checkpoint carries a quantization_config.
        notices: what a reader of the export should know.
    """

    method: DraftMethod
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    layers: tuple[DraftLayer, ...]
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    conv_kernel_size: int | None
    conv_group_size: int | None
    selector_rank: int | None
    selector_top_k: int | None
    has_own_quantization: bool
    notices: tuple[str, ...] = ()
    mla: DraftMla | None = None


def read_draft_config(draft: Checkpoint, target: DraftedTarget) -> DraftConfig:
    """Read a draft's config and check it against the target that it borrows embedding and head from.

    Args:
        draft: the draft checkpoint; its tensor names confirm what the config claims.
        target: the target's config.
    Raises:
        CheckpointError: the codes of `recognise_draft`, `refuse_unsupported` and `read_rope`; DRAFT_HIDDEN_SIZE,
            DRAFT_VOCABULARY, DRAFT_NUM_LAYERS, DRAFT_TAPS when it was made for another target; DRAFT_LAYERS,
            DRAFT_CONV, HEADS, FIELD_MISSING, FIELD_VALUE when it is malformed.
    Source: z-lab's `dflash` package for the fields and their defaults; speculators for its own spelling.
    """
    # 1. Kind, spellings, and what would be lost.
    method = recognise_draft(draft, target.architecture)
    merged = merge_spellings(draft.config)
    fields = merged.fields
    refuse_unsupported(draft, fields)

    # 2. Does it fit this target?
    hidden_size, vocab_size = fields.count("hidden_size"), fields.count("vocab_size")
    target_hidden_size = fields.count("target_hidden_size", default=hidden_size)
    _check_target_fit(fields, hidden_size, target_hidden_size, vocab_size, target)
    num_layers = fields.count("num_hidden_layers")
    taps, tap_notices = _taps(fields, num_layers, target)
    mask_token_id = fields.count("mask_token_id", minimum=0)
    if mask_token_id >= target.vocab_size:
        raise fields.wrong("mask_token_id", f"a row of the target's embedding table, below {target.vocab_size}")

    # 3. The body.
    mla = _mla(fields)
    num_heads, num_kv_heads, head_dim = _heads(fields, hidden_size) if mla is None else (
        fields.count("num_attention_heads"), 1, mla.nope_dim + mla.rope_dim)
    rotated = head_dim if mla is None else mla.rope_dim
    rope, rope_notices = read_rope(fields, head_dim=rotated, first=RopeSpelling.FLAT)
    layers, layer_notices = _layers(fields, num_layers, method, draft.config)
    block_size = fields.count("block_size", minimum=2)
    conv_kernel_size, conv_group_size = _conv(fields, method, block_size, hidden_size)
    selector_rank, selector_top_k = _selector(fields, method, vocab_size)
    admitted = ("DFlash2 draft: convolutions and candidate selector are used",) if method is DraftMethod.DFLASH2 else ()
    return DraftConfig(
        method=method, hidden_size=hidden_size, intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        vocab_size=vocab_size, rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6), rope=rope,
        block_size=block_size, mask_token_id=mask_token_id, target_layer_ids=taps,
        target_hidden_size=target_hidden_size, layers=layers,
        input_embedding_scale=fields.positive("input_embedding_scale", default=1.0),
        output_multiplier=fields.positive("output_multiplier", default=1.0),
        final_logit_softcapping=_softcap(fields),
        conv_kernel_size=conv_kernel_size, conv_group_size=conv_group_size,
        selector_rank=selector_rank, selector_top_k=selector_top_k,
        has_own_quantization=fields.has("quantization_config"),
        notices=admitted + merged.notices + tap_notices + rope_notices + layer_notices, mla=mla,
    )  # fmt: skip


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The taps of a draft that names none: spread evenly from layer 1 to the target's third last, halves to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = Fraction(num_target_layers - 4, num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _check_target_fit(
    fields: Fields, hidden_size: int, target_hidden_size: int, vocab_size: int, target: DraftedTarget
) -> None:
    widths = {"target_hidden_size": target_hidden_size, "hidden_size": hidden_size}
    for key, value in widths.items():
        if value != target.hidden_size:
            raise _other_target(
                "DRAFT_HIDDEN_SIZE", f"draft's {key} is not the target's, whose embedding and head it borrows",
                target.hidden_size, value,
            )
    for key in ("vocab_size", "draft_vocab_size"):
        value = fields.count(key, default=vocab_size)
        if value != target.vocab_size:
            raise _other_target(
                "DRAFT_VOCABULARY", f"draft's {key} is not the target's", target.vocab_size, value,
            )
    num_target_layers = fields.count("num_target_layers", default=target.num_layers)
    if num_target_layers != target.num_layers:
        raise _other_target(
            "DRAFT_NUM_LAYERS", "draft was made for a target of another depth (num_target_layers)", target.num_layers,
            num_target_layers,
        )


def _other_target(code: str, what: str, expected: int, got: int) -> CheckpointError:
    return CheckpointError(
        code, what, where=CONFIG_NAME, expected=expected, got=got, hint="use a draft that was trained for this target"
    )


def _taps(fields: Fields, num_layers: int, target: DraftedTarget) -> tuple[tuple[int, ...], tuple[str, ...]]:
    given = {key: _tap_list(fields, key, shift) for key, shift in TAP_SPELLINGS.items() if fields.has(key)}
    if not given:
        taps = default_taps(target.num_layers, num_layers)
        notices = [f"draft names no target_layer_ids: using the default taps {list(taps)}"]
    else:
        used, taps = next(iter(given.items()))
        notices = [
            f"{used} means layers {list(taps)} and {key} means {list(other)}: using {used}"
            for key, other in given.items() if other != taps
        ]  # fmt: skip
    if any(not 0 <= tap < target.num_layers for tap in taps) or len(set(taps)) != len(taps):
        raise CheckpointError(
            "DRAFT_TAPS", "taps are not distinct layers of the target", where=CONFIG_NAME,
            expected=f"distinct layers from 0 to {target.num_layers - 1}", got=list(taps),
            hint="pass the target that this draft was trained for",
        )
    if target.num_layers - 1 in taps:
        notices.append("the last layer is tapped: its output is taken before the target's final norm")
    return taps, tuple(notices)


def _tap_list(fields: Fields, key: str, shift: int) -> tuple[int, ...]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not all(type(layer) is int for layer in value):
        raise fields.wrong(key, "a list of layer numbers")
    return tuple(layer - shift for layer in value)


def _mla(fields: Fields) -> DraftMla | None:
    if fields.get("attention_mode") != "mla":
        return None
    rope_dim = fields.count("qk_rope_head_dim", minimum=2)
    if rope_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "an even number")
    return DraftMla(q_rank=fields.count("q_lora_rank"), kv_rank=fields.count("kv_lora_rank"),
                    nope_dim=fields.count("qk_nope_head_dim"), rope_dim=rope_dim, v_dim=fields.count("v_head_dim"))


def _heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    num_heads, num_kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            "HEADS", "attention heads do not divide into groups", where=CONFIG_NAME,
            expected=f"num_attention_heads {num_heads} divisible by num_key_value_heads", got=num_kv_heads,
            hint="download config.json again: one of the two is not the model's",
        )
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise CheckpointError(
            "HEADS", "hidden_size does not divide into heads, and head_dim is absent", where=CONFIG_NAME,
            expected=f"hidden_size {hidden_size} divisible by num_attention_heads", got=num_heads,
            hint="add the head_dim that the model was trained with",
        )
    return num_heads, num_kv_heads, fields.count("head_dim", default=hidden_size // num_heads)


def _layers(
    fields: Fields, num_layers: int, method: DraftMethod, config: Mapping[str, Any]
) -> tuple[tuple[DraftLayer, ...], tuple[str, ...]]:
    types = fields.get("layer_types")
    uses_swa = fields.flag("use_swa", default=False)
    notices: list[str] = []
    if types is None:
        is_sliding = [uses_swa] * num_layers
        sliding_causal = False
    else:
        is_sliding = _sliding_layers(fields, types, num_layers)
        sliding_causal = _sliding_causal(fields, method, config)
        if uses_swa and not any(is_sliding):
            notices.append("layer_types lists full layers alone and use_swa is true: using layer_types")
    window, window_notices = _window(fields) if any(is_sliding) else (None, ())
    causal = _is_causal(fields)
    if causal is None and read_architecture(config) == MUSE_ASSISTANT:
        causal = False
        notices.append(f"{MUSE_ASSISTANT} gives no is_causal: using false")
    layers = tuple(
        DraftLayer((sliding and sliding_causal) if causal is None else causal, window if sliding else None)
        for sliding in is_sliding
    )
    return layers, (*notices, *window_notices)


def _sliding_layers(fields: Fields, types: Any, num_layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise CheckpointError(
            "DRAFT_LAYERS", "layer_types does not say what each layer is", where=CONFIG_NAME,
            expected=f"{num_layers} times {FULL} or {SLIDING}", got=short(types),
            hint="download config.json again, or list one type for each layer",
        )
    is_sliding = [kind == SLIDING for kind in types]
    if any(is_sliding) and fields.get("use_sliding_window") is False:
        raise CheckpointError(
            "DRAFT_LAYERS", "layer_types lists sliding layers and use_sliding_window is false", where=CONFIG_NAME,
            hint="one of the two is out of date: the draft was trained with one visibility only",
        )
    return is_sliding


def _sliding_causal(fields: Fields, method: DraftMethod, config: Mapping[str, Any]) -> bool:
    """Whether a sliding layer is causal when is_causal is not given."""
    if config.get("speculators_model_type") is None:
        return True
    return not fields.flag("sliding_window_non_causal", default=method is DraftMethod.DFLASH2)


def _window(fields: Fields) -> tuple[int, tuple[str, ...]]:
    if not fields.has("swa_window_size"):
        if not fields.has("sliding_window"):
            raise CheckpointError(
                "DRAFT_LAYERS", "draft has sliding layers and no window", where=CONFIG_NAME,
                expected=f"sliding_window or {NESTED_KEY}.swa_window_size",
                hint="add the window that the draft was trained with",
            )
        return fields.count("sliding_window"), ()
    window = fields.count("swa_window_size")
    other = fields.get("sliding_window")
    if other is None or other == window:
        return window, ()
    return window, (f"sliding_window is {short(other)} and swa_window_size is {window}: using {window}",)


def _is_causal(fields: Fields) -> bool | None:
    value = fields.get("is_causal")
    if value is not None and (type(value) not in (bool, int) or value not in (0, 1)):
        raise fields.wrong("is_causal", "true, false, 1 or 0")
    return None if value is None else bool(value)


def _conv(
    fields: Fields, method: DraftMethod, block_size: int, hidden_size: int
) -> tuple[int | None, int | None]:
    if method is not DraftMethod.DFLASH2:
        return None, None
    kernel_size, group_size = fields.count("conv_kernel_size"), fields.count("conv_group_size")
    if kernel_size > block_size or hidden_size % group_size:
        raise CheckpointError(
            "DRAFT_CONV", "convolution does not fit the block or the channels", where=CONFIG_NAME,
            expected=f"conv_kernel_size ≤ block_size {block_size}, hidden_size {hidden_size} divisible by"
            " conv_group_size",
            got=f"conv_kernel_size {kernel_size}, conv_group_size {group_size}",
            hint="download config.json again: the block, the channels and the convolution are of different drafts",
        )
    return kernel_size, group_size


def _selector(fields: Fields, method: DraftMethod, vocab_size: int) -> tuple[int | None, int | None]:
    if method is not DraftMethod.DFLASH2:
        return None, None
    top_k = fields.count("selector_top_k")
    if top_k > vocab_size:
        raise fields.wrong("selector_top_k", f"at most vocab_size {vocab_size}")
    return fields.count("selector_rank"), top_k


def _softcap(fields: Fields) -> float | None:
    cap = fields.number("final_logit_softcapping", default=0.0)
    return cap if cap > 0 else None
