"""Sampling, acceptance and commit: hand tables, limits, dead lanes, and the target's marginals over many seeds."""

import numpy as np
import pytest
from dflash_core.errors import FormatError, QualityError

from runtime.ops.accept import accepts, residual
from runtime.ops.distribution import inverse_cdf
from runtime.ops.philox import Purpose, draw
from runtime.ops.registry import call

NAN, INF = np.nan, np.inf


def i32(values):
    return np.array(values, np.int32)


def f32(values):
    return np.array(values, np.float32)


def sampling(count, temperature=0.0, top_p=1.0, top_k=0, seeds=None):
    return {"temperature": np.full(count, temperature, np.float32), "top_p": np.full(count, top_p, np.float32),
            "top_k": np.full(count, top_k, np.int32),
            "seed": np.arange(count, dtype=np.uint64) if seeds is None else np.array(seeds, np.uint64)}


def sample(logits, positions, slots, settings, live_vocab=None):
    logits = f32(logits)
    groups, vocab = logits.shape
    emitted, produced = np.full((groups, 1), -7, np.int32), np.full(groups, -7, np.int32)
    call("dflash.sample/1", {"logits": logits, "positions": i32(positions), "slots": i32(slots), "emitted": emitted,
                             "produced": produced, **settings},
         groups=groups, vocab=vocab, live_vocab=live_vocab or vocab, max_slots=len(settings["seed"]))
    return emitted[:, 0].tolist(), produced.tolist()


def accept(logits, tokens, positions, slots, settings, limit=None, ids=None, probs=None, live_vocab=None):
    """logits [groups, block_rows, vocab]; tokens, positions [groups, block_rows]; ids, probs [groups, depth, K]."""
    logits = f32(logits)
    groups, block_rows, vocab = logits.shape
    depth, max_slots = block_rows - 1, len(settings["seed"])
    if ids is None:
        ids, probs = i32(tokens)[:, 1:, None], np.ones((groups, depth, 1), np.float32)
    emitted = np.full((groups, block_rows), -7, np.int32)
    produced, accepted = np.full(groups, -7, np.int32), np.full(groups, -7, np.int32)
    arrays = {
        "logits": logits.reshape(-1, vocab), "tokens": i32(tokens).reshape(-1), "positions": i32(positions).reshape(-1),
        "slots": i32(slots), "limit": i32([1000] * max_slots if limit is None else limit), "proposal_ids": i32(ids),
        "proposal_probs": f32(probs), **settings, "emitted": emitted, "produced": produced, "accepted": accepted,
    }  # fmt: skip
    call("dflash.accept/1", arrays, groups=groups, block_rows=block_rows, depth=depth, candidates=i32(ids).shape[2],
         vocab=vocab, live_vocab=live_vocab or vocab, max_slots=max_slots)
    return emitted.tolist(), produced.tolist(), accepted.tolist()


def peaks(tokens, vocab=8):
    """Logits [rows, vocab] whose argmax are `tokens`."""
    return np.eye(vocab, dtype=np.float32)[tokens]


# ---- sample


@pytest.mark.parametrize(
    ("row", "live_vocab", "token"),
    [
        pytest.param([0, 3, 1, 2], 4, 1, id="highest"),
        pytest.param([1, 3, 3, 2], 4, 1, id="tie: lowest id"),
        pytest.param([0, 1, 9, 9], 2, 1, id="padded ids never win"),
        pytest.param([16, 16.03125, 0, 0], 4, 1, id="fp32 logits that bf16 would tie"),
        pytest.param([-INF, -INF, -1, -INF], 4, 2, id="excluded ids"),
    ],
)
def test_greedy_sample_is_the_lowest_of_the_best_live_ids(row, live_vocab, token):
    assert sample([row], [4], [0], sampling(1), live_vocab) == ([token], [1])


def test_sample_is_drawn_for_the_position_after_its_row():
    logits = np.log(f32([0.5, 0.25, 0.25]))

    tokens, _ = sample([logits] * 40, [41] * 40, range(40), sampling(40, 1.0))

    expected = [inverse_cdf(f32([0.5, 0.25, 0.25]), draw(seed, 42, Purpose.TARGET)) for seed in range(40)]
    assert tokens == expected
    assert set(tokens) == {0, 1, 2}


