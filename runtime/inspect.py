"""What a core says about itself: identity, precision, graphs, memory, weights and signers. It executes nothing.

    report = inspect_core(Path("demo/core"), trust=None)     # report.authenticated is False
    report.weights[0].bits_per_weight

`inspect_table` draws a report; `dataclasses.asdict` of it is the JSON form.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dflash_core.compat import CPU, fit_symbols
from dflash_core.effective import has_draft
from dflash_core.errors import UsageError
from dflash_core.formats import FORMATS
from dflash_core.v1.graph_pb2 import KERNEL, WEIGHTS, BufferClass, Graph, GraphNode, GraphSet, NodeKind
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest
from dflash_core.v1.weights_pb2 import TensorView

from .archive import open_core
from .capacity import Capacity, capacity_of
from .check import available_bytes
from .inspect_precision import Component, Precision, components_of, precision_of
from .sbom import sbom
from .structure import check_manifest_structure
from .trust import TrustPolicy
from .verify import check_contents, check_version, file_sizes, parse_manifest, read_manifest, verify

_FORMAT_WORDS = {spec.view_format: fmt.value for fmt, spec in FORMATS.items() if spec.view_format}
_SCALE_SUFFIXES = (".block_scale", ".global_scale")
"""Views with these names belong to the view before the suffix, and count as its bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """One file that the manifest lists."""

    path: str
    role: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """Where a model came from; `nbytes` are those of its checkpoint files."""

    repository: str
    revision: str
    architecture: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made: method, proposals per step, rows of the draft's block."""

    method: str
    depth: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Vision:
    """The image encoder, and the tokens of the largest image (None: not recorded)."""

    encoder: Model
    max_image_tokens: int | None


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """One graph of one device target; `kernels` counts kernel nodes by name, and other nodes by their kind."""

    target: str
    name: str
    role: str
    batch: int
    query_tokens: int
    nodes: int
    kernels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """The buffers of one class; size in bytes is nbytes + sum(symbol × per_symbol[symbol]).

    `target` is empty for buffers that every device target has.
    """

    buffer_class: str
    target: str
    buffers: int
    nbytes: int
    per_symbol: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored tensors of one owner and format.

    `nbytes` and `weights` leave out what another owner has counted already; `nbytes` include scales. `bits_per_weight`
    is None when nothing is left.
    """

    owner: str
    format: str
    tensors: int
    weights: int
    nbytes: int
    bits_per_weight: float | None


@dataclass(frozen=True, slots=True)
class SignerSummary:
    """A trusted signer whose signature verified and counts."""

    keyid: str
    owner: str
    roles: Sequence[str]


@dataclass(frozen=True, slots=True)
class CoreReport:
    """Everything `inspect` shows. `signers` is empty unless `authenticated`; so is `components` unless combined."""

    authenticated: bool
    core_name: str
    core_digest: str
    release: int
    exporter_version: str
    export_device: str | None
    files: Sequence[File]
    target: Model
    draft: Model | None
    speculation: Speculation | None
    vision: Vision | None
    precision: Sequence[Precision]
    components: Sequence[Component]
    graphs: Sequence[GraphSummary]
    memory: Sequence[Memory]
    capacity: Capacity
    weights: Sequence[Weights]
    signers: Sequence[SignerSummary]


def inspect_core(path: Path, trust: TrustPolicy | None) -> CoreReport:
    """Read a core and sum it up.

    Args:
        path: the core's directory, or an archive of it.
        trust: whose signatures are accepted; None reads the core without asking who made it. Structure rules and the
            digests of the files that are parsed are checked either way.
    Raises:
        VerificationError, PolicyError: as `verify`; without `trust`, only for files that disagree with the manifest.
        FormatError, CompatibilityError: it breaks a structure rule or needs another runtime.
    """
    manifest, core_digest, graph_sets, signers = _read(path, trust)
    return _report(manifest, core_digest, graph_sets, signers)


def inspect_sbom(path: Path, trust: TrustPolicy | None) -> dict[str, Any]:
    """A core's parts as a CycloneDX document; arguments and errors as of `inspect_core`."""
    manifest, core_digest, _, _ = _read(path, trust)
    return sbom(manifest, core_digest)


