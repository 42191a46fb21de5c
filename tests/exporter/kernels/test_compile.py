"""Every kernel compiles for sm_90 without a GPU, at the demo's sizes and at the largest, and none spills registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from exporter.capture.compile import check_waits
from exporter.kernels.launch import Launch
from exporter.program.builder import Tensor
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower
from tests.exporter.kernels.shapes import DEMO, LARGEST, lowered_ops

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {DType.BF16: "*bf16", DType.F32: "*fp32", DType.I32: "*i32", DType.U64: "*u64", DType.U8: "*u8",
            DType.E4M3: "*u8"}
SHAPES = {"demo": DEMO, "largest": LARGEST}
MAX_SHARED_BYTES = 48 * 1024  # what every device grants without asking
REGISTERS_PER_BLOCK = 65536


def compile_launch(launch: Launch) -> CompiledKernel:
    """The kernel of a launch for sm_90, with pointers aligned to 16 bytes and no fused multiply-add."""
    kernel, names = launch.kernel, launch.kernel.function.arg_names
    assert {*launch.arguments, *kernel.constants} == {*names}
    pointers = {n: POINTERS[v.dtype] for n, v in launch.arguments.items() if isinstance(v, Tensor)}
    signature = {n: pointers.get(n, "i32") if n in launch.arguments else "constexpr" for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in pointers}
    return triton.compile(ASTSource(kernel.function, signature, dict(kernel.constants), aligned),
                          target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": kernel.num_warps, "num_stages": kernel.num_stages,
                                   "enable_fp_fusion": False})


def resources(cubin: Path) -> dict[str, int]:
    """Registers, stack, shared and local bytes of the one kernel in a cubin."""
    shown = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown.stdout)}


def check_compiles(lowering: str, case: Case, tmp_path: Path, *, most_shared: int = MAX_SHARED_BYTES,
                   step: bool = True) -> None:
    """Every launch of a case compiles for sm_90, chained: it waits, spills nothing, fits a block, needs no scratch.

    Args:
        step: what a step computes must round alike for any number of rows, so one matrix instruction serves them all.
    """
    program, _, calls = case.recorded()
    for launch in lower(lowering, calls, program, chained=True):
        compiled = compile_launch(launch)
        name = compiled.metadata.name
        check_waits(compiled.asm["ptx"], name)
        assert not step or "wgmma" not in compiled.asm["ptx"], name
        (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
        found = resources(tmp_path / "kernel.cubin")

        assert (found["STACK"], found["LOCAL"]) == (0, 0), name
        assert compiled.metadata.shared <= most_shared, name
        assert found["REG"] * 32 * compiled.metadata.num_warps <= REGISTERS_PER_BLOCK, name
        assert compiled.metadata.global_scratch_size == 0, name


@pytest.mark.parametrize("name", lowered_ops(DEMO))
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_for_sm_90_without_spills(shape, name, tmp_path):
    check_compiles(*lowered_ops(SHAPES[shape])[name], tmp_path)
