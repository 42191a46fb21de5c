"""The norm of an image tower is rounded once, as torch's own is."""

import ml_dtypes
import numpy as np
import torch

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16


def norm(x, weight, eps=0.0):
    out = np.empty_like(x)
    call("dflash.rms_norm_once/1", {"x": x, "weight": weight, "out": out}, rows=len(x), cols=x.shape[1], eps=eps,
         act=DType.BF16 if x.dtype == BF16 else DType.F32, w=DType.BF16 if weight.dtype == BF16 else DType.F32)
    return out


def test_result_is_rounded_once():
    """rms(7, 1) = 5, weight 1.125: 1.575 and 0.225; rounded before the weight they would be 1.5703125, 0.2255859375."""
    found = norm(np.array([[7, 1]], BF16), np.array([1.125, 1.125], BF16))

    assert found.tolist() == [[1.578125, 0.224609375]]


def test_bf16_is_torchs_with_the_epsilon_of_fp32():
    """torch without an epsilon takes fp32's 2^-23 for bf16 too, and not bf16's own 2^-7, which would halve this row."""
    torch.manual_seed(0)
    x = torch.randn(64, 48, dtype=torch.bfloat16) * 0.05
    module = torch.nn.RMSNorm(48, dtype=torch.bfloat16)
    module.weight.data = torch.randn(48).bfloat16()
    expected = module(x).float().detach().numpy()

    found = norm(x.float().numpy().astype(BF16), module.weight.float().detach().numpy().astype(BF16), 2.0**-23)

    assert np.array_equal(found.astype(np.float32), expected)


def test_sum_is_rounded_before_it_is_normalized():
    """256 + 1 is 256 in bf16; the norm of (256, 0) at weight 1 is sqrt 2."""
    residual, out = np.array([[256, 0]], BF16), np.empty((1, 2), BF16)

    call("dflash.add_rms_norm_once/1", {"residual": residual, "delta": np.array([[1, 0]], BF16),
                                        "weight": np.ones(2, BF16), "out": out},
         rows=1, cols=2, eps=0.0, act=DType.BF16, w=DType.BF16)

    assert residual.tolist() == [[256, 0]]
    assert out.tolist() == [[1.4140625, 0]]
