"""Write a core's weight files from checkpoints, piece by piece, in memory that the model's size does not touch.

Each file is written front to back. Two threads read some rows at a time and convert them; the calling thread hashes
what they bring in three ways (whole file, 4 MiB chunk, view) and writes it; a fourth has the disk keep up. A file gets
its final name, its digest, after it is complete and on the disk. A conversion whose process was killed goes on where it
stood, in the same folder.

    converted = convert_weights(layout, {"target": target, "draft": draft}, staging, progress.advance)
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from dflash_core.formats import Format
from dflash_core.v1.weights_pb2 import TensorView
from torch import Tensor

from exporter.checkpoint import Checkpoint
from exporter.convert import blob_file
from exporter.convert.blob_file import BlobFile, open_blob, writing
from exporter.convert.errors import ErrorStats, report_bytes
from exporter.convert.journal import Journal, WrittenWeight, conversion_digest
from exporter.convert.mxfp8 import quantize_mxfp8
from exporter.convert.nvfp4 import BLOCK as NVFP4_BLOCK
from exporter.convert.nvfp4 import global_scale_of, quantize_nvfp4
from exporter.convert.pieces import Piece, pieces_of
from exporter.convert.quantized import block_amax, check_matrix
from exporter.weights import BlobLayout, PlacedView, PlacedWeight, Raw, WeightLayout, WeightSpec
from runtime.error_report import WeightErrors

WEIGHTS_FOLDER = "weights"
THREADS = 2
PIECES_AHEAD = 4
KEPT_NBYTES = 256 << 20  # an NVFP4 weight up to this size is read once, and stays in memory between its two passes

_CODEC_VERSION: dict[Format | Raw, str] = {Format.MXFP8: "mxfp8/1", Format.NVFP4: "nvfp4/1"}


@dataclass(frozen=True, slots=True)
class ConvertedBlob:
    """A weight file as written.

    Attributes:
        key, blob_id: as in the layout.
        path: relative to the staging folder: `weights/<sha256>.bin`.
        size_bytes, sha256: of the whole file.
        chunk_bytes, chunk_digests: SHA-256 of every 4 MiB (the last chunk may be shorter), concatenated.
    """

    key: str
    blob_id: int
    path: str
    size_bytes: int
    sha256: bytes
    chunk_bytes: int
    chunk_digests: bytes


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Every weight file, the manifest's views of them in layout order, and the errors of every converted weight."""

    blobs: tuple[ConvertedBlob, ...]
    views: tuple[TensorView, ...]
    errors: tuple[WeightErrors, ...]


def convert_weights(
    layout: WeightLayout, checkpoints: Mapping[str, Checkpoint], staging: Path, on_bytes: Callable[[int], None]
) -> ConvertedWeights:
    """Convert and write every weight of a layout; equal inputs give equal bytes.

    Args:
        layout: from `layout_weights`.
        checkpoints: opened checkpoints by the key that specs use.
        staging: folder of the core that is being made; files go to its `weights/`. What a killed run of the same
            conversion left there is taken over, as far as its bytes are right.
        on_bytes: told the number of output bytes just written, `layout.size_bytes` in all.
    Raises:
        ConvertError: NON_FINITE_WEIGHT with tensor, row and column; WEIGHT_SHAPE or WEIGHT_DTYPE when a source is not
            what the layout says.
        CheckpointError: a source cannot be read, or changed since it was opened.
        ResourceError: NO_SPACE, NOT_WRITABLE or WRITE_FAILED, with the path. Nothing is then left under a final name
            that is not whole, and no partial file is left at all.
    """
    folder = staging / WEIGHTS_FOLDER
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    journal = Journal.open(staging, conversion_digest(layout, checkpoints))
    blobs: list[ConvertedBlob] = []
    views: list[TensorView] = []
    errors: list[WeightErrors] = []
    try:
        with _workers() as pool:
            for blob in layout.blobs:
                job = _BlobJob(blob, checkpoints, folder, journal, pool)
                blobs.append(job.convert(on_bytes))
                views += job.views
                errors += job.errors
    finally:
        journal.remove()
    return ConvertedWeights(tuple(blobs), tuple(views), tuple(errors))


