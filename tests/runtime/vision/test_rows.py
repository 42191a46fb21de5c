"""Rows of image embeddings are handed out without overlap, and a prompt's images get all they need or nothing."""

import numpy as np
import pytest
from dflash_core.errors import ImageError
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.vision.encode import VisionEncoder
from runtime.vision.rows import PromptImages, RowPool
from tests.oracles.drawn_images import drawn, png_of
from tests.tiny_vision import PLACEHOLDER, TinyVision


@pytest.fixture(scope="module")
def encoder():
    return VisionEncoder.of(TinyVision.record(buckets=(16, 64)).load(seed=1))


def images(encoder, *sizes):
    return [encoder.patches(png_of(drawn(*size))) for size in sizes]


def test_lowest_rows_that_fit_are_taken():
    pool = RowPool(10)

    assert [pool.take(4), pool.take(4), pool.take(4), pool.take(2), pool.take(1)] == [0, 4, None, 8, None]
    pool.give_back(0, 4)
    pool.give_back(8, 2)
    assert [pool.take(3), pool.take(2), pool.take(1)] == [0, 8, 3]


def test_neighbours_become_one_gap_again():
    pool = RowPool(9)
    assert [pool.take(3) for _ in range(3)] == [0, 3, 6]
    for first in (0, 6, 3):
        pool.give_back(first, 3)

    assert pool.take(9) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
@settings(deadline=None)
def test_no_row_is_ever_held_twice_and_none_is_lost(steps):
    pool, held, free = RowPool(24), [], set(range(24))
    for take, count in steps:
        if take:
            first = pool.take(count)
            gaps = any(set(range(start, start + count)) <= free for start in range(25 - count))
            assert (first is not None) == gaps
            if first is not None:
                rows = set(range(first, first + count))
                assert rows <= free
                free -= rows
                held.append((first, count))
        elif held:
            first, count = held.pop(count % len(held))
            pool.give_back(first, count)
            free |= set(range(first, first + count))
    for first, count in held:
        pool.give_back(first, count)
    assert pool.take(24) == 0


def test_prompt_gets_the_rows_of_each_of_its_images(encoder):
    pool = RowPool(encoder.capacity)
    assert pool.take(3) == 0
    small, large = images(encoder, (28, 28), (56, 84))
    prompt = PromptImages.of(encoder, [1, PLACEHOLDER, PLACEHOLDER, 2], [small, large])

    assert prompt.place(encoder, pool)

    assert prompt.prompt.tokens == (1, *[PLACEHOLDER] * 7, 2)
    assert prompt.sources(0, 9) == [0, 4, 5, 6, 7, 8, 9, 10, 0]
    found = encoder.rows(3, 7)
    for image, rows in ((small, found[:1]), (large, found[1:])):
        encoder.encode(image, 10)
        assert np.array_equal(encoder.rows(10, image.tokens), rows)


def test_prompt_waits_whole_while_there_is_no_room(encoder):
    pool = RowPool(encoder.capacity)
    first = PromptImages.of(encoder, [PLACEHOLDER], images(encoder, (112, 84)))
    second = PromptImages.of(encoder, [PLACEHOLDER, PLACEHOLDER], images(encoder, (28, 28), (56, 56)))
    assert (encoder.capacity, first.place(encoder, pool), second.place(encoder, pool)) == (16, True, False)

    first.release(pool)
    first.release(pool)

    assert second.place(encoder, pool)
    second.release(pool)
    assert pool.take(16) == 0


def test_images_that_a_cache_has_are_not_encoded_again(encoder, monkeypatch):
    pool, encoded = RowPool(encoder.capacity), []
    monkeypatch.setattr(VisionEncoder, "encode", lambda self, image, first: encoded.append((image.tokens, first)))
    prompt = PromptImages.of(encoder, [PLACEHOLDER, 5, PLACEHOLDER], images(encoder, (28, 56), (84, 28)))

    assert prompt.place(encoder, pool, stored=2)
    prompt.release(pool)
    assert prompt.place(encoder, pool, stored=1)
    prompt.release(pool)
    assert prompt.place(encoder, pool, stored=6)

    assert encoded == [(3, 0), (2, 0), (3, 2)]
    assert pool.take(16) == 0


def test_prompts_with_other_pictures_have_other_identities(encoder):
    one, other = images(encoder, (56, 28), (28, 56))
    same_levels = PromptImages.of(encoder, [PLACEHOLDER], [one]).identities

    assert same_levels == PromptImages.of(encoder, [PLACEHOLDER], images(encoder, (56, 28))).identities
    assert set(same_levels).isdisjoint(PromptImages.of(encoder, [PLACEHOLDER], [other]).identities)
    blank = [encoder.patches(png_of(np.zeros((h, w, 3), np.uint8))) for w, h in ((56, 28), (28, 56))]
    assert blank[0].levels.tobytes() == blank[1].levels.tobytes()
    first, second = (PromptImages.of(encoder, [PLACEHOLDER], [image]).identities for image in blank)
    assert set(first).isdisjoint(second)


def test_refuses_more_images_than_the_core_ever_holds(encoder):
    with pytest.raises(ImageError) as refused:
        PromptImages.of(encoder, [PLACEHOLDER] * 2, images(encoder, (112, 84), (56, 84)))

    error = refused.value
    assert (error.code, error.expected, error.got, bool(error.hint)) == ("IMAGE_ROOM", "at most 16", "18", True)


def test_refuses_text_that_spells_a_placeholder(encoder):
    with pytest.raises(ImageError, match="another number of image placeholders"):
        PromptImages.of(encoder, [PLACEHOLDER, 7, PLACEHOLDER], images(encoder, (28, 28)))
