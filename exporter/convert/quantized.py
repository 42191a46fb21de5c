"""What every block format shares: the quantized tensor, the checks on its input, and the largest value of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from dflash_core.errors import ConvertError
from dflash_core.formats import FORMATS, Format
from numpy.typing import NDArray
from torch import Tensor

NON_FINITE = "NON_FINITE_WEIGHT"
CHUNK_WEIGHTS = 1 << 19

_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in a block format.

    Attributes:
        format: MXFP8 or NVFP4.
        codes: u8 [rows, cols * bits / 8]; two 4-bit codes share a byte, the lower column in the low nibble.
        block_scale: u8 [rows, cols / block], not swizzled; E8M0 for MXFP8, E4M3 for NVFP4.
        global_scale: f32 [1] for NVFP4, None for MXFP8.
    """

    format: Format
    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor | None


def check_matrix(fmt: Format, weight: Tensor) -> None:
    """Refuse what a block format cannot hold: other than two axes, a torn last block, an element type that is no float.

    Raises:
        ConvertError: NOT_A_MATRIX, BLOCK_DIVISION or SOURCE_DTYPE.
    """
    block = FORMATS[fmt].block
    shape = list(weight.shape)
    if weight.dim() != 2:
        raise ConvertError(
            "NOT_A_MATRIX", f"{fmt.name} holds matrices", expected="two axes", got=shape,
            hint="keep this tensor in checkpoint precision",
        )
    if shape[1] % block:
        raise ConvertError(
            "BLOCK_DIVISION", f"row does not divide into {fmt.name} blocks", expected=f"a multiple of {block}",
            got=shape[1], hint="keep this tensor in checkpoint precision",
        )
    if weight.dtype not in _SOURCE_DTYPES:
        raise ConvertError(
            "SOURCE_DTYPE", f"{fmt.name} is made from plain floats", expected="bfloat16, float16 or float32",
            got=str(weight.dtype).removeprefix("torch."), hint="a tensor is never converted twice",
        )


class Scratch(threading.local):
    """Memory for what a codec computes on the way, kept by each thread from one chunk to the next.

    A chunk's intermediate values are larger than what an allocator keeps: without this every chunk would be given new
    pages by the system, which costs more than all the arithmetic. Codecs share few slots, so that those stay in cache.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Tensor] = {}
        self._views: dict[tuple[int, Sequence[int], torch.dtype], Tensor] = {}

    def take(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory; the last tensor that was taken from the same slot is then worthless."""
        view = self._views.get((slot, shape, dtype))
        if view is not None:
            return view
        nbytes = prod(shape) * dtype.itemsize
        held = self._slots.get(slot)
        if held is None or held.numel() < nbytes:
            held = self._slots[slot] = torch.empty(nbytes, dtype=torch.uint8)
            self._views.clear()
        view = self._views[slot, shape, dtype] = held[:nbytes].view(dtype).view(shape)
        return view


SCRATCH = Scratch()


def row_chunks(rows: int, cols: int) -> Iterator[slice]:
    """Slices of rows that hold about CHUNK_WEIGHTS weights each.

    They are few enough that what a codec makes of them stays in the last cache from one step to the next, and enough
    that the calls of Python between the steps cost little.
    """
    step = max(1, CHUNK_WEIGHTS // max(cols, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def block_amax(weight: Tensor, block: int) -> Tensor:
    """The largest magnitude of every block of `block` columns.

    Magnitudes are compared as integers, since a float's bits without the sign grow with its value: several times faster
    than a float maximum, and a NaN or infinity comes out on top of everything.

    Args:
        weight: [rows, cols], bf16, f16 or f32; cols divisible by `block`.
    Returns:
        f32 [rows, cols / block].
    Raises:
        ConvertError: NON_FINITE_WEIGHT, with the row and column of the first value that is not finite.
    """
    rows, cols = weight.shape
    amax = torch.empty(rows, cols // block, dtype=torch.float32)
    for part in row_chunks(rows, cols):
        piece = weight[part].float() if weight.dtype == torch.float16 else weight[part].contiguous()
        largest = _largest_of_each(magnitudes(piece, 0).numpy().reshape(-1), block)
        values = (largest.astype(np.int32) << 16 if piece.dtype == torch.bfloat16 else largest).view(np.float32)
        if not np.isfinite(values.max(initial=0)):
            raise _non_finite(weight)
        amax[part] = torch.from_numpy(values).view(-1, cols // block)
    return amax


def magnitudes(weight: Tensor, slot: int) -> Tensor:
    """The bits of a contiguous weight without their signs, in a slot of the scratch memory: i16, or i32 for f32."""
    integer, unsigned = (torch.int32, 0x7FFFFFFF) if weight.dtype == torch.float32 else (torch.int16, 0x7FFF)
    return torch.bitwise_and(weight.view(integer), unsigned, out=SCRATCH.take(slot, weight.shape, integer))


def values_of_e4m3(codes: Tensor, out: Tensor) -> Tensor:
    """What E4M3 codes stand for, times 2**-8.

    A code is the middle of a half float: its bits, moved up by the 7 that a half's mantissa has more, are its value *
    2**-8, denormal codes included. The sign has one place more to go, over the exponent bit that E4M3 lacks.

    Args:
        codes: u8, none of them NaN.
        out: f32 of the same shape; not in the third slot of the scratch memory.
    Returns:
        `out`.
    """
    bits = SCRATCH.take(2, codes.shape, torch.int16).copy_(codes.view(torch.int8))  # the sign in every upper bit
    return out.copy_(bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16))


def _largest_of_each(values: NDArray[np.signedinteger], block: int) -> NDArray[np.signedinteger]:
    """The largest of every `block` neighbours.

    Each pass compares every value with the one that is half as far on as in the pass before. What comes of it between
    two blocks is of no use, but a pass over unbroken memory is several times faster than one that ends at each block.
    """
    spare = SCRATCH.take(1, values.shape, torch.from_numpy(values).dtype).numpy()
    count, distance = values.size, block // 2
    while count and distance:
        count -= distance
        np.maximum(values[:count], values[distance : distance + count], out=spare[:count])
        values, spare = spare, values
        distance //= 2
    return values[::block].copy()


def _non_finite(weight: Tensor) -> ConvertError:
    row, col = (int(axis[0]) for axis in torch.nonzero(~torch.isfinite(weight), as_tuple=True))
    return non_finite_error(row, col, float(weight[row, col]))


def non_finite_error(row: int, col: int, value: float, where: str = "") -> ConvertError:
    """The error for a weight that no block format can hold."""
    return ConvertError(
        NON_FINITE, "weight is not finite", where=where or f"row {row}, column {col}", expected="a finite number",
        got=value, hint="the checkpoint is damaged: fetch it again, or keep this tensor in checkpoint precision",
    )
