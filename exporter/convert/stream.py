"""Write a core's weight files from checkpoints, piece by piece, in memory that the model's size does not touch.

Each file is written front to back: a tensor is read some rows at a time, converted, hashed three ways (whole file,
4 MiB chunk, view) and written. A file gets its final name, its digest, after it is complete and on the disk.

    converted = convert_weights(layout, {"target": target, "draft": draft}, staging, progress.advance)
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from dflash_core.errors import ConvertError, ResourceError
from dflash_core.formats import Format
from dflash_core.v1.weights_pb2 import TensorView
from torch import Tensor

from exporter.checkpoint import Checkpoint, read_rows, read_tensor
from exporter.convert.mxfp8 import quantize_mxfp8
from exporter.convert.nvfp4 import BLOCK as NVFP4_BLOCK
from exporter.convert.nvfp4 import global_scale_of, quantize_nvfp4
from exporter.convert.quantized import NON_FINITE, QuantizedTensor, block_amax
from exporter.weights import BlobLayout, PlacedView, PlacedWeight, WeightLayout, WeightSpec

DIGEST_CHUNK_NBYTES = 4 << 20
READ_NBYTES = 8 << 20
WEIGHTS_FOLDER = "weights"

_TORCH_DTYPE = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}
_CODEC_VERSION = {Format.MXFP8: "mxfp8/1", Format.NVFP4: "nvfp4/1"}


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
    """Every weight file, and the manifest's views of them in layout order."""

    blobs: tuple[ConvertedBlob, ...]
    views: tuple[TensorView, ...]


def convert_weights(
    layout: WeightLayout, checkpoints: Mapping[str, Checkpoint], staging: Path, on_bytes: Callable[[int], None]
) -> ConvertedWeights:
    """Convert and write every weight of a layout; equal inputs give equal bytes.

    Args:
        layout: from `layout_weights`.
        checkpoints: opened checkpoints by the key that specs use.
        staging: folder of the core that is being made; files go to its `weights/`.
        on_bytes: told the number of output bytes just written, `layout.size_bytes` in all.
    Raises:
        ConvertError: NON_FINITE_WEIGHT with tensor, row and column; WEIGHT_SHAPE or WEIGHT_DTYPE when a source is not
            what the layout says.
        CheckpointError: a source cannot be read, or changed since it was opened.
        ResourceError: NO_SPACE, NOT_WRITABLE or WRITE_FAILED, with the path. Nothing is then left under a final name
            that is not whole, and no partial file is left at all.
    """
    folder = staging / WEIGHTS_FOLDER
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    blobs: list[ConvertedBlob] = []
    views: list[TensorView] = []
    for blob in layout.blobs:
        converted, blob_views = _convert_blob(blob, checkpoints, folder, on_bytes)
        blobs.append(converted)
        views += blob_views
    return ConvertedWeights(tuple(blobs), tuple(views))


def _convert_blob(
    blob: BlobLayout, checkpoints: Mapping[str, Checkpoint], folder: Path, on_bytes: Callable[[int], None]
) -> tuple[ConvertedBlob, list[TensorView]]:
    partial = folder / f"{blob.key}.partial"
    try:
        with _writing(partial):
            file = partial.open("wb", buffering=0)
        with file:
            writer = _BlobWriter(file, partial, on_bytes)
            views = [view for weight in blob.weights for view in _write_weight(weight, checkpoints, writer)]
            assert writer.offset == blob.size_bytes, (blob.key, writer.offset, blob.size_bytes)
            digest, chunk_digests = writer.finish()
        path = folder / f"{digest.hex()}.bin"
        with _writing(path):
            partial.replace(path)
            _sync_folder(folder)
    finally:
        with suppress(OSError):  # renamed away on success; on failure the error under way matters more
            partial.unlink(missing_ok=True)
    name = f"{WEIGHTS_FOLDER}/{path.name}"
    converted = ConvertedBlob(
        blob.key, blob.blob_id, name, blob.size_bytes, digest, DIGEST_CHUNK_NBYTES, chunk_digests
    )
    return converted, views


def _write_weight(
    weight: PlacedWeight, checkpoints: Mapping[str, Checkpoint], writer: _BlobWriter
) -> Iterator[TensorView]:
    """Write a weight's views in storage order, and say what was written."""
    pieces = _Pieces(weight.spec, checkpoints)
    scales: list[Tensor] = []
    global_scale = _global_scale(pieces) if weight.spec.format is Format.NVFP4 else None

    def codes() -> Iterator[Tensor]:
        if weight.spec.format not in _CODEC_VERSION:
            yield from (piece.values for piece in pieces)
            return
        for piece in pieces:
            quantized = _quantize(piece, weight.spec.format, global_scale)
            scales.append(quantized.block_scale)
            yield quantized.codes

    yield _tensor_view(weight.views[0], weight.spec, writer.write_view(weight.views[0], codes()))
    rest = [scales, [global_scale]] if global_scale is not None else [scales]
    for view, tensors in zip(weight.views[1:], rest, strict=False):
        yield _tensor_view(view, weight.spec, writer.write_view(view, iter(tensors)))


def _quantize(piece: _Piece, fmt: Format, global_scale: Tensor | None) -> QuantizedTensor:
    with piece.located():
        if fmt is Format.MXFP8:
            return quantize_mxfp8(piece.values)
        return quantize_nvfp4(piece.values, global_scale)


def _global_scale(pieces: _Pieces) -> Tensor:
    """NVFP4's fp32 scale over all sources: one pass of its own, so that every row is coded under the final scale."""
    amax = torch.zeros(())
    for piece in pieces:
        with piece.located():
            amax = torch.maximum(amax, block_amax(piece.values, NVFP4_BLOCK).max())
    return global_scale_of(amax)


