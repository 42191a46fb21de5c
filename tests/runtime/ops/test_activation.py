"""silu is rounded before it multiplies: cases worked by hand in bf16, and the far ends of the curve."""

import ml_dtypes
import numpy as np
import pytest

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
