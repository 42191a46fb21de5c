"""silu is rounded before it multiplies: cases worked by hand in bf16, and the far ends of the curve."""

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16


def silu_mul(gate, up, act=DType.BF16):
    gate_up = np.concatenate([np.array(gate, np.float32), np.array(up, np.float32)], axis=-1).astype(act.numpy)
    rows, both = gate_up.shape
    out = np.full((rows, both // 2), -77, act.numpy)
    call("dflash.silu_mul/1", {"gate_up": gate_up, "out": out}, rows=rows, cols=both // 2, act=act)
    return out


@pytest.mark.parametrize(
    ("gate", "up", "expected", "rounded_once"),
    [
        # silu(1) = 0.7310586 = 187.15/256 -> 187/256; times 9 = 210.4/32 -> 210/32. Once: 6.5795 = 210.5/32 -> 211/32.
        pytest.param(1, 9, 6.5625, 6.59375, id="1 x 9"),
        # silu(2) = 1.7615942 = 225.48/128 -> 225/128; times 9/8 = 253.1/128. Once: 253.67/128 -> 254/128.
        pytest.param(2, 1.125, 1.9765625, 1.984375, id="2 x 1.125"),
        # silu(-1) = -0.2689414 = -137.7/512 -> -138/512; times 7 = -241.5/128, a tie, -> -242/128. Once: -240.97/128.
        pytest.param(-1, 7, -1.890625, -1.8828125, id="-1 x 7"),
    ],
)
def test_silu_is_rounded_before_the_product(gate, up, expected, rounded_once):
    out = silu_mul([[gate]], [[up]])

    assert out.tolist() == [[expected]]
    assert float(BF16(gate / (1 + np.exp(-gate)) * up)) == rounded_once


def test_fp32_is_not_rounded():
    assert silu_mul([[1, 2]], [[9, 1.125]], DType.F32).tolist() == [pytest.approx([6.5795274, 1.9817935], rel=1e-6)]


@pytest.mark.parametrize("act", [DType.BF16, DType.F32])
def test_far_gates_give_zero_or_themselves_and_no_warning(act, recwarn):
    assert silu_mul([[-1e30, -200, 200, 0]], [[2, 2, 2, 5]], act).tolist() == [[0, 0, 400, 0]]
    assert not recwarn.list


def test_gate_comes_first_and_up_second():
    assert silu_mul([[0, 100]], [[3, 4]]).tolist() == [[0, 400]]


def test_row_gives_the_same_bytes_alone_and_beside_others():
    rng = np.random.default_rng(5)
    gate, up = rng.normal(size=(40, 96)) * 4, rng.normal(size=(40, 96))
    together = silu_mul(gate, up, DType.F32)

    for row in range(40):
        assert silu_mul(gate[row : row + 1], up[row : row + 1], DType.F32).tobytes() == together[row].tobytes()


def situ_mul(gate, up, beta, linear_beta, act=DType.F32):
    gate_up = np.concatenate([np.array(gate, np.float32), np.array(up, np.float32)], axis=-1).astype(act.numpy)
    out = np.full((len(gate_up), gate_up.shape[1] // 2), -77, act.numpy)
    call("dflash.situ_mul/1", {"gate_up": gate_up, "out": out}, rows=len(gate_up), cols=out.shape[1], situ_beta=beta,
         situ_linear_beta=linear_beta, act=act)
    return out


def test_situ_bounds_gate_and_up():
    """Gate 4 gives 4 tanh(1) sigmoid(4), up 25 gives 25 tanh(1); without a linear beta up is itself."""
    gate, up = 4 * np.tanh(1) / (1 + np.exp(-4)), 25 * np.tanh(1)

    assert situ_mul([[4]], [[25]], 4, 25).tolist() == [[pytest.approx(gate * up, rel=1e-6)]]
    assert situ_mul([[4]], [[25]], 4, 0).tolist() == [[pytest.approx(gate * 25, rel=1e-6)]]
    assert situ_mul([[-200, 200]], [[1, -900]], 4, 25).tolist() == [[0, pytest.approx(-100, rel=1e-6)]]


def test_situ_is_rounded_once():
    """Over 127 values of up: the exact product rounded, which rounding the activated gate first would not give."""
    exact = 4 * np.tanh(0.25) / (1 + np.exp(-1)) * np.arange(1, 128.0)
    out = situ_mul(np.ones((127, 1)), np.arange(1, 128.0)[:, None], 4, 0, DType.BF16)[:, 0]

    assert out.tolist() == exact.astype(np.float32).astype(BF16).tolist()
    twice = (BF16(exact[0]).astype(np.float32) * np.arange(1, 128, dtype=np.float32)).astype(BF16)
    assert out.tolist() != twice.tolist()


@pytest.mark.parametrize(("beta", "linear"), [(-1, 0), (0, 25), (4, -1), (np.nan, 0), (np.inf, 0)])
def test_impossible_beta_is_refused(beta, linear):
    with pytest.raises(FormatError, match="impossible beta"):
        situ_mul([[1]], [[1]], beta, linear)


@pytest.mark.parametrize("act", [DType.F32, DType.BF16], ids=["f32", "bf16"])
def test_output_gate_is_a_sigmoid(act):
    """3 * sigmoid(0) = 1.5; sigmoid(ln 3) = 0.75; a gate far below gives 0 without a warning."""
    x, gate = (np.array(v, np.float32).astype(act.numpy) for v in ([[3, 8, 5]], [[0, np.log(3), -200]]))
    out = np.full((1, 3), -77, act.numpy)

    call("dflash.sigmoid_mul/1", {"x": x, "gate": gate, "out": out}, rows=1, cols=3, act=act)

    assert out.astype(np.float32).tolist() == [[1.5, pytest.approx(6, rel=1e-2 if act is DType.BF16 else 1e-6), 0]]
