"""The kernels of latent attention compile for sm_90 without a GPU, at tiny sizes and at Kimi's, and none spills."""

from __future__ import annotations

import pytest

from exporter.capture.compile import check_waits
from tests.exporter.kernels.interpreter import lower
from tests.exporter.kernels.latent_shapes import K3, KIMI_LINEAR, TINY, latent_ops
from tests.exporter.kernels.test_compile import MAX_SHARED_BYTES, REGISTERS_PER_BLOCK, compile_launch, resources

# Two tiles of 32 cached rows of 576 values are on their way, and the queries beside them.
MAX_ATTENTION_BYTES = 120 * 1024
SHAPES = {"tiny step": (TINY, 2, 5), "tiny chunk": (TINY, 1, 160), "Kimi-Linear step": (KIMI_LINEAR, 1, 8),
          "K3 step": (K3, 8, 16), "K3 chunk": (K3, 1, 512)}
CHUNK_OPS = ("cache", "absorb", "expand", "attention")
CASES = [pytest.param(shape, name, id=f"{name}, {shape}") for shape in SHAPES for name in latent_ops(*SHAPES[shape])
         if "chunk" not in shape or name in CHUNK_OPS]


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_compiles_for_sm_90_without_spills(shape, name, tmp_path):
    lowering, case = latent_ops(*SHAPES[shape])[name]
    program, _, calls = case.recorded()

    for launch in lower(lowering, calls, program, chained=True):
        compiled = compile_launch(launch)
        check_waits(compiled.asm["ptx"], compiled.metadata.name)
        # What a step computes must round alike for any number of rows, so one matrix instruction serves them all.
        assert "chunk" in shape or "wgmma" not in compiled.asm["ptx"]
        (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
        found = resources(tmp_path / "kernel.cubin")

        assert (found["STACK"], found["LOCAL"]) == (0, 0)
        assert compiled.metadata.shared <= (MAX_ATTENTION_BYTES if "attention" in name else MAX_SHARED_BYTES)
        assert found["REG"] * 32 * compiled.metadata.num_warps <= REGISTERS_PER_BLOCK
        assert compiled.metadata.global_scratch_size == 0
