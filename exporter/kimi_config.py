"""What a Kimi-Linear or Kimi K3 target is: its layers, its mixture and its state, read from either published spelling.

Kimi K3 nests the text model in `text_config`, whose own `architectures` name the older class: the top level decides.

    config = read_kimi_config(open_checkpoint(path))
    config.kda_layers                                    # {0, 1, 2, 4, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dflash_core.errors import CheckpointError

from exporter.checkpoint import CONFIG_NAME, Checkpoint
from exporter.config_fields import Fields, short
from exporter.draft_kind import read_architecture
from exporter.target_config import eos_token_ids, trained_dtype

LATENT_EPS = 1e-6  # of the latent norms: the published code leaves it at its class default, whatever rms_norm_eps is
LOWEST_DECAY = -5.0
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "num_expert_group": ("num_expert_group", "n_group"),
    "moe_renormalize": ("moe_renormalize", "norm_topk_prob"),
    "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
}


class KimiFamily(Enum):
    """The families. The value is the top level's model_type."""

    KIMI_LINEAR = "kimi_linear"
    KIMI_K3 = "kimi_k3"


ARCHITECTURES: Mapping[str, KimiFamily] = {
    "KimiLinearForCausalLM": KimiFamily.KIMI_LINEAR, "KimiK3ForConditionalGeneration": KimiFamily.KIMI_K3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KdaShape:
    """The recurrent layers.

    Attributes:
        conv_taps: width of the short convolution, the row itself included.
        lower_bound: of the log-decay, in the bounded form; None: the unbounded form.
        full_rank_gate: the output gate is one matrix; otherwise two of rank head_dim.
    """

    num_heads: int
    head_dim: int
    conv_taps: int
    lower_bound: float | None
    full_rank_gate: bool

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaShape:
    """The latent attention layers.

    Attributes:
        q_rank: rank of the query's projection; None: one matrix.
        kv_rank, rope_dim: a cached row is kv_rank + rope_dim values; none of them is rotated.
        output_gate: a sigmoid gate before the output projection.
        latent_eps: added to the mean square in the latent norms.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool
    latent_eps: float

    @property
    def q_width(self) -> int:
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def row_width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The mixtures of experts.

    Attributes:
        num_groups, top_groups: experts are chosen within the top_groups best of num_groups groups.
        renormalize, scale: weights are divided by their sum, then multiplied.
        latent: width in which routed experts work; None: the model's own.
        latent_norm: the weighted sum of routed experts is normalized in that width.
    """

    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    renormalize: bool
    scale: float
    inner: int
    latent: int | None
    latent_norm: bool


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """A Kimi text model, with every default filled in. Layers are numbered from 0.

    Attributes:
        kda_layers: layers with a recurrent state; all others attend.
        moe_layers: layers with a mixture of experts; all others have one MLP.
        situ_beta, situ_linear_beta: of the SiTU activation; a situ_beta of 0 means SiLU, a situ_linear_beta of 0 means
            that the up half is not bounded.
        residual_block: layers per snapshot of the attention residuals; None: one plain residual stream.
        eos_token_ids, dtype, notices, max_position_embeddings: as in `TargetConfig`.
    """

    family: KimiFamily
    hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    kda: KdaShape
    mla: MlaShape
    moe: MoeShape
    kda_layers: frozenset[int]
    moe_layers: frozenset[int]
    situ_beta: float
    situ_linear_beta: float
    residual_block: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    notices: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The family's class name in `architectures`."""
        return next(name for name, family in ARCHITECTURES.items() if family is self.family)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """The attending layers, in order: their index here is their place in the cache."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.kda_layers)


def is_kimi(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's top level names a Kimi family."""
    return read_architecture(checkpoint.config) in ARCHITECTURES


def read_kimi_config(checkpoint: Checkpoint) -> KimiConfig:
    """Read and check the config of a checkpoint of which `is_kimi` holds.

    Raises:
        CheckpointError: TARGET_CONTRADICTION; UNSUPPORTED_FIELD for a feature that would be lost; LAYER_TYPES when the
            two layer lists do not partition the layers; FIELD_MISSING, FIELD_VALUE.
    Source: the config classes of Kimi-Linear in transformers and of Kimi K3 in SGLang and vLLM, for the defaults.
    """
    family = ARCHITECTURES[read_architecture(checkpoint.config)]
    top = Fields(checkpoint.config, CONFIG_NAME)
    if top.text("model_type", default=family.value) != family.value:
        raise CheckpointError("TARGET_CONTRADICTION", f"model_type does not go with {read_architecture(top.values)}",
                              where=CONFIG_NAME, expected=family.value, got=short(top.get("model_type")),
                              hint="download config.json again: it is put together from two models")
    fields = _one_spelling(top.section("text_config") if top.has("text_config") else top)
    _refuse_unsupported(fields)
    num_layers = fields.count("num_hidden_layers")
    linear = fields.section("linear_attn_config")
    kda_layers = _kda_layers(linear, num_layers)
    vocab_size = fields.count("vocab_size")
    situ = fields.text("hidden_act", default="silu") == "situ"
    eos = fields if fields.has("eos_token_id") else top
    return KimiConfig(
        family=family, hidden_size=fields.count("hidden_size"), num_layers=num_layers, vocab_size=vocab_size,
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        max_position_embeddings=fields.count("max_position_embeddings", default=4096),
        kda=_kda(linear), mla=_mla(fields), moe=_moe(fields), kda_layers=kda_layers,
        moe_layers=_moe_layers(fields, num_layers),
        situ_beta=fields.positive("activation_situ_beta", default=1.0) if situ else 0.0,
        situ_linear_beta=_optional_positive(fields, "activation_situ_linear_beta") or 0.0 if situ else 0.0,
        residual_block=fields.count("attn_res_block_size") if fields.has("attn_res_block_size") else None,
        eos_token_ids=eos_token_ids(checkpoint, eos, vocab_size), dtype=trained_dtype(checkpoint, fields),
    )  # fmt: skip


def _one_spelling(fields: Fields) -> Fields:
    """The fields with every alias under its first name."""
    values = dict(fields.values)
    for name, spellings in SPELLINGS.items():
        found = next((s for s in spellings if values.get(s) is not None), None)
        if found is not None:
            values[name] = values[found]
    return Fields(values, fields.where, {name: " or ".join(spellings) for name, spellings in SPELLINGS.items()})


def _refuse_unsupported(fields: Fields) -> None:
    if not fields.flag("mla_use_nope", default=False):
        raise _unsupported(fields, "mla_use_nope", "no rotated form of these layers is published")
    if fields.flag("tie_word_embeddings", default=False):
        raise _unsupported(fields, "tie_word_embeddings", "the family has a head of its own")
    if fields.count("num_nextn_predict_layers", default=0, minimum=0):
        raise _unsupported(fields, "num_nextn_predict_layers", "prediction layers beside a draft are not built")
    if fields.text("hidden_act", default="silu") not in ("silu", "situ"):
        raise _unsupported(fields, "hidden_act", "only silu and situ are built")
    if fields.text("moe_router_activation_func", default="sigmoid") != "sigmoid":
        raise _unsupported(fields, "moe_router_activation_func", "only a sigmoid router is built")
    if not fields.has("num_experts"):
        raise fields.missing("num_experts")


def _unsupported(fields: Fields, key: str, lost: str) -> CheckpointError:
    return CheckpointError("UNSUPPORTED_FIELD", f"target with {key} {short(fields.get(key))} is not supported: {lost}",
                           where=fields.where, hint="no published model has it: compare config.json with the one that "
                                                    "was published")


def _kda(linear: Fields) -> KdaShape:
    bound = linear.number("gate_lower_bound") if linear.has("gate_lower_bound") else None
    if bound is not None and not LOWEST_DECAY <= bound < 0:
        raise linear.wrong("gate_lower_bound", f"a number from {LOWEST_DECAY} to below 0")
    return KdaShape(num_heads=linear.count("num_heads"), head_dim=linear.count("head_dim"),
                    conv_taps=linear.count("short_conv_kernel_size", minimum=2), lower_bound=bound,
                    full_rank_gate=linear.flag("use_full_rank_gate", default=False))


def _mla(fields: Fields) -> MlaShape:
    return MlaShape(
        num_heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.count("kv_lora_rank"), nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"), v_dim=fields.count("v_head_dim"),
        output_gate=fields.flag("mla_use_output_gate", default=False), latent_eps=LATENT_EPS)


def _moe(fields: Fields) -> MoeShape:
    experts = fields.count("num_experts")
    top_k = fields.count("num_experts_per_token")
    groups, kept = fields.count("num_expert_group", default=1), fields.count("topk_group", default=1)
    size = experts // groups
    if experts % groups or kept > groups or top_k > kept * size or (kept < groups and size < 2):
        raise CheckpointError(
            "EXPERTS", "experts cannot be chosen as the config says", where=fields.where,
            expected="groups that divide the experts, and as many in topk_group of them as are chosen",
            got=f"{experts} experts, {top_k} chosen in {kept} of {groups} groups",
            hint="download config.json again, or mend its expert counts")
    fields.count("num_shared_experts")
    return MoeShape(
        num_experts=experts, top_k=top_k, num_groups=groups, top_groups=kept,
        renormalize=fields.flag("moe_renormalize", default=True),
        scale=fields.positive("routed_scaling_factor", default=1.0), inner=fields.count("moe_intermediate_size"),
        latent=fields.count("routed_expert_hidden_size") if fields.has("routed_expert_hidden_size") else None,
        latent_norm=fields.flag("latent_moe_use_norm", default=False))


def _kda_layers(linear: Fields, num_layers: int) -> frozenset[int]:
    """The recurrent layers, from 0; the config counts from 1, and must name each layer in one of its two lists."""
    lists = {key: _layer_numbers(linear, key) for key in ("kda_layers", "full_attn_layers")}
    named = sorted(number for numbers in lists.values() for number in numbers)
    if named != list(range(1, num_layers + 1)):
        raise CheckpointError(
            "LAYER_TYPES", "kda_layers and full_attn_layers do not name each layer once", where=linear.where,
            expected=f"the layers 1 to {num_layers} between them", got=" and ".join(short(n) for n in lists.values()),
            hint="the lists count layers from 1: download config.json again")
    return frozenset(number - 1 for number in lists["kda_layers"])


def _layer_numbers(linear: Fields, key: str) -> list[int]:
    value: Any = linear.get(key)
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise linear.wrong(key, "a list of layer numbers, the first layer being 1") if key in linear.values else (
            linear.missing(key))
    return value


def _moe_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    first = fields.count("first_k_dense_replace", default=0, minimum=0)
    every = fields.count("moe_layer_freq", default=1)
    return frozenset(layer for layer in range(first, num_layers) if layer % every == 0)


def _optional_positive(fields: Fields, key: str) -> float | None:
    return fields.positive(key) if fields.has(key) else None