def inspect_dot(path: Path, trust: TrustPolicy | None, name: str) -> str:
    """A graph as Graphviz text; where several device targets have it, the last one's, which is a GPU's.

    Arguments and errors as of `inspect_core`; UsageError GRAPH_UNKNOWN, the core has no graph of that name.
    """
    from .graph_dot import graph_dot

    manifest, _, graph_sets, _ = _read(path, trust)
    targets = {target.target_id: target.name for target in manifest.device_targets}
    graphs = [(targets[file.target_id], graph, graph_sets[file.file.digest].templates)
              for file in manifest.graph_files for graph in graph_sets[file.file.digest].graphs]
    found = [item for item in graphs if item[1].name == name]
    if not found:
        raise UsageError("GRAPH_UNKNOWN", "the core has no graph of this name", where=str(path),
                         expected=", ".join(dict.fromkeys(graph.name for _, graph, _ in graphs)), got=name,
                         hint="name one of them with --dot")
    target, graph, templates = found[-1]
    return graph_dot(graph, {template.template_id: template for template in templates}, manifest, target)


def _read(
    path: Path, trust: TrustPolicy | None
) -> tuple[RebuildManifest, str, Mapping[bytes, GraphSet], tuple[SignerSummary, ...] | None]:
    """Manifest, core digest, graphs by file digest, and the signers; None when nobody asked who made the core."""
    if trust is None:
        with open_core(path) as files:
            data = read_manifest(files)
            manifest = parse_manifest(data)
            check_version(manifest)
            check_manifest_structure(manifest, file_sizes(files))
            graph_sets = check_contents(files, manifest).graph_sets
        return manifest, hashlib.sha256(data).hexdigest(), graph_sets, None
    with verify(path, trust) as core:
        graph_sets = {item.file.digest: core.graph_set(item) for item in core.manifest.graph_files}
        signers = tuple(SignerSummary(signer.keyid, signer.owner, signer.roles) for signer in core.signers)
        return core.manifest, core.core_digest, graph_sets, signers


def _report(
    manifest: RebuildManifest, core_digest: str, graph_sets: Mapping[bytes, GraphSet],
    signers: tuple[SignerSummary, ...] | None,
) -> CoreReport:
    speculation = manifest.speculation
    drafts = has_draft(manifest)
    provenance = manifest.provenance
    return CoreReport(
        authenticated=signers is not None,
        core_name=manifest.core_name,
        core_digest=core_digest,
        release=manifest.release,
        exporter_version=provenance.exporter_version,
        export_device=provenance.export_device if provenance.HasField("export_device") else None,
        files=tuple(File(entry.path, entry.role, entry.ref.size_bytes) for entry in manifest.files),
        target=_model(manifest.target),
        draft=_model(speculation.draft) if drafts else None,
        speculation=(
            Speculation(speculation.method, speculation.draft_depth, speculation.block_size) if drafts else None
        ),
        vision=_vision(manifest),
        precision=precision_of(manifest),
        components=components_of(manifest),
        graphs=_graphs(manifest, graph_sets),
        memory=_memory(manifest),
        capacity=_capacity(manifest),
        weights=_weights(manifest.tensor_views),
        signers=signers or (),
    )


def _model(identity: ModelIdentity) -> Model:
    return Model(
        identity.repository, identity.revision, identity.architecture, len(identity.files),
        sum(item.size_bytes for item in identity.files),
    )


def _vision(manifest: RebuildManifest) -> Vision | None:
    if not manifest.HasField("vision"):
        return None
    vision = manifest.vision
    return Vision(_model(vision.encoder), vision.max_image_tokens if vision.HasField("max_image_tokens") else None)