def _tensor_view(view: PlacedView, spec: WeightSpec, sha256: bytes) -> TensorView:
    codec = _CODEC_VERSION.get(spec.format)
    return TensorView(
        name=view.name, blob_id=view.blob_id, offset_bytes=view.offset_bytes, size_bytes=view.size_bytes,
        dtype=view.dtype, shape=view.shape, format=view.format or None, scale_view=view.scale_view or None,
        source_tensors=spec.sources, recipe=f"{spec.recipe}+{codec}" if codec else spec.recipe, sha256=sha256,
        owner=spec.owner,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of one source: values as the checkpoint has them, and where they begin in it."""

    source: str
    shard: str
    first_row: int
    values: Tensor

    @contextmanager
    def located(self) -> Iterator[None]:
        """Give a codec's error about a value the tensor's name and its row there."""
        try:
            yield
        except ConvertError as error:
            if error.code != NON_FINITE:
                raise
            row, col = (int(axis[0]) for axis in torch.nonzero(~torch.isfinite(self.values), as_tuple=True))
            place = f" in {self.shard}" if self.shard else ""
            raise ConvertError(
                NON_FINITE, "weight is not finite", where=f"{self.source}{place}, row {self.first_row + row}, "
                f"column {col}", expected=error.expected, got=error.got, hint=error.hint,
            ) from error


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A weight's sources in order, some rows at a time; may be walked more than once."""

    spec: WeightSpec
    checkpoints: Mapping[str, Checkpoint]

    def __post_init__(self) -> None:
        if self.spec.data is not None:
            shapes = [tuple(self.spec.data.shape)]
        else:
            tensors = self.checkpoints[self.spec.checkpoint].tensors
            shapes = [tensors[name].shape for name in self.spec.sources]
        if len({shape[1:] for shape in shapes}) != 1 or _concatenated(shapes) != self.spec.shape:
            raise ConvertError(
                "WEIGHT_SHAPE", "checkpoint tensors do not make up the stored weight",
                where=f"{self.spec.name} from {', '.join(self.spec.sources) or 'generated data'}",
                expected=list(self.spec.shape), got=" and ".join(str(list(shape)) for shape in shapes),
            )

    def __iter__(self) -> Iterator[_Piece]:
        if self.spec.data is not None:
            yield self._checked(_Piece(self.spec.name, "", 0, self.spec.data))
            return
        checkpoint = self.checkpoints[self.spec.checkpoint]
        for name in self.spec.sources:
            entry = checkpoint.tensors[name]
            if not entry.shape:
                yield self._checked(_Piece(name, entry.shard, 0, read_tensor(checkpoint, name)))
                continue
            rows = entry.shape[0]
            step = max(1, READ_NBYTES * rows // max(entry.nbytes, 1))
            for start in range(0, rows, step):
                values = read_rows(checkpoint, name, start, min(start + step, rows))
                yield self._checked(_Piece(name, entry.shard, start, values))

    def _checked(self, piece: _Piece) -> _Piece:
        expected = _TORCH_DTYPE.get(self.spec.format)
        if expected is not None and piece.values.dtype != expected:
            raise ConvertError(
                "WEIGHT_DTYPE", "a weight in a plain format keeps its checkpoint's element type",
                where=f"{self.spec.name} from {piece.source}", expected=_dtype_name(expected),
                got=_dtype_name(piece.values.dtype), hint="publish the checkpoint in bfloat16 or float32",
            )
        return piece


class _BlobWriter:
    """Appends views to one file, hashing whole file and chunks; gaps before a view are zeros."""

    def __init__(self, file: BinaryIO, path: Path, on_bytes: Callable[[int], None]) -> None:
        self.offset = 0
        self._file = file
        self._path = path
        self._on_bytes = on_bytes
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunk_digests = bytearray()

    def write_view(self, view: PlacedView, tensors: Iterator[Tensor]) -> bytes:
        """Write a view's tensors one after another at its offset; returns the SHA-256 of its bytes."""
        self._append(memoryview(bytes(view.offset_bytes - self.offset)))
        digest = hashlib.sha256()
        for tensor in tensors:
            payload = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            digest.update(payload)
            self._append(payload)
        assert self.offset == view.offset_bytes + view.size_bytes, (view, self.offset)
        return digest.digest()

    def finish(self) -> tuple[bytes, bytes]:
        """Force the file to the disk; returns its SHA-256 and the digests of its chunks."""
        with _writing(self._path):
            os.fsync(self._file.fileno())
        if self.offset % DIGEST_CHUNK_NBYTES:
            self._chunk_digests += self._chunk.digest()
        return self._whole.digest(), bytes(self._chunk_digests)

    def _append(self, payload: memoryview) -> None:
        while payload:
            part = payload[: DIGEST_CHUNK_NBYTES - self.offset % DIGEST_CHUNK_NBYTES]
            with _writing(self._path):
                count = self._file.write(part)
            part = part[:count]
            self._whole.update(part)
            self._chunk.update(part)
            self.offset += count
            payload = payload[count:]
            if self.offset % DIGEST_CHUNK_NBYTES == 0:
                self._chunk_digests += self._chunk.digest()
                self._chunk = hashlib.sha256()
            self._on_bytes(count)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into a ResourceError that names the path."""
    try:
        yield
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError("NO_SPACE", "no space left for the weights", where=str(path),
                                hint="free some space, or write the core to another disk") from cause
        if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ResourceError("NOT_WRITABLE", "weights may not be written here", where=str(path),
                                hint="choose a folder that you may write to") from cause
        raise ResourceError("WRITE_FAILED", f"weights cannot be written ({cause.strerror})", where=str(path)) from cause


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _concatenated(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
