"""The grouped convolution is form A: literals worked by hand, a slow restatement, and the same chain in torch."""

import ml_dtypes
import numpy as np
import pytest
import torch
from dflash_core.errors import FormatError

from runtime.ops.registry import DType, call

BF16 = ml_dtypes.bfloat16
INF = np.inf
ACTS = [pytest.param(DType.BF16, id="bf16"), pytest.param(DType.F32, id="f32")]


def convolve(x, base, delta, *, block_rows, group_size=1, side=0, act=DType.BF16):
    """x [rows, hidden]; base [taps, hidden] and delta [rows, taps, groups] of `side`; the other side is poison."""
    x, base, delta = np.array(x, np.float32), np.array(base, np.float32), np.array(delta, np.float32)
    rows, hidden = x.shape
    taps = base.shape[0]
    both_bases = np.full((2, taps, hidden), 1000.0, np.float32)
    both_deltas = np.full((rows, 2, taps, hidden // group_size), 1000.0, np.float32)
    both_bases[side], both_deltas[:, side] = base, delta
    dtype = act.numpy
    out = np.full((rows, hidden), -77.0, dtype)
    arrays = {"x": x.astype(dtype), "delta": both_deltas.reshape(rows, -1).astype(dtype),
              "base": both_bases.astype(dtype), "out": out}
    call("dflash.grouped_conv/1", arrays, rows=rows, hidden=hidden, block_rows=block_rows, taps=taps,
         group_size=group_size, side=side, act=act, w=act)
    return out.astype(np.float32)


def convolve_column(x, base, delta, block_rows, act=DType.BF16):
    """One channel: x [rows], base [taps], delta [taps] the same in every row."""
    x = np.array(x, np.float32)[:, None]
    delta = np.tile(np.array(delta, np.float32)[None, :, None], (len(x), 1, 1))
    return convolve(x, np.array(base)[:, None], delta, block_rows=block_rows, act=act)[:, 0]


def r(value: float) -> float:
    return float(np.float32(value).astype(BF16))


def slow_column(x, base, delta, block_rows, form, live=lambda i, t, block: i % block >= t):
    """One channel element by element, in each of the four known rounding forms (fp64 inside, exact for bf16 input)."""
    out = []
    for i in range(len(x)):
        acc = 0.0
        for t, (b, d) in enumerate(zip(base, delta, strict=True)):
            value = x[i - t] if live(i, t, block_rows) and i >= t else 0.0
            if form == "A":
                product = r(r(b + d) * value)
                acc = product if t == 0 else r(acc + product)
            elif form == "B":
                acc = r(acc + r(b * value))
                acc = r(acc + d * value)
            elif form == "C":
                acc = r(acc + r(b * value))
                acc = r(acc + r(d * value))
            elif form == "E":
                acc = acc + (b + d) * value
        out.append(r(acc) if form == "E" else acc)
    return out


BLOCKS = [
    pytest.param(5, 10, [1, 3, 6, 9, 12, 6, 13, 21, 24, 27], id="block 5"),
    pytest.param(8, 17, [1, 3, 6, 9, 12, 15, 18, 21, 9, 19, 30, 33, 36, 39, 42, 45, 17], id="block 8"),
    pytest.param(16, 18, [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 17, 35], id="block 16"),
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("block_rows", "rows", "expected"), BLOCKS)
def test_taps_stop_at_the_start_of_their_block(block_rows, rows, expected, act):
    out = convolve_column(range(1, rows + 1), [1, 1, 1], [0, 0, 0], block_rows, act)

    assert out.tolist() == expected


def test_block_of_five_is_not_masked_with_four():
    """`i & (block - 1)` is only a remainder for powers of two; at 5 it gives this other row."""
    wrong = slow_column(range(1, 11), [1, 1, 1], [0, 0, 0], 5, "A", live=lambda i, t, block: (i & (block - 1)) >= t)

    out = convolve_column(range(1, 11), [1, 1, 1], [0, 0, 0], 5)

    assert wrong == [1, 2, 3, 4, 12, 15, 18, 21, 9, 10]
    assert out.tolist() == [1, 3, 6, 9, 12, 6, 13, 21, 24, 27]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("act", ACTS)
def test_channels_of_a_group_share_the_coefficient_of_their_own_row(act, side):
    x = [[1, 2, 3, 4], [5, 6, 7, 8]]
    base = [[1, 2, 3, 4], [10, 20, 30, 40]]
    delta = [[[0.5, 0.25], [1, 2]], [[0, -1], [2, -4]]]

    out = convolve(x, base, delta, block_rows=2, group_size=2, side=side, act=act)

    assert out.tolist() == [[1.5, 5, 9.75, 17], [17, 56, 92, 168]]


TINY = 2.0**-9
ROUNDING = [
    pytest.param(2, [3, 89, 3, 89], [9, 272, 9, 272], [9, 270, 9, 270], id="block 2: 272, not 270"),
    pytest.param(4, [3, 89, 91, 5] * 2, [9, 272, 360, 106] * 2, [9, 270, 362, 106] * 2, id="block 4"),
    pytest.param(5, [3, 89, 91, 5, 7, 89, 3, 1], [9, 272, 360, 106, 26, 268, 98, 6],
                 [9, 270, 362, 106, 26, 268, 98, 6], id="block 5"),
]


@pytest.mark.parametrize(("block_rows", "x", "expected", "rounded_once"), ROUNDING)
def test_every_product_and_sum_is_rounded_to_bf16(block_rows, x, expected, rounded_once):
    out = convolve_column(x, [3, 1], [TINY, TINY], block_rows)

    assert out.tolist() == expected
    assert slow_column(x, [3, 1], [TINY, TINY], block_rows, "E") == rounded_once


@pytest.mark.parametrize(
    ("form", "second_row"),
    [
        pytest.param("A", 2.875, id="A: coefficient, product and sum rounded"),
        pytest.param("B", 3.0625, id="B: fused multiply-add of delta"),
        pytest.param("C", 2.9375, id="C: base and delta apart"),
        pytest.param("E", 3.015625, id="E: rounded once"),
    ],
)
def test_four_rounding_forms_part_ways_and_ours_is_the_first(form, second_row):
    x, base, delta = [18, 21], [1, -1], [13 / 256, -15 / 256]

    out = convolve_column(x, base, delta, 2)

    assert slow_column(x, base, delta, 2, form) == [18.875, second_row]
    assert out.tolist() == [18.875, 2.875]


def test_fp32_activations_are_not_rounded():
    assert convolve_column([18, 21], [1, -1], [13 / 256, -15 / 256], 2, DType.F32).tolist() == [18.9140625, 3.01171875]
    assert convolve_column([3, 89], [3, 1], [TINY, TINY], 2, DType.F32).tolist() == [9.005859375, 270.1796875]


@pytest.mark.parametrize("act", ACTS)
def test_dead_tap_is_selected_away_so_infinity_stays_in_its_block(act):
    """A mask that multiplies would make row 2 a NaN: 2 + 0 * infinity."""
    out = convolve_column([1, INF, 2, 3], [1, 1], [0, 0], 2, act)

    assert out.tolist() == [1, INF, 2, 5]


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("block_rows", [5, 8, 16])
def test_equals_the_bf16_op_chain_of_torch_bit_for_bit(block_rows, taps):
    rng = np.random.default_rng(block_rows * 10 + taps)
    rows, hidden, group_size = 2 * block_rows, 32, 4
    x, base = rng.normal(size=(rows, hidden)), rng.normal(size=(taps, hidden))
    delta = rng.normal(size=(rows, taps, hidden // group_size)) * 0.3

    out = convolve(x, base, delta, block_rows=block_rows, group_size=group_size)

    tx, tb, td = (torch.tensor(v.astype(np.float32)).bfloat16() for v in (x, base, delta))
    expected = None
    for t in range(taps):
        shifted = torch.zeros_like(tx)
        shifted[t:] = tx[: rows - t]
        shifted[torch.arange(rows) % block_rows < t] = 0
        product = (tb[t] + td[:, t].repeat_interleave(group_size, dim=-1)) * shifted
        expected = product if expected is None else expected + product
    assert np.array_equal(out, expected.float().numpy())


@pytest.mark.parametrize("act", ACTS)
def test_group_gives_the_same_bits_alone_and_in_a_batch_of_four(act):
    rng = np.random.default_rng(3)
    x, delta = rng.normal(size=(32, 64)).astype(np.float32), rng.normal(size=(32, 3, 4)).astype(np.float32)
    base = rng.normal(size=(3, 64)).astype(np.float32)
    x[:8], delta[24:] = INF, np.nan

    with np.errstate(invalid="ignore"):
        together = convolve(x, base, delta, block_rows=8, group_size=16, act=act)

    for group in (slice(8, 16), slice(16, 24)):
        alone = convolve(x[group], base, delta[group], block_rows=8, group_size=16, act=act)
        assert together[group].tobytes() == alone.tobytes()
        assert np.isfinite(alone).all()


def test_output_may_overwrite_the_input():
    x = np.array([[3], [89]], BF16)
    arrays = {"x": x, "out": x, "delta": np.full((2, 4), TINY, BF16), "base": np.array([[[3], [1]]] * 2, BF16)}

    call("dflash.grouped_conv/1", arrays, rows=2, hidden=1, block_rows=2, taps=2, group_size=1, side=0,
         act=DType.BF16, w=DType.BF16)

    assert x.tolist() == [[9.0], [272.0]]


def test_weights_may_be_fp32_beside_bf16_activations():
    """base 1 + 2**-9 is not a bf16 value: it is rounded after delta is added, not before."""
    out = np.zeros((1, 1), BF16)
    arrays = {"x": np.array([[1]], BF16), "delta": np.full((1, 2), 2.0**-8, BF16), "out": out,
              "base": np.full((2, 1, 1), 1 + 2.0**-9, np.float32)}

    call("dflash.grouped_conv/1", arrays, rows=1, hidden=1, block_rows=1, taps=1, group_size=1, side=0,
         act=DType.BF16, w=DType.F32)

    assert out.tolist() == [[1.0078125]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"group_size": 3}, id="groups do not divide"),
        pytest.param({"group_size": 0}, id="no group"),
        pytest.param({"side": 2}, id="a third side"),
        pytest.param({"block_rows": 0}, id="empty block"),
    ],
)
def test_rejects_impossible_shape(change):
    scalars = {"rows": 2, "hidden": 4, "block_rows": 2, "taps": 1, "group_size": 2, "side": 0} | change
    columns = 2 * 4 // scalars["group_size"] if scalars["group_size"] else 0
    arrays = {"x": np.zeros((2, 4), BF16), "out": np.zeros((2, 4), BF16), "delta": np.zeros((2, columns), BF16),
              "base": np.zeros((2, 1, 4), BF16)}

    with pytest.raises(FormatError, match="impossible shape") as e:
        call("dflash.grouped_conv/1", arrays, **scalars, act=DType.BF16, w=DType.BF16)

    assert e.value.code == "OP_SCALAR"
