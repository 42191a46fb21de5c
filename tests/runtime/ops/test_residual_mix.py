"""Attention residuals: literals, an fp64 restatement, and rows that do not see each other."""

import numpy as np
import pytest

from runtime.ops import DType, call
from tests.oracles import kimi_numpy

F32, BF16 = DType.F32, DType.BF16


def mix(parts, norm, score, *, eps=1e-5, act=F32):
    parts = np.asarray(parts, np.float32).astype(act.numpy)
    out = np.full(parts.shape[1:], -77, act.numpy)
    call("dflash.residual_mix/1",
         {"x": parts, "norm": np.asarray(norm, np.float32), "score": np.asarray(score, np.float32), "out": out},
         parts=len(parts), rows=parts.shape[1], cols=parts.shape[2], eps=eps, act=act, w=F32)
    return out


def test_literal():
    """Rows (3, 4) and (4, 3) have rms sqrt(12.5); with norm 1 and score ln(3) * sqrt(12.5) * (1, 0) their scores differ
    by ln 3, so the second has three times the share of the first: 3/4 and 1/4."""
    out = mix([[[3, 4]], [[4, 3]]], [1, 1], [np.log(3) * np.sqrt(12.5), 0], eps=0)

    assert out.tolist() == [[pytest.approx(3.75, rel=1e-6), pytest.approx(3.25, rel=1e-6)]]


def test_one_part_is_itself():
    assert mix([[[1, -2], [5, 7]]], [1, 2], [3, 4]).tolist() == [[1, -2], [5, 7]]


@pytest.mark.parametrize("parts", [2, 9])
def test_mixture_is_that_of_the_description(parts):
    rng = np.random.default_rng(parts)
    x, norm, score = rng.normal(size=(parts, 7, 64)), 1 + 0.1 * rng.normal(size=64), rng.normal(size=64)

    got = mix(x, norm, score)

    expected = kimi_numpy.mix(list(x), norm, score, 1e-5)
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("act", [F32, BF16], ids=["f32", "bf16"])
def test_row_gives_the_same_bytes_alone_and_among_others(act):
    rng = np.random.default_rng(0)
    x, norm, score = rng.normal(size=(3, 9, 48)), np.ones(48), rng.normal(size=48)
    together = mix(x, norm, score, act=act)

    for row in range(9):
        assert mix(x[:, row:row + 1], norm, score, act=act).tobytes() == together[row:row + 1].tobytes()
