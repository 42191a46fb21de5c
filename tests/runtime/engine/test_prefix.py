"""Which part of a prompt is taken over: up to a page border with a snapshot of exactly that depth."""

import pytest

from runtime.engine.prefix import PrefixCache

A, B = [1] * 4, [2] * 4


def remembered(cache, prompt, depth, pages, node=None, *, snapshot=True):
    """Extend by a sequence's pages and snapshot the end; returns what it holds and which pages went over."""
    node, taken = cache.extend(node, prompt, depth, pages)
    place = cache.place_snapshot(node) if snapshot else None
    return node, taken, place


def test_prefix_is_usable_at_the_deepest_border_with_a_snapshot_and_never_to_its_last_token():
    cache = PrefixCache(4, snapshots=2)
    node, taken, place = remembered(cache, A + B + A, 8, [10, 11, 12])
    assert (node.depth, taken, place) == (8, [10, 11], 0)
    cache.release(node)

    assert cache.match(A + B + [9]) is node
    assert cache.match(A + B) is None, "one token must be left to run, and depth 4 has no snapshot"
    assert cache.match(A + A + B) is None
    assert cache.match(B + A + B) is None
    assert [part.page for part in node.path()] == [11, 10]


def test_shallower_snapshot_serves_a_prompt_that_parts_later():
    cache = PrefixCache(4, snapshots=2)
    shallow, _, _ = remembered(cache, A + B, 4, [10, 11])
    deep, _, _ = remembered(cache, A + B, 8, [10, 11], shallow)

    assert cache.match(A + B + B) is deep
    assert cache.match(A + A + A) is shallow
    assert cache.match(A + B) is shallow


def test_pages_without_a_snapshot_are_not_usable():
    cache = PrefixCache(4, snapshots=0)
    remembered(cache, A + B, 8, [10, 11])

    assert cache.match(A + B + A) is None


def test_least_recently_used_snapshot_gives_its_place():
    cache = PrefixCache(4, snapshots=2)
    first, _, _ = remembered(cache, A, 4, [10])
    second, _, _ = remembered(cache, B, 4, [11])
    cache.hold(first)

    third, _, place = remembered(cache, [3] * 4, 4, [12])

    assert place == 1 and second.snapshot is None
    assert (first.snapshot, third.snapshot) == (0, 1)
    assert cache.match(B + A) is None


def test_page_of_who_came_first_stays_and_the_other_keeps_its_own():
    cache = PrefixCache(4, snapshots=1)
    first, taken, _ = remembered(cache, A + B, 8, [10, 11])
    second, kept, place = remembered(cache, A + B, 8, [20, 21])

    assert (taken, kept, place) == ([10, 11], [], None)
    assert second is first and first.holders == 2


def test_held_pages_are_not_given_back_and_leaves_go_first():
    cache = PrefixCache(4, snapshots=3)
    long, _, _ = remembered(cache, A + B, 8, [10, 11])
    short, _, _ = remembered(cache, B, 4, [12])
    assert cache.evictable() == 0

    cache.release(long)
    assert cache.evictable() == 2
    assert cache.evict(1) == [11]
    assert cache.match(A + B + A) is None and cache.match(A + B) is None
    assert cache.evict(1) == [10]
    cache.release(short)
    assert cache.evict(1) == [12]
    assert [remembered(cache, [n] * 4, 4, [n])[2] for n in (5, 6, 7)] != [None] * 3, "their places are free again"


@pytest.mark.parametrize("prompt", [[], [1], A], ids=len)
def test_prompt_of_at_most_a_page_takes_nothing_over(prompt):
    cache = PrefixCache(4, snapshots=1)
    remembered(cache, A + B, 4, [10])

    assert cache.match(prompt) is None
