"""Rotation is rounded once, after fp32 products with an fp32 table; cases worked by hand in bf16."""

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16
PAGE_TOKENS, PAGES, MAX_PAGES = 4, 6, 2


def rotate(qkv, table, positions=None, *, heads=1, kv_heads=1, rotary_dims=None, interleaved=0, act=DType.BF16,
           block_rows=1, slots=None, page_table=None, norm=None):
    """Run rope_cache, or norm_rope_cache with `norm` = (q weight, k weight); returns q, and the arena's K and V.

    Args:
        qkv: [rows, (heads + 2 kv_heads) * head_dim].
        table: [context, 2, rotary_dims / 2], cos then sin.
    """
    qkv, table = np.array(qkv, np.float32).astype(act.numpy), np.array(table, np.float32)
    rows, head_dim = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    side = kv_heads * PAGE_TOKENS * head_dim
    arena = np.full((PAGES, 2, kv_heads, PAGE_TOKENS, head_dim), -77, act.numpy)
    q = np.full((rows, heads * head_dim), -77, act.numpy)
    slots = np.array(slots if slots is not None else [0] * (rows // block_rows), np.int32)
    page_table = np.array(page_table if page_table is not None else [[0, 1]], np.int32)
    arrays = {"qkv": qkv, "rope_table": table, "positions": np.array(positions or range(rows), np.int32),
              "slots": slots, "page_table": page_table, "q": q, "kv": arena.reshape(-1).view(np.uint8)}
    scalars = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
               "rotary_dims": rotary_dims or head_dim, "interleaved": interleaved, "context": len(table), "act": act,
               "block_rows": block_rows, "page_tokens": PAGE_TOKENS, "page_bytes": 2 * side * act.bits // 8,
               "kv_pages": PAGES, "max_slots": len(page_table), "max_pages": MAX_PAGES}
    if norm is None:
        call("dflash.rope_cache/1", arrays, **scalars)
    else:
        weights = {n: np.array(v, np.float32).astype(act.numpy)
                   for n, v in zip(("q_weight", "k_weight"), norm, strict=True)}
        call("dflash.norm_rope_cache/1", {**arrays, **weights}, eps=0.0, w=act, **scalars)
    return q, arena[:, 0], arena[:, 1]


def test_rotation_is_rounded_once_from_an_fp32_table():
    """cos 0.6, sin 0.8 of (1, 1): 0.6 - 0.8 = -0.2 -> -205/1024, and 0.6 + 0.8 = 1.4 -> 179/128.

    cos and sin in bf16 are 154/256 and 205/256, and so is each product when it is rounded: the difference is then
    -51/256 exactly, and the sum 359/256, a tie that goes to 180/128.
    """
    q, k, v = rotate([[1, 1, 1, 1, 1, 1]], [[[0.6], [0.8]]])

    assert q.tolist() == [[-0.2001953125, 1.3984375]]
    assert k[0, 0, 0].tolist() == [-0.2001953125, 1.3984375]
    assert v[0, 0, 0].tolist() == [1, 1]
    cos, sin = np.float32(BF16(0.6)), np.float32(BF16(0.8))
    assert [float(BF16(cos - sin)), float(BF16(cos + sin))] == [-0.19921875, 1.40625]


def test_fp32_is_not_rounded():
    q, _, _ = rotate([[1, 1] * 3], [[[0.6], [0.8]]], act=DType.F32)

    assert q.tolist() == [pytest.approx([-0.2, 1.4], rel=1e-6)]


QUARTER_TURN = [[[0, 0], [1, 1]]]


@pytest.mark.parametrize(
    ("interleaved", "rotary_dims", "table", "expected"),
    [
        pytest.param(0, 4, QUARTER_TURN, [-3, -4, 1, 2], id="halves"),
        pytest.param(1, 4, QUARTER_TURN, [-2, 1, -4, 3], id="interleaved pairs"),
        pytest.param(0, 2, [[[0], [1]]], [-2, 1, 3, 4], id="halves, two of four dimensions"),
        pytest.param(1, 2, [[[0], [1]]], [-2, 1, 3, 4], id="interleaved, two of four dimensions"),
        pytest.param(0, 4, [[[1, 0], [0, 1]]], [1, -4, 3, 2], id="each pair has its own angle"),
    ],
)
def test_pairs_of_dimensions_are_rotated_together(interleaved, rotary_dims, table, expected):
    q, k, v = rotate([[1, 2, 3, 4] * 3], table, interleaved=interleaved, rotary_dims=rotary_dims)

    assert q[0].tolist() == expected
    assert k[0, 0, 0].tolist() == expected
    assert v[0, 0, 0].tolist() == [1, 2, 3, 4]


def test_angle_follows_the_position_and_not_the_row():
    table = [[[c], [0]] for c in (1, 2, 3, 4, 5, 6)]

    q, k, _ = rotate([[1, 1] * 3] * 3, table, positions=[5, 0, 2])

    assert q[:, 0].tolist() == [6, 1, 3]
    assert [k[1, 0, 1, 0], k[0, 0, 0, 0], k[0, 0, 2, 0]] == [6, 1, 3]


def test_rows_are_stored_in_the_pages_of_their_own_slot_and_dead_rows_nowhere():
    qkv = [[0, 0, 10 * row + 1, 10 * row + 2, 10 * row + 3, 10 * row + 4] for row in range(4)]

    _, k, v = rotate(qkv, [[[1], [0]]] * 8, positions=[3, 4, 7, -1], block_rows=2, slots=[1, 0],
                     page_table=[[5, 2], [0, 3]])

    assert k[0, 0, 3].tolist() == [1, 2]
    assert v[0, 0, 3].tolist() == [3, 4]
    assert k[3, 0, 0].tolist() == [11, 12]
    assert v[3, 0, 0].tolist() == [13, 14]
    assert k[2, 0, 3].tolist() == [21, 22]
    assert v[2, 0, 3].tolist() == [23, 24]
    assert int((k != -77).sum()) == 6
    assert int((v != -77).sum()) == 6


def test_q_and_k_are_normalized_per_head_with_their_own_weights_before_the_rotation():
    """rms(7, 1) = 5: 1.4 -> 179/128, 0.2 -> 205/1024, as in rms_norm; v is stored as it is."""
    q, k, v = rotate([[7, 1, 1, 7, 7, 1, 7, 1]], [[[1], [0]]], heads=2, norm=([1.125, 2], [2, 1.125]))

    assert q.tolist() == [[1.5703125, 0.400390625, 0.2255859375, 2.796875]]
    assert k[0, 0, 0].tolist() == [2.796875, 0.2255859375]
    assert v[0, 0, 0].tolist() == [7, 1]


def test_normalized_heads_are_rounded_before_the_rotation():
    """(7, 1) by weight 1.125 becomes 201/128, 231/1024, turned by (0.6, 0.8): 0.94219 - 0.18047 = 195/256.

    Without rounding the normalized head, 1.57324 and 0.22522, the difference is 195.5/256 and goes to 196/256.
    """
    q, _, _ = rotate([[7, 1] * 3], [[[0.6], [0.8]]], norm=([1.125, 1.125], [1, 1]))

    assert q.tolist() == [[0.76171875, 1.390625]]
    assert float(BF16(1.5732421875 * 0.6 - 0.22521972 * 0.8)) == 0.765625


def test_draft_block_is_rotated_without_a_cache():
    qkv = np.array([[7, 1, 1, 7, 5, 5], [1, 7, 7, 1, 5, 5]], BF16)
    q, k = np.zeros((2, 2), BF16), np.zeros((2, 2), BF16)
    table = np.array([[[1], [0]], [[0], [1]]], np.float32)
    arrays = {"qkv": qkv, "q_weight": np.array([1, 1], BF16), "k_weight": np.array([1.125, 1.125], BF16),
              "rope_table": table, "positions": np.array([1, -1], np.int32), "q": q, "k": k}

    call("dflash.norm_rope/1", arrays, rows=2, heads=1, kv_heads=1, head_dim=2, rotary_dims=2, interleaved=0, context=2,
         act=DType.BF16, eps=0.0, w=DType.BF16)

    assert q.tolist() == [[-0.2001953125, 1.3984375], [0.2001953125, 1.3984375]]
    assert k[0].tolist() == [-1.5703125, 0.2255859375]


def test_draft_context_is_stored_for_live_rows_alone():
    arena = np.full((3, 2, 1, PAGE_TOKENS, 2), -77, BF16)
    arrays = {"kv_rows": np.array([[7, 1, 3, 4], [1, 7, 5, 6], [9, 9, 9, 9]], BF16),
              "k_weight": np.array([1.125, 1.125], BF16), "rope_table": np.array([[[0], [1]]] * 8, np.float32),
              "positions": np.array([4, 5, -1], np.int32), "slots": np.array([0], np.int32),
              "page_table": np.array([[0, 2]], np.int32), "kv": arena.reshape(-1).view(np.uint8)}

    call("dflash.norm_rope_context/1", arrays, rows=3, kv_heads=1, head_dim=2, rotary_dims=2, interleaved=0, context=8,
         act=DType.BF16, block_rows=3, eps=0.0, w=DType.BF16, page_tokens=PAGE_TOKENS, page_bytes=32, kv_pages=3,
         max_slots=1, max_pages=2)

    assert arena[2, 0, 0, :2].tolist() == [[-0.2255859375, 1.5703125], [-1.5703125, 0.2255859375]]
    assert arena[2, 1, 0, :2].tolist() == [[3, 4], [5, 6]]
    assert int((arena != -77).sum()) == 8


@pytest.mark.parametrize("act", [DType.BF16, DType.F32])
def test_row_gives_the_same_bytes_alone_and_in_a_batch(act):
    rng = np.random.default_rng(11)
    heads, kv_heads, head_dim = 3, 1, 24
    qkv, norm = rng.normal(size=(7, 5 * head_dim)), (rng.normal(size=head_dim), rng.normal(size=head_dim))
    table = rng.normal(size=(8, 2, head_dim // 2))
    q, k, _ = rotate(qkv, table, heads=heads, kv_heads=kv_heads, act=act, norm=norm)

    for row in range(7):
        alone_q, alone_k, _ = rotate(qkv[row : row + 1], table, [row], heads=heads, kv_heads=kv_heads, act=act,
                                     norm=norm)
        assert alone_q[0].tobytes() == q[row].tobytes()
        assert alone_k[row // 4, 0, row % 4].tobytes() == k[row // 4, 0, row % 4].tobytes()