def write_error_report(staging: Path, weights: ConvertedWeights) -> None:
    """Add the errors of all converted weights to a core, as a file of its config folder; none converted, no file.

    Raises:
        ResourceError: as `convert_weights`.
    """
    if not weights.errors:
        return
    data = report_bytes(weights.errors)
    path = staging / "config" / hashlib.sha256(data).hexdigest()
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


@dataclass(frozen=True, slots=True)
class _Done:
    """A piece as it will be stored: plain values, or codes with block scales and their errors."""

    codes: Tensor
    block_scale: Tensor | None = None
    stats: ErrorStats | None = None


class _BlobJob:
    """Writes one blob; afterwards `views` and `errors` say what is in it."""

    def __init__(self, blob: BlobLayout, checkpoints: Mapping[str, Checkpoint], folder: Path, journal: Journal,
                 pool: ThreadPoolExecutor) -> None:
        self.views: list[TensorView] = []
        self.errors: list[WeightErrors] = []
        self._blob = blob
        self._pieces = {weight.spec.name: pieces_of(weight.spec, checkpoints) for weight in blob.weights}
        self._folder = folder
        self._journal = journal
        self._pool = pool
        self._surveys: dict[str, list[Future[_Survey]]] = {}

    def convert(self, on_bytes: Callable[[int], None]) -> ConvertedBlob:
        blob = self._blob
        resume = self._restore()
        with open_blob(self._folder, blob.key, resume=resume, on_bytes=on_bytes) as file:
            left = self._take_over(file) if resume else blob.weights
            done = self._in_order(left)
            for weight in left:
                written = self._write(weight, done, file)
                self._journal.add(weight.spec.name, written)
                self._note(weight, written)
            assert file.offset == blob.size_bytes, (blob.key, file.offset, blob.size_bytes)
            path, digest, chunk_digests = file.finish()
        self._journal.add_blob(blob.key, path.name)
        return ConvertedBlob(blob.key, blob.blob_id, f"{WEIGHTS_FOLDER}/{path.name}", blob.size_bytes, digest,
                             blob_file.DIGEST_CHUNK_NBYTES, chunk_digests)

    def _restore(self) -> bool:
        """Whether there is a file to go on with; one that was finished gets its partial name back."""
        partial = self._folder / f"{self._blob.key}{blob_file.PARTIAL_SUFFIX}"
        finished = self._journal.finished.get(self._blob.key)
        if finished is not None and (self._folder / finished).is_file():
            with writing(partial):
                (self._folder / finished).replace(partial)
        return bool(self._journal.earlier) and partial.is_file()

    def _take_over(self, file: BlobFile) -> tuple[PlacedWeight, ...]:
        """Keep the weights of an earlier run, up to the first that is missing or damaged; returns those that follow."""
        kept = 0
        for weight in self._blob.weights:
            written = self._journal.earlier.get(weight.spec.name)
            if written is None or not file.take_over(weight.views, written.digests):
                break
            self._note(weight, written)
            kept += 1
        file.cut()
        return self._blob.weights[kept:]

    def _note(self, weight: PlacedWeight, written: WrittenWeight) -> None:
        self.views += [tensor_view(view, weight.spec, digest)
                       for view, digest in zip(weight.views, written.digests, strict=True)]
        if written.errors is not None and isinstance(weight.spec.format, Format):
            self.errors.append(written.errors.summary(weight.spec.name, weight.spec.format))

    def _in_order(self, weights: tuple[PlacedWeight, ...]) -> Iterator[_Done]:
        """Every piece, converted, in storage order; a few more are under way."""
        tasks = self._tasks(weights)
        ahead = deque(islice(tasks, PIECES_AHEAD))
        while ahead:
            done = ahead.popleft().result()
            ahead.extend(islice(tasks, 1))
            yield done

    def _tasks(self, weights: tuple[PlacedWeight, ...]) -> Iterator[Future[_Done]]:
        """Submit the pieces one by one. NVFP4 needs the largest weight first: a pass of its own over all pieces, which
        is submitted before any of them, so that threads that wait for it cannot keep it from being run."""
        for weight in weights:
            name, fmt = weight.spec.name, weight.spec.format
            pieces = self._pieces[name]
            if fmt is Format.NVFP4:
                keep = sum(piece.nbytes for piece in pieces) <= KEPT_NBYTES
                self._surveys[name] = [self._pool.submit(_survey, piece, keep) for piece in pieces]
            for index, piece in enumerate(pieces):
                yield self._pool.submit(_convert_piece, piece, fmt, self._surveys.get(name, []), index)

    def _write(self, weight: PlacedWeight, done: Iterator[_Done], file: BlobFile) -> WrittenWeight:
        """Write a weight's views in storage order."""
        scales: list[Tensor] = []
        stats = ErrorStats() if weight.spec.format in _CODEC_VERSION else None

        def codes() -> Iterator[Tensor]:
            for piece in islice(done, len(self._pieces[weight.spec.name])):
                if stats is not None and piece.stats is not None and piece.block_scale is not None:
                    stats.merge(piece.stats)
                    scales.append(piece.block_scale)
                yield piece.codes

        digests = [file.write_view(weight.views[0], codes())]
        if stats is not None:
            digests.append(file.write_view(weight.views[1], iter(scales)))
        if weight.spec.format is Format.NVFP4:
            digests.append(file.write_view(weight.views[2], iter([_global_scale(self._surveys.pop(weight.spec.name))])))
        return WrittenWeight(digests, stats)


