"""The target's distribution and a draw from it: hand tables, and z-lab's function on the same rows."""

import numpy as np
import pytest
import torch
from dflash.model import _sampling_probs

from runtime.ops.distribution import inverse_cdf, target_distribution

INF = np.inf
LOG = np.log(np.array([0.5, 0.3, 0.2], np.float32))


@pytest.mark.parametrize(
    ("logits", "temperature", "top_k", "top_p", "expected"),
    [
        pytest.param([0, np.log(3)], 1.0, 0, 1.0, [0.25, 0.75], id="plain softmax"),
        pytest.param([0, np.log(3)], 0.5, 0, 1.0, [0.1, 0.9], id="temperature first"),
        pytest.param([1, 2, 2, 2], 1.0, 2, 1.0, [0, 0.5, 0.5, 0], id="top-k keeps exactly k, ties ascending"),
        pytest.param([0, 0, 0, 0], 1.0, 9, 1.0, [0.25] * 4, id="top-k beyond the vocabulary keeps all"),
        pytest.param(LOG, 1.0, 0, 0.5, [1, 0, 0], id="top-p: stop once the sum before reaches it"),
        pytest.param(LOG, 1.0, 0, 0.51, [0.625, 0.375, 0], id="top-p: the id that crosses is kept"),
        pytest.param(LOG, 1.0, 0, 0.99, [0.5, 0.3, 0.2], id="top-p keeps all"),
        pytest.param(LOG, 1.0, 0, 1e-9, [1, 0, 0], id="top-p always keeps one"),
        pytest.param(LOG, 1.0, 0, 0.0, [1, 0, 0], id="top-p of 0 keeps one too"),
        pytest.param([1, 1, 1, 1], 1.0, 0, 0.5, [0.5, 0.5, 0, 0], id="top-p: ties by ascending id"),
        pytest.param(LOG, 1.0, 2, 0.6, [1, 0, 0], id="top-p runs on what top-k kept and scaled"),
        pytest.param([-INF, 0, -INF], 1.0, 0, 1.0, [0, 1, 0], id="excluded ids have probability 0"),
        pytest.param([1, 2, 0], 1e-40, 0, 1.0, [0, 1, 0], id="tiniest temperature does not overflow"),
    ],
)
def test_temperature_then_top_k_then_top_p(logits, temperature, top_k, top_p, expected):
    probabilities = target_distribution(np.array(logits, np.float32), temperature, top_k, top_p)

    assert probabilities.dtype == np.float32
    assert probabilities.tolist() == pytest.approx(expected, abs=1e-6)
    assert (probabilities == 0).tolist() == [e == 0 for e in expected]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.6])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (0, 0.3), (50, 0.9), (3, 0.5), (1, 0.9)])
def test_agrees_with_zlab(temperature, top_k, top_p):
    logits = np.random.default_rng(1).normal(size=5003).astype(np.float32) * 3

    ours = target_distribution(logits, temperature, top_k, top_p)

    theirs = _sampling_probs(torch.tensor(logits)[None], temperature, top_p, top_k)[0].numpy()
    assert np.array_equal(ours > 0, theirs > 0)
    assert np.allclose(ours, theirs, rtol=2e-5, atol=1e-9)


def test_sums_that_top_p_compares_do_not_drift():
    """20,000 ids of fp32(1/20000), a little under it: 10,000 sum to less than 0.5, so one more is kept; not in fp32."""
    equal = target_distribution(np.zeros(20_000, np.float32), 1.0, 0, 1.0)

    kept = np.flatnonzero(target_distribution(np.zeros(20_000, np.float32), 1.0, 0, 0.5))

    assert kept.tolist() == list(range(10_001))
    assert np.count_nonzero(np.cumsum(equal) - equal < 0.5) == 10_000


@pytest.mark.parametrize(
    ("probabilities", "u", "token"),
    [
        pytest.param([0.5, 0.25, 0.25], 0.0, 0, id="zero"),
        pytest.param([0.5, 0.25, 0.25], 0.4999999, 0, id="below the first edge"),
        pytest.param([0.5, 0.25, 0.25], 0.5, 1, id="an edge belongs to the next id"),
        pytest.param([0.5, 0.25, 0.25], 0.75, 2, id="second edge"),
        pytest.param([0.5, 0.25, 0.25], 1 - 2**-24, 2, id="largest draw"),
        pytest.param([0, 0, 1, 0], 0.0, 2, id="zero skips leading zeros"),
        pytest.param([0, 0.5, 0, 0.5, 0], 0.5, 3, id="edge skips zeros"),
        pytest.param([0.5, 0.5, 0, 0], 1 - 2**-24, 1, id="largest draw skips trailing zeros"),
        pytest.param([0.1, 0.1], 0.5, 1, id="the draw is scaled by the total"),
        pytest.param([0.6, 0.6], 0.99, 1, id="a total above 1"),
    ],
)
def test_inverse_cdf_takes_the_first_id_beyond_the_draw(probabilities, u, token):
    assert inverse_cdf(np.array(probabilities, np.float32), u) == token


def test_inverse_cdf_sums_in_fp64():
    """Sixty-four ids of 2**-25 after one of 1: in fp32 the running sum would not move, and they could not be drawn."""
    assert inverse_cdf(np.array([1] + [2**-25] * 64, np.float32), 1 - 2**-21) == 48
