"""Rules for tensor views: where they lie in a blob, and that their bytes are what shape, dtype and format need.

Source: docs/core-format.md. The attacks they answer are in tests/attacks/test_structure_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from dflash_core.formats import FORMATS, FormatSpec
from dflash_core.v1.weights_pb2 import TensorView

from .structure_rules import DTYPE_BITS, MAX_RANK, MAX_VIEWS, VIEW_ALIGNMENT, broken, inside, unique

_FORMATS_BY_VIEW: dict[str, FormatSpec] = {spec.view_format: spec for spec in FORMATS.values() if spec.view_format}


def check_views(views: Sequence[TensorView], blob_bytes: Mapping[int, int]) -> None:
    """Check every view against its blob, then how the views of each blob lie beside each other.

    Args:
        views: the manifest's `tensor_views`, without unknown fields.
        blob_bytes: size of each blob by id.
    Raises:
        FormatError: MANIFEST_LIMIT, MANIFEST_TABLE, VIEW_RANGE, VIEW_SHAPE or VIEW_OVERLAP.
    """
    if len(views) > MAX_VIEWS:
        raise broken("MANIFEST_LIMIT", "too many views", "tensor_views", expected=f"at most {MAX_VIEWS}",
                     got=len(views))
    unique((view.name for view in views), "MANIFEST_TABLE", "view")
    by_blob: dict[int, list[TensorView]] = {blob_id: [] for blob_id in blob_bytes}
    by_name: dict[str, TensorView] = {}
    for view in views:
        if view.blob_id not in by_blob:
            raise broken("MANIFEST_TABLE", "view is in an unknown blob", _place(view), got=view.blob_id)
        _check_range(view, blob_bytes[view.blob_id])
        _check_shape(view)
        by_blob[view.blob_id].append(view)
        by_name[view.name] = view
    for view in views:
        if view.HasField("format"):
            _check_scale(view, by_name)
    for blob_id, members in by_blob.items():
        _check_neighbours(blob_id, blob_bytes[blob_id], members)


def _check_range(view: TensorView, size: int) -> None:
    if view.offset_bytes % VIEW_ALIGNMENT:
        raise broken("VIEW_RANGE", "view is not aligned", _place(view), expected=f"a multiple of {VIEW_ALIGNMENT}",
                     got=view.offset_bytes)
    if not inside(view.offset_bytes, view.size_bytes, size):
        raise broken("VIEW_RANGE", "view leaves its blob", _place(view), expected=f"within {size} bytes",
                     got=f"{view.size_bytes} bytes at {view.offset_bytes}")


def _check_shape(view: TensorView) -> None:
    place = _place(view)
    if len(view.shape) > MAX_RANK:
        raise broken("VIEW_SHAPE", "view has too many dimensions", place, expected=f"at most {MAX_RANK}",
                     got=len(view.shape))
    if not all(view.shape):
        raise broken("VIEW_SHAPE", "view has an empty dimension", place, got=list(view.shape))
    bits = DTYPE_BITS.get(view.dtype)
    if bits is None:
        raise broken("VIEW_SHAPE", "unknown dtype", place, expected=" ".join(DTYPE_BITS), got=repr(view.dtype))
    count = prod(view.shape)
    needed = -(-count * bits // 8)
    if view.size_bytes != needed:
        raise broken("VIEW_SHAPE", "view does not hold the bytes that its shape needs", place,
                     expected=f"{needed} bytes for {view.dtype} {list(view.shape)}", got=f"{view.size_bytes} bytes")
    _check_strides(view, count)
    if view.HasField("shard"):
        shard = view.shard
        if shard.axis >= len(view.shape) or shard.index >= shard.count:
            raise broken("VIEW_SHAPE", "shard does not fit the view", place,
                         expected=f"axis below {len(view.shape)} and index below count",
                         got=f"axis {shard.axis}, index {shard.index} of {shard.count}")


def _check_strides(view: TensorView, count: int) -> None:
    if not view.strides:
        return
    if len(view.strides) != len(view.shape) or min(view.strides) < 0:
        raise broken("VIEW_SHAPE", "strides must be one per dimension and not negative", _place(view),
                     expected=f"{len(view.shape)} strides", got=list(view.strides))
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if last >= count:
        raise broken("VIEW_SHAPE", "strides leave the view", _place(view), expected=f"elements below {count}",
                     got=f"element {last}")


def _check_scale(view: TensorView, by_name: Mapping[str, TensorView]) -> None:
    place = _place(view)
    spec = _FORMATS_BY_VIEW.get(view.format)
    if spec is None:
        raise broken("VIEW_SHAPE", "unknown format", place, expected=" ".join(_FORMATS_BY_VIEW), got=repr(view.format))
    if view.dtype != spec.view_dtype:
        raise broken("VIEW_SHAPE", f"dtype does not belong to {view.format}", place, expected=spec.view_dtype,
                     got=view.dtype)
    if not view.shape or view.shape[-1] % spec.block:
        raise broken("VIEW_SHAPE", f"row does not divide into blocks of {view.format}", place,
                     expected=f"a multiple of {spec.block}", got=list(view.shape))
    scale = by_name.get(view.scale_view)
    if scale is None:
        raise broken("MANIFEST_TABLE", "view of block scales is absent", place, got=repr(view.scale_view))
    needed = prod(view.shape) // spec.block * spec.scale_bits // 8
    if scale.size_bytes != needed:
        raise broken("VIEW_SHAPE", "block scales do not fit their codes", _place(scale),
                     expected=f"{needed} bytes for {view.name}", got=f"{scale.size_bytes} bytes of {scale.dtype}")


def _check_neighbours(blob_id: int, size: int, views: list[TensorView]) -> None:
    """Two views are disjoint or the same thing twice; no hole is long enough to hide a tensor."""
    ordered = sorted(views, key=lambda view: (view.offset_bytes, view.size_bytes))
    for left, right in pairwise(ordered):
        if right.offset_bytes < left.offset_bytes + left.size_bytes and _content(left) != _content(right):
            raise broken("VIEW_OVERLAP", "views overlap", f"{left.name} and {right.name}, blob {blob_id}",
                         expected=f"{right.name} at or after {left.offset_bytes + left.size_bytes}",
                         got=right.offset_bytes)
    end = 0
    for view in ordered:
        _check_gap(blob_id, end, view.offset_bytes)
        end = view.offset_bytes + view.size_bytes
    _check_gap(blob_id, end, size)


def _check_gap(blob_id: int, start: int, stop: int) -> None:
    if stop - start >= VIEW_ALIGNMENT:
        raise broken("VIEW_OVERLAP", "bytes belong to no view", f"blob {blob_id}, bytes {start} to {stop}",
                     expected=f"a gap below {VIEW_ALIGNMENT} bytes", got=stop - start)


def _content(view: TensorView) -> tuple[object, ...]:
    return view.offset_bytes, view.size_bytes, view.dtype, view.format, tuple(view.shape)


def _place(view: TensorView) -> str:
    return f"view {view.name}, blob {view.blob_id}"
