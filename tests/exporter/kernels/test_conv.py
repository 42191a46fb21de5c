"""The convolution kernel has the CPU op's bits: on the literals that tell roundings apart, and on random data."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, same_bits

BF16 = ml_dtypes.bfloat16
INF = np.inf


def conv_case(x, delta, base, *, block_rows, group_size, side=0, w=BF16):
    """x [rows, hidden]; delta [rows, 2, taps, groups]; base [2, taps, hidden]."""
    x, base = np.array(x, np.float32), np.array(base, np.float32)
    rows, hidden = x.shape
    arrays = {"x": x.astype(BF16), "delta": np.array(delta, np.float32).reshape(rows, -1).astype(BF16),
              "base": base.astype(w), "out": np.full((rows, hidden), 77, BF16)}
    return Case(arrays, [("dflash.grouped_conv/1",
                          {"rows": rows, "hidden": hidden, "block_rows": block_rows, "taps": base.shape[1],
                           "group_size": group_size, "side": side, "act": DType.BF16,
                           "w": DType.F32 if w is np.float32 else DType.BF16})])


def one_channel(x, base, delta, block_rows):
    """One channel of one group, the same coefficients in every row, on side 0."""
    taps, rows = len(base), len(x)
    return conv_case([[v] for v in x], [[[[d] for d in delta], [[0]] * taps]] * rows,
                     [[[b] for b in base], [[0]] * taps], block_rows=block_rows, group_size=1)


TINY = 2.0**-9
LITERALS = [
    pytest.param([3, 89, 3, 89], [3, 1], [TINY, TINY], 2, [9, 272, 9, 272], id="272, not 270"),
    pytest.param([3, 89, 91, 5], [3, 1], [TINY, TINY], 4, [9, 272, 360, 106], id="block 4"),
    pytest.param([3, 89, 91, 5, 7, 89, 3, 1], [3, 1], [TINY, TINY], 5, [9, 272, 360, 106, 26, 268, 98, 6],
                 id="block 5"),
    pytest.param([18, 21], [1, -1], [13 / 256, -15 / 256], 2, [18.875, 2.875], id="four forms apart"),
    pytest.param([1, INF, 2, 3], [1, 1], [0, 0], 2, [1, INF, 2, 5], id="dead tap beside infinity"),
    pytest.param(range(1, 11), [1, 1, 1], [0, 0, 0], 5, [1, 3, 6, 9, 12, 6, 13, 21, 24, 27], id="taps 3, block 5"),
    pytest.param(range(1, 18), [1, 1, 1], [0, 0, 0], 8,
                 [1, 3, 6, 9, 12, 15, 18, 21, 9, 19, 30, 33, 36, 39, 42, 45, 17], id="taps 3, block 8"),
    pytest.param(range(1, 19), [1, 1, 1], [0, 0, 0], 16,
                 [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 17, 35], id="taps 3, block 16"),
]


@pytest.mark.parametrize(("x", "base", "delta", "block_rows", "out"), LITERALS)
def test_rounds_after_every_step(interpreter, x, base, delta, block_rows, out):
    got = interpreter.run("conv.lower_grouped_conv", one_channel(x, base, delta, block_rows))

    assert got["out"][:, 0].astype(np.float32).tolist() == out


def test_channels_of_a_group_share_their_coefficients(interpreter):
    delta = [[[[0.5, 0.25], [1, 2]], [[0, 0], [0, 0]]], [[[0, -1], [2, -4]], [[0, 0], [0, 0]]]]
    case = conv_case([[1, 2, 3, 4], [5, 6, 7, 8]], delta, [[[1, 2, 3, 4], [10, 20, 30, 40]], [[0] * 4] * 2],
                     block_rows=2, group_size=2)

    got = interpreter.run("conv.lower_grouped_conv", case)

    assert got["out"].astype(np.float32).tolist() == [[1.5, 5, 9.75, 17], [17, 56, 92, 168]]


@pytest.mark.parametrize("block_rows", [5, 8, 16])
@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("w", [BF16, np.float32])
def test_random_data_has_the_bits_of_the_cpu_op(interpreter, block_rows, taps, side, w):
    rng = np.random.default_rng(block_rows * 10 + taps)
    rows, hidden, group_size = 2 * block_rows, 528, 16
    case = conv_case(rng.normal(size=(rows, hidden)), rng.normal(size=(rows, 2, taps, hidden // group_size)),
                     rng.normal(size=(2, taps, hidden)), block_rows=block_rows, group_size=group_size, side=side, w=w)

    assert same_bits(interpreter.run("conv.lower_grouped_conv", case)["out"], case.expected()["out"])
