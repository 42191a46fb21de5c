"""A picture to the patches that the vision graph reads, as Kimi K3's processor makes them.

1. Scale down, never up, so that the patch grid and each of its sides stay within their limits.
2. Resize (bicubic, Pillow's own; transparent pixels weigh nothing), and put what is transparent on a chessboard.
3. Pad at the right and below with black to whole 2 x 2 groups of patches.
4. Cut into patches, row by row. Levels stay bytes: the graph's first node normalizes them.

    settings = read_image_settings(core.file("preprocessor_config.json"))
    patches = image_patches(picture, settings, max_tokens=4096)

Source: the published processor's arithmetic, rounding included; docs/decisions/0009 says where we differ, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from dflash_core.errors import FormatError
from PIL import Image

PREPROCESSOR_CONFIG = "preprocessor_config.json"
U8Array = npt.NDArray[np.uint8]


class FillStage(Enum):
    """When a transparent picture is put on its background. The value is the config's word."""

    BEFORE_RESIZE = "before_resize"
    AFTER_RESIZE = "after_resize"


@dataclass(frozen=True, slots=True)
class Background:
    """What shows through: squares of two greys, the top left one of the first."""

    first: int = 255
    second: int = 180
    square: int = 8

    def pixels(self, width: int, height: int) -> U8Array:
        """u8 [height, width, 1]."""
        odd = (np.arange(height)[:, None] // self.square + np.arange(width)[None, :] // self.square) % 2
        return np.where(odd, self.second, self.first).astype(np.uint8)[:, :, None]


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How a model wants its images; the defaults are Kimi K3's published ones.

    Attributes:
        patch_size: pixels along a side of a patch.
        merge_size: patches along a side of the group that becomes one token.
        max_patches: patches of the scaled picture, before padding.
        max_side_patches: patches along one side.
        mean, std: of each colour, in units of the full level.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 65536
    max_side_patches: int = 512
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    background: Background | None = Background()
    fill_stage: FillStage = FillStage.AFTER_RESIZE

    def pixel_table(self) -> npt.NDArray[np.float32]:
        """The normalized value of each level, f32 [3, 256]: (r(level / 255) - mean) / std, rounded after each step."""
        levels = (np.arange(256) / 255.0).astype(np.float32)
        centred = levels[None, :] - np.array(self.mean)[:, None]
        scaled = centred.astype(np.float32) * (1.0 / np.array(self.std))[:, None]
        table: npt.NDArray[np.float32] = scaled.astype(np.float32)
        return table


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
    alpha = pixels[:, :, 3:].astype(np.float32) / np.float32(255)
    behind = background.pixels(*picture.size)
    mixed: U8Array = (alpha * colours + (np.float32(1) - alpha) * behind).astype(np.uint8)
    return mixed


def read_image_settings(data: bytes | None) -> ImageSettings:
    """The settings of a preprocessor_config.json; None: Kimi K3's published ones.

    Raises:
        FormatError: IMAGE_SETTINGS, with the field; a value of the wrong kind, or a way of preprocessing that this
            runtime does not have.
    """
    if data is None:
        return ImageSettings()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise _wrong("the file", "JSON", str(err)) from err
    media = document.get("media_proc_cfg", {}) if isinstance(document, dict) else None
    if not isinstance(media, dict):
        raise _wrong("media_proc_cfg", "an object", media)
    if media.get("fixed_output_tokens") is not None:
        raise _wrong("fixed_output_tokens", "null", media["fixed_output_tokens"])
    default = ImageSettings()
    merge = media.get("merge_kernel_size", default.merge_size)
    if isinstance(merge, list) and len(merge) == 2 and merge[0] == merge[1]:
        merge = merge[0]
    stage = media.get("transparent_bg_fill_stage", FillStage.AFTER_RESIZE.value)
    if stage not in [s.value for s in FillStage]:
        raise _wrong("transparent_bg_fill_stage", " or ".join(s.value for s in FillStage), stage)
    return ImageSettings(
        patch_size=_count(media, "patch_size", default.patch_size, 256),
        merge_size=_count({"merge_kernel_size": merge}, "merge_kernel_size", default.merge_size, 16),
        max_patches=_count(media, "in_patch_limit", default.max_patches, 1 << 24),
        max_side_patches=_count(media, "patch_limit_on_one_side", default.max_side_patches, 1 << 16),
        mean=_colour(media, "image_mean", default.mean, positive=False),
        std=_colour(media, "image_std", default.std, positive=True),
        background=_background(media), fill_stage=FillStage(stage))


def _background(media: Mapping[str, Any]) -> Background | None:
    """The published default is a chessboard; null keeps the colours under transparent pixels."""
    if "transparent_bg_config" not in media:
        return Background()
    config = media["transparent_bg_config"]
    if config is None:
        return None
    pattern = config.get("pattern", "black") if isinstance(config, dict) else config
    plain = {"white": 255, "black": 0, "gray": 128}
    if isinstance(pattern, str) and pattern in plain:
        return Background(plain[pattern], plain[pattern], 1)
    if pattern != "chessboard":
        raise _wrong("transparent_bg_config", "a pattern: chessboard, white, black or gray", pattern)
    white = _count(config, "chessboard_white_value", 255, 255, least=0)
    grey = _count(config, "chessboard_gray_value", 200, 255, least=0)
    square = _count(config, "chessboard_square_size", 16, 1 << 16)
    if config.get("chessboard_square_on_top_left", True):
        return Background(white, grey, square)
    return Background(grey, white, square)


def _count(values: Mapping[str, Any], name: str, default: int, most: int, *, least: int = 1) -> int:
    value = values.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise _wrong(name, f"a whole number, {least} to {most}", value)
    return value


def _colour(values: Mapping[str, Any], name: str, default: tuple[float, float, float],
            *, positive: bool) -> tuple[float, float, float]:
    value = values.get(name, list(default))
    if not isinstance(value, list) or len(value) != 3 or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 and (v > 0 or not positive)
            for v in value):
        raise _wrong(name, "three numbers" + (" > 0" if positive else ""), value)
    return float(value[0]), float(value[1]), float(value[2])


def _wrong(name: str, expected: str, got: object) -> FormatError:
    return FormatError("IMAGE_SETTINGS", f"{name} is not what this runtime reads", where=PREPROCESSOR_CONFIG,
                       expected=expected, got=ascii(got)[:120],
                       hint="use a newer runtime, or export the core again from an unchanged checkpoint")
