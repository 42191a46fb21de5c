"""What differs between two cores: precision by role, tensors by format, and graphs by name.

    report = diff_cores(Path("a"), Path("b"), trust)
    report.differs(Part.DRAFT)               # would a server run another draft?

Ids do not count: a graph is the same when the same kernels do the same to the same named buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dflash_core.effective import Role, effective_precision
from dflash_core.errors import UsageError
from dflash_core.formats import FORMATS
from dflash_core.v1.graph_pb2 import GraphTemplate
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest
from dflash_core.v1.weights_pb2 import TensorView

from .archive import open_core
from .diff_errors import SqnrDiff, compare_errors
from .diff_graph import Facts, GraphNames, described, first_difference
from .error_report import WeightErrors, errors_of, reported_in
from .structure import check_manifest_structure
from .trust import TrustPolicy
from .verify import check_contents, check_version, file_sizes, parse_manifest, read_manifest, verify


class Part(Enum):
    """What `--fail-on` can name. The value is the word on the command line."""

    TARGET = "target"
    DRAFT = "draft"
    GRAPHS = "graphs"


class Change(Enum):
    """How an entry of the right core stands to the left core's."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class CoreSide:
    """Which core a side is."""

    path: str
    core_name: str
    release: int
    core_digest: str


@dataclass(frozen=True, slots=True)
class Value:
    """A recorded value (None: nothing is recorded), what it means, and what decided that."""

    recorded: str | None
    effective: str
    origin: str


@dataclass(frozen=True, slots=True)
class RoleDiff:
    """One role's precision on both sides; `same` compares what they mean."""

    role: str
    left: Value
    right: Value
    same: bool


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field and its values on both sides; an empty text is an absent value."""

    part: Part
    field: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class FormatDiff:
    """Tensors and bytes of one owner in one format, on both sides."""

    owner: str
    format: str
    left_tensors: int
    left_nbytes: int
    right_tensors: int
    right_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor that one side lacks, or the fields in which the two differ: name -> (left, right)."""

    name: str
    owner: str
    change: Change
    fields: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """A graph that one side lacks, or the first thing in which the two differ."""

    target: str
    name: str
    change: Change
    where: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class CoreDiff:
    """Everything `diff` shows.

    `authenticated`: both cores were verified against a trust file. `sqnr` is None unless both carry an error report.
    """

    authenticated: bool
    left: CoreSide
    right: CoreSide
    precision: tuple[RoleDiff, ...]
    identity: tuple[FieldDiff, ...]
    formats: tuple[FormatDiff, ...]
    tensors: tuple[TensorDiff, ...]
    sqnr: tuple[SqnrDiff, ...] | None
    graphs: tuple[GraphDiff, ...]

    def differs(self, part: Part) -> bool:
        """Whether the cores differ in this part: its identity, effective precision or tensors; or in a graph."""
        if part is Part.GRAPHS:
            return bool(self.graphs)
        return (any(not row.same for row in self.precision if _PART_OF_ROLE[row.role] is part)
                or any(row.part is part for row in self.identity)
                or any((row.owner == "draft") == (part is Part.DRAFT) for row in self.tensors))

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        return {
            **asdict(self, dict_factory=_plain), "differs": {part.value: self.differs(part) for part in Part},
        }


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in items}


_PART_OF_ROLE = {Role.TARGET.value: Part.TARGET, Role.VERIFY_HEAD.value: Part.TARGET,
                 Role.DRAFT_BODY.value: Part.DRAFT, Role.DRAFT_HEAD.value: Part.DRAFT}
_FORMAT_WORDS = {spec.view_format: fmt.value for fmt, spec in FORMATS.items() if spec.view_format}
_GLOBAL_SCALE = ".global_scale"
_TENSOR_FIELDS = ("dtype", "format", "shape", "size_bytes", "recipe", "owner", "sha256")
_SPECULATION_FIELDS = ("method", "draft_depth", "block_size", "candidate_top_k", "acceptance_rule", "conv_taps",
                       "conv_group_size", "output_multiplier", "final_logit_softcapping", "input_embedding_scale",
                       "tap_source")


@dataclass(frozen=True, slots=True)
class _Opened:
    side: CoreSide
    manifest: RebuildManifest
    graphs: Mapping[tuple[str, str], tuple[Facts, ...]]
    errors: tuple[WeightErrors, ...]


def parts_named(words: Iterable[str]) -> tuple[Part, ...]:
    """The parts that the command line names.

    Raises:
        UsageError: DIFF_PART.
    """
    known = {part.value: part for part in Part}
    given = list(words)
    for word in given:
        if word not in known:
            raise UsageError("DIFF_PART", "no such part of a core", where="--fail-on", expected=" or ".join(known),
                             got=repr(word))
    return tuple(known[word] for word in given)


def diff_cores(left: Path, right: Path, trust: TrustPolicy | None) -> CoreDiff:
    """Compare two cores.

    Args:
        trust: whose signatures are accepted; None reads the cores without asking who made them. Structure rules and
            the digests of the files that are parsed are checked either way.
    Raises:
        VerificationError, PolicyError: as `verify`; without `trust`, only for files that disagree with the manifest.
        FormatError, CompatibilityError: a core breaks a structure rule or needs another runtime.
    """
    ours, theirs = _open(left, trust), _open(right, trust)
    return CoreDiff(
        authenticated=trust is not None, left=ours.side, right=theirs.side,
        precision=_precision(ours.manifest, theirs.manifest), identity=tuple(_identity(ours.manifest, theirs.manifest)),
        formats=_formats(ours.manifest, theirs.manifest),
        tensors=tuple(_tensors(ours.manifest.tensor_views, theirs.manifest.tensor_views)),
        sqnr=compare_errors(ours.errors, theirs.errors),
        graphs=tuple(_graphs(ours.graphs, theirs.graphs)),
    )


