"""The norm kernel alone, with the residual add, and the add alone: bits of the CPU ops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case

BF16 = ml_dtypes.bfloat16
OPS = {
    "norm": ("dflash.rms_norm/1", {"x": "x"}),
    "add and norm": ("dflash.add_rms_norm/1", {"residual": "x"}),
    "add": ("dflash.add/1", {"residual": "x"}),
}


@pytest.mark.parametrize("cols", [64, 576])
@pytest.mark.parametrize("name", OPS)
def test_rounds_as_the_op_does(interpreter, name, cols):
    rng = np.random.default_rng(cols)
    op, names = OPS[name]
    arrays = {"x": rng.standard_normal((5, cols)).astype(BF16), "delta": rng.standard_normal((5, cols)).astype(BF16),
              "weight": (1 + 0.1 * rng.standard_normal(cols)).astype(BF16), "out": np.zeros((5, cols), BF16)}
    scalars = {"rows": 5, "cols": cols, "act": DType.BF16}
    if name != "add":
        scalars |= {"eps": 1e-5, "w": DType.BF16}
    case = Case(arrays, [(op, scalars)], names={0: names})

    got, want = interpreter.run("lower.lower_graph", case), case.expected()

    for array in ("x", "out"):
        assert (got[array] == want[array]).mean() > 0.999, array
        apart = np.abs(got[array].astype(np.float32) - want[array].astype(np.float32))
        assert apart.max() <= 2.0**-7 * np.abs(want[array].astype(np.float32)).max(), array
