"""Sampling: greedy ties, the target's distribution after top-k and top-p, and the CPU op's draws."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.ops.distribution import inverse_cdf
from runtime.ops.philox import Purpose, draw
from tests.exporter.kernels.interpreter import Case

NAN, INF = np.nan, np.inf


def sampling_arrays(count, temperature=0.0, top_p=1.0, top_k=0, seeds=None):
    return {"temperature": np.full(count, temperature, np.float32), "top_p": np.full(count, top_p, np.float32),
            "top_k": np.full(count, top_k, np.int32),
            "seed": np.arange(count, dtype=np.uint64) if seeds is None else np.array(seeds, np.uint64)}


def sample_case(logits, positions, slots, settings, live_vocab=None):
    logits = np.array(logits, np.float32)
    groups, vocab = logits.shape
    arrays = {"logits": logits, "positions": np.array(positions, np.int32), "slots": np.array(slots, np.int32),
              **settings, "emitted": np.full((groups, 1), -7, np.int32), "produced": np.full(groups, -7, np.int32)}
    return Case(arrays, [("dflash.sample/1", {"groups": groups, "vocab": vocab, "live_vocab": live_vocab or vocab,
                                              "max_slots": len(settings["seed"])})])


def sampled(interpreter, case):
    got = interpreter.run("sampling.lower_sample", case)
    return got["emitted"][:, 0].tolist(), got["produced"].tolist()


@pytest.mark.parametrize(
    ("row", "live_vocab", "token"),
    [
        pytest.param([0, 3, 1, 2], 4, 1, id="highest"),
        pytest.param([1, 3, 3, 2], 4, 1, id="tie: lowest id"),
        pytest.param([0, 1, 9, 9], 2, 1, id="padded ids never win"),
        pytest.param([16, 16.03125, 0, 0], 4, 1, id="fp32 logits that bf16 would tie"),
        pytest.param([-INF, -INF, -1, -INF], 4, 2, id="excluded ids"),
        pytest.param([-1, -0.0, 0.0, -2], 4, 1, id="zeros are equal"),
    ],
)
def test_greedy_sample_is_the_lowest_of_the_best_live_ids(interpreter, row, live_vocab, token):
    assert sampled(interpreter, sample_case([row], [4], [0], sampling_arrays(1), live_vocab)) == ([token], [1])


def test_greedy_sample_ties_across_chunks_go_to_the_lowest_id(interpreter):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 40, (4, 4500)) / 8
    case = sample_case(logits, [1, 2, 3, 4], [3, 1, 0, 2], sampling_arrays(4), 4400)

    assert sampled(interpreter, case) == (case.expected()["emitted"][:, 0].tolist(), [1, 1, 1, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("position", "slot"), [(-1, 0), (5, -1), (-1, -1)])
def test_dead_lane_emits_nothing_and_is_not_checked(interpreter, position, slot, temperature):
    case = sample_case([[NAN, NAN]], [position], [slot], sampling_arrays(1, temperature))

    assert sampled(interpreter, case) == ([0], [0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0, NAN, 1], [0, INF, 1], [-INF, -INF, -INF], [0, -NAN, 1]], ids=str)
def test_lane_without_a_finite_best_logit_produces_minus_one(interpreter, row, temperature):
    case = sample_case([[1, 2, 3], row], [5, 5], [0, 1], sampling_arrays(2, temperature, top_k=1))

    assert sampled(interpreter, case) == ([2, 0], [1, -1])


def test_each_lane_samples_with_the_settings_of_its_slot(interpreter):
    row = np.log(np.float32([0.1, 0.2, 0.3, 0.4]))
    settings = {"temperature": np.float32([0, 5, 5, 5]), "top_p": np.float32([1, 1, 1e-6, 1]),
                "top_k": np.int32([0, 1, 0, 0]), "seed": np.array([1, 1, 1, 2**63 + 5], np.uint64)}

    tokens, produced = sampled(interpreter, sample_case([row] * 4, [7] * 4, [3, 2, 1, 0], settings))

    softened = np.float32([0.1, 0.2, 0.3, 0.4]) ** np.float32(0.2)
    assert tokens == [inverse_cdf(softened, draw(2**63 + 5, 8, Purpose.TARGET)), 3, 3, 3]
    assert produced == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        pytest.param(1.0, 0, 1.0, {0, 1, 2, 3, 4, 5}, id="all"),
        pytest.param(1.0, 3, 1.0, {0, 2, 4}, id="top-k cuts a tie by id"),
        pytest.param(1.0, 99, 1.0, {0, 1, 2, 3, 4, 5}, id="top-k beyond the vocabulary"),
        pytest.param(1.0, 0, 0.0, {2}, id="top-p 0 keeps the best"),
        pytest.param(1.0, 0, 0.25, {2}, id="top-p met by the first"),
        pytest.param(1.0, 0, 0.5, {2, 0}, id="top-p cuts a tie by id"),
        pytest.param(1.0, 0, 0.85, {2, 0, 4, 5}, id="top-p"),
        pytest.param(1.0, 4, 0.5, {2, 0}, id="top-p of what top-k left"),
        pytest.param(1.0, 3, 0.95, {2, 0, 4}, id="both cut in one tie"),
    ],
)
def test_only_ids_that_the_settings_keep_are_drawn(interpreter, temperature, top_k, top_p, kept):
    row = np.log(np.float32([0.2, 0.08, 0.3, 0.02, 0.2, 0.2]))
    case = sample_case([row] * 9, [41] * 9, range(9), sampling_arrays(9, temperature, top_p, top_k))

    tokens, _ = sampled(interpreter, case)

    assert tokens == case.expected()["emitted"][:, 0].tolist()
    assert set(tokens) <= kept
    assert len(set(tokens)) >= min(len(kept), 2)


@pytest.mark.parametrize("temperature", [0.02, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (200, 0.7)])
def test_draws_over_several_blocks_are_the_cpu_ops(interpreter, temperature, top_k, top_p):
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(3, 9000)).round(2) * 3
    case = sample_case(logits, [4, 5, 6], [2, 0, 1], sampling_arrays(3, temperature, top_p, top_k), 8900)

    tokens, produced = sampled(interpreter, case)

    assert tokens == case.expected()["emitted"][:, 0].tolist()
    assert produced == [1, 1, 1]
