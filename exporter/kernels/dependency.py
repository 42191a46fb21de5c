"""Programmatic launch: a kernel starts while the one before it still runs, and waits where it first needs its results.

Every kernel first lets its successor start. Before `wait_inputs` it may read weights and nothing else; no thread may
return before it. A kernel that has waited knows that the whole kernel before it is complete, and since that one had
waited too, so is everything earlier in the chain.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from exporter.kernels.launch import Launch

SWITCH = "CHAINED"
"""Name of the compile-time parameter of every kernel that says whether it is launched programmatically."""
MIN_CAPABILITY = 90


@triton.jit
def start_successor(CHAINED: tl.constexpr):
    """Let the next kernel start as soon as every block of this one has."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_inputs(CHAINED: tl.constexpr):
    """Wait until the kernel before this one is complete and what it wrote can be read."""
    if CHAINED:
        gdc_wait()


@triton.jit
def begin(CHAINED: tl.constexpr):
    """For a kernel that has nothing to do before its inputs are there."""
    start_successor(CHAINED)
    wait_inputs(CHAINED)


def switched(launch: Launch, chained: bool) -> Launch:
    """The launch, with its kernel compiled for a programmatic chain or for plain edges."""
    kernel = launch.kernel
    return replace(launch, kernel=replace(kernel, constants={**kernel.constants, SWITCH: chained}))
