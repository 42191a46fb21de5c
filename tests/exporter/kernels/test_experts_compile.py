"""The kernels of a mixture compile for sm_90 at the sizes of a tiny model, Kimi-Linear and Kimi K3, without spills."""

from __future__ import annotations

import pytest

from tests.exporter.kernels.experts_shapes import MIXTURES, experts_case, gated_ops
from tests.exporter.kernels.test_compile import check_compiles


@pytest.mark.parametrize("op", gated_ops(MIXTURES["tiny"], 8))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_surrounds_the_experts_compiles(mixture, op, tmp_path):
    check_compiles(*gated_ops(MIXTURES[mixture], 8)[op], tmp_path)


MIXED = [
    ("tiny", "bf16"), ("tiny", "mxfp4"), ("tiny", "nvfp4"), ("Kimi-Linear", "bf16"), ("Kimi-Linear", "mxfp4"),
    ("Kimi-Linear", "nvfp4"), ("Kimi K3", "mxfp4"), ("Kimi K3", "nvfp4"),
]


@pytest.mark.parametrize(("mixture", "weights"), MIXED)
def test_experts_of_a_step_compile(mixture, weights, tmp_path):
    check_compiles("experts.lower_experts", experts_case(MIXTURES[mixture], 8, weights=weights), tmp_path)


@pytest.mark.parametrize(("mixture", "weights"), MIXED)
def test_experts_of_a_prefill_compile(mixture, weights, tmp_path):
    """A block of a prefill holds 128 weight rows, four steps ahead: bf16 needs 96 KiB."""
    check_compiles("experts.lower_experts", experts_case(MIXTURES[mixture], 2048, weights=weights), tmp_path,
                   most_shared=96 * 1024, step=False)
