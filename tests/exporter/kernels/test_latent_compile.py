"""The kernels of latent attention compile for sm_90 without a GPU, at tiny sizes and at Kimi's, and none spills."""

from __future__ import annotations

import pytest

from tests.exporter.kernels.latent_shapes import K3, KIMI_LINEAR, TINY, latent_ops
from tests.exporter.kernels.test_compile import MAX_SHARED_BYTES, check_compiles

# Two tiles of 32 cached rows of 576 values are on their way, and the queries beside them.
MAX_ATTENTION_BYTES = 120 * 1024
SHAPES = {"tiny step": (TINY, 2, 5), "tiny chunk": (TINY, 1, 160), "Kimi-Linear step": (KIMI_LINEAR, 1, 8),
          "K3 step": (K3, 8, 16), "K3 chunk": (K3, 1, 512)}
CHUNK_OPS = ("cache", "absorb", "expand", "attention")
CASES = [pytest.param(shape, name, id=f"{name}, {shape}") for shape in SHAPES for name in latent_ops(*SHAPES[shape])
         if "chunk" not in shape or name in CHUNK_OPS]


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_compiles_for_sm_90_without_spills(shape, name, tmp_path):
    check_compiles(*latent_ops(*SHAPES[shape])[name], tmp_path, step="chunk" not in shape,
                   most_shared=MAX_ATTENTION_BYTES if "attention" in name else MAX_SHARED_BYTES)
