"""The router against the CPU op: ids are equal where choices are apart or exactly equal, weights within 1e-6."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, same_bits

BF16 = ml_dtypes.bfloat16


def route_case(logits, bias, top_k, *, groups=1, top_groups=1, renormalize=1, scale=1.0):
    rows, experts = logits.shape
    arrays = {"logits": np.asarray(logits, np.float32), "bias": bias, "ids": np.full((rows, top_k), -9, np.int32),
              "weights": np.full((rows, top_k), -9, np.float32)}
    return Case(arrays, [("dflash.route/1",
                          {"rows": rows, "experts": experts, "top_k": top_k, "groups": groups,
                           "top_groups": top_groups, "renormalize": renormalize, "scale": scale,
                           "w": DType.F32 if bias.dtype == np.float32 else DType.BF16})])


def apart(rows, experts, seed=0):
    """Logits whose sigmoids are evenly spaced, in another order in every row."""
    order = np.argsort(np.random.default_rng(seed).random((rows, experts)), axis=1)
    share = (order + 1) / (experts + 1)
    return np.log(share / (1 - share)).astype(np.float32)


CASES = [
    pytest.param(896, 16, {}, BF16, id="Kimi K3"),
    pytest.param(256, 8, {"scale": 2.446}, np.float32, id="Kimi-Linear"),
    pytest.param(24, 5, {"groups": 3, "top_groups": 2, "scale": 0.5}, np.float32, id="two of three groups"),
    pytest.param(40, 3, {"groups": 8, "top_groups": 1, "renormalize": 0}, BF16, id="one of eight groups"),
    pytest.param(6, 6, {"renormalize": 0}, BF16, id="all of six"),
    pytest.param(1, 1, {}, np.float32, id="one"),
]


@pytest.mark.parametrize(("experts", "top_k", "options", "w"), CASES)
def test_chooses_and_weighs_as_the_op_does(interpreter, experts, top_k, options, w):
    bias = (np.round(np.random.default_rng(1).normal(size=experts)) / 4).astype(w)
    case = route_case(apart(4, experts), bias, top_k, **options)

    got, want = interpreter.run("router.lower_route", case), case.expected()

    assert got["ids"].tolist() == want["ids"].tolist()
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"groups": 4, "top_groups": 2}], ids=str)
def test_equal_choices_go_by_ascending_id(interpreter, options):
    logits = np.zeros((3, 40), np.float32)
    logits[1, 7::9] = 3
    logits[2] = np.random.default_rng(0).integers(-2, 2, 40)
    logits[2, 5] = -np.inf
    case = route_case(logits, np.zeros(40, np.float32), 7, **options)

    got, want = interpreter.run("router.lower_route", case), case.expected()

    assert got["ids"].tolist() == want["ids"].tolist()
    assert got["ids"][0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_group_scores_the_sum_of_its_two_best(interpreter):
    logits = np.float32([[-5, 4, -5, 1, 1, 0, 2, -9, -9]])
    case = route_case(logits, np.zeros(9, BF16), 2, groups=3)

    assert interpreter.run("router.lower_route", case)["ids"].tolist() == case.expected()["ids"].tolist() == [[3, 4]]


def test_saturated_and_missing_logits_rank_as_in_the_op(interpreter):
    logits = np.array([[200, -200, np.nan, 1, -np.inf, np.inf, -85, np.nan]], np.float32)
    case = route_case(logits, np.zeros(8, BF16), 8, renormalize=0)

    got, want = interpreter.run("router.lower_route", case), case.expected()

    assert got["ids"].tolist() == want["ids"].tolist() == [[0, 5, 3, 6, 1, 4, 2, 7]]
    np.testing.assert_allclose(got["weights"], want["weights"], rtol=1e-6, atol=1e-45)


def test_a_row_has_the_same_bits_in_any_company(interpreter):
    rng = np.random.default_rng(5)
    case = route_case(rng.normal(size=(8, 60)), rng.normal(size=60).astype(BF16), 6, groups=3, top_groups=2)
    rows = {"logits", "ids", "weights"}
    op, scalars = case.ops[0]

    together = interpreter.run("router.lower_route", case)

    for row in (0, 7):
        alone = replace(case, arrays={n: a[row:row + 1] if n in rows else a for n, a in case.arrays.items()},
                        ops=[(op, {**scalars, "rows": 1})])
        single = interpreter.run("router.lower_route", alone)
        assert all(same_bits(together[n][row:row + 1], single[n]) for n in ("ids", "weights"))
