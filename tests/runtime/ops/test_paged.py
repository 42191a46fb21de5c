"""Where a position's K and V lie in an arena, and what is refused."""

import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.ops import Args, DType
from runtime.ops.paged import PagedKV

SCALARS = {"act": DType.F32, "kv_pages": 3, "kv_heads": 2, "page_tokens": 4, "head_dim": 1, "page_bytes": 128}
LAYER_BYTES = 2 * 2 * 4 * 1 * 4


def paged(memory, **changes):
    return PagedKV.of(Args("op", {**SCALARS, **changes}, {"kv": memory}), "kv")


def test_page_holds_keys_then_values_by_head_then_token():
    arena = np.arange(3 * 32, dtype=np.float32)

    cache = paged(arena.view(np.uint8))

    assert cache.keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [32, 33, 34, 35], [64, 65, 66, 67]]
    assert cache.keys[1, 1, :, 0].tolist() == [36, 37, 38, 39]
    assert cache.values[1, :, :, 0].tolist() == [[40, 41, 42, 43], [44, 45, 46, 47]]


def test_second_layer_starts_at_its_own_offset_in_every_page():
    arena = np.arange(3 * 32, dtype=np.float32)

    cache = paged(arena.view(np.uint8)[LAYER_BYTES:])

    assert cache.keys[:, 0, 0, 0].tolist() == [16, 48, 80]
    assert cache.values[:, 0, 0, 0].tolist() == [24, 56, 88]


def test_writes_live_rows_where_the_page_table_leads_and_nothing_else():
    arena = np.full(3 * 32, -1, np.float32)
    tables = np.array([[2, 0], [1, 1]], np.int32)
    keys = np.array([[[10], [11]], [[20], [21]], [[30], [31]], [[40], [41]]], np.float32)

    paged(arena.view(np.uint8)).write(keys, keys + 0.5, np.array([3, 4, -1, 1], np.int32), tables,
                                      np.array([0, 1], np.int32), block_rows=2)

    expected = np.full(3 * 32, -1, np.float32)
    expected[[64 + 3, 64 + 4 + 3, 64 + 8 + 3, 64 + 12 + 3]] = [10, 11, 10.5, 11.5]
    expected[[0, 4, 8, 12]] = [20, 21, 20.5, 21.5]
    expected[[32 + 1, 32 + 4 + 1, 32 + 8 + 1, 32 + 12 + 1]] = [40, 41, 40.5, 41.5]
    assert arena.tolist() == expected.tolist()


def test_rows_that_are_all_dead_write_nothing():
    arena = np.full(3 * 32, -1, np.float32)

    paged(arena.view(np.uint8)).write(np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), np.array([-1], np.int32),
                                      np.array([[0, 0]], np.int32), np.array([-1], np.int32), block_rows=1)

    assert arena.tolist() == [-1] * 96


@pytest.mark.parametrize(
    ("nbytes", "changes"),
    [
        pytest.param(383 - 64, {}, id="last page is cut short"),
        pytest.param(384, {"kv_pages": 4}, id="more pages than the arena has"),
        pytest.param(384, {"kv_pages": 0}, id="no page"),
        pytest.param(384, {"page_bytes": 60}, id="pages closer than a layer is long"),
        pytest.param(384, {"head_dim": 9}, id="heads wider than a page"),
        pytest.param(0, {}, id="no arena"),
    ],
)
def test_refuses_pages_that_reach_beyond_the_arena(nbytes, changes):
    with pytest.raises(FormatError) as refused:
        paged(np.zeros(nbytes, np.uint8), **changes)

    assert refused.value.code == "KV_RANGE"
    assert refused.value.where == "op"


def test_last_layer_of_the_last_page_may_end_with_the_arena():
    assert paged(np.zeros(384, np.uint8)[LAYER_BYTES:]).keys.shape == (3, 2, 4, 1)