def _open(path: Path, trust: TrustPolicy | None) -> _Opened:
    if trust is None:
        with open_core(path) as files:
            data = read_manifest(files)
            manifest = parse_manifest(data)
            check_version(manifest)
            check_manifest_structure(manifest, file_sizes(files))
            contents = check_contents(files, manifest)
        sets, errors = contents.graph_sets, reported_in(contents.files)
        digest = hashlib.sha256(data).hexdigest()
    else:
        with verify(path, trust) as core:
            manifest, digest, errors = core.manifest, core.core_digest, errors_of(core)
            sets = {file.file.digest: core.graph_set(file) for file in manifest.graph_files}
    names, targets = GraphNames.of(manifest), {t.target_id: t.name for t in manifest.device_targets}
    graphs = {}
    for file in manifest.graph_files:
        templates: dict[int, GraphTemplate] = {t.template_id: t for t in sets[file.file.digest].templates}
        target = targets[file.target_id] + (f" rank {file.rank}" if file.HasField("rank") else "")
        for graph in sets[file.file.digest].graphs:
            graphs[target, graph.name] = described(graph, names, templates)
    return _Opened(CoreSide(str(path), manifest.core_name, manifest.release, digest), manifest, graphs, errors)


def _precision(left: RebuildManifest, right: RebuildManifest) -> tuple[RoleDiff, ...]:
    rows = []
    for ours, theirs in zip(effective_precision(left), effective_precision(right), strict=True):
        values = [Value(item.recorded, item.text, item.origin.value) for item in (ours, theirs)]
        rows.append(RoleDiff(ours.role.value, values[0], values[1], ours.value == theirs.value))
    return tuple(rows)


def _identity(left: RebuildManifest, right: RebuildManifest) -> Iterator[FieldDiff]:
    """Models and speculation; precision is not repeated here."""
    yield from _model(Part.TARGET, left.target, right.target)
    yield from _model(Part.DRAFT, left.speculation.draft, right.speculation.draft)
    for name in _SPECULATION_FIELDS:
        values = [str(getattr(m.speculation, name)) if m.speculation.HasField(name) else "" for m in (left, right)]
        if values[0] != values[1]:
            yield FieldDiff(Part.DRAFT, name, *values)


def _model(part: Part, left: ModelIdentity, right: ModelIdentity) -> Iterator[FieldDiff]:
    for name in ("repository", "revision", "architecture"):
        if getattr(left, name) != getattr(right, name):
            yield FieldDiff(part, name, getattr(left, name), getattr(right, name))
    ours, theirs = ({file.path: file.sha256.hex() for file in model.files} for model in (left, right))
    for path in sorted(ours.keys() | theirs.keys()):
        if ours.get(path) != theirs.get(path):
            yield FieldDiff(part, path, ours.get(path, ""), theirs.get(path, ""))


def _formats(left: RebuildManifest, right: RebuildManifest) -> tuple[FormatDiff, ...]:
    ours, theirs = _by_format(left.tensor_views), _by_format(right.tensor_views)
    return tuple(FormatDiff(*key, *ours.get(key, (0, 0)), *theirs.get(key, (0, 0)))
                 for key in sorted(ours.keys() | theirs.keys()))


def _by_format(views: Iterable[TensorView]) -> dict[tuple[str, str], tuple[int, int]]:
    """Owner and format -> tensors and bytes; the scales of a tensor are its bytes."""
    listed = list(views)
    codes = {view.scale_view: view for view in listed if view.HasField("scale_view")}
    codes |= {f"{view.name}{_GLOBAL_SCALE}": view for view in listed if view.HasField("format")}
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for view in listed:
        owner = codes.get(view.name, view)
        key = owner.owner or "target", _FORMAT_WORDS.get(owner.format, owner.dtype)
        tensors, nbytes = found.get(key, (0, 0))
        found[key] = tensors + (owner is view), nbytes + view.size_bytes
    return found


def _tensors(left: Iterable[TensorView], right: Iterable[TensorView]) -> Iterator[TensorDiff]:
    ours, theirs = ({view.name: view for view in views} for views in (left, right))
    for name in (*ours, *(name for name in theirs if name not in ours)):
        views = ours.get(name), theirs.get(name)
        if views[0] is None or views[1] is None:
            view = views[0] or views[1]
            assert view is not None
            change = Change.REMOVED if views[1] is None else Change.ADDED
            yield TensorDiff(name, view.owner or "target", change, {})
            continue
        fields = {field: (_text(views[0], field), _text(views[1], field)) for field in _TENSOR_FIELDS}
        different = {field: values for field, values in fields.items() if values[0] != values[1]}
        if different:
            yield TensorDiff(name, views[0].owner or "target", Change.CHANGED, different)


def _text(view: TensorView, field: str) -> str:
    if field == "owner":
        return view.owner or "target"
    value = getattr(view, field)
    if isinstance(value, bytes):
        return value.hex()
    return str(list(value)) if field == "shape" else str(value)


def _graphs(
    left: Mapping[tuple[str, str], tuple[Facts, ...]], right: Mapping[tuple[str, str], tuple[Facts, ...]]
) -> Iterator[GraphDiff]:
    for key in (*left, *(key for key in right if key not in left)):
        if key not in left or key not in right:
            yield GraphDiff(*key, Change.ADDED if key not in left else Change.REMOVED, "", "", "")
            continue
        difference = first_difference(left[key], right[key])
        if difference is not None:
            yield GraphDiff(*key, Change.CHANGED, *difference)