@dataclass(frozen=True, slots=True)
class _Survey:
    """What NVFP4 has to know of every piece before it converts the first.

    Attributes:
        amax: f32 [rows, blocks]; `largest` is the largest of them.
        values: the piece itself, unless its weight is so large that it is better read twice.
    """

    amax: Tensor
    largest: Tensor
    values: Tensor | None


def _convert_piece(piece: Piece, fmt: Format | Raw, surveys: list[Future[_Survey]], index: int) -> _Done:
    if fmt not in _CODEC_VERSION or not isinstance(fmt, Format):
        return _Done(piece.read())
    stats = ErrorStats()
    if fmt is Format.MXFP8:
        values = piece.read()
        with piece.located(values):
            quantized = quantize_mxfp8(values, stats)
    else:
        global_scale = _global_scale(surveys)
        survey = surveys[index].result()
        values = piece.read() if survey.values is None else survey.values
        quantized = quantize_nvfp4(values, global_scale, survey.amax, stats)
    return _Done(quantized.codes, quantized.block_scale, stats)


def _survey(piece: Piece, keep: bool) -> _Survey:
    values = piece.read()
    with piece.located(values):
        check_matrix(Format.NVFP4, values)
        amax = block_amax(values, NVFP4_BLOCK)
    return _Survey(amax, amax.max() if amax.numel() else torch.zeros(()), values if keep else None)


def _global_scale(surveys: list[Future[_Survey]]) -> Tensor:
    """NVFP4's fp32 scale over all sources, so that every row is coded under the final scale."""
    return global_scale_of(torch.stack([torch.zeros(()), *(future.result().largest for future in surveys)]).max())


def tensor_view(view: PlacedView, spec: WeightSpec, sha256: bytes) -> TensorView:
    codec = _CODEC_VERSION.get(spec.format)
    return TensorView(
        name=view.name, blob_id=view.blob_id, offset_bytes=view.offset_bytes, size_bytes=view.size_bytes,
        dtype=view.dtype, shape=view.shape, format=view.format or None, scale_view=view.scale_view or None,
        source_tensors=spec.sources, recipe=f"{spec.recipe}+{codec}" if codec else spec.recipe, sha256=sha256,
        owner=spec.owner,
    )


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that convert, each on one core: an operation that spreads over cores waits for the slowest of them."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, "convert", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
