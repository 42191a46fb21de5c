"""Rotary position embeddings: which kind a config asks for, and the table of cosines and sines it means.

The table is the same bytes on every machine: powers, cosines and sines are taken in float64 and rounded to fp32,
where fp32 libraries differ in the last bit between processors. Everything else is rounded where transformers
rounds it: frequencies, angles (position × frequency) and the table are fp32.

    rope, notices = read_rope(fields, head_dim=64, first=RopeSpelling.NESTED)
    table = rope_table(rope, head_dim=64, max_context=8192)      # [8192, 2, 32]: cosines, then sines
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from dflash_core.errors import CheckpointError
from torch import Tensor

from exporter.config_fields import Fields, short

CHUNK_POSITIONS = 32768


class RopeType(Enum):
    """How frequencies are stretched for contexts longer than the pretraining's. The value is the config's word."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class RopeSpelling(Enum):
    """Which spelling of rope_theta and partial_rotary_factor wins when both are there and differ."""

    FLAT = "flat"
    NESTED = "nested"


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """A rotary embedding, with every default filled in.

    Attributes:
        type: which of the four computations below.
        theta: base of the frequencies.
        partial_rotary_factor: the share of a head's dims that rotates.
        factor: context stretch; linear, llama3 and yarn.
        original_max_position_embeddings: context length of the pretraining, in tokens; llama3 and yarn, else 0.
        low_freq_factor, high_freq_factor: llama3 alone.
        beta_fast, beta_slow: turns within the original context that bound yarn's ramp.
        attention_factor: multiplies cosines and sines; 1 except for yarn.
        truncate: yarn's ramp starts and ends at whole dims.
    """

    type: RopeType
    theta: float
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def rotary_dims(rope: RopeParameters, head_dim: int) -> int:
    """How many of a head's first dims rotate."""
    return int(head_dim * rope.partial_rotary_factor)


def read_rope(
    fields: Fields, *, head_dim: int, first: RopeSpelling, default_theta: float | None = None
) -> tuple[RopeParameters, tuple[str, ...]]:
    """Read a config's rope fields in the spelling of either transformers generation.

    Args:
        fields: the config; `rope_theta`, `partial_rotary_factor` and `rope_dim` may stand in it flat, or in its
            `rope_parameters` (older name `rope_scaling`).
        head_dim: dims of one attention head.
        first: the spelling that wins.
        default_theta: used when no theta is given; None refuses.
    Returns:
        The parameters, and a notice for each value that is given twice and differs.
    Raises:
        CheckpointError: ROPE_TYPE, ROPE_CONFLICT, ROPE_LAYERED, ROPE_MULTIMODAL, ROPE_DIMS, FIELD_MISSING or
            FIELD_VALUE.
    """
    nested = _nested_fields(fields)
    notices: list[str] = []
    merged = dict(nested.values)
    for key in ("rope_theta", "partial_rotary_factor", "rope_dim"):
        flat, inner = fields.get(key), nested.get(key)
        if flat is None:
            continue
        if inner is not None and inner != flat:
            used = flat if first is RopeSpelling.FLAT else inner
            notices.append(f"{key} is {short(flat)} and in the rope parameters {short(inner)}: using {short(used)}")
        if inner is None or first is RopeSpelling.FLAT:
            merged[key] = flat
    spellings = {"rope_theta": "rope_theta or rope_parameters.rope_theta", **fields.spellings}
    return _parameters(Fields(merged, nested.where, spellings), fields, head_dim, default_theta), tuple(notices)


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Angle per position of each rotating pair: fp32 [rotary_dims / 2].

    Source: the rope types of Hugging Face transformers; the yarn ramp as in Peng et al. 2023, "YaRN".
    """
    dims = rotary_dims(rope, head_dim)
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    periods = (rope.theta ** exponents.double()).float()
    plain = 1.0 / periods
    if rope.type is RopeType.LINEAR:
        return plain / rope.factor
    if rope.type is RopeType.LLAMA3:
        return _llama3(rope, plain)
    if rope.type is RopeType.YARN:
        stretched = 1.0 / (rope.factor * periods)
        keep = 1 - _yarn_ramp(rope, dims)
        return stretched * (1 - keep) + plain * keep
    return plain


def rope_table(rope: RopeParameters, head_dim: int, max_context: int) -> Tensor:
    """Cosines and sines of every position, times the attention factor.

    Returns:
        fp32 [max_context, 2, rotary_dims / 2]; axis 1 holds cosines, then sines. Dims i and i + rotary_dims / 2 of
        a head form pair i.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    table = torch.empty(max_context, 2, frequencies.numel(), dtype=torch.float32)
    for start in range(0, max_context, CHUNK_POSITIONS):
        stop = min(start + CHUNK_POSITIONS, max_context)
        positions = torch.arange(start, stop, dtype=torch.float32)
        angles = (positions[:, None] * frequencies).double()
        table[start:stop, 0] = angles.cos().float() * rope.attention_factor
        table[start:stop, 1] = angles.sin().float() * rope.attention_factor
    return table


