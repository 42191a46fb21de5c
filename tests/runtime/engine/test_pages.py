"""Pages are handed out once, and come back."""

import pytest

from runtime.engine.pages import PagePool


def test_pages_are_handed_out_once_each():
    pool = PagePool(5)

    taken = pool.take(2) + pool.take(3)

    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.available == 0


def test_returned_pages_are_handed_out_again():
    pool = PagePool(4)
    first, second = pool.take(3), pool.take(1)

    pool.give_back(first)

    assert pool.available == 3
    assert set(pool.take(3)) == set(first)
    assert not set(first) & set(second)


def test_no_page_is_free_to_take_and_return():
    pool = PagePool(2)

    pool.give_back(pool.take(0))

    assert pool.available == 2


def test_taking_more_than_there_are_is_our_bug():
    with pytest.raises(AssertionError, match=r"\(3, 2\)"):
        PagePool(2).take(3)
