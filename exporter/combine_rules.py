"""Which cores may become one: every rule that manifests alone decide, with both values, their origin and the remedy.

    for rule in manifest_rules(inputs):
        print(rule.name, rule.verdict.value, rule.left.effective, rule.right.effective, rule.change)

Precision is compared by what it means (`dflash_core.effective`), never by what was recorded. What the tables of two
cores hold (tensors, buffers, graphs) is compared where they are merged, in `combine_ids` and `combine_graphs`.
Source: docs/compatibility.md, "Which cores combine".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dflash_core.effective import (
    CHECKPOINT,
    NO_CONVERSION,
    ONLINE_MXFP8,
    Effective,
    Role,
    effective_precision,
    effective_scope,
    has_draft,
)
from dflash_core.errors import CompatibilityError
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest

from exporter.combine_inputs import Input, all_parts

RECORDED, ABSENT = "recorded", "default"


class Verdict(Enum):
    """What became of a rule. The value is the word that reports print."""

    HOLDS = "holds"
    FAILS = "fails"
    APART = "not compared"


@dataclass(frozen=True, slots=True)
class Side:
    """One core's side of a comparison.

    Attributes:
        core: how messages call it.
        recorded: what its manifest says; "-" when it says nothing.
        effective: what that means; two sides agree when these are equal.
        origin: what decided it.
    """

    core: str
    recorded: str
    effective: str
    origin: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule applied to two cores.

    Attributes:
        name, code: words for a person and for a script.
        verdict: whether it holds; APART when a side takes no part.
        left, right: None where there is no such side.
        where: the first thing that differs, when the values alone do not show it.
        change: the smallest change that would make it hold; empty when it does.
    """

    name: str
    code: str
    verdict: Verdict
    left: Side | None
    right: Side | None
    where: str = ""
    change: str = ""


Change = Callable[[Side, Side], str]


def manifest_rules(inputs: Sequence[Input]) -> tuple[Rule, ...]:
    """Every rule that the manifests decide, in the order in which `combine` applies them."""
    return (*_target_rules(inputs), *_format_rules(inputs), *_serving_rules(inputs), *_draft_rules(inputs))


def refusal(rule: Rule) -> CompatibilityError:
    """The error for a rule that fails: both cores, both recorded and both effective values."""
    assert rule.left is not None and rule.right is not None
    sides = f"{rule.left.core} and {rule.right.core}"
    return CompatibilityError(
        rule.code, f"the cores do not combine: {rule.name} differs",
        where=f"{sides}: {rule.where}" if rule.where else sides,
        expected=_side_text(rule.left), got=_side_text(rule.right), hint=rule.change,
    )


def _side_text(side: Side) -> str:
    if side.recorded == side.effective:
        return side.effective
    return f"{side.effective} (recorded {side.recorded}; {side.origin})"


def _compare(name: str, code: str, sides: Sequence[Side], change: Change) -> Iterable[Rule]:
    """Each side against the first; equality is transitive, so no pair is missed."""
    if len(sides) < 2:
        yield Rule(name, code, Verdict.APART, sides[0] if sides else None, None)
        return
    first = sides[0]
    for other in sides[1:]:
        same = first.effective == other.effective
        yield Rule(name, code, Verdict.HOLDS if same else Verdict.FAILS, first, other,
                   change="" if same else change(first, other))


def _plain(core: str, value: object, present: bool = True, default: str = "") -> Side:
    text = str(value) if present else "-"
    return Side(core, text, text if present else default, RECORDED if present else ABSENT)


def _target_rules(inputs: Sequence[Input]) -> Iterable[Rule]:
    def change(left: Side, right: Side) -> str:
        return f"export {right.core} from the checkpoint that {left.core} was made from"

    for name in ("repository", "revision", "architecture"):
        values = [_plain(i.label, getattr(i.manifest.target, name) or "-") for i in inputs]
        yield from _compare(f"target {name}", f"COMBINE_TARGET_{name.upper()}", values, change)
    files = [_plain(i.label, _files_text(i.manifest.target)) for i in inputs]
    by_label = {i.label: i.manifest.target for i in inputs}
    for rule in _compare("target files", "COMBINE_TARGET_FILES", files, change):
        if rule.verdict is Verdict.FAILS and rule.left and rule.right:
            rule = replace(rule, where=_first_file(by_label[rule.left.core], by_label[rule.right.core]))
        yield rule


def _files_text(model: ModelIdentity) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.files, key=lambda f: f.path):
        digest.update(f"{file.path}\0{file.sha256.hex()}\n".encode())
    return f"{len(model.files)} files {digest.hexdigest()[:16]}"


def _first_file(left: ModelIdentity, right: ModelIdentity) -> str:
    """Path of the first source file that the two do not share."""
    ours, theirs = ({(f.path, f.sha256) for f in model.files} for model in (left, right))
    return min(ours ^ theirs)[0]


