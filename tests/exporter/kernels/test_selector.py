"""The selector's walk in two launches, its draws, its dead ends; and proposals by argmax."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from runtime.ops.distribution import inverse_cdf
from runtime.ops.philox import Purpose, draw
from tests.exporter.kernels.interpreter import Case, same_bits

BF16 = ml_dtypes.bfloat16
NAN, INF = np.nan, np.inf
PROPOSED = ("proposals", "proposal_ids", "proposal_probs")


def walk_case(ids, scores, projected, predecessor, successor, tokens, positions, slots, temperature, seed):
    """ids, scores [groups, block_rows, top_k]; projected [groups * block_rows, rank]."""
    ids = np.array(ids, np.int32)
    groups, block_rows, top_k = ids.shape
    vocab, rank = np.shape(predecessor)
    depth = block_rows - 1
    arrays = {
        "candidate_ids": ids.reshape(-1, top_k), "candidate_scores": np.array(scores, np.float32).reshape(-1, top_k),
        "projected": np.array(projected, np.float32).reshape(-1, rank).astype(BF16),
        "predecessor": np.array(predecessor, np.float32).astype(BF16),
        "successor": np.array(successor, np.float32).astype(BF16), "tokens": np.array(tokens, np.int32).reshape(-1),
        "positions": np.array(positions, np.int32).reshape(-1), "slots": np.array(slots, np.int32),
        "temperature": np.array(temperature, np.float32), "seed": np.array(seed, np.uint64),
        "proposals": np.full((groups, depth), -7, np.int32),
        "proposal_ids": np.full((groups, depth, top_k), -7, np.int32),
        "proposal_probs": np.full((groups, depth, top_k), -7, np.float32),
    }  # fmt: skip
    return Case(arrays, [("dflash.selector_walk/1",
                          {"groups": groups, "block_rows": block_rows, "depth": depth, "top_k": top_k, "rank": rank,
                           "vocab": vocab, "max_slots": len(seed), "act": DType.BF16, "w": DType.BF16})])


def case_by_hand(temperature=0.0, seed=0, scores=((0, 0), (3, 2.5), (2, 2)), positions=(10, 11, 12), slot=0, anchor=3):
    """Vocabulary 4, rank 1, two candidates a slot, every projection 1."""
    return walk_case([[[0, 0], [1, 2], [0, 1]]], [scores], np.ones((3, 1)), [[1], [0], [2], [-1]],
                     [[0], [1], [-0.5], [4]], [anchor, 0, 0], positions, [slot], [temperature], [seed])


def random_case(groups, block_rows, top_k, rank, temperature, *, vocab=50, dead_from=None, seed=1):
    rng = np.random.default_rng(seed)
    rows = groups * block_rows
    ids = np.stack([rng.permutation(vocab)[:top_k] for _ in range(rows)]).reshape(groups, block_rows, top_k)
    positions = np.arange(40, 40 + block_rows) + 100 * np.arange(groups)[:, None]
    if dead_from is not None:
        positions[0, dead_from:] = -1
    return walk_case(ids, rng.normal(size=(groups, block_rows, top_k)), rng.normal(size=(rows, rank)),
                     rng.normal(size=(vocab, rank)), rng.normal(size=(vocab, rank)), rng.integers(0, vocab, rows),
                     positions, rng.permutation(groups), [temperature] * groups, rng.integers(0, 2**63, groups))


def test_greedy_walk_prefers_the_pair_over_the_higher_logit(interpreter):
    got = interpreter.run("selector.lower_selector_walk", case_by_hand())

    assert got["proposals"].tolist() == [[2, 1]]
    assert got["proposal_ids"].tolist() == [[[1, 2], [0, 1]]]
    assert got["proposal_probs"].tolist() == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize(
    ("groups", "block_rows", "top_k", "rank", "dead_from"),
    [
        pytest.param(1, 8, 16, 32, None, id="demo"),
        pytest.param(3, 3, 5, 64, 2, id="a shortened block"),
        pytest.param(2, 2, 3, 512, None, id="largest rank"),
        pytest.param(1, 3, 1, 8, None, id="one candidate"),
        pytest.param(2, 4, 4, 256, 0, id="a dead lane"),
        pytest.param(1, 4, 4, 1, None, id="rank 1"),
    ],
)
def test_greedy_walk_has_the_bits_of_the_cpu_op(interpreter, groups, block_rows, top_k, rank, dead_from):
    case = random_case(groups, block_rows, top_k, rank, 0.0, dead_from=dead_from)

    got, expected = interpreter.run("selector.lower_selector_walk", case), case.expected()

    assert [n for n in PROPOSED if not same_bits(got[n], expected[n])] == []


def test_equal_scores_go_to_the_first_candidate(interpreter):
    case = walk_case([[[0, 0, 0], [3, 1, 2]]], [[[0, 0, 0], [1, 2, 2]]], np.ones((2, 1)), np.zeros((4, 1)),
                     np.zeros((4, 1)), [0, 0], [5, 6], [0], [0.0], [0])

    assert interpreter.run("selector.lower_selector_walk", case)["proposals"].tolist() == [[1]]


def test_link_is_rounded_to_bf16_before_the_dot(interpreter):
    """1.0078125 squared is 1.01568603515625; bf16 makes it 1.015625, a tie that the first candidate wins."""
    case = walk_case([[[0, 0], [2, 1]]], [[[0, 0], [1.015625, 0]]], np.full((2, 1), 1.0078125), [[1.0078125]] * 3,
                     [[0], [1], [0]], [0, 0], [5, 6], [0], [0.0], [0])

    assert interpreter.run("selector.lower_selector_walk", case)["proposals"].tolist() == [[2]]
    assert case.expected()["proposals"].tolist() == [[2]]


def test_score_sums_in_numpy_order(interpreter):
    """Beside 2**24 an fp32 sum loses ones: which ones survive depends on the order alone."""
    rank, rng = 256, np.random.default_rng(11)
    terms = np.repeat([2.0**24, -(2.0**24), 1.0, 3.0], rank // 4)
    products = [rng.permutation(terms) for _ in range(8)]
    case = walk_case([[[0] * 8, list(range(8))]], np.zeros((1, 2, 8)), np.ones((2, rank)), np.ones((8, rank)), products,
                     [0, 0], [5, 6], [0], [20.0], [0])

    got, expected = interpreter.run("selector.lower_selector_walk", case), case.expected()

    assert len(set(expected["proposal_probs"].ravel().tolist())) > 4
    np.testing.assert_allclose(got["proposal_probs"], expected["proposal_probs"], rtol=2e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.6])
def test_sampled_walk_draws_the_cpu_ops_proposals(interpreter, temperature):
    case = random_case(3, 6, 8, 16, temperature, dead_from=4, seed=2)

    got, expected = interpreter.run("selector.lower_selector_walk", case), case.expected()

    assert got["proposals"].tolist() == expected["proposals"].tolist()
    assert got["proposal_ids"].tolist() == expected["proposal_ids"].tolist()
    np.testing.assert_allclose(got["proposal_probs"], expected["proposal_probs"], rtol=2e-6)


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 9])
def test_proposal_is_drawn_at_its_own_position(interpreter, seed):
    got = interpreter.run("selector.lower_selector_walk", case_by_hand(temperature=1.5, seed=seed))

    ranks = [inverse_cdf(got["proposal_probs"][0, i], draw(seed, 11 + i, Purpose.PROPOSAL)) for i in range(2)]
    assert got["proposals"].tolist() == [[(1, 2)[ranks[0]], (0, 1)[ranks[1]]]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("scores", "proposals"),
    [
        pytest.param(((0, 0), (NAN, 2), (2, 2)), [-1, -1], id="NaN"),
        pytest.param(((0, 0), (3, 2.5), (INF, 2)), [2, -1], id="infinity in the second slot"),
        pytest.param(((0, 0), (-INF, -INF), (2, 2)), [-1, -1], id="no candidate"),
    ],
)
def test_best_score_that_is_not_finite_ends_the_walk(interpreter, scores, proposals, temperature):
    case = case_by_hand(temperature=temperature, scores=scores, seed=0)

    got = interpreter.run("selector.lower_selector_walk", case)

    assert got["proposals"].tolist() == [proposals]
    assert got["proposal_probs"][0, 1].tolist() == [0, 0]


@pytest.mark.parametrize("anchor", [-1, 4])
def test_anchor_outside_the_vocabulary_is_not_read(interpreter, anchor):
    got = interpreter.run("selector.lower_selector_walk", case_by_hand(anchor=anchor))

    assert got["proposals"].tolist() == [[-1, -1]]


@pytest.mark.parametrize(("positions", "slot"), [((-1, -1, -1), 0), ((10, 11, 12), -1)], ids=["dead", "empty lane"])
def test_dead_rows_give_zeros(interpreter, positions, slot):
    got = interpreter.run("selector.lower_selector_walk", case_by_hand(positions=positions, slot=slot))

    assert [got[n].any() for n in PROPOSED] == [False, False, False]


def test_argmax_proposals_are_the_cpu_ops(interpreter):
    rng = np.random.default_rng(4)
    logits = np.float32(rng.normal(size=(8, 4200)).round(1))
    logits[5, 4150:] = 99  # padding
    logits[6, 17] = NAN
    arrays = {"logits": logits, "proposals": np.zeros((2, 3), np.int32), "proposal_ids": np.zeros((2, 3, 1), np.int32),
              "proposal_probs": np.zeros((2, 3, 1), np.float32)}
    case = Case(arrays, [("dflash.argmax_proposals/1", {"groups": 2, "block_rows": 4, "depth": 3, "vocab": 4200,
                                                        "live_vocab": 4150})])

    got, expected = interpreter.run("selector.lower_argmax_proposals", case), case.expected()

    assert got["proposals"][1, 1] == 17
    assert [n for n in PROPOSED if not same_bits(got[n], expected[n])] == []