def test_each_lane_samples_with_the_settings_of_its_slot():
    row = np.log(f32([0.1, 0.2, 0.3, 0.4]))
    settings = {"temperature": f32([0, 5, 5, 5]), "top_p": f32([1, 1, 1e-6, 1]), "top_k": i32([0, 1, 0, 0]),
                "seed": np.array([1, 1, 1, 2**63 + 5], np.uint64)}

    tokens, produced = sample([row] * 4, [7] * 4, [3, 2, 1, 0], settings)

    softened = f32([0.1, 0.2, 0.3, 0.4]) ** f32(0.2)
    assert tokens == [inverse_cdf(softened, draw(2**63 + 5, 8, Purpose.TARGET)), 3, 3, 3]
    assert produced == [1, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("position", "slot"), [(-1, 0), (5, -1), (-1, -1)])
def test_dead_lane_emits_nothing_and_is_not_checked(position, slot, temperature):
    assert sample([[NAN, NAN]], [position], [slot], sampling(1, temperature)) == ([0], [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0, NAN, 1], [0, INF, 1], [-INF, -INF, -INF]], ids=str)
def test_live_lane_without_a_finite_best_logit_is_an_error(row, temperature):
    with pytest.raises(QualityError, match="request slot 1") as e:
        sample([[1, 2, 3], row], [5, 5], [0, 1], sampling(2, temperature))

    assert e.value.code == "LOGITS_NOT_FINITE"


# ---- accept, temperature 0


@pytest.mark.parametrize(
    ("drafts", "argmax", "emitted", "accepted"),
    [
        pytest.param([2, 3, 4], [2, 3, 4, 5], [2, 3, 4, 5], 3, id="all kept, and a bonus"),
        pytest.param([2, 3, 4], [2, 3, 1, 5], [2, 3, 1, 0], 2, id="last rejected"),
        pytest.param([2, 3, 4], [7, 3, 4, 5], [7, 0, 0, 0], 0, id="first rejected, later agreement is void"),
        pytest.param([2, 3, 4], [2, 7, 4, 5], [2, 7, 0, 0], 1, id="middle rejected"),
    ],
)
def test_greedy_keeps_the_longest_agreeing_run_and_adds_the_targets_token(drafts, argmax, emitted, accepted):
    got = accept([peaks(argmax)], [[6, *drafts]], [[10, 11, 12, 13]], [0], sampling(1))

    assert got == ([emitted], [accepted + 1], [accepted])


def test_greedy_accept_compares_fp32_logits_that_bf16_would_tie():
    """In bf16 16.03125 is 16: id 0 would tie and win, and the proposal 1 be lost."""
    got = accept([[[16, 16.03125], [1, 0]]], [[0, 1]], [[4, 5]], [0], sampling(1))

    assert got == ([[1, 0]], [2], [1])