def _graphs(manifest: RebuildManifest, graph_sets: Mapping[bytes, GraphSet]) -> tuple[GraphSummary, ...]:
    targets = {target.target_id: target.name for target in manifest.device_targets}
    kernels = {kernel.kernel_id: kernel.name for kernel in manifest.kernels}
    found = []
    for graph_file in manifest.graph_files:
        graph_set = graph_sets[graph_file.file.digest]
        templates = {template.template_id: template.nodes for template in graph_set.templates}
        for graph in graph_set.graphs:
            nodes = templates[graph.template_id] if graph.HasField("template_id") else graph.nodes
            found.append(GraphSummary(
                targets[graph_file.target_id], graph.name, graph.role, graph.bucket.batch, graph.bucket.query_tokens,
                len(nodes), _histogram(graph, nodes, kernels),
            ))
    return tuple(found)


def _histogram(graph: Graph, nodes: Iterable[GraphNode], kernels: Mapping[int, str]) -> dict[str, int]:
    """How often each kernel occurs, the most frequent first."""
    replaced = {item.node_id: item.kernel_id for item in graph.overrides if item.HasField("kernel_id")}
    counts: Counter[str] = Counter()
    for node in nodes:
        if node.kind == KERNEL:
            counts[kernels[replaced.get(node.node_id, node.kernel_id)]] += 1
        else:
            counts[NodeKind.Name(node.kind).lower()] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _capacity(manifest: RebuildManifest) -> Capacity:
    """For this machine's processor and the memory that is free now; as recorded, for a core without a CPU target."""
    target = next((t.target_id for t in manifest.device_targets if t.name == CPU), None)
    if target is None:
        values = {s.symbol_id: s.default_value or s.minimum for s in manifest.symbols}
    else:
        values = fit_symbols(manifest, target, available_bytes())
    return capacity_of(manifest, {s.name: values[s.symbol_id] for s in manifest.symbols})


def _memory(manifest: RebuildManifest) -> tuple[Memory, ...]:
    blob_bytes = {blob.blob_id: blob.file.size_bytes for blob in manifest.weight_blobs}
    symbols = {symbol.symbol_id: symbol.name for symbol in manifest.symbols}
    targets = {target.target_id: target.name for target in manifest.device_targets}
    fixed: Counter[tuple[int, str]] = Counter()
    buffers: Counter[tuple[int, str]] = Counter()
    terms: dict[tuple[int, str], Counter[str]] = {}
    mapped: set[int] = set()
    for buffer in manifest.buffers:
        key = (int(buffer.buffer_class), targets[buffer.device_target] if buffer.HasField("device_target") else "")
        buffers[key] += 1
        if buffer.buffer_class != WEIGHTS:
            fixed[key] += buffer.fixed_bytes
        elif buffer.blob_id not in mapped:
            mapped.add(buffer.blob_id)
            fixed[key] += blob_bytes[buffer.blob_id]
        for term in buffer.size_terms:
            terms.setdefault(key, Counter())[symbols[term.symbol_id]] += term.bytes
    return tuple(
        Memory(BufferClass.Name(kind).lower(), target, buffers[kind, target], fixed[kind, target],
               dict(terms.get((kind, target), {})))
        for kind, target in sorted(buffers)
    )


def _weights(views: Sequence[TensorView]) -> tuple[Weights, ...]:
    by_name = {view.name: view for view in views}
    tensors: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    seen: set[tuple[int, int]] = set()
    for view in views:
        codes = _codes_of(view, by_name)
        key = (codes.owner or "target", _FORMAT_WORDS.get(codes.format, codes.dtype))
        if codes is view:
            tensors[key] += 1
        if (view.blob_id, view.offset_bytes) in seen:
            continue
        seen.add((view.blob_id, view.offset_bytes))
        nbytes[key] += view.size_bytes
        if codes is view:
            weights[key] += prod(view.shape)
    return tuple(
        Weights(*key, tensors[key], weights[key], nbytes[key],
                round(8 * nbytes[key] / weights[key], 3) if weights[key] else None)
        for key in sorted(tensors)
    )


def _codes_of(view: TensorView, by_name: Mapping[str, TensorView]) -> TensorView:
    """The view whose scales this one holds, or itself."""
    for suffix in _SCALE_SUFFIXES:
        codes = by_name.get(view.name.removesuffix(suffix))
        if codes is not None and view.name.endswith(suffix) and codes.HasField("format"):
            return codes
    return view
