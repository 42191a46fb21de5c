"""Compile a Triton kernel to a cubin for a named architecture, on a machine with or without a GPU.

Compiled without line information, so that bytes do not depend on where the source lies, and without contraction of
multiply and add, since contraction changes results. Slots, block size and shared memory are read from the compiled
module and compared with what the launch passes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import CaptureError

from exporter.capture.cubin import param_slots
from exporter.kernels.dependency import SWITCH
from exporter.kernels.launch import Kernel, Launch
from exporter.program.builder import Symbol, Tensor
from runtime.ops import DType

POINTER_TYPES = {DType.BF16: "*bf16", DType.F32: "*fp32", DType.I32: "*i32", DType.U8: "*u8", DType.U64: "*u64",
                 DType.E4M3: "*u8", DType.E2M1: "*u8"}
# Triton adds two pointers after the visible arguments, global and profile scratch, whatever their sizes.
HIDDEN_POINTERS = ("global_scratch", "profile_scratch")
ALIGNED_BYTES = 16
# Shared memory that a block can ask for, less than 1 KiB of it the driver's. Source: CUDA C++ programming guide,
# technical specifications per compute capability.
SHARED_OPTIN_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter that a launch passes."""

    name: str
    triton_type: str
    size: int
    aligned: bool


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin and how to launch it.

    Attributes:
        entry: symbol of the kernel.
        arguments: visible parameters in index order; the two hidden pointers follow them.
        shared_bytes: dynamic shared memory.
        chained: it lets its successor start early, and waits for its predecessor before it writes anything.
        source_sha256: over the Triton source, constants and options; groups modules, never identifies one.
        options: what was passed to the compiler, for the record.
        compiler_version, assembler: Triton's version, and the ptxas that it carries.
        launcher: Triton's own compiled kernel, which a witness launches.
    """

    cubin: bytes
    entry: str
    arguments: tuple[Argument, ...]
    num_warps: int
    shared_bytes: int
    chained: bool
    source_sha256: bytes
    options: Mapping[str, str]
    compiler_version: str
    assembler: str
    launcher: Any


class Compiler:
    """Compiles each distinct kernel once."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._done: dict[tuple[Any, ...], CompiledKernel] = {}

    def compile(self, launch: Launch) -> CompiledKernel:
        """The kernel of a launch, for the types and alignments of its arguments.

        Raises:
            CaptureError: KERNEL_COMPILE, KERNEL_SLOTS, KERNEL_SCRATCH, KERNEL_SHARED or KERNEL_WAIT.
        """
        kernel = launch.kernel
        arguments = launch_arguments(launch)
        key = (kernel.function, tuple(sorted(kernel.constants.items(), key=lambda item: item[0])), kernel.num_warps,
               kernel.num_stages, arguments)
        if key not in self._done:
            self._done[key] = _compile(kernel, arguments, self.capability)
        return self._done[key]


def launch_arguments(launch: Launch) -> tuple[Argument, ...]:
    """Visible parameters of a launch, in the order of the function's signature."""
    names = list(inspect.signature(launch.kernel.function.fn).parameters)
    given = launch.arguments.keys() | launch.kernel.constants.keys()
    if given != set(names):
        raise CaptureError("KERNEL_ARGUMENTS", "a launch does not pass its kernel's parameters",
                           where=launch.kernel.function.fn.__name__, expected=sorted(names), got=sorted(given))
    return tuple(_argument(name, launch.arguments[name]) for name in names if name in launch.arguments)


def _argument(name: str, value: Tensor | int | float | Symbol) -> Argument:
    if isinstance(value, Tensor):
        return Argument(name, POINTER_TYPES[value.dtype], 8, value.offset % ALIGNED_BYTES == 0)
    return Argument(name, "fp32" if isinstance(value, float) else "i32", 4, False)


def _compile(kernel: Kernel, arguments: tuple[Argument, ...], capability: int) -> CompiledKernel:
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    function = kernel.function
    name = function.fn.__name__
    names = list(inspect.signature(function.fn).parameters)
    types = {a.name: a.triton_type for a in arguments}
    signature = {n: types.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): v for n, v in kernel.constants.items()}
    attributes = {(names.index(a.name),): [["tt.divisibility", ALIGNED_BYTES]] for a in arguments
                  if a.aligned and a.triton_type.startswith("*")}
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": False,
               "launch_pdl": bool(kernel.constants[SWITCH])}
    try:
        compiled = triton.compile(ASTSource(function, signature, constants, attributes),
                                  target=GPUTarget("cuda", capability, 32), options=dict(options))
    except Exception as e:
        reason = str(e).strip().splitlines()
        raise CaptureError("KERNEL_COMPILE", "Triton does not compile a kernel",
                           where=f"{name} {dict(kernel.constants)}",
                           got=reason[-1] if reason else type(e).__name__) from e
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.num_ctas != 1:
        raise CaptureError("KERNEL_SCRATCH", "a kernel asks for scratch memory or a cluster, which is not recorded",
                           where=name, expected="none",
                           got=f"{metadata.global_scratch_size} bytes, {metadata.num_ctas} blocks")
    cubin = compiled.asm["cubin"]
    sizes = [slot.size for slot in param_slots(cubin, metadata.name)]
    expected = [a.size for a in arguments] + [8] * len(HIDDEN_POINTERS)
    if sizes != expected:
        raise CaptureError("KERNEL_SLOTS", "the compiled kernel has other parameters than its launch passes",
                           where=name, expected=expected, got=sizes)
    most = SHARED_OPTIN_KIB[capability] << 10
    if metadata.shared > most:
        raise CaptureError("KERNEL_SHARED", "a kernel needs more shared memory than a block can have",
                           where=f"{name} {dict(kernel.constants)} for sm_{capability}",
                           expected=f"at most {most} bytes", got=metadata.shared,
                           hint="report this, with the model's config.json; a core for --device cpu is not affected")
    chained = bool(kernel.constants[SWITCH])
    if chained:
        check_waits(compiled.asm["ptx"], name)
    source = json.dumps([function.src, [(n, repr(v)) for n, v in sorted(kernel.constants.items())], sorted(
        options.items()), [(a.name, a.triton_type, a.aligned) for a in arguments]])
    return CompiledKernel(cubin, metadata.name, arguments, metadata.num_warps, metadata.shared, chained,
                          hashlib.sha256(source.encode()).digest(), {k: str(v) for k, v in options.items()},
                          triton.__version__, f"ptxas {get_ptxas(capability).version}", compiled)


def check_waits(ptx: str, where: str) -> None:
    """A kernel of a programmatic chain waits once, at the top level, before it writes or returns.

    Args:
        ptx: the compiled kernel as text.
    Raises:
        CaptureError: KERNEL_WAIT.
    """
    before, wait, _ = ptx.partition("griddepcontrol.wait;")
    if not wait:
        raise CaptureError("KERNEL_WAIT", "a chained kernel does not wait for its predecessor",
                           where=where, expected="griddepcontrol.wait", got="none",
                           hint="call wait_inputs(CHAINED) before the first use of an input")
    early = re.search(r"^\s*(?:@\S+\s+)?(st\.(?!shared)|atom\.|red\.|ret;|bra\b)[^\n]*", before, re.MULTILINE)
    if early:
        raise CaptureError("KERNEL_WAIT", "a chained kernel writes, branches or returns before it waits",
                           where=where, expected="loads of weights alone", got=early[0].strip(),
                           hint="call wait_inputs(CHAINED) earlier")