def _format_rules(inputs: Sequence[Input]) -> Iterable[Rule]:
    def online(left: Side, right: Side) -> str:
        if left.effective == "none":
            return f"export {right.core} without --online-mxfp8-scope"
        if left.effective == ONLINE_MXFP8:
            return f"export {right.core} with --online-mxfp8-scope, as {left.core} was"
        return f"export both with one release of dflash: {left.core} has {left.effective}, which this one does not make"

    def scope(left: Side, right: Side) -> str:
        if left.effective == str(NO_CONVERSION.value):
            return f"export {right.core} without --online-mxfp8-scope"
        return f"export {right.core} with --online-mxfp8-scope {left.effective}"

    def verify(left: Side, right: Side) -> str:
        return f"export both with one verification head, {left.effective} as in {left.core}"

    def tuning(left: Side, right: Side) -> str:
        return "export both with the same release and the same target settings, so that one tuning is pinned"

    labelled = [(i.label, i.manifest) for i in inputs]
    yield from _compare("online quantization", "COMBINE_ONLINE_QUANTIZATION",
                        [_plain(core, m.online_quantization, bool(m.online_quantization), "none")
                         for core, m in labelled], online)
    yield from _compare("target scope", "COMBINE_TARGET_SCOPE", [_scope_side(core, m) for core, m in labelled], scope)
    yield from _compare("verification head", "COMBINE_VERIFY_HEAD",
                        [_role_side(core, m, Role.VERIFY_HEAD) for core, m in labelled], verify)
    known = [_plain(core, m.tuning_identity.hex()[:16]) for core, m in labelled if m.tuning_identity]
    yield from _compare("tuning identity", "COMBINE_TUNING", known, tuning)


def _scope_side(core: str, manifest: RebuildManifest) -> Side:
    scope = effective_scope(manifest)
    recorded = manifest.online_mxfp8_scope or "-"
    if isinstance(scope, str):
        return Side(core, recorded, scope, RECORDED if manifest.online_mxfp8_scope else ABSENT)
    return Side(core, recorded, str(scope.value), CHECKPOINT)


def _role_side(core: str, manifest: RebuildManifest, role: Role) -> Side:
    entry: Effective = next(e for e in effective_precision(manifest) if e.role is role)
    return Side(core, entry.recorded or "-", entry.text, entry.origin.value)


def _serving_rules(inputs: Sequence[Input]) -> Iterable[Rule]:
    def change(left: Side, right: Side) -> str:
        return f"export both for one serving set-up; {right.core} needs {left.effective}"

    yield from _compare("parallelism", "COMBINE_PARALLELISM", [_parallelism(i) for i in inputs], change)
    yield from _compare("vision", "COMBINE_VISION", [
        _plain(i.label, hashlib.sha256(i.manifest.vision.SerializeToString(deterministic=True)).hexdigest()[:16],
               i.manifest.HasField("vision"), "none") for i in inputs], change)
    for field in ("page_tokens", "vocab_size", "kv_bytes_per_page", "state_bytes_per_slot"):
        values = [_plain(i.label, getattr(i.manifest.contract, field)) for i in inputs]
        yield from _compare(field.replace("_", " "), f"COMBINE_{field.upper()}", values, change)


def _parallelism(item: Input) -> Side:
    """Absent and spelled-out single rank are one thing."""
    p = item.manifest.parallelism
    sizes = (p.world_size, p.tensor_parallel, p.decode_context_parallel)
    interleave = p.kv_interleave if p.HasField("kv_interleave") else 1
    effective = " × ".join(str(max(1, size)) for size in sizes) + f", {interleave} tokens a stripe"
    if p.collective_plan:
        effective += f", {p.collective_plan}"
    present = item.manifest.HasField("parallelism")
    return Side(item.label, effective if present else "-", effective, RECORDED if present else ABSENT)


def _draft_rules(inputs: Sequence[Input]) -> Iterable[Rule]:
    drafted = [part for part in all_parts(inputs) if has_draft(part.manifest)]
    yield from _compare("draft body", "COMBINE_DRAFT_BODY",
                        [_role_side(p.label, p.manifest, Role.DRAFT_BODY) for p in drafted], _body_change)
    for name, code, roles, sides in (
        ("draft", "COMBINE_DRAFT", ("prefill", "draft", "verify"), [_draft_side(p.label, p.manifest) for p in drafted]),
        ("proposal head", "COMBINE_DRAFT_HEAD", ("draft",),
         [_role_side(p.label, p.manifest, Role.DRAFT_HEAD) for p in drafted]),
    ):
        names = {part.label: _graph_names(inputs, part.label, roles) for part in drafted}
        for rule in _compare(name, code, sides, _draft_change):
            shared = names[rule.left.core] & names[rule.right.core] if rule.left and rule.right else frozenset()
            if rule.verdict is Verdict.FAILS and not shared:
                rule = replace(rule, verdict=Verdict.APART, where="no graph has the same name", change="")
            yield replace(rule, where=f"graph {min(shared)}") if rule.verdict is Verdict.FAILS else rule


def _draft_side(core: str, manifest: RebuildManifest) -> Side:
    draft, taps = manifest.speculation.draft, manifest.speculation.tap_source
    text = f"{manifest.speculation.method} {draft.repository or draft.architecture} {_files_text(draft)}"
    return _plain(core, f"{text} taps of the {taps}" if taps else text)


def _graph_names(inputs: Sequence[Input], label: str, roles: tuple[str, ...]) -> frozenset[str]:
    """Names of a part's graphs in these roles."""
    for item in inputs:
        for part in item.parts:
            if part.label == label:
                own = set(part.component.graph_names)
                return frozenset(graph.name for file in item.manifest.graph_files
                                 for graph in item.core.graph_set(file).graphs
                                 if graph.role in roles and graph.name in own)
    return frozenset()


def _body_change(left: Side, right: Side) -> str:
    flag = "--draft-body-quantization"
    converted, kept = (left, right) if right.effective == CHECKPOINT else (right, left)
    if kept.effective == CHECKPOINT:
        if converted.recorded == "-":
            return f"export {kept.core} with {flag} {converted.effective}"
        return f"export {kept.core} with {flag} {converted.effective}, or {converted.core} without {flag}"
    return f"export both with the same {flag}; {right.core} with {left.effective}"


def _draft_change(left: Side, right: Side) -> str:
    return (f"export both with the same draft and --draft-head-quantization, or {right.core} with other --batch sizes "
            f"than {left.core}")
