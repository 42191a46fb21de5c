"""GELU: the error function against Python's own, both forms against torch's, and one rounding in bf16."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from runtime.ops import DType, call
from runtime.ops.gelu import erf

BF16 = ml_dtypes.bfloat16


def gelu(name, x):
    x = np.atleast_2d(x)
    out = np.empty_like(x)
    call(f"dflash.{name}/1", {"x": x, "out": out}, rows=len(x), cols=x.shape[1],
         act=DType.BF16 if x.dtype == BF16 else DType.F32)
    return out


def test_error_function_is_that_of_c():
    x = np.concatenate([np.linspace(-7, 7, 4001), np.logspace(-300, 0, 100), [0.0, 1.0, np.nextafter(1, 0), 40.0]])
    expected = np.array([math.erf(v) for v in x])

    assert np.abs(erf(x) - expected).max() <= 2.0**-52
    assert (np.abs(erf(x) - expected) <= 4e-16 * np.abs(expected)).all()
    assert erf(np.array([np.inf, -np.inf])).tolist() == [1, -1]
    assert np.isnan(erf(np.array([np.nan]))[0])


@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_both_forms_are_torchs_in_fp64(name, approximate):
    x = np.linspace(-12, 12, 20001, dtype=np.float32)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate=approximate).numpy()

    assert np.abs(gelu(name, x)[0] - expected).max() <= 8e-7


@pytest.mark.parametrize(("name", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_every_bf16_value_is_rounded_once_as_torch_does(name, approximate):
    """All up to 8, against torch in fp64, whose bf16 kernels flush subnormals on some processors: equal from -2 on;
    below, 1 + tanh loses bits of fp32, and they differ by a unit at most."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(BF16)
    x = x[np.abs(x.astype(np.float32)) <= 8]
    wide = torch.nn.functional.gelu(torch.from_numpy(x.astype(np.float64)), approximate=approximate)
    expected = wide.float().numpy().astype(BF16).astype(np.float32)
    found = gelu(name, x)[0].astype(np.float32)
    near = x.astype(np.float32) > -2

    assert (found[near] != expected[near]).sum() == 0
    assert np.abs(found - expected).max() <= 2.0**-15


def test_the_two_forms_differ():
    x = np.array([2.0], np.float32)

    assert gelu("gelu", x)[0, 0] == pytest.approx(1.9544997, abs=1e-6)
    assert gelu("gelu_tanh", x)[0, 0] == pytest.approx(1.9545977, abs=1e-6)