def _nested_fields(fields: Fields) -> Fields:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new.values and old.values and new.values != old.values:
        raise CheckpointError(
            "ROPE_CONFLICT", "rope_parameters and rope_scaling are both there and differ", where=fields.where,
            expected=short(new.values), got=short(old.values), hint="remove the one that is out of date",
        )
    nested = new if new.values else old
    for key, value in nested.values.items():
        if isinstance(value, dict):
            raise CheckpointError(
                "ROPE_LAYERED", "rope parameters per layer type are not built yet", where=nested.where, got=key,
                hint="choose a model whose layers share one rope",
            )
    if any(key.startswith("mrope_") and value for key, value in nested.values.items()):
        raise CheckpointError(
            "ROPE_MULTIMODAL", "multimodal rope (mrope) is not built yet: positions would lose two of their axes",
            where=nested.where, hint="choose a model whose positions have one axis",
        )
    return nested


def _parameters(rope: Fields, config: Fields, head_dim: int, default_theta: float | None) -> RopeParameters:
    word = rope.text("rope_type" if rope.has("rope_type") else "type", default="default")
    if word not in {known.value for known in RopeType}:
        raise CheckpointError(
            "ROPE_TYPE", "rope type is not supported", where=rope.where,
            expected=" ".join(known.value for known in RopeType), got=short(word),
            hint="choose a model with one of these: another one would turn positions by other angles",
        )
    kind = RopeType(word)
    theta = rope.number("rope_theta", default=default_theta)
    if theta <= 1:
        raise rope.wrong("rope_theta", "a number > 1")
    share = _rotary_share(rope, head_dim)
    if kind is RopeType.DEFAULT:
        return RopeParameters(kind, theta, share)
    if kind is RopeType.LINEAR:
        return RopeParameters(kind, theta, share, rope.positive("factor"))
    original = _original_context(rope, config)
    if kind is RopeType.LLAMA3:
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor {low:g}")
        return RopeParameters(kind, theta, share, rope.positive("factor"), original, low, high)
    return _yarn_parameters(rope, config, theta, share, original)


def _yarn_parameters(
    rope: Fields, config: Fields, theta: float, share: float, original: int
) -> RopeParameters:
    if rope.has("factor"):
        factor = rope.positive("factor")
    else:
        factor = config.count("max_position_embeddings") / original
    beta_fast = rope.number("beta_fast", default=32.0) or 32.0
    beta_slow = rope.number("beta_slow", default=1.0) or 1.0
    if not 0 < beta_slow <= beta_fast:
        raise rope.wrong("beta_fast", f"a number ≥ beta_slow {beta_slow:g} > 0")
    return RopeParameters(
        RopeType.YARN, theta, share, factor, original, beta_fast=beta_fast, beta_slow=beta_slow,
        attention_factor=_yarn_attention_factor(rope, factor), truncate=rope.flag("truncate", default=True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.positive("attention_factor")
    mscale, mscale_all_dim = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original_context(rope: Fields, config: Fields) -> int:
    # A top-level value wins, and max_position_embeddings stands in for an absent one, as transformers reads it.
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.count(key)
    return rope.count(key) if rope.has(key) else config.count("max_position_embeddings")


def _rotary_share(rope: Fields, head_dim: int) -> float:
    share = rope.positive("partial_rotary_factor", default=1.0)
    if rope.has("rope_dim"):
        share_of_dims = rope.count("rope_dim") / head_dim
        if rope.has("partial_rotary_factor") and share_of_dims != share:
            raise rope.wrong("rope_dim", f"{int(head_dim * share)}, as partial_rotary_factor {share:g} says")
        share = share_of_dims
    dims = int(head_dim * share)
    if share > 1 or dims < 2 or dims % 2:
        raise CheckpointError(
            "ROPE_DIMS", "rotating dims are not an even part of the head", where=rope.where,
            expected=f"an even number up to {head_dim}", got=dims,
            hint="download config.json again, or mend partial_rotary_factor",
        )
    return share


def _llama3(rope: RopeParameters, plain: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > longest, plain / rope.factor, plain)
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, (1 - blend) * stretched / rope.factor + blend * stretched, stretched)


def _yarn_ramp(rope: RopeParameters, dims: int) -> Tensor:
    """0 where a frequency is kept, 1 where it is stretched, rising linearly between: fp32 [dims / 2]."""
    low, high = (_yarn_boundary(rope, turns, dims) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _yarn_boundary(rope: RopeParameters, turns: float, dims: int) -> float:
    """The (fractional) pair whose frequency makes `turns` turns within the original context."""
    original = rope.original_max_position_embeddings
    return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
