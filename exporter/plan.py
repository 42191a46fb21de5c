"""Choose a format for every tensor, with the origin of every choice, before a weight is read.

    settings = PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4")
    plan = plan_precision(target, load_recipe("llama"), draft, draft_config, settings)
    for row in plan_table(plan):
        print(row.part, row.group, row.formats, row.nbytes_after, row.effective, row.origin.value)
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from dflash_core.effective import CHECKPOINT, Effective, Origin, Role, effective_precision
from dflash_core.effective import ONLINE_MXFP8 as MXFP8
from dflash_core.errors import PlanError
from dflash_core.formats import FORMATS, Format, divides, packed
from dflash_core.v1.manifest_pb2 import RebuildManifest, RebuildSpeculation

from exporter.convert.packed import PackedFormat, group_packed
from exporter.draft_tensors import canonical_name
from exporter.plan_rules import (
    BODY_FLAG,
    DraftFacts,
    PrecisionSettings,
    RecordedPrecision,
    own_quantization,
    resolve,
    undeclared_body,
)
from exporter.recipe import DRAFT_BODY, ONLINE_MXFP8, Recipe, load_recipe
from exporter.recipe_match import MatchedTensor, find_rows, match_tensors
from exporter.safetensors_header import TensorEntry

__all__ = ["PlanRow", "PlannedTensor", "PrecisionPlan", "PrecisionSettings", "plan_precision", "plan_table"]

_SOURCE_FORMATS: Mapping[str, Format | PackedFormat] = {
    "BF16": Format.BF16, "F16": Format.F16, "F32": Format.F32, **{kind.value: kind for kind in PackedFormat},
}
PLAIN_DTYPES = ("BF16", "F16", "F32")
_HEAD_ROLES = ("head", "embedding")  # a tied head is the embedding table


class PlannedCheckpoint(Protocol):
    """What planning reads of a checkpoint; `exporter.checkpoint.Checkpoint` has it."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...


