"""The mixture of residual parts against the CPU op."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, same_bits

BF16 = ml_dtypes.bfloat16


def mix_case(parts, rows, cols, *, w=BF16, only=None, scale=1.0):
    rng = np.random.default_rng([parts, rows, cols])
    x = (rng.standard_normal((parts, rows, cols)) * rng.uniform(0.5, 3, (parts, rows, 1))).astype(BF16)
    arrays = {"x": x if only is None else x[:, only:only + 1].copy(),
              "norm": (1 + 0.1 * rng.standard_normal(cols)).astype(w),
              "score": (rng.standard_normal(cols) * scale / cols**0.5).astype(w)}
    arrays["out"] = np.full((arrays["x"].shape[1], cols), 77, BF16)
    return Case(arrays, [("dflash.residual_mix/1",
                          {"parts": parts, "rows": arrays["x"].shape[1], "cols": cols, "eps": 1e-5, "act": DType.BF16,
                           "w": DType.F32 if w is np.float32 else DType.BF16})])


@pytest.mark.parametrize("w", [BF16, np.float32])
@pytest.mark.parametrize(("parts", "rows", "cols"), [(2, 3, 24), (9, 2, 1200), (12, 2, 600), (1, 2, 16)])
def test_computes_what_the_op_says(interpreter, parts, rows, cols, w):
    case = mix_case(parts, rows, cols, w=w)

    got = interpreter.run("residual_mix.lower_residual_mix", case)["out"].astype(np.float32)

    want = case.expected()["out"].astype(np.float32)
    assert (got == want).mean() > 0.99
    assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()  # one rounding apart


def test_the_epsilon_counts_and_a_part_far_ahead_takes_all(interpreter):
    case = mix_case(3, 1, 16, scale=0.0)
    case.arrays["x"][...] = np.array([1e-3, 2, 1e-3], BF16)[:, None, None]
    case.arrays["score"][...] = 100

    got = interpreter.run("residual_mix.lower_residual_mix", case)

    assert same_bits(got["out"], case.expected()["out"])
    assert (got["out"] == 2).all()


def test_rows_neither_see_each_other_nor_depend_on_their_number(interpreter):
    case = mix_case(9, 8, 600)
    case.arrays["x"][:, 3] = np.nan

    together = interpreter.run("residual_mix.lower_residual_mix", case)["out"]

    for row in (0, 7):
        single = interpreter.run("residual_mix.lower_residual_mix", mix_case(9, 8, 600, only=row))["out"]
        assert same_bits(together[row:row + 1], single)
    assert np.isnan(together[3].astype(np.float32)).all()
