"""What an op call becomes on a GPU: kernels with their compile-time constants, and launches with their arguments.

A kernel family's file holds `@triton.jit` functions and a `lower(call, program)` that turns one recorded op call into
launches. Nothing here needs a GPU, or triton.

    def lower(call: OpCall, program: Program) -> list[Launch]:
        kernel = Kernel(_add, ops=(call.op,), constants={"COLS": call.number("cols"), "BLOCK": 1024}, num_warps=4)
        x, y = call.operands["residual"], call.operands["delta"]
        return [Launch(kernel, {"x": x, "y": y}, grid=(call.number("rows"), 1, 1), reads=(x, y), writes=(x,))]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exporter.program.builder import OpCall, Symbol, Tensor

__all__ = ["Kernel", "Launch", "OpCall"]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A Triton function with everything that is fixed when it is compiled.

    Attributes:
        function: the `@triton.jit` function.
        ops: names of the CPU ops that it computes, in order; more than one when fused.
        constants: value of each `tl.constexpr` parameter. A pointer that a variant does not use is a constant None.
        num_warps, num_stages: as Triton means them.
    """

    function: Any
    ops: tuple[str, ...]
    constants: Mapping[str, int | float | bool | str | None]
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel node.

    Attributes:
        arguments: a value for every parameter that is not a constant, by name: a tensor for a pointer, a number or a
            symbol for an i32 scalar (a Python float for an f32 one).
        grid: blocks in x, y, z.
        reads, writes: what the kernel touches, beyond what the ops declare too (scratch of a two-stage reduction).
        nodes: the op calls it computes, as node ids of the CPU graph.
        label: as in OpCall.
    """

    kernel: Kernel
    arguments: Mapping[str, Tensor | int | float | Symbol]
    grid: tuple[int, int, int]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    nodes: tuple[int, ...] = ()
    label: str = ""
