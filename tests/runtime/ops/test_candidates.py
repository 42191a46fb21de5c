"""Candidates: order, ties, the live vocabulary, and where the scalars are applied."""

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.ops.candidates import top_ids
from runtime.ops.registry import call

INF, NAN = np.inf, np.nan


def top_candidates(logits, top_k, *, live_vocab=None, multiplier=1.0, cap=0.0):
    logits = np.array(logits, np.float32)
    rows, vocab = logits.shape
    ids, scores = np.full((rows, top_k), -7, np.int32), np.full((rows, top_k), -7, np.float32)
    call("dflash.top_candidates/1", {"logits": logits, "candidate_ids": ids, "candidate_scores": scores},
         rows=rows, vocab=vocab, live_vocab=live_vocab or vocab, top_k=top_k, multiplier=multiplier, cap=cap)
    return ids, scores


@pytest.mark.parametrize(
    ("row", "live_vocab", "ids", "scores"),
    [
        pytest.param([1, 3, 2.5, 0], 4, [1, 2], [3, 2.5], id="descending"),
        pytest.param([2, 2, 0, 1], 4, [0, 1], [2, 2], id="tie: lower id first"),
        pytest.param([0, 5, 7, 5], 4, [2, 1], [7, 5], id="tie at the end: lower id stays"),
        pytest.param([1, 2, 9, 9], 2, [1, 0], [2, 1], id="padded ids never win"),
        pytest.param([-INF, 1, -INF, -INF], 4, [1, 0], [1, -INF], id="excluded ids come last, ascending"),
        pytest.param([0.0, -0.0, -1, -1], 4, [0, 1], [0, 0], id="zeros of both signs tie"),
        pytest.param([1, NAN, 2, 3], 4, [1, 3], [NAN, 3], id="NaN comes first, to be seen"),
    ],
)
def test_candidates_come_best_first_with_ties_by_ascending_id(row, live_vocab, ids, scores):
    got_ids, got_scores = top_candidates([row], 2, live_vocab=live_vocab)

    assert got_ids[0].tolist() == ids
    assert np.array_equal(got_scores[0], np.float32(scores), equal_nan=True)


def test_multiplier_comes_before_the_cap():
    ids, scores = top_candidates([[4, 8, -8]], 3, multiplier=0.5, cap=2.0)

    assert ids.tolist() == [[1, 0, 2]]
    assert np.array_equal(scores, np.float32([[1.9280552, 1.5231883, -1.9280552]]))


def test_cap_of_zero_is_off():
    _, scores = top_candidates([[400, 300]], 2, multiplier=0.5, cap=0.0)

    assert scores.tolist() == [[200, 150]]


def test_scores_stay_fp32_where_bf16_would_saturate_into_a_tie():
    """2 tanh(4) and 2 tanh(8) are both 2 in bf16: rounded there, id 0 would come first."""
    ids, scores = top_candidates([[8, 16, 1]], 2, cap=2.0)

    assert ids.tolist() == [[1, 0]]
    assert np.array_equal(scores, np.float32([[1.9999995, 1.9986587]]))
    assert scores.astype(ml_dtypes.bfloat16).tolist() == [[2, 2]]


def ranked(row, k):
    return np.array(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


@pytest.mark.parametrize("k", [1, 16, 50])
@pytest.mark.parametrize("size", [50, 1000, 64 * 50, 64 * 50 + 63, 49152])
@pytest.mark.parametrize("levels", [3, 40, 10**6])
def test_fold_finds_what_a_full_sort_finds(size, k, levels):
    """Few levels make long ties across the folds, the bound and the tail."""
    row = np.random.default_rng(size + levels).integers(0, levels, size).astype(np.float32)

    assert np.array_equal(top_ids(row, k), ranked(row, k))


@pytest.mark.parametrize("place", [0, 63, 64, 767, 768, 49151, 49152, 49170], ids=str)
def test_fold_finds_a_single_peak_anywhere(place):
    row = np.full(49171, -3, np.float32)
    row[place] = 1

    expected = [place, *(i for i in range(4) if i != place)][:4]
    assert top_ids(row, 4).tolist() == expected


def test_row_of_equal_logits_gives_the_first_ids():
    assert top_ids(np.full(49152, -INF, np.float32), 3).tolist() == [0, 1, 2]


def test_row_gives_the_same_bits_alone_and_in_a_batch_of_four():
    logits = np.random.default_rng(5).normal(size=(4, 4099)).astype(np.float32) * 4
    logits[1] = NAN

    ids, scores = top_candidates(logits, 16, multiplier=0.3, cap=5.0)

    for row in (0, 2, 3):
        alone_ids, alone_scores = top_candidates(logits[row : row + 1], 16, multiplier=0.3, cap=5.0)
        assert ids[row].tobytes() == alone_ids.tobytes()
        assert scores[row].tobytes() == alone_scores.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"top_k": 0}, id="no candidate"),
        pytest.param({"top_k": 3, "live_vocab": 2}, id="more candidates than live ids"),
        pytest.param({"live_vocab": 5}, id="more live ids than logits"),
        pytest.param({"multiplier": 0.0}, id="multiplier that flattens"),
        pytest.param({"multiplier": -1.0}, id="multiplier that reverses"),
        pytest.param({"cap": -2.0}, id="negative cap"),
    ],
)
def test_rejects_impossible_candidates(change):
    scalars = {"rows": 1, "vocab": 4, "live_vocab": 4, "top_k": 2, "multiplier": 1.0, "cap": 0.0} | change
    arrays = {"logits": np.zeros((1, 4), np.float32), "candidate_ids": np.zeros((1, scalars["top_k"]), np.int32),
              "candidate_scores": np.zeros((1, scalars["top_k"]), np.float32)}

    with pytest.raises(FormatError) as e:
        call("dflash.top_candidates/1", arrays, **scalars)

    assert e.value.code == "OP_SCALAR"
