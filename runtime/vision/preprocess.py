"""A picture to the patches that the vision graph reads, as Kimi K3's processor makes them.

1. Scale down, never up, so that the patch grid and each of its sides stay within their limits.
2. Resize (bicubic, Pillow's own; transparent pixels weigh nothing), and put what is transparent on a chessboard.
3. Pad at the right and below with black to whole 2 x 2 groups of patches.
4. Cut into patches, row by row. Levels stay bytes: the graph's first node normalizes them.

    patches = image_patches(picture, settings, max_tokens=4096)

Source: the published processor's arithmetic, rounding included; docs/decisions/0010 says where we differ, and why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from runtime.vision.settings import Background, FillStage, ImageSettings, U8Array

BAND_ROWS = 64  # rows of pixels that are mixed at a time: fp32 of a whole large picture would take 500 MB


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Sizes of one image: the scaled picture in pixels, and the padded grid in patches.

    Attributes:
        width, height: of the scaled picture.
        rows, cols: patches from top to bottom and from left to right, whole groups.
        tokens: rows of embeddings that the image becomes.
    """

    width: int
    height: int
    rows: int
    cols: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """An image, ready for the vision graph.

    Attributes:
        levels: u8 [rows * cols, 3 * patch_size * patch_size]; a patch's colours one after the other, each row by row.
        rows, cols: of the patch grid.
        tokens: rows of embeddings it becomes.
        width, height: of the picture as it was sent, upright: what the prompt says of it.
    """

    levels: U8Array
    rows: int
    cols: int
    tokens: int
    width: int
    height: int


def plan_image(width: int, height: int, settings: ImageSettings, max_tokens: int) -> ImagePlan:
    """Size of the patch grid for a picture of width x height pixels, at most `max_tokens` tokens.

    The published limits hold before padding, so that a grid may exceed them by its padding. Where it then has more
    tokens than the core has room for, the limit on patches is lowered in proportion until it fits.
    """
    limit = min(settings.max_patches, max_tokens * settings.merge_size**2)
    while True:
        plan = _plan(width, height, settings, limit)
        if plan.tokens <= max_tokens or limit == 0:
            return plan
        limit = min(limit - 1, limit * max_tokens // plan.tokens)


def _plan(width: int, height: int, settings: ImageSettings, max_patches: int) -> ImagePlan:
    patch, side = settings.patch_size, settings.max_side_patches * settings.patch_size
    by_patches = math.sqrt(max_patches / (max(1, width // patch) * max(1, height // patch)))
    scale = min(1.0, by_patches, side / width, side / height)
    new_width, new_height = (min(max(1, int(pixels * scale)), side) for pixels in (width, height))
    group = settings.merge_size * patch
    rows, cols = -(-new_height // group), -(-new_width // group)
    return ImagePlan(new_width, new_height, rows * settings.merge_size, cols * settings.merge_size, rows * cols)


def image_patches(picture: Image.Image, settings: ImageSettings, max_tokens: int) -> ImagePatches:
    """Scale, pad and cut a picture of mode RGB or RGBA into patches.

    Args:
        max_tokens: what the core has room for.
    """
    plan = plan_image(*picture.size, settings, max_tokens)
    pixels = _pixels(picture, plan, settings)
    patch = settings.patch_size
    padded = np.zeros((plan.rows * patch, plan.cols * patch, 3), np.uint8)
    padded[:plan.height, :plan.width] = pixels
    levels = padded.reshape(plan.rows, patch, plan.cols, patch, 3).transpose(0, 2, 4, 1, 3)
    flat = np.ascontiguousarray(levels).reshape(plan.rows * plan.cols, 3 * patch * patch)
    return ImagePatches(flat, plan.rows, plan.cols, plan.tokens, *picture.size)


def _pixels(picture: Image.Image, plan: ImagePlan, settings: ImageSettings) -> U8Array:
    """The scaled picture, u8 [height, width, 3]."""
    if settings.fill_stage is FillStage.BEFORE_RESIZE:
        picture = Image.fromarray(_fill(picture, settings.background))
    if picture.size != (plan.width, plan.height):
        picture = picture.resize((plan.width, plan.height), Image.Resampling.BICUBIC)
    return _fill(picture, settings.background)


def _fill(picture: Image.Image, background: Background | None) -> U8Array:
    """u8 [height, width, 3]: each colour weighed by alpha against the background in fp32, then cut to whole levels."""
    pixels: U8Array = np.asarray(picture)
    if picture.mode == "RGB":
        return pixels
    colours = pixels[:, :, :3]
    if background is None:
        return colours
    behind = background.pixels(*picture.size)
    mixed = np.empty(colours.shape, np.uint8)
    for first in range(0, len(pixels), BAND_ROWS):
        band = slice(first, first + BAND_ROWS)
        alpha = pixels[band, :, 3:].astype(np.float32) / np.float32(255)
        mixed[band] = alpha * colours[band] + (np.float32(1) - alpha) * behind[band]
    return mixed
