"""Which matrices and vectors a core stores, and where each lies in its blob.

Model code lists `WeightSpec`s; `layout_weights` places them without reading a byte, so that buffers and graphs can be
built before any weight is converted; `exporter.convert.stream` then writes exactly this layout.

    layout = layout_weights([WeightSpec("target.norm", "target", "target", "target", ("model.norm.weight",),
                                        "copy/1", Format.BF16, (576,))])
    layout.view("target.norm").offset_bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod

from dflash_core.errors import ConvertError
from dflash_core.formats import FORMATS, Format, divides, packed
from torch import Tensor

ALIGNMENT = 256
BLOCK_SCALE_SUFFIX = ".block_scale"
GLOBAL_SCALE_SUFFIX = ".global_scale"
FIRST_BLOB_ID = 1  # so that an id which was never set names no blob


class Raw(Enum):
    """Element types of bytes that are kept as a checkpoint ships them. The value is `TensorView.dtype`."""

    U8 = "u8"
    F8_E4M3 = "f8e4m3"


class GlobalScale(Enum):
    """What a checkpoint does with the one fp32 scale of a quantized tensor, after the block scales have multiplied."""

    MULTIPLIES = "multiplies"
    DIVIDES = "divides"


@dataclass(frozen=True, slots=True, eq=False)
class WeightSpec:
    """One stored matrix or vector.

    Attributes:
        name: logical view name, stable across exports, such as `target.layers.0.qkv`.
        blob: key of the blob that holds it: `target`, `draft` or `head`.
        owner: whose weight it is: `target` or `draft`.
        checkpoint: key of the opened checkpoint that its sources are read from.
        sources: checkpoint tensors, concatenated along the first axis in this order.
        recipe: how it is made from its sources, with a version: `copy/1`, `concat-rows/1`.
        format: plain and raw formats keep the source's own element type, which must be this one.
        shape: logical shape, outermost axis first.
        data: the weight itself, for one that no checkpoint holds; `sources` is then empty.
        global_scale: the sources are such scales, one value each, and stored as multipliers: 1 / x, rounded once to
            fp32, of a scale that divides. None for everything else.
    """

    name: str
    blob: str
    owner: str
    checkpoint: str
    sources: tuple[str, ...]
    recipe: str
    format: Format | Raw
    shape: tuple[int, ...]
    data: Tensor | None = None
    global_scale: GlobalScale | None = None


@dataclass(frozen=True, slots=True)
class PlacedView:
    """A byte range of a blob under a name.

    Attributes:
        name: as in `TensorView.name`.
        blob: key of the blob; `blob_id` is its number in the manifest.
        offset_bytes: a multiple of 256.
        size_bytes: bytes without the gap that follows.
        dtype: as in `TensorView.dtype`.
        shape: logical shape, also where two codes share a byte.
        format: as in `TensorView.format`; empty for plain element types.
        scale_view: name of the view with the block scales; empty for plain element types.
    """

    name: str
    blob: str
    blob_id: int
    offset_bytes: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    format: str
    scale_view: str


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A weight and its views in storage order: the codes, then block scales and the global scale where it has them."""

    spec: WeightSpec
    views: tuple[PlacedView, ...]


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """One weight file: its weights in storage order; gaps between views are zeros, shorter than 256 bytes."""

    key: str
    blob_id: int
    size_bytes: int
    weights: tuple[PlacedWeight, ...]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weight files of a core."""

    blobs: tuple[BlobLayout, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all blobs: the length of the conversion's progress bar."""
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def views(self) -> tuple[PlacedView, ...]:
        """Every view, by blob and then by offset."""
        return tuple(view for blob in self.blobs for weight in blob.weights for view in weight.views)

    def view(self, name: str) -> PlacedView:
        """The view of that name; KeyError when there is none."""
        for view in self.views:
            if view.name == name:
                return view
        raise KeyError(name)


def layout_weights(specs: Iterable[WeightSpec]) -> WeightLayout:
    """Place every weight, in the order given, in the blob it names; blobs are numbered as they first appear.

    A weight in a block format becomes three views: `name` (codes), `name.block_scale` (u8 [rows, cols / block]) and,
    for NVFP4, `name.global_scale` (f32 [1]).

    Raises:
        ConvertError: BLOCK_DIVISION when a row does not divide into blocks, NOT_A_MATRIX when a block format is asked
            for anything but two axes, FORMAT_F16 because cores hold no F16 weights.
    """
    by_blob: dict[str, list[WeightSpec]] = {}
    for spec in specs:
        _check(spec)
        by_blob.setdefault(spec.blob, []).append(spec)
    blobs = tuple(_lay_out(key, blob_id, by_blob[key]) for blob_id, key in enumerate(by_blob, FIRST_BLOB_ID))
    layout = WeightLayout(blobs)
    names = [view.name for view in layout.views]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
    return layout


def align(offset: int) -> int:
    """The next multiple of 256 at or after `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _check(spec: WeightSpec) -> None:
    assert (spec.data is None) == bool(spec.sources), spec.name
    if isinstance(spec.format, Raw):
        return
    if spec.format is Format.F16:
        raise ConvertError(
            "FORMAT_F16", "cores hold no F16 weights", where=spec.name, expected="BF16, F32, MXFP8 or NVFP4",
            hint="publish the checkpoint in bfloat16: half precision overflows in drafts",
        )
    block = FORMATS[spec.format].block
    if block > 1 and len(spec.shape) != 2:
        raise ConvertError(
            "NOT_A_MATRIX", f"{spec.format.name} holds matrices", where=spec.name, expected="two axes",
            got=list(spec.shape), hint="keep this tensor in checkpoint precision",
        )
    if not divides(spec.format, spec.shape) and block > 1:
        raise ConvertError(
            "BLOCK_DIVISION", f"row does not divide into {spec.format.name} blocks",
            where=f"{spec.name} {list(spec.shape)}", expected=f"a multiple of {block}", got=spec.shape[-1],
            hint="keep this tensor in checkpoint precision",
        )


def _lay_out(key: str, blob_id: int, specs: list[WeightSpec]) -> BlobLayout:
    end = 0
    weights = []
    for spec in specs:
        views = []
        for name, size_bytes, dtype, shape, fmt, scale_view in _parts(spec):
            offset = align(end)
            views.append(PlacedView(name, key, blob_id, offset, size_bytes, dtype, shape, fmt, scale_view))
            end = offset + size_bytes
        weights.append(PlacedWeight(spec, tuple(views)))
    return BlobLayout(key, blob_id, end, tuple(weights))


def _parts(spec: WeightSpec) -> Iterable[tuple[str, int, str, tuple[int, ...], str, str]]:
    if isinstance(spec.format, Raw):
        yield spec.name, prod(spec.shape), spec.format.value, spec.shape, "", ""
        return
    row = FORMATS[spec.format]
    size = packed(spec.format, spec.shape)
    scale_view = spec.name + BLOCK_SCALE_SUFFIX if row.scale_bits else ""
    yield spec.name, size.codes, row.view_dtype, spec.shape, row.view_format, scale_view
    if row.scale_bits:
        yield scale_view, size.block_scale, "u8", (spec.shape[0], spec.shape[1] // row.block), "", ""
    if row.has_global_scale:
        yield spec.name + GLOBAL_SCALE_SUFFIX, size.global_scale, "f32", (1,), "", ""