def test_padded_ids_are_never_the_targets_choice():
    got = accept([[[0, 1, 9], [1, 0, 9]]], [[0, 1]], [[4, 5]], [0], sampling(1), live_vocab=2)

    assert got == ([[1, 0]], [2], [1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("limit", "positions", "emitted", "produced", "accepted"),
    [
        pytest.param(15, [10, 11, 12, 13], [2, 3, 4, 5], 4, 3, id="just room"),
        pytest.param(14, [10, 11, 12, 13], [2, 3, 4, 0], 3, 3, id="no room for the bonus"),
        pytest.param(13, [10, 11, 12, -1], [2, 3, 0, 0], 2, 2, id="block shortened at the limit"),
        pytest.param(12, [10, 11, -1, -1], [2, 0, 0, 0], 1, 1, id="block of two"),
        pytest.param(12, [10, -1, -1, -1], [2, 0, 0, 0], 1, 0, id="anchor alone: plain decoding"),
        pytest.param(1000, [10, 11, -1, -1], [2, 3, 0, 0], 2, 1, id="shortened block adds its own bonus"),
        pytest.param(11, [10, -1, -1, -1], [0, 0, 0, 0], 0, 0, id="at the limit"),
        pytest.param(3, [10, 11, 12, 13], [0, 0, 0, 0], 0, 3, id="beyond the limit: never negative"),
    ],
)
def test_nothing_is_emitted_at_or_beyond_the_limit(limit, positions, emitted, produced, accepted, temperature):
    logits = peaks([2, 3, 4, 5]) * 1000

    got = accept([logits], [[6, 2, 3, 4]], [positions], [0], sampling(1, temperature), limit=[limit])

    assert got == ([emitted], [produced], [accepted])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("positions", "slot"),
    [
        pytest.param([-1, -1], -1, id="empty lane"),
        pytest.param([-1, -1], 0, id="no rows"),
        pytest.param([3, 4], -1, id="no slot"),
    ],
)
def test_dead_lane_accepts_nothing_and_is_not_checked(positions, slot, temperature):
    logits = np.full((1, 2, 4), NAN)

    assert accept(logits, [[0, 1]], [positions], [slot], sampling(1, temperature)) == ([[0, 0]], [0], [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_read_are_not_checked(temperature):
    logits = np.concatenate([peaks([2, 3]) * 1000, np.full((2, 8), NAN, np.float32)])

    got = accept([logits], [[6, 2, 4, 4]], [[10, 11, 12, 13]], [0], sampling(1, temperature))

    assert got == ([[2, 3, 0, 0]], [2], [1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_row", [0, 1])
def test_live_row_with_a_nan_is_an_error(bad_row, temperature):
    logits = peaks([2, 3]) * 1000
    logits[bad_row, 5] = NAN

    with pytest.raises(QualityError, match="request slot 0") as e:
        accept([logits], [[6, 2]], [[10, 11]], [0], sampling(1, temperature))

    assert e.value.code == "LOGITS_NOT_FINITE"


# ---- accept, temperature above 0

P, Q_IDS, Q = [0.5, 0.3, 0.2, 0.0], [0, 2], [0.6, 0.4]
LANES = 4000


def speculate(p_rows, q_ids, q, temperature=1.0, top_p=1.0, top_k=0):
    """LANES requests with seeds 0.., one block each at position 20, proposals drawn as the draft draws them."""
    depth = len(p_rows) - 1
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(f32(p_rows)), (LANES, 1, 1))
    ranks = [[inverse_cdf(f32(q), draw(s, 21 + i, Purpose.PROPOSAL)) for i in range(depth)] for s in range(LANES)]
    tokens = np.concatenate([np.full((LANES, 1), 3), np.array(q_ids)[ranks]], axis=1)
    emitted, produced, accepted = accept(
        logits, tokens, np.tile(np.arange(20, 21 + depth), (LANES, 1)), range(LANES),
        sampling(LANES, temperature, top_p, top_k), ids=np.tile(q_ids, (LANES, depth, 1)),
        probs=np.tile(f32(q), (LANES, depth, 1)),
    )  # fmt: skip
    return np.array(emitted), np.array(produced), np.array(accepted)


def frequencies(tokens, vocab=4):
    return (np.bincount(tokens, minlength=vocab) / len(tokens)).tolist()


def test_first_token_has_the_targets_distribution_whatever_was_proposed():
    """The worked example: acceptance 0.7, residual all on id 1, output p itself."""
    emitted, _, accepted = speculate([P, [0.25] * 4], Q_IDS, Q)

    assert frequencies(emitted[:, 0]) == pytest.approx(P, abs=0.02)
    assert accepted.mean() == pytest.approx(0.7, abs=0.02)
    assert set(emitted[accepted == 0, 0].tolist()) == {1}


def test_every_later_token_has_the_targets_distribution_too():
    second, third = [0.1, 0.2, 0.3, 0.4], [0.7, 0.0, 0.1, 0.2]

    emitted, produced, _ = speculate([P, second, third], Q_IDS, Q)

    assert frequencies(emitted[produced > 1, 1]) == pytest.approx(second, abs=0.03)
    assert frequencies(emitted[produced > 2, 2]) == pytest.approx(third, abs=0.05)


def test_tokens_of_one_block_are_independent_of_each_other():
    """The second token's distribution given the first is the target's: no draw is used twice."""
    emitted, produced, _ = speculate([P, P, P], Q_IDS, Q)

    for first in (0, 2):
        given = emitted[(produced > 1) & (emitted[:, 0] == first), 1]
        assert frequencies(given) == pytest.approx(P, abs=0.045)


def test_temperature_top_k_and_top_p_shape_the_target_before_acceptance():
    emitted, _, _ = speculate([[0.4, 0.3, 0.2, 0.1], [0.25] * 4], Q_IDS, Q, temperature=0.5, top_k=3, top_p=0.8)

    assert frequencies(emitted[:, 0]) == pytest.approx([0.64, 0.36, 0, 0], abs=0.02)


def test_greedy_proposals_keep_a_sampling_request_exact():
    """q all on one id, as a greedy draft reports it."""
    emitted, _, accepted = speculate([P, [0.25] * 4], [0, 2], [1, 0])

    assert frequencies(emitted[:, 0]) == pytest.approx(P, abs=0.02)
    assert accepted.mean() == pytest.approx(0.5, abs=0.02)


def test_draws_belong_to_the_position_of_the_token_they_decide():
    """Recomputed by hand: ACCEPT at 21 and 22, RESIDUAL where a proposal falls, TARGET after a full run."""
    emitted, produced, accepted = speculate([P, P, P], Q_IDS, Q)

    for seed in range(50):
        expected = []
        for position in (21, 22):
            rank = inverse_cdf(f32(Q), draw(seed, position, Purpose.PROPOSAL))
            if draw(seed, position, Purpose.ACCEPT) * f32(Q[rank]) < f32(P[Q_IDS[rank]]):
                expected.append(Q_IDS[rank])
                continue
            expected.append(inverse_cdf(f32([0, 0.3, 0, 0]), draw(seed, position, Purpose.RESIDUAL)))
            break
        else:
            expected.append(inverse_cdf(f32(P), draw(seed, 23, Purpose.TARGET)))
        assert emitted[seed, : produced[seed]].tolist() == expected
    assert set(accepted[:50].tolist()) == {0, 1, 2}


def test_residual_draw_uses_its_own_purpose():
    p, q_ids, q = [0.1, 0.3, 0.3, 0.3], [0], [1.0]

    emitted, _, accepted = speculate([p, [0.25] * 4], q_ids, q)

    for seed in np.flatnonzero(accepted == 0)[:50].tolist():
        assert emitted[seed, 0] == inverse_cdf(f32([0, 0.3, 0.3, 0.3]), draw(seed, 21, Purpose.RESIDUAL))


def test_bonus_after_a_full_run_is_what_plain_sampling_would_emit_there():
    emitted, _, accepted = speculate([P, [0.1, 0.2, 0.3, 0.4]], Q_IDS, Q)
    full = np.flatnonzero(accepted == 1)[:60]

    plain, _ = sample(np.tile(np.log(f32([0.1, 0.2, 0.3, 0.4])), (len(full), 1)), [21] * len(full), full,
                      sampling(LANES, 1.0))

    assert emitted[full, 1].tolist() == plain


@pytest.mark.parametrize(
    ("u", "q", "p", "expected"),
    [
        pytest.param(0.5, 0.5, 0.25, False, id="equal is a rejection"),
        pytest.param(0.5, 0.5, 0.2500001, True, id="just below"),
        pytest.param(0.0, 1.0, 0.0, False, id="probability 0 is never kept, not even by a draw of 0"),
        pytest.param(1 - 2**-24, 0.3, 0.3, True, id="q = p is always kept"),
        pytest.param(1 - 2**-23, 0.5 + 2**-24, 0.5, False, id="product 0.5 - 2**-47 is 0.5 in fp32"),
    ],
)
def test_proposal_is_kept_while_u_q_is_strictly_below_p(u, q, p, expected):
    assert accepts(np.float32(u), np.float32(q), np.float32(p)) is expected


@pytest.mark.parametrize(
    ("p", "ids", "q", "expected"),
    [
        pytest.param([0.5, 0.25, 0.25, 0], [0, 2], [0.75, 0.125], [0, 0.25, 0.125, 0], id="clamped at 0"),
        pytest.param([0.5, 0.5, 0, 0], [1, 3], [0.5, 0.5], [0.5, 0, 0, 0], id="ids that the target excludes"),
        pytest.param([0.5, 0.5, 0, 0], [1, 0], [0.5, 0.5], [0.5, 0.5, 0, 0], id="nothing left: the target itself"),
    ],
)
def test_residual_is_what_the_target_has_beyond_the_draft(p, ids, q, expected):
    assert residual(f32(p), i32(ids), f32(q)).tolist() == expected


def test_group_gives_the_same_result_alone_and_in_a_batch_of_four():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, 6, 300)).astype(np.float32) * 2
    ids = np.stack([[np.argsort(-logits[g, i])[:4] for i in range(5)] for g in range(4)])
    probs = rng.dirichlet([1] * 4, size=(4, 5))
    tokens = np.concatenate([np.zeros((4, 1), int), ids[:, :, 0]], axis=1)
    positions = np.array([[30, 31, 32, 33, 34, 35], [7, 8, 9, -1, -1, -1], [-1] * 6, [90, 91, 92, 93, 94, 95]])
    logits[2], slots, limit = NAN, [2, 0, -1, 3], [10, 0, 1000, 94]
    settings = {"temperature": f32([0.8, 1, 0, 1.2]), "top_p": f32([0.9, 1, 1, 1]), "top_k": i32([0, 0, 0, 40]),
                "seed": np.array([3, 1, 4, 15], np.uint64)}

    together = accept(logits, tokens, positions, slots, settings, limit, ids, probs)

    for g in range(4):
        one = slice(g, g + 1)
        alone = accept(logits[one], tokens[one], positions[one], slots[one], settings, limit, ids[one], probs[one])
        assert [t[g] for t in together] == [a[0] for a in alone]
    assert together[1][2] == 0
    assert min(together[1][0], together[1][1], together[1][3]) > 0


def test_rejects_impossible_blocks_and_vocabularies():
    arrays = {"emitted": np.zeros((1, 2), np.int32)}

    with pytest.raises(FormatError, match="expected 1 to 4, got 5"):
        accept(np.zeros((1, 2, 4)), [[0, 1]], [[0, 1]], [0], sampling(1), live_vocab=5)
    with pytest.raises(FormatError, match="expected 1 to 4, got 5"):
        sample(np.zeros((1, 4)), [0], [0], sampling(1), live_vocab=5)
    with pytest.raises(FormatError, match="expected 3, got 2"):
        arrays |= {"logits": f32([[0] * 4] * 2), "tokens": i32([0, 1]), "positions": i32([0, 1]), "slots": i32([0]),
                   "limit": i32([9]), "proposal_ids": np.zeros((1, 2, 1), np.int32),
                   "proposal_probs": np.ones((1, 2, 1), np.float32), "produced": i32([0]), "accepted": i32([0]),
                   **sampling(1)}
        call("dflash.accept/1", arrays, groups=1, block_rows=2, depth=2, candidates=1, vocab=4, live_vocab=4,
             max_slots=1)


# ---- what a step leaves behind


def test_context_is_the_rows_that_were_produced():
    context = np.full(9, -7, np.int32)

    call("dflash.accepted_positions/1", {"positions": i32([10, 11, 12, 5, 6, -1, -1, -1, -1]),
                                         "produced": i32([3, 1, 0]), "context_positions": context},
         groups=3, block_rows=3)

    assert context.tolist() == [10, 11, 12, 5, -1, -1, -1, -1, -1]


def test_commit_advances_each_lanes_slot_and_leaves_the_others():
    length, anchor = i32([100, 200, 300, 400, 500]), i32([1, 2, 3, 4, 5])

    call("dflash.commit/1", {"slots": i32([3, 0, -1, 2]), "produced": i32([2, 3, 1, 0]), "length": length,
                             "anchor": anchor, "emitted": i32([[7, 8, 9], [4, 5, 6], [1, 1, 1], [2, 2, 2]])},
         groups=4, block_rows=3, max_slots=5)

    assert length.tolist() == [103, 200, 300, 402, 500]
    assert anchor.tolist() == [6, 2, 3, 8, 5]


@pytest.mark.parametrize(
    ("slot", "length", "anchor"),
    [pytest.param(1, [100, 264], [1, 9], id="chunk"), pytest.param(-1, [100, 200], [1, 2], id="empty lane")],
)
def test_commit_of_a_chunk_advances_its_slot(slot, length, anchor):
    arrays = {"slots": i32([slot]), "count": i32([64]), "emitted": i32([[9]]), "length": i32([100, 200]),
              "anchor": i32([1, 2])}

    call("dflash.commit_chunk/1", arrays, max_slots=2)

    assert arrays["length"].tolist() == length
    assert arrays["anchor"].tolist() == anchor
