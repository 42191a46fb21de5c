"""Stored weight codes to fp32 values: exact for every format, so a decoded weight is the weight.

NVFP4 decodes to code x block_scale, which fp32 (and bf16) hold exactly; the global scale multiplies a GEMM's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from runtime.ops.parallel import crew, ranges
from runtime.ops.registry import Array, F32Array

E4M3_VALUES: F32Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E8M0_VALUES: F32Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
E2M1_VALUES: F32Array = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E2M1_PAIRS: F32Array = np.stack([E2M1_VALUES[np.arange(256) & 15], E2M1_VALUES[np.arange(256) >> 4]], axis=-1)


def bf16_to_f32(x: Array) -> F32Array:
    """bf16 values in fp32, by shifting their bits: several times faster than a cast."""
    wide = x.view(np.uint16).astype(np.uint32)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)


def by_rows(rows: int, cols: int, fill: Callable[[int, int, F32Array], Any]) -> F32Array:
    """An fp32 matrix [rows, cols] that `fill(first, last, part)` writes, in row ranges on all threads."""
    out = np.empty((rows, cols), np.float32)
    crew().run([partial(fill, a, b, out[a:b]) for a, b in ranges(rows, crew().threads)])
    return out


def decode_plain(w: Array) -> F32Array:
    """A bf16 or fp32 matrix in fp32 (an fp32 matrix itself, not a copy)."""
    if w.dtype == np.float32:
        return w
    bits = w.view(np.uint16)

    def fill(a: int, b: int, part: F32Array) -> None:
        wide = part.view(np.uint32)
        wide[...] = bits[a:b]
        np.left_shift(wide, 16, out=wide)

    return by_rows(w.shape[0], w.shape[1], fill)


def decode_mxfp8(codes: Array, block_scale: Array) -> F32Array:
    """E4M3 codes [rows, cols] times E8M0 scales [rows, cols / 32]."""
    rows, cols = codes.shape

    def fill(a: int, b: int, part: F32Array) -> None:
        np.take(E4M3_VALUES, codes[a:b], out=part)
        blocks = part.reshape(b - a, cols // 32, 32)
        blocks *= E8M0_VALUES[block_scale[a:b]][:, :, None]

    return by_rows(rows, cols, fill)


def decode_nvfp4(codes: Array, block_scale: Array) -> F32Array:
    """E2M1 codes [rows, cols / 2] (low nibble first) times E4M3 scales [rows, cols / 16], without the global scale."""
    rows, cols = codes.shape[0], codes.shape[1] * 2

    def fill(a: int, b: int, part: F32Array) -> None:
        np.take(E2M1_PAIRS, codes[a:b], axis=0, out=part.reshape(b - a, cols // 2, 2))
        blocks = part.reshape(b - a, cols // 16, 16)
        blocks *= E4M3_VALUES[block_scale[a:b]][:, :, None]

    return by_rows(rows, cols, fill)
