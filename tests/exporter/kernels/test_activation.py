"""The gated activations and the sigmoid gate as kernels of their own, against the CPU ops."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits

BF16 = ml_dtypes.bfloat16
EXTREMES = [0.0, -0.0, 1e-3, -0.24, 0.26, 5, -30, 90, -95, 200, -200, np.inf]
OPS = {
    "silu": ("dflash.silu_mul/1", {}),
    "situ, up unbounded": ("dflash.situ_mul/1", {"situ_beta": 4.0, "situ_linear_beta": 0.0}),
    "situ": ("dflash.situ_mul/1", {"situ_beta": 0.7, "situ_linear_beta": 25.0}),
    "sigmoid": ("dflash.sigmoid_mul/1", {}),
}


def activation_case(name, rows, cols):
    op, scalars = OPS[name]
    gate, up = (np.random.default_rng([cols, i]).standard_normal((rows, cols)) * 4 for i in range(2))
    gate[0, :len(EXTREMES)] = EXTREMES
    up[1, :len(EXTREMES)] = EXTREMES
    arrays = {"gate_up": np.concatenate([gate, up], 1).astype(BF16), "out": np.full((rows, cols), 77, BF16)}
    if name == "sigmoid":
        arrays |= {"x": up.astype(BF16), "gate": gate.astype(BF16)}
    return Case(arrays, [(op, {"rows": rows, "cols": cols, "act": DType.BF16, **scalars})])


@pytest.mark.parametrize("cols", [24, 1100])
@pytest.mark.parametrize("name", OPS)
def test_computes_what_the_op_says(interpreter, name, cols):
    case = activation_case(name, 3, cols)

    got = interpreter.run("lower.lower_graph", case)["out"].astype(np.float32)

    want = case.expected()["out"].astype(np.float32)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    finite = np.isfinite(want)
    assert (got == want)[finite].mean() > 0.99
    np.testing.assert_allclose(got[finite], want[finite], rtol=2.0**-7)  # one rounding apart
    assert np.array_equal(np.signbit(got[finite]), np.signbit(want[finite]))


@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_in_any_company(interpreter, name):
    case = activation_case(name, 9, 40)
    op, scalars = case.ops[0]
    alone = replace(case, arrays={n: a[8:] for n, a in case.arrays.items()}, ops=[(op, {**scalars, "rows": 1})])

    together, single = (interpreter.run("lower.lower_graph", c)["out"] for c in (case, alone))

    assert same_bits(together[8:], single)


def test_fp32_activations_are_refused():
    case = activation_case("situ", 3, 24)
    program, _, calls = case.recorded()

    with pytest.raises(Exception, match="bf16"):
        lower("activation.lower_gated", [replace(calls[0], scalars={**calls[0].scalars, "act": DType.F32})], program)
