"""The selector walk: a case worked by hand, its rounding, its draws, dead rows; and z-lab's selector on equal data."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from dflash.model import CandidateSelector
from dflash_core.errors import FormatError, QualityError

from runtime.ops.candidates import top_ids
from runtime.ops.distribution import inverse_cdf
from runtime.ops.philox import Purpose, draw
from runtime.ops.registry import DType, call

BF16 = ml_dtypes.bfloat16
HAND_IDS = [[0, 0], [1, 2], [0, 1]]
HAND_SCORES = [[0, 0], [3, 2.5], [2, 2]]


def walk(ids, scores, projected, predecessor, successor, tokens, positions, slots, temperature, seed=(0, 0, 0, 0),
         act=DType.BF16, w=DType.BF16):
    """Arrays as the op takes them, groups first: ids and scores [groups, block_rows, top_k]."""
    ids, scores = np.array(ids, np.int32), np.array(scores, np.float32)
    groups, block_rows, top_k = ids.shape
    projected = np.array(projected, np.float32).reshape(groups * block_rows, -1)
    predecessor, successor = np.array(predecessor, np.float32), np.array(successor, np.float32)
    depth, (vocab, rank) = block_rows - 1, predecessor.shape
    proposals = np.full((groups, depth), -7, np.int32)
    out_ids, probs = np.full((groups, depth, top_k), -7, np.int32), np.full((groups, depth, top_k), -7, np.float32)
    arrays = {
        "candidate_ids": ids.reshape(-1, top_k), "candidate_scores": scores.reshape(-1, top_k),
        "projected": projected.astype(act.numpy), "predecessor": predecessor.astype(w.numpy),
        "successor": successor.astype(w.numpy), "tokens": np.array(tokens, np.int32).reshape(-1),
        "positions": np.array(positions, np.int32).reshape(-1), "slots": np.array(slots, np.int32),
        "temperature": np.array(temperature, np.float32), "seed": np.array(seed, np.uint64)[: len(temperature)],
        "proposals": proposals, "proposal_ids": out_ids, "proposal_probs": probs,
    }  # fmt: skip
    call("dflash.selector_walk/1", arrays, groups=groups, block_rows=block_rows, depth=depth, top_k=top_k, rank=rank,
         vocab=vocab, max_slots=len(temperature), act=act, w=w)
    return proposals, out_ids, probs


def walk_by_hand(temperature=0.0, seed=0, scores=HAND_SCORES, positions=(10, 11, 12), slot=0):
    """Vocabulary 4, rank 1, two candidates a slot, every projection 1, anchor 3."""
    return walk([HAND_IDS], [scores], np.ones((1, 3, 1)), [[1], [0], [2], [-1]], [[0], [1], [-0.5], [4]],
                [[3, 0, 0]], [positions], [slot], [temperature], [seed])


def test_greedy_walk_prefers_the_pair_over_the_higher_logit():
    """Slot 1 scores {1: 2, 2: 3}, slot 2 after token 2 scores {0: 2, 1: 4}."""
    proposals, ids, probs = walk_by_hand()

    assert proposals.tolist() == [[2, 1]]
    assert ids.tolist() == [[[1, 2], [0, 1]]]
    assert probs.tolist() == [[[0, 1], [0, 1]]]


def test_sampled_walk_reports_softmax_over_the_candidates():
    proposals, ids, probs = walk_by_hand(temperature=1.0, seed=0)

    assert proposals[0, 0] == 2
    assert ids.tolist() == [[[1, 2], [0, 1]]]
    assert probs[0, 0].tolist() == pytest.approx([0.2689414, 0.7310586], abs=1e-6)
    assert probs[0, 1].tolist() == pytest.approx([0.1192029, 0.8807971], abs=1e-6)


def test_temperature_divides_the_score():
    _, _, probs = walk_by_hand(temperature=0.5)

    assert probs[0, 0].tolist() == pytest.approx([0.1192029, 0.8807971], abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_proposal_is_drawn_at_its_own_position(seed):
    proposals, ids, probs = walk_by_hand(temperature=1.5, seed=seed)

    for i, position in enumerate((11, 12)):
        rank = inverse_cdf(probs[0, i], draw(seed, position, Purpose.PROPOSAL))
        assert proposals[0, i] == ids[0, i, rank]


def test_proposals_follow_their_probabilities():
    firsts = [int(walk_by_hand(temperature=1.0, seed=seed)[0][0, 0]) for seed in range(2000)]

    assert firsts.count(2) / 2000 == pytest.approx(0.731, abs=0.02)


def test_equal_scores_go_to_the_lowest_rank():
    """Slot 1 scores {1: 3, 2: 3}, slot 2 after token 1 scores {0: 2, 1: 2}."""
    proposals, _, probs = walk_by_hand(scores=[[0, 0], [4, 2.5], [2, 2]])

    assert proposals.tolist() == [[1, 0]]
    assert probs.tolist() == [[[1, 0], [1, 0]]]


@pytest.mark.parametrize(
    ("act", "probability"),
    [
        pytest.param(DType.BF16, 1 / (1 + np.exp(0.015625 * 64)), id="bf16: the product is rounded, 1.015625"),
        pytest.param(DType.F32, 1 / (1 + np.exp(0.01568603515625 * 64)), id="fp32: it is not, 1.01568603515625"),
    ],
)
def test_product_of_predecessor_and_projection_is_rounded_to_the_activation_type(act, probability):
    """(1 + 2**-7)**2 = 1.01568603515625 lies between bf16 values 1.015625 and 1.0234375."""
    one_more = 1 + 2.0**-7

    _, _, probs = walk([[[0, 0], [0, 1]]], [[[0, 0], [1, 0]]], np.full((1, 2, 1), one_more),
                       np.full((2, 1), one_more), [[0], [1]], [[0, 0]], [[5, 6]], [0], [2.0**-6], act=act)

    assert probs[0, 0, 0] == pytest.approx(probability, rel=1e-5)


def test_dot_and_score_stay_fp32():
    """257 is not a bf16 value: summed or scored in bf16 it would be 256, a tie that rank 0 wins."""
    proposals, _, _ = walk([[[0, 0], [0, 1]]], [[[0, 0], [256, 0]]], np.ones((1, 2, 2)), np.ones((2, 2)),
                           [[0, 0], [256, 1]], [[0, 0]], [[5, 6]], [0], [0.0])

    assert proposals.tolist() == [[1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_score_that_is_not_finite_names_row_group_and_slot(bad, temperature):
    with pytest.raises(QualityError, match="row 2 of group 0, request slot 0") as e:
        walk_by_hand(temperature=temperature, scores=[[0, 0], [3, 2.5], [2, bad]])

    assert e.value.code == "SELECTOR_NAN"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("positions", "slot", "live"),
    [
        pytest.param((10, 11, -1), 0, 1, id="block shortened by one"),
        pytest.param((10, -1, -1), 0, 0, id="anchor alone"),
        pytest.param((-1, -1, -1), 0, 0, id="dead rows"),
        pytest.param((-1, -1, -1), -1, 0, id="empty lane"),
        pytest.param((10, 11, 12), -1, 0, id="no slot"),
    ],
)
def test_dead_rows_give_zeros_and_are_not_checked(positions, slot, live, temperature):
    scores = [[0, 0], [3, 2.5] if live else [np.nan, 0], [np.nan, np.nan]]

    proposals, ids, probs = walk_by_hand(temperature, scores=scores, positions=positions, slot=slot)

    assert (proposals[0, :live] == 2).all()
    assert ids[0, :live].tolist() == [[1, 2]][:live]
    assert not proposals[0, live:].any()
    assert not ids[0, live:].any()
    assert not probs[0, live:].any()


def random_batch(groups, block_rows=6, top_k=4, rank=24, vocab=50):
    rng = np.random.default_rng(9)
    ids = np.stack([[rng.permutation(vocab)[:top_k] for _ in range(block_rows)] for _ in range(groups)])
    return {
        "ids": ids, "scores": rng.normal(size=ids.shape), "projected": rng.normal(size=(groups, block_rows, rank)),
        "predecessor": rng.normal(size=(vocab, rank)), "successor": rng.normal(size=(vocab, rank)),
        "tokens": rng.integers(0, vocab, (groups, block_rows)),
        "positions": 20 * np.arange(groups)[:, None] + np.arange(block_rows),
    }  # fmt: skip


@pytest.mark.parametrize("act", [DType.BF16, DType.F32])
def test_group_gives_the_same_bits_alone_and_in_a_batch_of_four(act):
    batch, temperature, seed = random_batch(4), [0.7, 0.0, 0.0, 1.3], [5, 6, 7, 8]
    batch["positions"][2] = -1
    slots = [3, 1, -1, 0]

    together = walk(**batch, slots=slots, temperature=temperature, seed=seed, act=act)

    for g in (0, 1, 3):
        one = {k: v if k.endswith("cessor") else v[g : g + 1] for k, v in batch.items()}
        alone = walk(**one, slots=slots[g : g + 1], temperature=temperature, seed=seed, act=act)
        assert [t[g].tobytes() for t in together] == [a[0].tobytes() for a in alone]


def test_fp32_walk_agrees_with_zlab():
    rng = np.random.default_rng(2)
    vocab, rank, hidden, block_rows, top_k = 60, 16, 24, 8, 5
    config = SimpleNamespace(vocab_size=vocab, hidden_size=hidden, selector_rank=rank, selector_top_k=top_k)
    selector = CandidateSelector(config)
    for parameter in selector.parameters():
        parameter.data = torch.tensor(rng.normal(size=tuple(parameter.shape)).astype(np.float32)) * 0.5
    states = rng.normal(size=(6, block_rows, hidden)).astype(np.float32)
    logits = rng.normal(size=(6, block_rows, vocab)).astype(np.float32)
    anchors = rng.integers(0, vocab, 6)
    ids = np.array([[top_ids(row, top_k) for row in group] for group in logits])
    projected = states @ selector.hidden_projection.weight.detach().numpy().T

    proposals, _, _ = walk(
        ids, np.take_along_axis(logits, ids, axis=-1), projected, selector.predecessor_codebook.weight.detach().numpy(),
        selector.successor_codebook.weight.detach().numpy(), np.repeat(anchors[:, None], block_rows, axis=1),
        np.tile(np.arange(block_rows), (6, 1)), range(6), [0.0] * 6, [0] * 6, DType.F32, DType.F32,
    )  # fmt: skip

    for g in range(6):
        with torch.no_grad():
            path, _, _ = selector.select(torch.tensor(states[g, 1:])[None], torch.tensor(logits[g, 1:])[None],
                                         torch.tensor(anchors[g : g + 1]), 0.0)
        assert proposals[g].tolist() == path[0].tolist()


def argmax_proposals(logits, live_vocab):
    logits = np.array(logits, np.float32)
    groups, block_rows, vocab = logits.shape
    depth = block_rows - 1
    proposals, ids = np.full((groups, depth), -7, np.int32), np.full((groups, depth, 1), -7, np.int32)
    probs = np.full((groups, depth, 1), -7, np.float32)
    call("dflash.argmax_proposals/1", {"logits": logits.reshape(-1, vocab), "proposals": proposals,
                                       "proposal_ids": ids, "proposal_probs": probs},
         groups=groups, block_rows=block_rows, depth=depth, vocab=vocab, live_vocab=live_vocab)
    return proposals, ids, probs


def test_argmax_proposes_the_lowest_of_the_best_live_ids_and_skips_the_anchor():
    logits = [[[9, 0, 0, 0], [0, 4, 4, 9], [3, 1, 2, 9]], [[0, 9, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]]

    proposals, ids, probs = argmax_proposals(logits, live_vocab=3)

    assert proposals.tolist() == [[1, 0], [2, 1]]
    assert ids.tolist() == [[[1], [0]], [[2], [1]]]
    assert probs.tolist() == [[[1], [1]], [[1], [1]]]


def test_argmax_compares_fp32_logits_that_bf16_would_tie():
    proposals, _, _ = argmax_proposals([[[0, 0], [16, 16.03125]]], live_vocab=2)

    assert proposals.tolist() == [[1]]


def test_argmax_of_dead_rows_is_harmless():
    proposals, _, _ = argmax_proposals([[[0, 0], [np.nan, np.nan], [-np.inf, -np.inf]]], live_vocab=2)

    assert proposals.tolist() == [[0, 0]]


def test_rejects_a_block_that_is_not_anchor_and_proposals():
    arrays = {"logits": np.zeros((2, 4), np.float32), "proposals": np.zeros((1, 2), np.int32),
              "proposal_ids": np.zeros((1, 2, 1), np.int32), "proposal_probs": np.zeros((1, 2, 1), np.float32)}

    with pytest.raises(FormatError, match="expected 3, got 2"):
        call("dflash.argmax_proposals/1", arrays, groups=1, block_rows=2, depth=2, vocab=4, live_vocab=4)
    with pytest.raises(FormatError, match="expected 1 to 4, got 5"):
        argmax_proposals(np.zeros((1, 2, 4)), live_vocab=5)
