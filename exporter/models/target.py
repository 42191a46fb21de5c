"""A target model of any family, as the graphs see it: one name for what each family's module records."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.kimi_config import KimiConfig
from exporter.models import dense, kimi
from exporter.models.context import Forward, HiddenRows, StateSlots, TargetMemory
from exporter.program.builder import Program, Tensor
from exporter.target_config import TargetConfig
from runtime.ops import DType

AnyTarget = TargetConfig | KimiConfig


def cache_layer_values(config: AnyTarget) -> tuple[int, int]:
    """How many layers have a cache, and how many values each stores per token."""
    if isinstance(config, KimiConfig):
        return len(config.mla_layers), config.mla.row_width
    return config.num_layers, 2 * config.num_kv_heads * config.head_dim


def has_state(config: AnyTarget) -> bool:
    """Whether a sequence has recurrent states, beside what is cached."""
    return isinstance(config, KimiConfig)


def tap_source(config: AnyTarget) -> str | None:
    """What a draft's taps are taken from, as a core records it; None: the residual stream."""
    return "residual-mixture" if isinstance(config, KimiConfig) and config.residual_block is not None else None


def state_slots(program: Program, config: AnyTarget, max_slots: int, act: DType) -> dict[int, StateSlots]:
    """Add the recurrent state of the layers that have one."""
    return kimi.state_slots(program, config, max_slots, act) if isinstance(config, KimiConfig) else {}


def head_name(config: AnyTarget) -> str:
    """Logical name of the verification head."""
    return kimi.HEAD_NAME if isinstance(config, KimiConfig) else dense.head_name(config)


def record_layers(fwd: Forward, config: AnyTarget, memory: TargetMemory, tokens: Tensor, taps: Sequence[int], *,
                  undoable: bool = False) -> HiddenRows:
    """Record embedding and layers for the rows of `fwd`; the cache is written for live rows.

    Args:
        tokens: i32 [rows].
        taps: layers whose output goes into the features, in the order of their columns.
        undoable: recurrent states are left as they are, for `record_commit`; otherwise every live row is committed.
    """
    if isinstance(config, KimiConfig):
        return kimi.record_layers(fwd, config, memory, tokens, taps, undoable=undoable)
    return dense.record_layers(fwd, config, memory.cache, tokens, taps)


def record_commit(fwd: Forward, config: AnyTarget, memory: TargetMemory, hidden: HiddenRows, kept: Tensor) -> None:
    """Commit the recurrent states of an undoable step.

    Args:
        kept: i32 [rows], the positions of the rows that the step keeps, -1 elsewhere.
    """
    if isinstance(config, KimiConfig):
        kimi.record_commit(fwd, config, memory, hidden.pending, kept)
