"""Which positions and tokens the rows of a step hold, and how embeddings are scaled; small cases in full."""

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import CompatibilityError

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16


def i32(values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [
        pytest.param(5, 20, [5, 6, 7, 8], id="whole block"),
        pytest.param(5, 9, [5, 6, 7, 8], id="block ends at the limit"),
        pytest.param(5, 8, [5, 6, 7, -1], id="one row beyond the limit"),
        pytest.param(5, 7, [5, 6, -1, -1], id="one token may follow"),
        pytest.param(5, 6, [-1, -1, -1, -1], id="no token may follow"),
        pytest.param(5, 5, [-1, -1, -1, -1], id="at the limit"),
        pytest.param(0, 20, [0, 1, 2, 3], id="nothing stored yet"),
    ],
)
def test_block_starts_at_the_length_and_ends_before_the_limit(length, limit, expected):
    positions = i32([7] * 8)

    call("dflash.block_positions/1",
         {"slots": i32([-1, 1]), "length": i32([3, length]), "limit": i32([99, limit]), "positions": positions},
         groups=2, block_rows=4, max_slots=2)

    assert positions.tolist() == [-1] * 4 + expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(4, [6, 7, 8, 9]), (3, [6, 7, 8, -1]), (1, [6, -1, -1, -1]), (0, [-1, -1, -1, -1])],
)
def test_chunk_continues_its_sequence(count, expected):
    positions = i32([7] * 4)

    call("dflash.chunk_positions/1",
         {"slots": i32([1]), "count": i32([count]), "length": i32([50, 6]), "positions": positions},
         rows=4, max_slots=2)

    assert positions.tolist() == expected


def test_draft_block_is_the_anchor_and_masks():
    tokens = i32([7] * 9)

    call("dflash.block_tokens/1", {"slots": i32([1, -1, 0]), "anchor": i32([40, 41]), "tokens": tokens},
         groups=3, block_rows=3, mask_token_id=9, max_slots=2)

    assert tokens.tolist() == [41, 9, 9, 9, 9, 9, 40, 9, 9]


def test_block_to_verify_is_the_anchor_and_the_proposals():
    tokens = i32([7] * 9)

    call("dflash.verify_tokens/1",
         {"slots": i32([1, -1, 0]), "anchor": i32([40, 41]), "proposals": i32([[1, 2], [3, 4], [5, 6]]),
          "tokens": tokens}, groups=3, block_rows=3, depth=2, max_slots=2)

    assert tokens.tolist() == [41, 1, 2, 0, 3, 4, 40, 5, 6]


def embed(tokens, table, scale, act=DType.BF16, w=DType.BF16):
    table = np.array(table, np.float32).astype(w.numpy)
    out = np.zeros((len(tokens), table.shape[1]), act.numpy)
    call("dflash.embedding/1", {"tokens": i32(tokens), "table": table, "out": out}, rows=len(tokens), vocab=len(table),
         cols=table.shape[1], scale=scale, act=act, w=w)
    return out.tolist()


@pytest.mark.parametrize(
    ("value", "scale", "expected", "scale_in_bf16"),
    [
        # 3 * 0.3 = 0.9 = 230.4/256; 0.3 in bf16 is 154/512, and 3 * 154/512 = 231/256.
        pytest.param(3, 0.3, 0.8984375, 0.90234375, id="3 x 0.3"),
        # 9 * sqrt(24) = 44.09 = 176.4/4; sqrt(24) in bf16 is 157/32, and 9 * 157/32 = 176.6/4.
        pytest.param(9, 24**0.5, 44.0, 44.25, id="9 x sqrt(24)"),
    ],
)
def test_embedding_scale_stays_in_fp32(value, scale, expected, scale_in_bf16):
    assert embed([0], [[value]], scale) == [[expected]]
    assert float(BF16(value * float(BF16(scale)))) == scale_in_bf16


def test_embedding_copies_rows_at_scale_one():
    table = [[1.0078125, -3], [5, 7], [-0.0, np.inf]]

    assert embed([2, 0, 0], table, 1.0) == [[0, np.inf], [1.0078125, -3], [1.0078125, -3]]


def test_embedding_of_an_fp32_table_is_rounded_to_the_activation_type():
    assert embed([0], [[1 + 2.0**-8 + 2.0**-16]], 1.0, w=DType.F32) == [[1.0078125]]
    assert embed([0], [[1 + 2.0**-8]], 1.0, act=DType.F32, w=DType.F32) == [[1.00390625]]


@pytest.mark.parametrize(("tokens", "got"), [([0, 3], "[3]"), ([-1, 0], "[-1]"), ([9, 0, 3, -5, 7], "[9, 3, -5, 7]")])
def test_embedding_refuses_tokens_outside_the_table(tokens, got):
    with pytest.raises(CompatibilityError) as refused:
        embed(tokens, [[1], [2], [3]], 1.0)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("TOKEN_RANGE", "0 to 2", got)


def test_tap_fills_its_own_columns():
    features = np.full((2, 6), 9, BF16)

    call("dflash.tap/1", {"x": np.array([[1, 2], [3, 4]], BF16), "features": features}, rows=2, cols=2, taps=3, index=1,
         act=DType.BF16)

    assert features.tolist() == [[9, 9, 1, 2, 9, 9], [9, 9, 3, 4, 9, 9]]


@pytest.mark.parametrize(
    ("positions", "row", "last"),
    [([4, 5, 6], 2, 6), ([4, 5, -1], 1, 5), ([4, -1, -1], 0, 4), ([-1, -1, -1], 0, -1)],
)
def test_last_row_is_the_last_live_one(positions, row, last):
    x, out, last_position = np.array([[10, 11], [20, 21], [30, 31]], BF16), np.zeros((1, 2), BF16), i32([7])

    call("dflash.last_row/1", {"x": x, "positions": i32(positions), "out": out, "last_position": last_position},
         rows=3, cols=2, act=DType.BF16)

    assert out.tolist() == [x[row].tolist()]
    assert last_position.tolist() == [last]
