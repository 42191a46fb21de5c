"""Normalization rounds twice, and a residual is rounded before it is normalized: cases worked by hand in bf16."""

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16
ACTS = [pytest.param(DType.BF16, id="bf16"), pytest.param(DType.F32, id="f32")]


def rms_norm(x, weight, *, eps=0.0, act=DType.BF16, w=DType.BF16):
    x = np.array(x, np.float32).astype(act.numpy)
    out = np.full(x.shape, -77, act.numpy)
    call("dflash.rms_norm/1", {"x": x, "weight": np.array(weight, np.float32).astype(w.numpy), "out": out},
         rows=x.shape[0], cols=x.shape[1], eps=eps, act=act, w=w)
    return out


def add_rms_norm(residual, delta, weight, *, eps=0.0, act=DType.BF16):
    residual, delta = (np.array(v, np.float32).astype(act.numpy) for v in (residual, delta))
    out = np.full(residual.shape, -77, act.numpy)
    call("dflash.add_rms_norm/1",
         {"residual": residual, "delta": delta, "weight": np.array(weight, np.float32).astype(act.numpy), "out": out},
         rows=residual.shape[0], cols=residual.shape[1], eps=eps, act=act, w=act)
    return residual, out


def test_normalized_value_is_rounded_before_the_weight_and_after_it():
    """rms(7, 1) = 5, so x / rms = 1.4, 0.2.

    Two roundings: 1.4 -> 179/128, times 9/8 = 201.4/128 -> 201/128; 0.2 -> 205/1024, times 9/8 = 230.6/1024
    -> 231/1024.
    One rounding: 1.575 = 201.6/128 -> 202/128; 0.225 = 230.4/1024 -> 230/1024.
    """
    out = rms_norm([[7, 1]], [1.125, 1.125])

    assert out.tolist() == [[1.5703125, 0.2255859375]]
    assert np.array([1.575, 0.225]).astype(BF16).tolist() == [1.578125, 0.224609375]


def test_fp32_is_not_rounded():
    assert rms_norm([[7, 1]], [1.125, 1.125], act=DType.F32, w=DType.F32).tolist() == [
        pytest.approx([1.575, 0.225], rel=1e-6)]


def test_epsilon_is_added_to_the_mean_square():
    """sqrt(16 + 9) = 5: 0.8 -> 205/256. Beside the root it would be 4 / (4 + 9) -> 0.30859375."""
    assert rms_norm([[4, -4]], [1, 1], eps=9.0).tolist() == [[0.80078125, -0.80078125]]


def test_row_of_zeros_stays_zero():
    assert rms_norm([[0, 0, 0]], [1, 2, 3], eps=1e-6).tolist() == [[0, 0, 0]]


def test_fp32_weight_beside_bf16_rows_is_not_rounded_first():
    """1.4 -> 179/128; times 1 + 2**-8 = 179.7/128 -> 180/128. The weight as bf16 would be 1, and the result 179/128."""
    assert rms_norm([[7, 1]], [1 + 2.0**-8, 1], w=DType.F32).tolist() == [[1.40625, 0.2001953125]]


def test_residual_is_rounded_before_it_is_normalized():
    """2 + 1/128 lies halfway between two bf16 values and goes to the even one, 2.

    From 2, 1: 1 / sqrt(2.5) = 161.9/256 -> 162/256. From the unrounded sum: 1 / sqrt(2.5157) = 161.4/256 -> 161/256.
    """
    residual, out = add_rms_norm([[2, 1]], [[1 / 128, 0]], [1, 1])

    assert residual.tolist() == [[2, 1]]
    assert out.tolist() == [[1.265625, 0.6328125]]
    assert np.array([(1 / np.sqrt((2.0078125**2 + 1) / 2))]).astype(BF16).tolist() == [0.62890625]


def test_fp32_residual_keeps_its_sum():
    residual, out = add_rms_norm([[2, 1]], [[1 / 128, 0]], [1, 1], act=DType.F32)

    assert residual.tolist() == [[2.0078125, 1]]
    assert out[0, 1] == pytest.approx(0.6304840, rel=1e-6)


@pytest.mark.parametrize(
    ("residual", "delta", "expected"),
    [
        pytest.param(1.0, 2.0**-8, 1.0, id="tie to even, down"),
        pytest.param(1.0078125, 2.0**-8, 1.015625, id="tie to even, up"),
        pytest.param(256, 1.5, 258, id="nearest"),
        pytest.param(3, -3, 0, id="cancels"),
    ],
)
def test_add_rounds_the_sum_to_nearest_even(residual, delta, expected):
    held = np.array([[residual]], BF16)

    call("dflash.add/1", {"residual": held, "delta": np.array([[delta]], BF16)}, rows=1, cols=1, act=DType.BF16)

    assert held.tolist() == [[expected]]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("cols", [1, 7, 64, 129, 576, 1536])
def test_row_gives_the_same_bytes_alone_and_beside_any_neighbours(cols, act):
    rng = np.random.default_rng(cols)
    x, weight = rng.normal(size=(9, cols)), rng.normal(size=cols)
    together = rms_norm(x, weight, eps=1e-5, act=act, w=act)

    for row in range(9):
        beside_nan = np.full((3, cols), np.nan)
        beside_nan[1] = x[row]
        assert rms_norm(x[row : row + 1], weight, eps=1e-5, act=act, w=act).tobytes() == together[row].tobytes()
        assert rms_norm(beside_nan, weight, eps=1e-5, act=act, w=act)[1].tobytes() == together[row].tobytes()
