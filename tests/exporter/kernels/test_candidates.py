"""Candidates: ids exact to the last tie, scores mapped after the choice."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.kernels.candidates import chunk_size
from tests.exporter.kernels.interpreter import Case, same_bits

NAN, INF = np.nan, np.inf


def candidates_case(logits, top_k, *, live_vocab=None, multiplier=1.0, cap=0.0):
    logits = np.array(logits, np.float32)
    rows, vocab = logits.shape
    arrays = {"logits": logits, "candidate_ids": np.full((rows, top_k), -7, np.int32),
              "candidate_scores": np.full((rows, top_k), -7, np.float32)}
    return Case(arrays, [("dflash.top_candidates/1",
                          {"rows": rows, "vocab": vocab, "live_vocab": live_vocab or vocab, "top_k": top_k,
                           "multiplier": multiplier, "cap": cap})])


@pytest.mark.parametrize(
    ("row", "top_k", "live_vocab", "ids"),
    [
        pytest.param([1, 5, 5, 2], 3, 4, [1, 2, 3], id="ties by ascending id"),
        pytest.param([1, 2, 9, 9], 2, 2, [1, 0], id="padded ids take no part"),
        pytest.param([-INF, -3, -INF, -4], 4, 4, [1, 3, 0, 2], id="excluded ids last, by id"),
        pytest.param([0.0, -0.0, 0.0, -1.0], 3, 4, [0, 1, 2], id="zeros are equal"),
        pytest.param([2, INF, NAN, INF], 3, 4, [1, 2, 3], id="NaN ranks with infinity"),
        pytest.param([3, 4, 1, 0], 1, 4, [1], id="one candidate"),
        pytest.param([1e-45, -1e-45, 0, 3e-45], 4, 4, [3, 0, 2, 1], id="subnormals"),
    ],
)
def test_order_of_candidates(interpreter, row, top_k, live_vocab, ids):
    case = candidates_case([row], top_k, live_vocab=live_vocab)

    got = interpreter.run("candidates.lower_top_candidates", case)

    assert got["candidate_ids"].tolist() == [ids]
    np.testing.assert_array_equal(got["candidate_scores"], np.float32([row])[:, ids])


@pytest.mark.parametrize("top_k", [7, 32])
def test_merged_chunks_give_the_ids_and_scores_of_the_cpu_op(interpreter, top_k):
    rng = np.random.default_rng(top_k)
    logits = rng.normal(size=(2, 2500)).round(1)  # many ties, within chunks and across them
    case = candidates_case(logits, top_k, live_vocab=2437, multiplier=0.3)

    got = interpreter.run("candidates.lower_top_candidates", case)

    expected = case.expected()
    assert same_bits(got["candidate_ids"], expected["candidate_ids"])
    assert same_bits(got["candidate_scores"], expected["candidate_scores"])


@pytest.mark.parametrize(
    ("logit", "score"), [(4, 1.5231883), (8, 1.9280552), (-8, -1.9280552), (1e-4, 5e-5), (0, 0), (3e38, 2)]
)
def test_multiplier_comes_before_the_cap(interpreter, logit, score):
    case = candidates_case([[logit]], 1, multiplier=0.5, cap=2.0)

    got = interpreter.run("candidates.lower_top_candidates", case)["candidate_scores"]

    np.testing.assert_array_max_ulp(got, np.float32([[score]]), maxulp=2)


def test_capped_scores_are_within_two_ulp_of_the_cpu_op(interpreter):
    rng = np.random.default_rng(3)
    logits = np.float32(rng.normal(size=(2, 64)) * 10.0 ** rng.integers(-6, 3, (2, 64)))
    case = candidates_case(logits, 32, multiplier=1.25, cap=7.0)

    got, expected = interpreter.run("candidates.lower_top_candidates", case), case.expected()

    assert same_bits(got["candidate_ids"], expected["candidate_ids"])
    np.testing.assert_array_max_ulp(got["candidate_scores"], expected["candidate_scores"], maxulp=2)


@pytest.mark.parametrize(
    ("live_vocab", "kept", "size"), [(49152, 16, 1024), (49152, 32, 1024), (151936, 16, 2048), (262144, 32, 4096)]
)
def test_chunks_are_few_enough_to_merge_in_one_block(live_vocab, kept, size):
    assert chunk_size(live_vocab, kept) == size
