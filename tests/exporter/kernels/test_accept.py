"""Acceptance: the run of kept proposals, the token that ends it, limits, dead lanes, and rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
from dflash_core.errors import CaptureError

from exporter.kernels.accept import lower_accept
from exporter.kernels.launch import OpCall
from exporter.program.builder import Program
from runtime.ops.philox import Purpose, draw
from tests.exporter.kernels.interpreter import Case, lower
from tests.exporter.kernels.test_sampling import sampling_arrays

NAN = np.nan
DECIDED = ("emitted", "produced", "accepted", "context_positions")


def accept_case(logits, tokens, positions, slots, settings, limit=None, ids=None, probs=None, live_vocab=None):
    """logits [groups, block_rows, vocab]; tokens, positions [groups, block_rows]; ids, probs [groups, depth, K]."""
    logits, tokens = np.array(logits, np.float32), np.array(tokens, np.int32)
    groups, block_rows, vocab = logits.shape
    depth, max_slots = block_rows - 1, len(settings["seed"])
    if ids is None:
        ids, probs = tokens[:, 1:, None], np.ones((groups, depth, 1))
    ids, probs = np.array(ids, np.int32), np.array(probs, np.float32)
    arrays = {
        "logits": logits.reshape(-1, vocab), "tokens": tokens.reshape(-1),
        "positions": np.array(positions, np.int32).reshape(-1), "slots": np.array(slots, np.int32),
        "limit": np.array([1000] * max_slots if limit is None else limit, np.int32), "proposal_ids": ids,
        "proposal_probs": probs, **settings, "emitted": np.full((groups, block_rows), -7, np.int32),
        "produced": np.full(groups, -7, np.int32), "accepted": np.full(groups, -7, np.int32),
        "context_positions": np.full(groups * block_rows, -7, np.int32),
    }  # fmt: skip
    block = {"groups": groups, "block_rows": block_rows}
    return Case(arrays, [("dflash.accept/1", {**block, "depth": depth, "candidates": ids.shape[2], "vocab": vocab,
                                              "live_vocab": live_vocab or vocab, "max_slots": max_slots}),
                         ("dflash.accepted_positions/1", block)])


def peaks(tokens, vocab=8):
    """Logits [rows, vocab] whose argmax are `tokens`."""
    return np.eye(vocab, dtype=np.float32)[tokens]


def decided(arrays):
    return {name: arrays[name].tolist() for name in DECIDED}


@pytest.mark.parametrize(
    ("argmax", "drafts", "positions", "limit", "emitted", "produced", "accepted", "context"),
    [
        pytest.param([1, 2, 3, 4], [1, 2, 3], [9, 10, 11, 12], 99, [1, 2, 3, 4], 4, 3, [9, 10, 11, 12], id="all kept"),
        pytest.param([1, 2, 3, 0], [1, 2, 3], [9, 10, 11, 12], 99, [1, 2, 3, 0], 4, 3, [9, 10, 11, 12],
                     id="all kept, and id 0 follows"),
        pytest.param([1, 5, 3, 4], [1, 2, 3], [9, 10, 11, 12], 99, [1, 5, 0, 0], 2, 1, [9, 10, -1, -1],
                     id="a later match does not count"),
        pytest.param([7, 2, 3, 4], [1, 2, 3], [9, 10, 11, 12], 99, [7, 0, 0, 0], 1, 0, [9, -1, -1, -1], id="none kept"),
        pytest.param([1, 2, 3, 4], [1, 2, 3], [9, 10, -1, -1], 99, [1, 2, 0, 0], 2, 1, [9, 10, -1, -1],
                     id="shortened block"),
        pytest.param([1, 2, 3, 4], [1, 2, 3], [9, 10, 11, 12], 12, [1, 2, 0, 0], 2, 3, [9, 10, -1, -1], id="limit"),
        pytest.param([1, 2, 3, 4], [1, 2, 3], [9, 10, 11, 12], 10, [0, 0, 0, 0], 0, 3, [-1, -1, -1, -1],
                     id="no room at all"),
        pytest.param([1, 2, 3, 4], [1, 2, 3], [9, 10, 11, 12], 5, [0, 0, 0, 0], 0, 3, [-1, -1, -1, -1],
                     id="beyond the limit"),
    ],
)  # fmt: skip
def test_greedy_block_keeps_the_longest_matching_run(interpreter, argmax, drafts, positions, limit, emitted, produced,
                                                     accepted, context):
    case = accept_case([peaks(argmax)], [[0, *drafts]], [positions], [0], sampling_arrays(1), limit=[limit])

    got = decided(interpreter.run("accept.lower_accept", case))

    assert got == {"emitted": [emitted], "produced": [produced], "accepted": [accepted], "context_positions": context}
    assert got == decided(case.expected())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("positions", "slot"), [([-1] * 3, 0), ([4, 5, 6], -1)], ids=["dead", "empty lane"])
def test_dead_lane_produces_nothing_and_is_not_checked(interpreter, positions, slot, temperature):
    logits = [peaks([1, 2, 3]), np.full((3, 8), NAN)]
    case = accept_case(logits, [[0, 1, 2], [0, -1, -1]], [[4, 5, 6], positions], [1, slot],
                       sampling_arrays(2, temperature, top_k=1))

    got = decided(interpreter.run("accept.lower_accept", case))

    assert got == {"emitted": [[1, 2, 3], [0, 0, 0]], "produced": [3, 0], "accepted": [2, 0],
                   "context_positions": [4, 5, 6, -1, -1, -1]}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("row", [0, 1])
def test_row_that_is_read_and_not_finite_produces_minus_one(interpreter, row, temperature):
    logits = peaks([1, 2, 3])
    logits[row, 6] = NAN
    case = accept_case([peaks([1, 2, 3]), logits], [[0, 1, 2]] * 2, [[4, 5, 6]] * 2, [0, 1],
                       sampling_arrays(2, temperature, top_k=1))

    got = decided(interpreter.run("accept.lower_accept", case))

    assert got == {"emitted": [[1, 2, 3], [0, 0, 0]], "produced": [3, -1], "accepted": [2, 0],
                   "context_positions": [4, 5, 6, -1, -1, -1]}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_row_behind_a_rejection_is_not_checked(interpreter, temperature):
    logits = peaks([7, 2, 3])
    logits[1:] = NAN
    case = accept_case([logits], [[0, 1, 2]], [[4, 5, 6]], [0], sampling_arrays(1, temperature, top_k=1))

    assert decided(interpreter.run("accept.lower_accept", case))["produced"] == [1]


def test_row_behind_the_block_is_not_checked(interpreter):
    logits = peaks([1, 2, 3])
    logits[2] = NAN
    case = accept_case([logits], [[0, 1, -1]], [[4, 5, -1]], [0], sampling_arrays(1))

    assert decided(interpreter.run("accept.lower_accept", case))["emitted"] == [[1, 2, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_proposal_produces_minus_one(interpreter, temperature):
    case = accept_case([peaks([7, 2, 3])], [[0, 1, -1]], [[4, 5, 6]], [0], sampling_arrays(1, temperature))

    got = decided(interpreter.run("accept.lower_accept", case))

    assert (got["produced"], got["accepted"], got["emitted"]) == ([-1], [0], [[0, 0, 0]])


def test_proposal_is_kept_while_u_times_q_is_below_p(interpreter):
    """p = .5, .3, .2, 0 and q = .6 on id 0: kept where u < .8333; else drawn from max(p - q, 0), which is id 1."""
    p = np.float32([0.5, 0.3, 0.2, 1e-30])
    seeds = range(14)
    case = accept_case([[np.log(p), np.log(p)]] * 14, [[3, 0]] * 14, [[6, 7]] * 14, range(14),
                       sampling_arrays(14, 1.0, seeds=seeds), ids=[[[0, 2]]] * 14, probs=[[[0.6, 0.4]]] * 14)

    got = decided(interpreter.run("accept.lower_accept", case))

    kept = [bool(draw(seed, 7, Purpose.ACCEPT) * 0.6 < 0.5) for seed in seeds]
    assert got["accepted"] == [int(k) for k in kept]
    assert {e[0] for e, k in zip(got["emitted"], kept, strict=True) if not k} == {1}
    assert got == decided(case.expected())


def test_nothing_left_after_a_rejection_is_drawn_from_p(interpreter):
    """q covers p wholly and is twice as large: a rejected token is drawn from p itself."""
    p = np.log(np.float32([0.4, 0.4, 0.2]))
    case = accept_case([[p, p]] * 12, [[0, 0]] * 12, [[6, 7]] * 12, range(12), sampling_arrays(12, 1.0),
                       ids=[[[0, 1, 2]]] * 12, probs=[[[0.9, 0.9, 0.9]]] * 12)

    got = decided(interpreter.run("accept.lower_accept", case))

    assert got == decided(case.expected())
    assert {e[0] for e, a in zip(got["emitted"], got["accepted"], strict=True) if a == 0} >= {0, 1}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 0.8)])
@pytest.mark.parametrize("temperature", [0.4, 1.3])
def test_sampled_blocks_are_the_cpu_ops(interpreter, temperature, top_k, top_p):
    rng = np.random.default_rng(21)
    groups, block_rows, vocab, live_vocab, kept = 3, 4, 2100, 2060, 8
    logits = rng.normal(size=(groups, block_rows, vocab)).round(2)
    ids = np.stack([rng.permutation(live_vocab)[:kept] for _ in range(groups * 3)]).reshape(groups, 3, kept)
    logits[np.arange(groups)[:, None, None], np.arange(3)[None, :, None], ids] += 9
    q = rng.random((groups, 3, kept)) + 0.05
    positions = 30 + np.arange(block_rows) + 10 * np.arange(groups)[:, None]
    positions[1, 2:] = -1
    tokens = np.concatenate([np.zeros((groups, 1)), ids[:, :, 0]], axis=1)
    case = accept_case(logits, tokens, positions, [2, 0, 1], sampling_arrays(groups, temperature, top_p, top_k),
                       limit=[99, 99, 33], ids=ids, probs=q / q.sum(axis=2, keepdims=True), live_vocab=live_vocab)

    got, expected = decided(interpreter.run("accept.lower_accept", case)), decided(case.expected())

    assert got == expected
    assert len(set(got["accepted"])) > 1


def test_acceptance_alone_leaves_the_context_positions(interpreter):
    case = accept_case([peaks([1, 2])], [[0, 1]], [[4, 5]], [0], sampling_arrays(1))
    alone = Case(case.arrays, case.ops[:1])

    got = decided(interpreter.run("accept.lower_accept", alone))

    assert (got["produced"], got["context_positions"]) == ([2], [-7, -7])


def test_last_launch_computes_both_ops():
    program, _, calls = accept_case([peaks([1, 2])], [[0, 1]], [[4, 5]], [0], sampling_arrays(1)).recorded()

    launches = lower("accept.lower_accept", calls, program)

    assert [launch.nodes for launch in launches] == [(), (), (10, 11)]
    assert launches[-1].kernel.ops == ("dflash.accept/1", "dflash.accepted_positions/1")


def test_refuses_to_fuse_another_op():
    calls = [OpCall("dflash.accept/1", {}, {}, "", 0), OpCall("dflash.commit/1", {}, {}, "", 1)]

    with pytest.raises(CaptureError, match="context positions alone") as e:
        lower_accept(calls, Program())

    assert e.value.code == "GPU_ACCEPT"
