"""Merge signed cores into one that serves every graph of each.

    request = CombineRequest((Path("b1"), Path("b4")), Path("both"))
    combined = combine(request, TrustPolicy.load(Path("trust.json")), load_private_key(Path("key.pem")))

1. Verify every input as the loader does. 2. Apply every rule to what the manifests record and mean. 3. Merge tables and
graphs under one numbering. 4. Copy files, once per digest. 5. Write the manifest, with each input's beside it, byte for
byte. 6. Sign, open the result as the loader would, and only then give it its name.

The same inputs in the same order give the same bytes, signatures aside. Inputs are only read.
Source: docs/compatibility.md, "Which cores combine".
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.effective import has_draft
from dflash_core.errors import DflashError, UsageError
from dflash_core.v1.manifest_pb2 import CoreComponent, IdMap, Provenance, RebuildManifest, ServingContract
from dflash_core.v1.weights_pb2 import FileEntry

import exporter
from exporter.combine_graphs import MergedSet, merge_graphs
from exporter.combine_ids import STAGES, Tables
from exporter.combine_inputs import Input, open_inputs
from exporter.combine_rules import RECORDED, Rule, Side, Verdict, manifest_rules, refusal
from exporter.progress import Progress, Silent
from exporter.staging import check_output, staged, writing
from runtime.console import human_bytes
from runtime.corefiles import mismatch
from runtime.keys import PrivateKey, encode_public_key, keyid
from runtime.sign import file_entry, sign_core
from runtime.trust import FORMAT, TrustPolicy
from runtime.verify import MANIFEST, verify

_COPIED = {"module": "modules", "weights": "weights", "state": "state", "config": "config", "golden": "golden"}
_ID_MAPS = ("kernel", "module", "buffer", "blob", "symbol")


@dataclass(frozen=True, slots=True)
class CombineRequest:
    """What to combine.

    Attributes:
        cores: paths of 2 to 16 cores; their order decides ids and whose recorded settings the result shows first.
        out: the combined core's folder; must not exist unless `force`.
        core_name, release: identity of the result; None: the name of `out`.
    """

    cores: tuple[Path, ...]
    out: Path
    core_name: str | None = None
    release: int = 1
    force: bool = False


@dataclass(frozen=True, slots=True)
class CombinedCore:
    """A finished core; `digest` is the SHA-256 of its manifest in hex, `rules` are those that held."""

    path: Path
    signature: Path
    manifest: RebuildManifest
    digest: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """Everything the combined manifest is made of, and the rules that led there."""

    tables: Tables
    sets: tuple[MergedSet, ...]
    rules: tuple[Rule, ...]


def combine(request: CombineRequest, trust: TrustPolicy, key: PrivateKey,
            progress: Progress | None = None) -> CombinedCore:
    """Write a signed core that serves every graph of its inputs.

    Args:
        trust: whose signatures on the inputs are accepted; there is no way around it.
        key: signs the result.
    Raises:
        UsageError: OUTPUT_EXISTS; COMBINE_COUNT, COMBINE_TWICE; COMBINE_OUTPUT, the output is or lies in an input.
        PolicyError, VerificationError, FormatError: an input is not what trusted keys have signed, or not sound.
        CompatibilityError: COMBINE_…, the first rule that fails.
        ResourceError: an input cannot be read, or the output not be written.
    """
    watch = progress or Silent()
    check_output(request.out, force=request.force)
    _refuse_output_in_input(request)
    with open_inputs(request.cores, trust) as inputs:
        with watch.stage("compare", 0):
            merged = merge(inputs)
        watch.done("compare", f"{len(inputs)} cores   {len(merged.rules)} rules hold")
        with staged(request.out, force=request.force) as staging:
            manifest = _write(staging, request, inputs, merged, watch)
            with watch.stage("sign", sum(f.ref.size_bytes for f in manifest.files)) as on_bytes:
                signature = sign_core(staging, key, on_bytes=on_bytes)
            watch.done("sign", f"{len(manifest.files) + 1} files   (key {signature.stem[:12]}…)")
            with verify(staging, _only(key)) as result:
                digest = result.core_digest
    return CombinedCore(request.out, request.out / "signatures" / signature.name, manifest, digest, merged.rules)


def explain(cores: Sequence[Path], trust: TrustPolicy) -> tuple[Rule, ...]:
    """Every rule with both values, whether the cores combine or not; nothing is written. Raises as `open_inputs`."""
    with open_inputs(cores, trust) as inputs:
        return (*manifest_rules(inputs), *_table_rules(inputs)[2])


def first_failure(rules: Sequence[Rule]) -> Rule | None:
    """The rule that `combine` would refuse by; None when the cores combine."""
    return next((rule for rule in rules if rule.verdict is Verdict.FAILS), None)


def merge(inputs: Sequence[Input]) -> Merged:
    """Apply every rule, and merge.

    Raises:
        CompatibilityError: the first rule that fails.
    """
    rules = manifest_rules(inputs)
    wrong = first_failure(rules)
    if wrong is not None:
        raise refusal(wrong)
    tables, sets, more, failed = _table_rules(inputs)
    if failed is not None:
        raise failed
    return Merged(tables, sets, (*rules, *more))


def _table_rules(
    inputs: Sequence[Input],
) -> tuple[Tables, tuple[MergedSet, ...], tuple[Rule, ...], DflashError | None]:
    """Merge table after table; after the first refusal the others, which build on it, are not compared."""
    tables, sets, rules = Tables.of(inputs), (), []
    failed: DflashError | None = None
    for name, stage in (*STAGES, ("graphs", None)):
        code = f"COMBINE_{name.upper()}"
        if failed is not None:
            rules.append(Rule(name, code, Verdict.APART, None, None, where="builds on what failed above"))
            continue
        try:
            if stage is None:
                sets = merge_graphs(tables, inputs)
            else:
                stage(tables, inputs)
        except DflashError as error:
            failed = error
            left, right = (Side("", text or "-", text or "-", RECORDED) for text in (error.expected, error.got))
            rules.append(Rule(name, error.code, Verdict.FAILS, left, right, where=error.where, change=error.hint))
            continue
        counts = [_count(item, name) for item in inputs]
        total = sum(len(s.graphs.graphs) for s in sets) if stage is None else len(getattr(tables, name))
        left, right = (Side("", text, text, RECORDED) for text in (" + ".join(counts), f"{total} combined"))
        rules.append(Rule(name, code, Verdict.HOLDS, left, right))
    return tables, sets, tuple(rules), failed


def _count(item: Input, name: str) -> str:
    fields = {"blobs": "weight_blobs", "views": "tensor_views", "targets": "device_targets"}
    if name == "graphs":
        return str(sum(len(item.core.graph_set(file).graphs) for file in item.manifest.graph_files))
    return str(len(getattr(item.manifest, fields.get(name, name))))


def _refuse_output_in_input(request: CombineRequest) -> None:
    out = request.out.resolve()
    for core in request.cores:
        if core.resolve() in (out, *out.parents):
            raise UsageError("COMBINE_OUTPUT", "the output is one of the cores to combine, or lies in it",
                             where=str(request.out), hint="choose another name: inputs are never changed")


def _only(key: PrivateKey) -> TrustPolicy:
    """A policy that accepts one key: the result is opened as its own signer would."""
    public = key.public_key()
    name = keyid(public)
    document = {"format": FORMAT, "keys": {name: {"pem": encode_public_key(public).decode(), "owner": "combine"}},
                "roles": {"builder": {"keys": [name], "threshold": 1}}, "require": ["builder"]}
    return TrustPolicy.parse(json.dumps(document).encode(), "the signing key")


def _write(staging: Path, request: CombineRequest, inputs: Sequence[Input], merged: Merged,
           watch: Progress) -> RebuildManifest:
    """Write every file but the signatures; returns the manifest."""
    entries = _copy_files(staging, inputs, watch)
    for path, data in sorted({path: data for item in inputs for path, data in item.carried.items()}.items()):
        entries[path] = _write_file(staging, path, "component", data)
    manifest = _manifest(request, inputs, merged)
    for merged_set in merged.sets:
        data = merged_set.graphs.SerializeToString(deterministic=True)
        path = f"graphs/{hashlib.sha256(data).hexdigest()}.pb"
        entries[path] = _write_file(staging, path, "graph", data)
        manifest.graph_files.add(target_id=merged_set.target_id, rank=merged_set.rank, file=entries[path].ref,
                                 graph_names=[graph.name for graph in merged_set.graphs.graphs])
    manifest.files.extend(entries[path] for path in sorted(entries))
    _put(staging / MANIFEST, [manifest.SerializeToString(deterministic=True)])
    return manifest


def _copy_files(staging: Path, inputs: Sequence[Input], watch: Progress) -> dict[str, FileEntry]:
    """Copy every file that is neither graph nor component, once per digest, and compare it with its digest."""
    found: dict[str, tuple[Input, FileEntry]] = {}
    for item in inputs:
        for entry in item.manifest.files:
            if entry.role in _COPIED:
                suffix = Path(entry.path).suffix if entry.role != "config" else ""
                found.setdefault(f"{_COPIED[entry.role]}/{entry.ref.digest.hex()}{suffix}", (item, entry))
    entries: dict[str, FileEntry] = {}
    total = sum(entry.ref.size_bytes for _, entry in found.values())
    listed = sum(e.ref.size_bytes for item in inputs for e in item.manifest.files if e.role in _COPIED)
    with watch.stage("copy", total) as on_bytes:
        for path in sorted(found):
            item, entry = found[path]
            digest = hashlib.sha256()
            _put(staging / path, _told(item.core.pieces(entry.path), (digest.update, lambda p: on_bytes(len(p)))))
            if digest.digest() != entry.ref.digest:
                raise mismatch(f"{item.label}: {entry.path}", entry.ref.digest, digest.digest())
            entries[path] = FileEntry()
            entries[path].CopyFrom(entry)
            entries[path].path = path
    watch.done("copy", f"{len(found)} files   {human_bytes(listed)} → {human_bytes(total)}")
    return entries


def _told(pieces: Iterable[memoryview], everyone: Sequence[Callable[[memoryview], object]]) -> Iterator[memoryview]:
    """Pieces of a file as they come, after everyone was told of each."""
    for piece in pieces:
        for tell in everyone:
            tell(piece)
        yield piece


def _put(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file of the staging folder and force it to the disk."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())


def _manifest(request: CombineRequest, inputs: Sequence[Input], merged: Merged) -> RebuildManifest:
    """The combined manifest, without its files and graph files.

    It begins as the first input's, so that fields which this release does not know are kept; what other inputs record
    is kept in their own manifests, under components/.
    """
    first, tables = inputs[0].manifest, merged.tables
    manifest = RebuildManifest()
    manifest.CopyFrom(first)
    manifest.core_name = request.core_name or request.out.name.lower()
    manifest.release = request.release
    drafted = next((item.manifest for item in inputs if has_draft(item.manifest)), None)
    if drafted is not None:
        manifest.speculation.CopyFrom(drafted.speculation)
    for name, entries in (
        ("files", ()), ("graph_files", ()), ("weight_blobs", tables.blobs), ("tensor_views", tables.views),
        ("buffers", tables.buffers), ("modules", tables.modules), ("kernels", tables.kernels),
        ("symbols", tables.symbols), ("device_targets", tables.targets), ("components", _components(inputs, tables)),
        ("required_features", sorted({f for item in inputs for f in item.manifest.required_features})),
    ):
        manifest.ClearField(name)
        getattr(manifest, name).extend(entries)
    _merge_contract(manifest.contract, inputs, tables)
    if not all(item.manifest.HasField("tuning_identity") for item in inputs):
        manifest.ClearField("tuning_identity")
    parents = {ref.digest: ref for item in inputs for ref in item.parents}
    manifest.provenance.CopyFrom(Provenance(exporter_version=exporter.__version__, parents=parents.values()))
    return manifest


def _merge_contract(contract: ServingContract, inputs: Sequence[Input], tables: Tables) -> None:
    contracts = [item.manifest.contract for item in inputs]
    for name in ("max_batch", "max_query_tokens", "max_context"):
        setattr(contract, name, max(getattr(other, name) for other in contracts))
    contract.sampling_modes[:] = list(dict.fromkeys(mode for other in contracts for mode in other.sampling_modes))
    del contract.io[:]
    contract.io.extend(tables.bindings)


def _components(inputs: Sequence[Input], tables: Tables) -> Iterator[CoreComponent]:
    """One per export, listed flat; the ids of a component of a combined input are led through both numberings."""
    component_id = 0
    for item, maps in zip(inputs, tables.maps, strict=True):
        for part in item.parts:
            component_id += 1
            component = CoreComponent()
            component.CopyFrom(part.component)
            component.component_id = component_id
            nested = bool(item.manifest.components)
            for kind in _ID_MAPS:
                moved: dict[int, int] = getattr(maps, kind)
                pairs = [(m.component, m.combined) for m in getattr(component, f"{kind}_ids")] if nested else [
                    (old, old) for old in moved]
                component.ClearField(f"{kind}_ids")
                getattr(component, f"{kind}_ids").extend(
                    IdMap(component=own, combined=moved[held]) for own, held in sorted(pairs))
            yield component


def _write_file(staging: Path, path: str, role: str, data: bytes) -> FileEntry:
    _put(staging / path, [data])
    return file_entry(staging / path, path, role)
