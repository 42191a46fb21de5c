"""The published preprocessor_config.json is read field by field; what cannot be done is refused by name."""

import json

import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.vision.settings import Background, FillStage, ImageSettings, read_image_settings

K3 = ImageSettings()


def test_levels_are_normalized_to_these_values():
    table = K3.pixel_table()

    assert table.shape == (3, 256)
    assert (table[0, 0], table[1, 255]) == (-1, 1)
    assert table[2, 128] == np.float32(2) * (np.float32(128 / 255) - np.float32(0.5))
    assert ImageSettings(mean=(0.0, 0.25, 0.5), std=(1.0, 0.5, 2.0)).pixel_table()[:, 255].tolist() == [1, 1.5, 0.25]


PUBLISHED = {
    "in_patch_limit": 65536, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    "transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 8,
                              "chessboard_square_on_top_left": True, "chessboard_white_value": 255,
                              "chessboard_gray_value": 180},
    "transparent_bg_fill_stage": "after_resize",
}  # fmt: skip


def read(**changes):
    return read_image_settings(json.dumps({"media_proc_cfg": {**PUBLISHED, **changes}}).encode())


def test_published_config_is_the_default():
    assert read() == K3 == read_image_settings(None) == read_image_settings(b"{}")


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"in_patch_limit": 40960}, "max_patches", 40960), ({"patch_limit_on_one_side": 64}, "max_side_patches", 64),
        ({"merge_kernel_size": [2, 2]}, "merge_size", 2), ({"image_mean": [0, 0.25, 1]}, "mean", (0.0, 0.25, 1.0)),
        ({"transparent_bg_fill_stage": "before_resize"}, "fill_stage", FillStage.BEFORE_RESIZE),
        ({"transparent_bg_config": None}, "background", None),
        ({"transparent_bg_config": {"pattern": "gray"}}, "background", Background(128, 128, 1)),
        ({"transparent_bg_config": {}}, "background", Background(0, 0, 1)),
        ({"transparent_bg_config": {"pattern": "chessboard", "chessboard_square_on_top_left": False}}, "background",
         Background(200, 255, 16)),
    ],
)  # fmt: skip
def test_config_is_read(changes, field, value):
    assert getattr(read(**changes), field) == value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"patch_size": 0}, "patch_size"), ({"patch_size": True}, "patch_size"), ({"patch_size": 10**9}, "patch_size"),
        ({"merge_kernel_size": [2, 3]}, "merge_kernel_size"), ({"in_patch_limit": 1.5}, "in_patch_limit"),
        ({"patch_limit_on_one_side": None}, "patch_limit_on_one_side"), ({"image_mean": [1, 2]}, "image_mean"),
        ({"image_std": [0, 1, 1]}, "image_std"), ({"image_std": "wide"}, "image_std"),
        ({"fixed_output_tokens": 256}, "fixed_output_tokens"), ({"transparent_bg_config": 3}, "transparent_bg_config"),
        ({"transparent_bg_config": {"pattern": ["x"]}}, "transparent_bg_config"),
        ({"transparent_bg_config": {"pattern": "chessboard", "chessboard_gray_value": 256}}, "chessboard_gray_value"),
        ({"transparent_bg_fill_stage": "never"}, "transparent_bg_fill_stage"),
    ],
)  # fmt: skip
def test_refuses_config_by_field(changes, named):
    with pytest.raises(FormatError) as refused:
        read(**changes)

    assert (refused.value.code, refused.value.where) == ("IMAGE_SETTINGS", "preprocessor_config.json")
    assert refused.value.what.startswith(named)
    assert refused.value.hint


@pytest.mark.parametrize("data", [b"", b"[", b"[1]", b"\xff", b'{"media_proc_cfg": 1}', b"[" * 100_000])
def test_refuses_what_is_no_config(data):
    with pytest.raises(FormatError, match=r"preprocessor_config\.json"):
        read_image_settings(data)
