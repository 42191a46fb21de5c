"""Run lowered launches on a GPU, compiled and chained as an export compiles them: the interpreter's cases, on hardware.

Buffers, guards and checks are those of `interpreter`: what no launch declares as written must not change.
"""

from __future__ import annotations

import numpy as np
import torch
from dflash_core.v1 import graph_pb2

from exporter.capture.compile import Compiler
from exporter.capture.witness import load, run
from runtime.gpu.nodes import Addresses
from tests.exporter.kernels.interpreter import (
    GUARD_BYTE,
    GUARD_NBYTES,
    SCRATCH_BYTE,
    Case,
    inside,
    lower,
)

CAPABILITY = 90


class OnGpu:
    """Stands in for `interpreter.Interpreter`."""

    def __init__(self) -> None:
        self._compiler = Compiler(CAPABILITY)

    def run(self, lowering: str, case: Case) -> dict[str, np.ndarray]:
        """The arrays after the launches of `lowering`."""
        program, tensors, calls = case.recorded()
        launches = lower(lowering, calls, program, chained=True, tuning=case.tuning)
        host = {}
        for buffer in program.buffers:
            host[buffer.buffer_id] = np.full(buffer.fixed_bytes + 2 * GUARD_NBYTES, GUARD_BYTE, np.uint8)
            host[buffer.buffer_id][GUARD_NBYTES:-GUARD_NBYTES] = (
                0 if buffer.buffer_class == graph_pb2.STATE else SCRATCH_BYTE)
        for name, array in case.arrays.items():
            inside(host, tensors[name])[...] = np.frombuffer(array.tobytes(), np.uint8)
        before = {n: inside(host, t).copy() for n, t in tensors.items()}
        memory = {i: torch.from_numpy(m).cuda() for i, m in host.items()}
        addresses = Addresses({i: m.data_ptr() + GUARD_NBYTES for i, m in memory.items()}, {})
        for launch in launches:
            compiled = self._compiler.compile(launch)
            load(compiled)
            run(launch, compiled, addresses, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        host = {i: m.cpu().numpy() for i, m in memory.items()}
        written = {t.buffer_id for launch in launches for t in launch.writes}
        for name, tensor in tensors.items():
            assert tensor.buffer_id in written or (before[name] == inside(host, tensor)).all(), f"{name} was written"
        for buffer in program.buffers:
            edges = host[buffer.buffer_id]
            assert (edges[:GUARD_NBYTES] == GUARD_BYTE).all(), f"written before {buffer.name}"
            assert (edges[-GUARD_NBYTES:] == GUARD_BYTE).all(), f"written behind {buffer.name}"
        return {n: inside(host, tensors[n]).view(a.dtype).reshape(a.shape).copy() for n, a in case.arrays.items()}

    def close(self) -> None:
        """Nothing is held."""

