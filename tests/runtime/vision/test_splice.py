"""Placeholders become as many tokens as an image has rows, and a chunk knows which row each token stands for."""

import pytest
from dflash_core.errors import ImageError
from hypothesis import given
from hypothesis import strategies as st

from runtime.vision.splice import ImageSpan, image_text, splice_images

PAD = 250


def test_each_placeholder_becomes_its_images_rows():
    prompt = splice_images([1, PAD, 2, 3, PAD, PAD], PAD, [3, 1, 2])

    assert prompt.tokens == (1, PAD, PAD, PAD, 2, 3, PAD, PAD, PAD)
    assert prompt.spans == (ImageSpan(1, 3), ImageSpan(6, 1), ImageSpan(7, 2))


def test_prompt_without_images_is_itself():
    assert splice_images([1, 2, 3], PAD, []).tokens == (1, 2, 3)
    assert splice_images([1, 2, 3], PAD, []).sources(0, 4, []) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "counts", "expected", "got"),
    [
        pytest.param([1, 2], [5], "1", "0", id="no placeholder"),
        pytest.param([PAD, 1, PAD], [5], "1", "2", id="text that spells a placeholder"),
        pytest.param([PAD, PAD, PAD], [3], "1", "3", id="already as many as the image has rows"),
        pytest.param([PAD], [], "0", "1", id="no image"),
        pytest.param([], [1], "1", "0", id="nothing"),
    ],
)
def test_refuses_another_number_of_placeholders_than_images(tokens, counts, expected, got):
    with pytest.raises(ImageError) as refused:
        splice_images(tokens, PAD, counts)

    error = refused.value
    assert (error.code, error.expected, error.got, bool(error.hint)) == ("IMAGE_PLACEHOLDERS", expected, got, True)


def test_chunks_name_the_rows_of_each_image():
    """Image 0 lies in rows 10 to 12, image 1 in rows 0 and 1; a chunk border cuts the first."""
    prompt = splice_images([1, PAD, 2, PAD], PAD, [3, 2])

    assert prompt.sources(0, 3, [10, 0]) == [0, 11, 12]
    assert prompt.sources(3, 4, [10, 0]) == [13, 0, 1, 2]
    assert prompt.sources(5, 8, [10, 0]) == [1, 2, 0, 0, 0, 0, 0, 0]


@given(st.lists(st.one_of(st.integers(0, 249), st.just(PAD)), max_size=12), st.data())
def test_any_chunking_names_every_row_once_and_in_order(tokens, data):
    counts = [data.draw(st.integers(1, 9)) for token in tokens if token == PAD]
    prompt = splice_images(tokens, PAD, counts)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    size = data.draw(st.integers(1, 7))

    found = [s for first in range(0, len(prompt.tokens), size)
             for s in prompt.sources(first, min(size, len(prompt.tokens) - first), firsts)]

    assert [s for s in found if s] == list(range(1, sum(counts) + 1))
    assert [s != 0 for s in found] == [token == PAD for token in prompt.tokens]


def test_identities_tell_pictures_apart_and_keep_the_text():
    prompt = splice_images([1, PAD, 2, PAD], PAD, [2, 2])

    first, again, other = (prompt.identities(d) for d in ([b"a", b"b"], [b"a", b"b"], [b"a", b"c"]))

    assert first == again
    assert [t for t in first if t >= 0] == [1, 2]
    assert (first[:4] == other[:4], first[4] == other[4], first[5] == other[5]) == (True, False, False)
    assert len(set(first)) == 6


def test_same_picture_twice_has_the_same_identities():
    prompt = splice_images([PAD, 7, PAD], PAD, [2, 2])
    found = prompt.identities([b"a", b"a"])

    assert found[:2] == found[3:]


def test_prompt_says_the_size_that_was_sent():
    assert image_text(640, 480) == "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
