"""Take converted weights from a core that already has them, byte for byte, and convert only what it lacks.

    core, report = export_reusing(request, Path("old/core"), trust, key)
    for miss in report.misses:
        print(miss.name, miss.field, miss.cached, miss.wanted)

A weight is a hit when the core verified, its checkpoint files are the ones at hand, and every field of every view is
what this export would write. The result is then the core that an export without reuse gives, to the byte.
Source: docs/compatibility.md, "Effective draft precision", for what must agree as a whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from dflash_core.effective import (
    CHECKPOINT,
    NO_CONVERSION,
    Role,
    effective_draft_body,
    effective_precision,
    effective_scope,
    same_draft_body,
)
from dflash_core.errors import CompatibilityError
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import TensorView

from exporter.checkpoint import Checkpoint
from exporter.combine_ids import field_text, first_field
from exporter.convert import stream
from exporter.convert.stream import ConvertedBlob, ConvertedWeights, convert_weights
from exporter.export import ExportRequest, OpenedModels, SignedCore, checkpoints, export
from exporter.package import CoreIdentity
from exporter.progress import Progress
from exporter.staging import writing
from exporter.weights import BlobLayout, PlacedWeight, WeightLayout, layout_weights
from runtime.console import human_bytes
from runtime.corefiles import CHUNK_BYTES, mismatch
from runtime.error_report import errors_of
from runtime.keys import PrivateKey
from runtime.sign import file_entry
from runtime.trust import TrustPolicy
from runtime.verify import VerifiedCore, verify

_NOT_COMPARED = ("blob_id", "offset_bytes", "sha256")
_TELLING = ("dtype", "format", "recipe", "shape")


@dataclass(frozen=True, slots=True)
class Miss:
    """A weight that had to be converted: the first field in which core and request differ, and both values."""

    name: str
    field: str
    cached: str
    wanted: str


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What was taken from a core. `nbytes_saved` of `nbytes_total` were copied and not converted, gaps left out."""

    hits: tuple[str, ...]
    misses: tuple[Miss, ...]
    nbytes_saved: int
    nbytes_total: int


