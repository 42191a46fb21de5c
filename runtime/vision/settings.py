"""How a model wants its images, as its preprocessor_config.json says. Needs no image library: an exporter reads it too.

    settings = read_image_settings(core.file(PREPROCESSOR_CONFIG))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from dflash_core.errors import FormatError

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