class PlannedTensor(NamedTuple):
    """One tensor and what becomes of it.

    Attributes:
        name: as the recipe spells it.
        source: as the checkpoint spells it.
        role: the recipe's word for it; `group` is the part that reports sum up by.
        shape: logical shape.
        source_dtype: as the safetensors header spells it.
        format: how the core stores it; a PackedFormat when its published bytes are kept; None when it does not.
        origin: what decided that.
        reason: why, in words.
        skipped: a conversion covers it, but the tensor cannot be converted; `reason` says why.
        nbytes_before, nbytes_after: in the checkpoint; in the core, scales included.
    """

    name: str
    source: str
    role: str
    group: str
    shape: tuple[int, ...]
    source_dtype: str
    format: Format | PackedFormat | None
    origin: Origin
    reason: str
    skipped: bool
    nbytes_before: int
    nbytes_after: int


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of a tensor: the fields of `PlannedTensor` that say so."""

    format: Format | PackedFormat | None
    origin: Origin
    reason: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """A format for every tensor of target and draft.

    Attributes:
        target, draft: in checkpoint order; `draft` is empty when speculation is off.
        proposal_head: a separate copy of the target's head; None: proposals use the target's own.
        recorded: what the manifest will say.
        effective: what that means for each role, with its origin.
    """

    target: tuple[PlannedTensor, ...]
    draft: tuple[PlannedTensor, ...]
    proposal_head: PlannedTensor | None
    recorded: RecordedPrecision
    effective: tuple[Effective, ...]

    @property
    def online_quantization(self) -> str | None:
        """The manifest's `online_quantization`."""
        return self.recorded.online_quantization

    @property
    def tuning_identity(self) -> bytes:
        """SHA-256 over the target's plan, which no draft setting changes. Takes a second for 250,000 tensors."""
        return _tuning_identity(self.target, self.recorded)

    @property
    def skipped(self) -> tuple[PlannedTensor, ...]:
        """Tensors that a conversion covers and that keep checkpoint precision all the same."""
        return tuple(tensor for tensor in (*self.target, *self.draft) if tensor.skipped)

    def role(self, role: Role) -> Effective:
        """The effective precision of one role."""
        return next(effective for effective in self.effective if effective.role is role)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the plan's table.

    Attributes:
        part: `target`, `draft` or `proposal head`.
        group: what the tensors are: `attention`, `body`, `selector`.
        num_tensors: how many; a setting converts `num_converted` of them, and covers `num_skipped` that keep checkpoint
            precision all the same.
        nbytes_before, nbytes_after: in the checkpoints; in the core. A copy has no bytes before.
        bits_per_weight: stored bits, scales included; 0 when nothing is stored.
        formats: words, largest share first.
        effective, origin: the value that applies to the group, and what decided it.
    """

    part: str
    group: str
    num_tensors: int
    nbytes_before: int
    nbytes_after: int
    bits_per_weight: float
    formats: tuple[str, ...]
    effective: str
    origin: Origin
    num_converted: int
    num_skipped: int


def plan_precision(
    target: PlannedCheckpoint,
    target_recipe: Recipe,
    draft: PlannedCheckpoint | None,
    draft_config: DraftFacts | None,
    settings: PrecisionSettings,
    draft_recipe: Recipe | None = None,
) -> PrecisionPlan:
    """Plan the precision of every tensor from names, shapes and dtypes alone.

    Args:
        target: its config and tensor entries.
        target_recipe: its family; decides which settings are allowed.
        draft, draft_config: both or neither.
        settings: what the user asked for.
        draft_recipe: None: the one named after the draft's method.
    Raises:
        PlanError: the settings do not go together (`exporter.plan_rules.resolve`), or cannot be applied:
            BODY_UNDECLARED, BODY_OWN_QUANTIZATION, BODY_INELIGIBLE, RETAINED_QUANTIZED, TENSOR_QUANTIZED,
            HEAD_INELIGIBLE, DRAFT_NAME_TWICE.
        RecipeError: a recipe does not describe its checkpoint.
    """
    with _no_garbage_collection():
        return _plan(target, target_recipe, draft, draft_config, settings, draft_recipe)


def _plan(
    target: PlannedCheckpoint,
    target_recipe: Recipe,
    draft: PlannedCheckpoint | None,
    draft_config: DraftFacts | None,
    settings: PrecisionSettings,
    draft_recipe: Recipe | None,
) -> PrecisionPlan:
    assert (draft is None) == (draft_config is None)
    recorded = resolve(settings, target_recipe, draft_config)
    effective = _effective(recorded)

    # 1. The target, which no draft setting touches.
    matched = _match(target_recipe, group_packed(target.tensors)[0], target.config)
    planned_target = _plan_target(matched, recorded)

    # 2. The draft, when one will run.
    planned_draft: tuple[PlannedTensor, ...] = ()
    if draft is not None and draft_config is not None and recorded.method is not None:
        recipe = draft_recipe or load_recipe(recorded.method)
        body = next(entry for entry in effective if entry.role is Role.DRAFT_BODY)
        if body.value == MXFP8:
            _check_body_possible(recipe, draft_config, body)
        matched = _match(recipe, _by_canonical_name(draft.tensors), draft.config)
        planned_draft = _plan_draft(matched, body)

    # 3. The head that proposes.
    head = _plan_head(planned_target, recorded.draft_head_quantization)
    return PrecisionPlan(planned_target, planned_draft, head, recorded, effective)


def plan_table(plan: PrecisionPlan) -> tuple[PlanRow, ...]:
    """The plan summed up by part and group, in the order in which groups first appear."""
    parts = [("target", plan.target), ("draft", plan.draft)]
    if plan.proposal_head is not None:
        parts.append(("proposal head", (plan.proposal_head,)))
    rows = []
    for part, tensors in parts:
        groups: dict[str, list[PlannedTensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.group, []).append(tensor)
        rows += [_row(plan, part, group, members) for group, members in groups.items()]
    return tuple(rows)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A plan of a large model is a million small objects without a cycle: looking for cycles costs a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _effective(recorded: RecordedPrecision) -> tuple[Effective, ...]:
    """The shared rule, applied to what the manifest will record; a default scope is told from one asked for."""
    speculation = RebuildSpeculation(
        method=recorded.method, draft_depth=recorded.depth,
        draft_body_quantization=recorded.draft_body_quantization,
        draft_head_quantization=recorded.draft_head_quantization,
    )
    manifest = RebuildManifest(
        online_quantization=recorded.online_quantization, online_mxfp8_scope=recorded.online_mxfp8_scope,
        speculation=speculation,
    )
    rows = effective_precision(manifest)
    if recorded.online_mxfp8_scope is None:
        return rows
    return tuple(replace(row, origin=recorded.scope_origin) if row.role is Role.TARGET else row for row in rows)


def _match(
    recipe: Recipe, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> tuple[MatchedTensor, ...]:
    """Match, after refusing quantized tensors by name: their scales would match no row and hide what is wrong."""
    odd = [name for name, entry in tensors.items() if entry.dtype not in PLAIN_DTYPES]
    for name, row in find_rows(recipe, odd, config).items():
        if row is None or row.ignored or (row.passthrough and tensors[name].dtype in _SOURCE_FORMATS):
            continue
        entry = tensors[name]
        code, what = "TENSOR_QUANTIZED", "tensor is not in an element type that can be planned"
        if row.keep_reason:
            code, what = "RETAINED_QUANTIZED", f"tensor that always keeps checkpoint precision ({row.keep_reason}) " \
                "is shipped quantized"
        raise PlanError(code, what, where=f"{entry.name} in {entry.shard}", expected=" ".join(PLAIN_DTYPES),
                        got=entry.dtype, hint="take the checkpoint as it was first published")
    return match_tensors(recipe, tensors, config)


def _plan_target(tensors: Sequence[MatchedTensor], recorded: RecordedPrecision) -> tuple[PlannedTensor, ...]:
    scope = recorded.online_mxfp8_scope

    def fate(tensor: MatchedTensor) -> _Fate:
        if scope is None or (ONLINE_MXFP8, scope) not in tensor.row.groups:
            return _kept(tensor)
        obstacle = tensor.row.keep_reason or _obstacle(tensor.entry.shape, Format.MXFP8)
        if obstacle:
            return replace(_kept(tensor), reason=obstacle, skipped=True)
        return _Fate(Format.MXFP8, recorded.scope_origin, f"online MXFP8, scope {scope}")

    return _planned(tensors, fate)


def _plan_draft(tensors: Sequence[MatchedTensor], body: Effective) -> tuple[PlannedTensor, ...]:
    def fate(tensor: MatchedTensor) -> _Fate:
        if body.value == CHECKPOINT or (DRAFT_BODY, "") not in tensor.row.groups:
            return _kept(tensor)
        fmt = Format(body.value)
        obstacle = _obstacle(tensor.entry.shape, fmt)
        if obstacle:
            raise PlanError(
                "BODY_INELIGIBLE", f"draft body cannot be converted: {obstacle}",
                where=f"{tensor.entry.name} {list(tensor.entry.shape)}", expected=f"rows of whole {fmt.name} blocks",
                hint="keep the body in checkpoint precision",
            )
        by = f"{BODY_FLAG} {fmt.value}" if body.origin is Origin.FLAG else "online MXFP8, scope all"
        return _Fate(fmt, body.origin, by)

    return _planned(tensors, fate)


def _plan_head(target: Sequence[PlannedTensor], asked: str | None) -> PlannedTensor | None:
    if asked is None:
        return None
    by_role = {tensor.role: tensor for tensor in target if tensor.role in _HEAD_ROLES}
    source = next(by_role[role] for role in _HEAD_ROLES if role in by_role)
    fmt = Format(asked)
    obstacle = _obstacle(source.shape, fmt)
    if obstacle:
        raise PlanError("HEAD_INELIGIBLE", f"proposal head cannot be converted: {obstacle}",
                        where=f"{source.source} {list(source.shape)}", expected=f"rows of whole {fmt.name} blocks",
                        hint="leave --draft-head-quantization out: proposals then use the target's own head")
    return source._replace(
        role="proposal_head", group="head", format=fmt, origin=Origin.FLAG, skipped=False, nbytes_before=0,
        nbytes_after=packed(fmt, source.shape).total, reason="a copy of the target's head for proposals",
    )


def _check_body_possible(recipe: Recipe, draft: DraftFacts, body: Effective) -> None:
    asked = BODY_FLAG if body.origin is Origin.FLAG else "--online-mxfp8-scope all, which covers the draft body"
    if DRAFT_BODY not in recipe.conversions:
        raise undeclared_body(recipe, asked)
    if draft.has_own_quantization:
        raise own_quantization(asked)


def _by_canonical_name(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        canonical = canonical_name(name)
        if canonical in found:
            raise PlanError("DRAFT_NAME_TWICE", "draft has one tensor under two names", where=canonical,
                            got=f"{found[canonical].name} and {name}", hint="remove one of the two")
        found[canonical] = entry
    return found


def _obstacle(shape: Sequence[int], fmt: Format) -> str:
    """Why a tensor cannot be stored in a block format; empty when it can."""
    if len(shape) != 2:
        return "it is no matrix"
    if not divides(fmt, shape):
        return f"last dimension {shape[-1]} is not divisible by {FORMATS[fmt].block}"
    return ""


def _kept(tensor: MatchedTensor) -> _Fate:
    if tensor.row.ignored:
        return _Fate(None, Origin.CHECKPOINT, "claimed, and not stored")
    reason = tensor.row.keep_reason or "no setting asks for a conversion"
    return _Fate(_SOURCE_FORMATS[tensor.entry.dtype], Origin.CHECKPOINT, reason)


def _planned(
    tensors: Sequence[MatchedTensor], fate_of: Callable[[MatchedTensor], _Fate]
) -> tuple[PlannedTensor, ...]:
    """What becomes of each tensor. Tensors of one row, shape and dtype share a fate: a model has few of those."""
    fates: dict[tuple[int, tuple[int, ...], str], tuple[_Fate, str, int]] = {}
    planned = []
    for tensor in tensors:
        entry, row = tensor.entry, tensor.row
        key = (id(row), entry.shape, entry.dtype)
        known = fates.get(key)
        if known is None:
            fate = fate_of(tensor)
            known = fates[key] = (fate, row.role.partition("_")[0], _stored_nbytes(fate.format, entry))
        fate, group, nbytes_after = known
        planned.append(PlannedTensor(
            tensor.name, entry.name, row.role, group, entry.shape, entry.dtype, fate.format, fate.origin, fate.reason,
            fate.skipped, entry.nbytes, nbytes_after,
        ))
    return tuple(planned)


def _stored_nbytes(fmt: Format | PackedFormat | None, entry: TensorEntry) -> int:
    if fmt is PackedFormat.NVFP4:  # whose checkpoint may have scales of activations too
        return packed(Format.NVFP4, entry.shape).total
    if isinstance(fmt, Format):
        return packed(fmt, entry.shape).total
    return entry.nbytes if fmt else 0


def _tuning_identity(target: Sequence[PlannedTensor], recorded: RecordedPrecision) -> bytes:
    """SHA-256 of [online_quantization, scope, [[name, shape, source dtype, format] by name]] as JSON without spaces.

    Tensors of one shape, dtype and format end in the same text, which is written once.
    """
    ends: dict[tuple[tuple[int, ...], str, int], str] = {}
    choices = []
    for tensor in sorted(target, key=attrgetter("name")):
        key = (tensor.shape, tensor.source_dtype, id(tensor.format))  # an enum's own hash is slow, its members are one
        if key not in ends:
            ends[key] = _compact_json([tensor.shape, tensor.source_dtype, tensor.format.value if tensor.format else ""])
        choices.append(f"[{encode_basestring_ascii(tensor.name)},{ends[key][1:]}")
    settings = _compact_json([recorded.online_quantization, recorded.online_mxfp8_scope])
    return hashlib.sha256(f"{settings[:-1]},[{','.join(choices)}]]".encode()).digest()


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _row(plan: PrecisionPlan, part: str, group: str, tensors: Sequence[PlannedTensor]) -> PlanRow:
    shares: dict[str, int] = {}
    for tensor in tensors:
        word = tensor.format.value if tensor.format else "not stored"
        shares[word] = shares.get(word, 0) + tensor.nbytes_after
    nbytes_after = sum(shares.values())
    weights = sum(prod(tensor.shape) for tensor in tensors if tensor.format)
    effective, origin = _group_effective(plan, part, group, tensors)
    return PlanRow(
        part, group, len(tensors), sum(tensor.nbytes_before for tensor in tensors), nbytes_after,
        nbytes_after * 8 / weights if weights else 0.0, tuple(sorted(shares, key=lambda word: -shares[word])),
        effective, origin, sum(tensor.origin is not Origin.CHECKPOINT for tensor in tensors),
        sum(tensor.skipped for tensor in tensors),
    )


def _group_effective(
    plan: PrecisionPlan, part: str, group: str, tensors: Sequence[PlannedTensor]
) -> tuple[str, Origin]:
    """A role's value for the groups that its setting reaches, "checkpoint" for all others."""
    role = {("draft", "body"): Role.DRAFT_BODY, ("proposal head", "head"): Role.DRAFT_HEAD}.get((part, group))
    if part == "target" and any(tensor.skipped or tensor.origin is not Origin.CHECKPOINT for tensor in tensors):
        role = Role.TARGET
    if role is None:
        return CHECKPOINT, Origin.CHECKPOINT
    return plan.role(role).text, plan.role(role).origin
