"""Pictures that are drawn by arithmetic: equal on every machine, with edges, slopes and every level of every colour."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np


def drawn(width: int, height: int, channels: int = 3) -> np.ndarray:
    """u8 [height, width, channels]: slopes, a disc with a hard edge, and a fine texture."""
    y, x = np.mgrid[:height, :width]
    disc = (x - width // 2) ** 2 + (y - height // 3) ** 2 < (min(width, height) // 3 + 1) ** 2
    planes = [(x * (3 + c) + y * (5 - c) + x * y // (7 + c) + 90 * c * disc + 16 * ((x + y) % 2)) % 256
              for c in range(channels)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def png(width: int, height: int, depth: int, colour: int, rows: list[bytes], *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written from its specification: `depth` bits a sample, `colour` type, unfiltered `rows`; `chunks` go before
    the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)


def png_of(pixels: np.ndarray) -> bytes:
    """An 8-bit PNG of u8 [height, width, 1 to 4]."""
    height, width, channels = pixels.shape
    return png(width, height, 8, {1: 0, 2: 4, 3: 2, 4: 6}[channels], [row.tobytes() for row in pixels])


def jpeg_of(pixels: np.ndarray, **options: object) -> bytes:
    """A JPEG by Pillow, which is also who reads it: only for what a lossy file must not be compared in bits."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", **options)
    return out.getvalue()
