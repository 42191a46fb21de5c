"""A weight's sources, some rows at a time: what is read, checked and handed to a codec at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, prod

import torch
from dflash_core.errors import ConvertError
from dflash_core.formats import Format
from torch import Tensor

from exporter.checkpoint import Checkpoint, read_rows, read_tensor
from exporter.convert.quantized import NON_FINITE
from exporter.weights import GlobalScale, Raw, WeightSpec

READ_NBYTES = 8 << 20

_TORCH_DTYPE: dict[Format | Raw, torch.dtype] = {
    Format.BF16: torch.bfloat16, Format.F32: torch.float32, Raw.U8: torch.uint8, Raw.F8_E4M3: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one source, not read yet.

    Attributes:
        source, shard: tensor and file; no shard for generated data.
        nbytes: of the piece, as read.
        first_row, last_row: rows of the source; both None for a tensor without axes or generated data.
    """

    spec: WeightSpec
    checkpoint: Checkpoint | None
    source: str
    shard: str
    nbytes: int
    first_row: int = 0
    last_row: int | None = None

    def read(self) -> Tensor:
        """The values as the checkpoint has them; a global scale as a multiplier.

        Raises:
            ConvertError: WEIGHT_DTYPE; GLOBAL_SCALE, which names a scale that is not a positive finite number.
            CheckpointError: as `exporter.checkpoint.read_rows`.
        """
        if self.checkpoint is None:
            assert self.spec.data is not None
            values = self.spec.data
        elif self.last_row is None:
            values = read_tensor(self.checkpoint, self.source)
        else:
            values = read_rows(self.checkpoint, self.source, self.first_row, self.last_row)
        expected = _TORCH_DTYPE.get(self.spec.format)
        if expected is not None and values.dtype != expected:
            raise ConvertError(
                "WEIGHT_DTYPE", "a weight in a plain format keeps its checkpoint's element type",
                where=f"{self.spec.name} from {self.source}", expected=_dtype_name(expected),
                got=_dtype_name(values.dtype), hint="publish the checkpoint in bfloat16 or float32",
            )
        return values if self.spec.global_scale is None else self._multiplier(values, self.spec.global_scale)

    def _multiplier(self, scale: Tensor, applied: GlobalScale) -> Tensor:
        factor = scale.reciprocal() if applied is GlobalScale.DIVIDES else scale
        if not (0 < float(scale) < inf and 0 < float(factor) < inf):
            raise ConvertError(
                "GLOBAL_SCALE", "global scale of a quantized weight is of no use",
                where=f"{self.source} in {self.shard}", expected=f"a positive finite number, which {applied.value}",
                got=float(scale), hint="the checkpoint is damaged: fetch it again",
            )
        return factor

    @contextmanager
    def located(self, values: Tensor) -> Iterator[None]:
        """Give a codec's error about a value the tensor's name and its row there."""
        try:
            yield
        except ConvertError as error:
            if error.code != NON_FINITE:
                raise
            row, col = (int(axis[0]) for axis in torch.nonzero(~torch.isfinite(values), as_tuple=True))
            place = f" in {self.shard}" if self.shard else ""
            raise ConvertError(
                NON_FINITE, "weight is not finite", where=f"{self.source}{place}, row {self.first_row + row}, "
                f"column {col}", expected=error.expected, got=error.got, hint=error.hint,
            ) from error


def pieces_of(spec: WeightSpec, checkpoints: Mapping[str, Checkpoint]) -> list[Piece]:
    """The pieces of a weight in storage order, each of about READ_NBYTES.

    Raises:
        ConvertError: WEIGHT_SHAPE when the sources do not make up the weight.
    """
    if spec.data is not None:
        _check_shapes(spec, [tuple(spec.data.shape)])
        return [Piece(spec, None, spec.name, "", spec.data.nbytes)]
    checkpoint = checkpoints[spec.checkpoint]
    entries = [checkpoint.tensors[name] for name in spec.sources]
    if spec.global_scale is not None:
        assert prod(spec.shape) == len(entries) and all(prod(entry.shape) == 1 for entry in entries), spec.name
        return [Piece(spec, checkpoint, entry.name, entry.shard, entry.nbytes) for entry in entries]
    _check_shapes(spec, [entry.shape for entry in entries])
    pieces = []
    for entry in entries:
        if not entry.shape:
            pieces.append(Piece(spec, checkpoint, entry.name, entry.shard, entry.nbytes))
            continue
        rows = entry.shape[0]
        step = max(1, READ_NBYTES * rows // max(entry.nbytes, 1))
        row_nbytes = entry.nbytes // max(rows, 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            pieces.append(Piece(spec, checkpoint, entry.name, entry.shard, (stop - start) * row_nbytes, start, stop))
    return pieces


def _check_shapes(spec: WeightSpec, shapes: list[tuple[int, ...]]) -> None:
    whole = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if len({shape[1:] for shape in shapes}) != 1 or whole != spec.shape:
        raise ConvertError(
            "WEIGHT_SHAPE", "checkpoint tensors do not make up the stored weight",
            where=f"{spec.name} from {', '.join(spec.sources) or 'generated data'}",
            expected=list(spec.shape), got=" and ".join(str(list(shape)) for shape in shapes),
            hint="check that config.json and the weights are of one model and one release",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
