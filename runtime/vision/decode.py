"""Bytes that a stranger sent, to an upright RGB or RGBA picture, within limits that hold before a pixel is decoded.

    picture = decode_image(decode_data_uri("data:image/png;base64,iVBORw0…"))
    picture.size                       # (width, height)

1. Size in bytes: of a URI's text before it is decoded, of the file before it is opened.
2. Format: by the file's first bytes, PNG or JPEG; no other decoder of Pillow's is reached.
3. Width, height and their ratio, from the header.
4. Pixels: a file that ends early is refused, never filled up with grey.
5. Orientation as the camera noted it (EXIF); then RGB, or RGBA where the file has transparency.

A palette is looked up here, so that resizing meets colours and not indices. Of 16 bits per sample the upper 8 are kept.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from dataclasses import dataclass

import numpy as np
from dflash_core.errors import ImageError, ResourceError

try:
    from PIL import Image, ImageOps
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
except ImportError as err:
    raise ResourceError("PILLOW", "Pillow is not installed, and images are read with it", where="PIL",
                        hint="pip install 'dflash-cores[vision]'") from err

# Pillow warns of broken EXIF in words that the file chooses: nobody's log is to be filled by a stranger's image.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

_SIGNATURES = ((b"\x89PNG\r\n\x1a\n", PngImageFile), (b"\xff\xd8\xff", JpegImageFile))
_DATA_URI = re.compile(r"data:image/(?:png|jpeg|jpg);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What is refused before it is decoded.

    Attributes:
        max_bytes: of the file.
        max_pixels: width x height; the largest square that Kimi K3's tower has positions for (512 patches of 14 a
            side) has no more.
        max_aspect: the longer side over the shorter one; what is longer is a bar code or an attack.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = (512 * 14) ** 2
    max_aspect: int = 200


def decode_data_uri(uri: str, limits: ImageLimits | None = None) -> bytes:
    """The bytes of a `data:` URI that holds a PNG or JPEG in base64.

    Raises:
        ImageError: IMAGE_URI; another scheme or type, or text that is not base64. IMAGE_BYTES; too long.
    """
    limits = limits or ImageLimits()
    header = _DATA_URI.match(uri)
    if header is None:
        raise ImageError("IMAGE_URI", "an image comes as a data: URI", where="image_url",
                         expected="data:image/png;base64,… or data:image/jpeg;base64,…", got=ascii(uri[:40]),
                         hint="send the image itself in base64; no address is fetched and no file is read")
    text = len(uri) - header.end()
    if text > 4 * (limits.max_bytes // 3 + 1):
        raise _too_many_bytes(limits, 3 * (text // 4))
    try:
        return base64.b64decode(uri[header.end():], validate=True)
    except (binascii.Error, ValueError) as err:
        raise ImageError("IMAGE_URI", "the image is not valid base64", where="image_url", got=str(err),
                         hint="encode the file's bytes in standard base64, padding included") from err


def decode_image(data: bytes, limits: ImageLimits | None = None, where: str = "image") -> Image.Image:
    """Decode a PNG or JPEG file.

    Args:
        where: what messages call the image.
    Returns:
        A picture of mode RGB, or RGBA where the file has transparency; upright.
    Raises:
        ImageError: IMAGE_BYTES, IMAGE_FORMAT, IMAGE_PIXELS, IMAGE_ASPECT or IMAGE_DAMAGED.
    """
    limits = limits or ImageLimits()
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(limits, len(data), where)
    kind = next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)
    if kind is None:
        raise ImageError("IMAGE_FORMAT", "this is neither a PNG nor a JPEG", where=where, expected="PNG or JPEG",
                         got=f"{len(data)} bytes that start with {data[:8].hex() or 'nothing'}",
                         hint="convert the image to PNG or JPEG")
    try:
        picture = kind(io.BytesIO(data))
        _check_size(*picture.size, limits, where)
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)  # no copy where nothing turns: a picture can take 200 MB
        return _colours(picture)
    except ImageError:
        raise
    except MemoryError as err:
        raise ResourceError("IMAGE_MEMORY", "there is no memory to decode an image", where=where,
                            hint="send a smaller image") from err
    except Exception as err:  # decoders of hostile bytes raise whatever they stumble over
        raise ImageError("IMAGE_DAMAGED", "the image is damaged or ends early", where=where,
                         got=f"{type(err).__name__}: {ascii(str(err))[:120]}",
                         hint="open the file in a viewer and save it again") from err


def _too_many_bytes(limits: ImageLimits, got: int, where: str = "image_url") -> ImageError:
    return ImageError("IMAGE_BYTES", "the image file is too large", where=where,
                      expected=f"at most {limits.max_bytes} bytes", got=got, hint="compress or scale the image")


def _check_size(width: int, height: int, limits: ImageLimits, where: str) -> None:
    if width * height > limits.max_pixels:
        raise ImageError("IMAGE_PIXELS", "the image has too many pixels", where=where,
                         expected=f"at most {limits.max_pixels}", got=f"{width} x {height} = {width * height}",
                         hint="scale the image down before sending it")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise ImageError("IMAGE_ASPECT", "the image is too long for its width", where=where,
                         expected=f"sides of at most {limits.max_aspect}:1", got=f"{width} x {height}",
                         hint="cut the image into parts")


def _colours(picture: Image.Image) -> Image.Image:
    """RGB, or RGBA where some of it may be transparent."""
    if picture.mode.startswith("I;16"):  # Pillow keeps the upper byte of 16-bit colour, but clips 16-bit grey to white
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    mode = "RGBA" if picture.has_transparency_data else "RGB"
    return picture if picture.mode == mode else picture.convert(mode)
