"""A picture becomes the patches that Kimi K3's processor makes: sizes, levels and order, against two oracles."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.vision.preprocess import image_patches, plan_image
from runtime.vision.settings import FillStage, ImageSettings
from tests.oracles import moonvit_oracle as oracle
from tests.oracles.drawn_images import drawn

RECORDED = np.load(Path(__file__).parent / "data" / "kimi_k25_processor.npz")
CASES = [key.removesuffix(" grid") for key in RECORDED.files if key.endswith(" grid")]
UNSCALED = [case for case in CASES if case.endswith("/64")]
K3 = ImageSettings()
PLENTY = 1 << 20


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(224, 224, 64), (640, 480, 414), (1024, 1536, 2035), (4000, 3000, 15444), (1, 1, 1), (29, 1, 2)],
)
def test_published_sizes_have_these_many_tokens(width, height, tokens):
    assert plan_image(width, height, K3, PLENTY).tokens == tokens


def test_sizes_are_those_of_transformers():
    """400 random sizes and limits, recorded from kimi_k25's `navit_resize`: K3 and K2.5 share this rule."""
    for width, height, most, side, *expected in RECORDED["sizes"].tolist():
        plan = plan_image(width, height, ImageSettings(max_patches=most, max_side_patches=side), PLENTY)

        assert [plan.width, plan.height, plan.cols * 14, plan.rows * 14] == expected


@given(st.integers(1, 8000), st.integers(1, 8000), st.integers(1, 20000))
@settings(max_examples=300, deadline=None)
def test_image_never_needs_more_tokens_than_there_is_room_for(width, height, max_tokens):
    plan = plan_image(width, height, K3, max_tokens)

    assert 1 <= plan.tokens <= max_tokens
    assert (plan.rows % 2, plan.cols % 2, plan.rows * plan.cols) == (0, 0, 4 * plan.tokens)
    assert 0 <= plan.cols * 14 - plan.width < 28
    assert 0 <= plan.rows * 14 - plan.height < 28
    assert plan.width <= width
    assert plan.height <= height


def test_room_changes_nothing_while_it_is_enough():
    assert plan_image(1024, 1536, K3, 2035) == plan_image(1024, 1536, K3, PLENTY)
    assert plan_image(1024, 1536, K3, 2034).tokens == 1980


def made(case):
    size, most = case.split("/")
    width, height = map(int, size.split("x"))
    return image_patches(Image.fromarray(drawn(width, height)), ImageSettings(max_patches=int(most)), PLENTY)


@pytest.mark.parametrize("case", CASES)
def test_grid_is_that_of_transformers(case):
    patches = made(case)

    assert [1, patches.rows, patches.cols] == RECORDED[f"{case} grid"].tolist()
    assert patches.levels.shape == (patches.rows * patches.cols, 588)


@pytest.mark.parametrize("case", UNSCALED)
def test_unscaled_picture_has_the_levels_and_values_of_transformers(case):
    """Levels are equal; values differ by one rounding at most: it normalizes with one division by 127.5."""
    values = RECORDED[f"{case} values"].reshape(-1, 588)
    levels = made(case).levels

    assert np.array_equal(np.round((values + 1) * 127.5).astype(np.uint8), levels)
    assert np.abs(K3.pixel_table()[0][levels] - values).max() <= 2.0**-24


@pytest.mark.parametrize("case", sorted(set(CASES) - set(UNSCALED)))
def test_scaled_picture_is_that_of_transformers_to_one_level(case):
    """Both are bicubic with antialiasing; torch and Pillow round their weights differently."""
    levels = np.round((RECORDED[f"{case} values"].reshape(-1, 588) + 1) * 127.5).astype(int)
    difference = np.abs(levels - made(case).levels)

    assert difference.max() <= 1
    assert difference.mean() < 0.005


@pytest.mark.parametrize("stage", FillStage)
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize(("width", "height", "most"), [(57, 30, 64), (128, 96, 24)])
def test_levels_are_the_oracles(width, height, most, channels, stage):
    picture = Image.fromarray(drawn(width, height, channels))

    patches = image_patches(picture, ImageSettings(max_patches=most, fill_stage=stage), PLENTY)
    expected, grid = oracle.patches(picture, most, 512, fill_first=stage is FillStage.BEFORE_RESIZE)

    assert grid == (patches.rows, patches.cols)
    assert np.array_equal(patches.levels, expected)


def test_transparent_pixels_show_a_chessboard_of_8_pixels_that_starts_white():
    levels = image_patches(Image.new("RGBA", (28, 28)), K3, PLENTY).levels.reshape(2, 2, 3, 14, 14)

    board = levels[:, :, 0].transpose(0, 2, 1, 3).reshape(28, 28)
    assert board[0].tolist() == [255] * 8 + [180] * 8 + [255] * 8 + [180] * 4
    assert board[8].tolist() == [180] * 8 + [255] * 8 + [180] * 8 + [255] * 4
    assert np.array_equal(levels[:, :, 0], levels[:, :, 1])
    assert np.array_equal(levels[:, :, 0], levels[:, :, 2])


def test_half_transparent_levels_are_cut_and_not_rounded():
    """Alpha 128 of 255 over white: 100 · 0.50196 + 255 · 0.49804 = 177.196; over 180, 139.84 becomes 139."""
    patches = image_patches(Image.new("RGBA", (28, 28), (100, 100, 100, 128)), K3, PLENTY)

    assert patches.levels[0, :10].tolist() == [177] * 8 + [139] * 2


def test_resizing_gives_transparent_pixels_no_weight():
    """Red where it can be seen, green where it cannot: no green may come through."""
    pixels = np.zeros((56, 56, 4), np.uint8)
    pixels[:, :28], pixels[:, 28:] = (255, 0, 0, 255), (0, 255, 0, 0)

    patches = image_patches(Image.fromarray(pixels), ImageSettings(max_patches=4), PLENTY)

    picture = patches.levels.reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3)
    assert picture[:, :14, 1].max() <= 20
    assert picture[0, :13].tolist() == [[255, 0, 0]] * 13


def test_padding_is_black_and_below_and_right():
    picture = Image.new("RGB", (15, 29), (200, 100, 50))

    patches = image_patches(picture, K3, PLENTY)

    whole = patches.levels.reshape(4, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(56, 28, 3)
    assert (patches.rows, patches.cols, patches.tokens, patches.width, patches.height) == (4, 2, 2, 15, 29)
    assert np.array_equal(whole[:29, :15], np.broadcast_to([200, 100, 50], (29, 15, 3)))
    assert (int(whole[29:].max()), int(whole[:, 15:].max())) == (0, 0)


def test_patch_holds_its_colours_one_after_the_other_row_by_row():
    pixels = np.zeros((28, 28, 3), np.uint8)
    pixels[14 + 2, 3] = (7, 8, 9)

    levels = image_patches(Image.fromarray(pixels), K3, PLENTY).levels

    assert {(int(p), int(i)): int(levels[p, i]) for p, i in np.argwhere(levels)} == {
        (2, 2 * 14 + 3): 7, (2, 196 + 2 * 14 + 3): 8, (2, 392 + 2 * 14 + 3): 9}
