"""The short convolution against a torch layer, and its window against the rows that were kept."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16
CHANNELS, HISTORY, SLOTS = 6, 3, 4
ACTS = [pytest.param(DType.BF16, id="bf16"), pytest.param(DType.F32, id="f32")]


class Conv:
    """One layer's weight and windows; `run` takes groups of rows, `keep` commits some of them."""

    def __init__(self, act=DType.F32, seed=0):
        rng = np.random.default_rng(seed)
        self.act = act
        self.weight = rng.normal(size=(CHANNELS, HISTORY + 1)).astype(np.float32)
        self.window = np.full((SLOTS, HISTORY, CHANNELS), np.nan, act.numpy)  # what a slot holds before is never read

    def shape(self, groups, block_rows):
        return {"groups": groups, "block_rows": block_rows, "channels": CHANNELS, "history": HISTORY,
                "max_slots": SLOTS, "act": self.act}

    def run(self, x, positions, slots):
        out = np.full(x.shape, -77, self.act.numpy)
        call("dflash.short_conv/1", {**self.rows(x, positions, slots), "weight": self.weight, "out": out},
             w=DType.F32, **self.shape(len(slots), len(x) // len(slots)))
        return out

    def keep(self, x, positions, slots):
        call("dflash.conv_window/1", self.rows(x, positions, slots), **self.shape(len(slots), len(x) // len(slots)))

    def rows(self, x, positions, slots):
        return {"x": x, "positions": np.array(positions, np.int32), "slots": np.array(slots, np.int32),
                "window": self.window}


def rows_of(count, act=DType.F32, seed=1):
    return np.random.default_rng(seed).normal(size=(count, CHANNELS)).astype(act.numpy)


def torch_conv(x, weight):
    x = torch.from_numpy(x.astype(np.float32)).T[None]
    padded = functional.pad(x, (HISTORY, 0))
    y = functional.conv1d(padded, torch.from_numpy(weight)[:, None], groups=CHANNELS)
    return functional.silu(y)[0].T.numpy()


def test_convolution_is_torchs_depthwise_conv1d_with_silu():
    conv, x = Conv(), rows_of(20)

    out = conv.run(x, range(20), [0])

    np.testing.assert_allclose(out, torch_conv(x, conv.weight), rtol=0, atol=1e-6)


def test_literal():
    """Weight 1, 10, 100, 1000 on rows 1, 2: the last tap meets the row itself. silu(y) is y for these."""
    conv = Conv()
    conv.weight[...] = [1, 10, 100, 1000]

    out = conv.run(np.tile(np.float32([[1], [2]]), CHANNELS), [0, 1], [0])

    assert out.tolist() == [[1000.0] * CHANNELS, [2100.0] * CHANNELS]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("cuts", [[20], [1] * 20, [2, 1, 7, 10], [3, 4, 13]], ids=str)
def test_any_cut_of_a_sequence_gives_the_same_bytes(cuts, act):
    whole, x = Conv(act), rows_of(20, act)
    expected = whole.run(x, range(20), [2])
    whole.keep(x, range(20), [2])

    conv, first = Conv(act), 0
    for count in cuts:
        rows, positions = x[first:first + count], range(first, first + count)
        assert conv.run(rows, positions, [2]).tobytes() == expected[first:first + count].tobytes()
        conv.keep(rows, positions, [2])
        first += count

    assert conv.window[2].tobytes() == whole.window[2].tobytes() == x[-HISTORY:].tobytes()
    assert np.isnan(conv.window[[0, 1, 3]].astype(np.float32)).all()


@pytest.mark.parametrize("kept", range(6))
def test_window_moves_by_exactly_the_kept_rows(kept):
    """A block of five rows after four committed ones: a rejected row leaves no trace."""
    x, conv = rows_of(9), Conv()
    conv.keep(x[:4], range(4), [1])
    before = conv.window[1].copy()

    conv.run(x[4:], range(4, 9), [1])
    assert conv.window[1].tobytes() == before.tobytes(), "running writes no window"
    conv.keep(x[4:], [4 + i if i < kept else -1 for i in range(5)], [1])

    assert conv.window[1].tobytes() == x[4 + kept - HISTORY:4 + kept].tobytes()


def test_lanes_use_their_own_slots_and_dead_rows_are_zeros():
    conv, x = Conv(), rows_of(12)
    conv.keep(x[:4], range(4), [3])
    alone = conv.run(x[4:7], [4, 5, 6], [3])

    out = conv.run(np.concatenate([x[8:11], x[4:7], x[:3]]), [0, 1, -1, 4, 5, 6, -1, -1, -1], [0, 3, -1])

    assert out[3:6].tobytes() == alone.tobytes()
    np.testing.assert_allclose(out[:2], torch_conv(x[8:10], conv.weight), atol=1e-6)
    assert not out[2].any() and not out[6:].any()


def test_result_is_rounded_once():
    """Taps of 2**-8 and 1 over ones: a sum in bf16 would lose the small one before SiLU."""
    conv = Conv(DType.BF16)
    conv.weight[...] = [0, 0, 2.0**-8, 1]
    out = conv.run(np.ones((2, CHANNELS), BF16), [0, 1], [0])

    assert out[1, 0] == BF16(1.00390625 / (1 + np.exp(-1.00390625)))
    assert float(out[1, 0]) != float(BF16(1 / (1 + np.exp(-1.0))))