@dataclass(frozen=True, slots=True)
class Sources:
    """The checkpoints of an export by the key that weights use, and the digests of their files by path."""

    checkpoints: Mapping[str, Checkpoint]
    sha256: Mapping[str, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Matched:
    """Which weights of a layout a core has: weight name -> its views there, and why it lacks the others."""

    hits: Mapping[str, tuple[TensorView, ...]]
    misses: tuple[Miss, ...]


def export_reusing(request: ExportRequest, cached: Path, trust: TrustPolicy, key: PrivateKey,
                   progress: Progress | None = None) -> tuple[SignedCore, ReuseReport]:
    """Export as `exporter.export.export` does, with weights from a core where it has them.

    Args:
        cached: the core to take weights from; it is only read.
        trust: whose signatures on it are accepted.
    Raises:
        CompatibilityError: REUSE_TARGET_FORMAT or REUSE_DRAFT_BODY, the core was converted in another way.
        PolicyError, VerificationError, FormatError: the core is not what trusted keys have signed, or not sound.
        DflashError: as `export`.
    """
    reports: list[ReuseReport] = []
    with verify(cached, trust) as core:

        def convert(models: OpenedModels, identity: CoreIdentity, layout: WeightLayout, staging: Path,
                    watch: Progress) -> ConvertedWeights:
            check_formats(core.manifest, identity, str(cached))
            digests = {"target": _digests(identity.target.files)}
            if identity.draft is not None:
                digests["draft"] = _digests(identity.draft.files)
            with watch.stage("reuse", layout.size_bytes) as on_bytes:
                sources = Sources(checkpoints(models), digests)
                weights, report = convert_reusing(layout, sources, staging, core, on_bytes)
            watch.done("reuse", f"{len(report.hits)} weights taken, {len(report.misses)} converted   "
                                f"{human_bytes(report.nbytes_saved)} of {human_bytes(report.nbytes_total)} saved")
            for miss in report.misses:
                watch.notice(f"converted {miss.name}: {miss.field} {miss.cached} there, {miss.wanted} wanted")
            reports.append(report)
            return weights

        signed = export(request, key, progress, convert)
    return signed, reports[0]


def check_formats(cached: RebuildManifest, wanted: CoreIdentity, where: str) -> None:
    """Compare what a core's precision means with what a request will record.

    The target's format always counts. The draft body counts when both have a draft: a request without one reads no
    draft weights, and a core without one has none to give.

    Raises:
        CompatibilityError: REUSE_TARGET_FORMAT, REUSE_DRAFT_BODY.
    """
    request = RebuildManifest(online_quantization=wanted.online_quantization,
                              online_mxfp8_scope=wanted.online_mxfp8_scope, speculation=wanted.speculation)
    formats = [(m.online_quantization or "none", effective_scope(m)) for m in (cached, request)]
    if formats[0] != formats[1]:
        scope = formats[0][1]
        change = "leave --reuse-weights or --online-mxfp8-scope out" if scope is NO_CONVERSION else \
            f"leave --reuse-weights out, or export with --online-mxfp8-scope {scope}"
        raise _refused("REUSE_TARGET_FORMAT", "the core's target is converted in another way", where, cached, request,
                       Role.TARGET, f"{change}, as the core was exported")
    if not same_draft_body(cached, request):
        body = effective_draft_body(cached)
        change = "leave --reuse-weights or --draft-body-quantization out" if body == CHECKPOINT else \
            f"leave --reuse-weights out, or export with --draft-body-quantization {body}"
        raise _refused("REUSE_DRAFT_BODY", "the core's draft body is converted in another way", where, cached, request,
                       Role.DRAFT_BODY, f"{change}, as the core was exported")


def match_weights(layout: WeightLayout, sources: Sources, cached: RebuildManifest) -> Matched:
    """Which weights of a layout a core has, and for each of the others the first thing that differs.

    Args:
        layout: what the export will write.
        sources: the checkpoints at hand.
        cached: the core's manifest, from verified bytes.
    """
    views = {view.name: view for view in cached.tensor_views}
    recorded = {"target": _digests(cached.target.files), "draft": _digests(cached.speculation.draft.files)}
    hits: dict[str, tuple[TensorView, ...]] = {}
    misses = []
    for placed in _weights(layout):
        miss = _source_miss(placed, sources, recorded) or _view_miss(placed, views)
        if miss is None:
            hits[placed.spec.name] = tuple(views[view.name] for view in placed.views)
        else:
            misses.append(miss)
    return Matched(hits, tuple(misses))


def convert_reusing(layout: WeightLayout, sources: Sources, staging: Path, core: VerifiedCore,
                    on_bytes: Callable[[int], None]) -> tuple[ConvertedWeights, ReuseReport]:
    """As `convert_weights`, with every weight that `core` has taken from it.

    Each file of the core is read once, and each view compared with its digest on the way. Needs the disk space of the
    converted weights twice while it runs.

    Raises:
        VerificationError: DIGEST_MISMATCH, a view's bytes are not those that its core lists.
        ConvertError, CheckpointError, ResourceError: as `convert_weights`.
    """
    matched = match_weights(layout, sources, core.manifest)
    saved = sum(view.size_bytes for views in matched.hits.values() for view in views)
    total = sum(view.size_bytes for view in layout.views)
    report = ReuseReport(tuple(matched.hits), matched.misses, saved, total)
    if not matched.hits:
        return convert_weights(layout, sources.checkpoints, staging, on_bytes), report
    with TemporaryDirectory(prefix="reuse-", dir=staging) as folder:
        files = {blob.key: Path(folder) / blob.key for blob in layout.blobs}
        for blob in layout.blobs:
            with writing(files[blob.key]), files[blob.key].open("wb") as file:
                file.truncate(blob.size_bytes)
        wanted = {view.name: (files[blob.key], view.offset_bytes)
                  for blob in layout.blobs for placed in blob.weights for view in placed.views}
        _take(core, matched, wanted, on_bytes)
        left = layout_weights(placed.spec for placed in _weights(layout) if placed.spec.name not in matched.hits)
        views = {view.name: view for held in matched.hits.values() for view in held}
        converted = convert_weights(left, sources.checkpoints, Path(folder), on_bytes)
        views |= {view.name: view for view in converted.views}
        paths = {blob.blob_id: Path(folder) / blob.path for blob in converted.blobs}
        _copy_ranges(converted.views, paths, wanted)
        blobs = tuple(_finish(blob, files[blob.key], staging) for blob in layout.blobs)
    result = []
    for placed in _weights(layout):
        result += [stream.tensor_view(view, placed.spec, views[view.name].sha256) for view in placed.views]
    errors = {entry.name: entry for entry in (*errors_of(core), *converted.errors)}
    measured = tuple(errors[placed.spec.name] for placed in _weights(layout) if placed.spec.name in errors)
    return replace(converted, blobs=blobs, views=tuple(result), errors=measured), report


def _weights(layout: WeightLayout) -> Iterable[PlacedWeight]:
    return (placed for blob in layout.blobs for placed in blob.weights)


def _digests(files: Iterable[Any]) -> dict[str, bytes]:
    """Path -> SHA-256 of a checkpoint's files, whether as hashed here or as a manifest lists them."""
    return {file.path: file.sha256 for file in files}


def _source_miss(placed: PlacedWeight, sources: Sources, recorded: Mapping[str, Mapping[str, bytes]]) -> Miss | None:
    """A checkpoint file that the core was not made from."""
    spec = placed.spec
    for name in spec.sources:
        shard = sources.checkpoints[spec.checkpoint].tensors[name].shard
        wanted = sources.sha256[spec.checkpoint][shard]
        cached = recorded.get(spec.checkpoint, {}).get(shard)
        if cached != wanted:
            return Miss(spec.name, f"source file {shard}", cached.hex()[:16] if cached else "absent", wanted.hex()[:16])
    return None


def _view_miss(placed: PlacedWeight, views: Mapping[str, TensorView]) -> Miss | None:
    """A view that the core lacks or has in another form; a generated weight has to have the same bytes."""
    for view in placed.views:
        cached = views.get(view.name)
        if cached is None:
            return Miss(placed.spec.name, "name", "absent", view.name)
        wanted = stream.tensor_view(view, placed.spec, b"")
        differs = first_field(cached, wanted, ignore=_NOT_COMPARED, first=_TELLING)
        if differs is not None:
            return Miss(placed.spec.name, differs, field_text(cached, differs), field_text(wanted, differs))
    data = placed.spec.data
    if data is not None:
        generated = hashlib.sha256(data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        cached_digest = views[placed.views[0].name].sha256
        if cached_digest != generated:
            return Miss(placed.spec.name, "sha256", cached_digest.hex()[:16], generated.hex()[:16])
    return None


@dataclass(slots=True)
class _Range:
    """A view on its way from a file of the core to where it belongs."""

    view: TensorView
    digest: Any
    descriptor: int
    offset: int


def _take(core: VerifiedCore, matched: Matched, wanted: Mapping[str, tuple[Path, int]],
          on_bytes: Callable[[int], None]) -> None:
    """Copy every hit to its place, reading each file of the core once."""
    by_blob: dict[int, list[TensorView]] = {}
    for views in matched.hits.values():
        for view in views:
            by_blob.setdefault(view.blob_id, []).append(view)
    names = {blob.blob_id: core.entry(blob.file).path for blob in core.manifest.weight_blobs}
    for blob_id, views in by_blob.items():
        _take_file(core, names[blob_id], views, wanted, on_bytes)


def _take_file(core: VerifiedCore, name: str, views: Sequence[TensorView], wanted: Mapping[str, tuple[Path, int]],
               on_bytes: Callable[[int], None]) -> None:
    opened: dict[Path, int] = {}
    try:
        ranges = []
        for view in views:
            path, offset = wanted[view.name]
            with writing(path):
                descriptor = opened[path] = opened[path] if path in opened else os.open(path, os.O_WRONLY)
            ranges.append(_Range(view, hashlib.sha256(), descriptor, offset))
        start = 0
        for piece in core.pieces(name):
            for item in ranges:
                first = max(item.view.offset_bytes, start)
                last = min(item.view.offset_bytes + item.view.size_bytes, start + len(piece))
                if first < last:
                    part = piece[first - start:last - start]
                    item.digest.update(part)
                    with writing(path):
                        _write_at(item.descriptor, part, item.offset + first - item.view.offset_bytes)
                    on_bytes(len(part))
            start += len(piece)
        for item in ranges:
            if item.digest.digest() != item.view.sha256:
                raise mismatch(f"{name}, {item.view.name}", item.view.sha256, item.digest.digest())
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _copy_ranges(views: Iterable[TensorView], paths: Mapping[int, Path],
                 wanted: Mapping[str, tuple[Path, int]]) -> None:
    """Copy converted views from the files of the misses to their places."""
    for view in views:
        path, offset = wanted[view.name]
        with writing(path), paths[view.blob_id].open("rb") as source, path.open("r+b") as destination:
            source.seek(view.offset_bytes)
            destination.seek(offset)
            left = view.size_bytes
            while left:
                piece = source.read(min(left, CHUNK_BYTES))
                destination.write(piece)
                left -= len(piece)


def _finish(blob: BlobLayout, file: Path, staging: Path) -> ConvertedBlob:
    """Force a complete weight file to the disk, digest it, and give it the name of its digest."""
    with writing(file):
        descriptor = os.open(file, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    entry = file_entry(file, f"weights/{blob.key}.bin", "weights")
    path = f"weights/{entry.ref.digest.hex()}.bin"
    with writing(staging / path):
        (staging / "weights").mkdir(exist_ok=True)
        file.replace(staging / path)
    return ConvertedBlob(blob.key, blob.blob_id, path, blob.size_bytes, entry.ref.digest, CHUNK_BYTES,
                         entry.chunk_digests or entry.ref.digest)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _refused(code: str, what: str, where: str, cached: RebuildManifest, wanted: RebuildManifest, role: Role,
             hint: str) -> CompatibilityError:
    sides = []
    for manifest in (cached, wanted):
        row = next(entry for entry in effective_precision(manifest) if entry.role is role)
        sides.append(f"{row.text} (recorded {row.recorded or '-'}; {row.origin.value})")
    return CompatibilityError(code, what, where=where, expected=sides[1], got=sides[0], hint=hint)
