"""Run a graph node by node on a GPU beside the CPU reference, and find the first node that computes something else.

Every node starts from the reference's own inputs, so that an error does not spread: a node is wrong by itself or right.
A GPU node names the CPU nodes that it computes; what both write is compared, element by element.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from dflash_core.errors import FormatError
from dflash_core.v1 import graph_pb2

from runtime.gpu.core import GpuCore
from runtime.ops import Array, DType, Operand
from runtime.run import BoundNode, LoadedCore

# Largest difference, relative to the largest value of the result, that rounding in another order can make.
TOLERANCE = {DType.BF16: 2.0**-7, DType.F32: 2.0**-12}


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one GPU node wrote, against the reference.

    Attributes:
        node_id, name: of the GPU node.
        ops: what it computes.
        max_abs: largest absolute difference.
        max_ulp: largest difference in units of the reference value's last place (of its type).
        equal: share of elements with equal bits.
        within: all differences are within the type's tolerance; integers must be equal.
    """

    node_id: int
    name: str
    ops: str
    max_abs: float
    max_ulp: float
    equal: float
    within: bool


def replay(gpu: GpuCore, cpu: LoadedCore, graph_name: str) -> list[NodeReport]:
    """Replay a graph from the state that the CPU core is in.

    Args:
        gpu, cpu: the same core, loaded twice. The CPU core's buffers are the inputs; both are changed.
    Returns:
        One report per GPU node, in order.
    Raises:
        FormatError: REPLAY_NAMES; a GPU node does not name the CPU nodes that it computes.
    """
    recorded = gpu.recorded(graph_name)
    reference = cpu.graphs[graph_name]
    kernels = {k.kernel_id: k for k in gpu.manifest.kernels}
    weights = {b.buffer_id for b in gpu.manifest.buffers if b.buffer_class == graph_pb2.WEIGHTS}
    for buffer_id, memory in cpu.memory.items():
        if buffer_id not in weights and not _own(gpu.manifest.buffers[buffer_id]):
            gpu.write_buffer(buffer_id, 0, bytearray(memory.data))
    done: set[int] = set()
    reports = []
    for node in recorded.nodes:
        gpu.run_node(graph_name, node.node_id)
        todo = [i for i in _computes(node, graph_name) if i not in done]
        done.update(todo)
        for index in todo:
            reference.steps[index]()
        written = {(a.buffer_id, a.offset) for a in node.accesses if a.write}
        computed = [b for b in (reference.bound[i] for i in todo) if b is not None]
        reports.append(_compare(gpu, node, kernels[node.kernel_id].op, computed, written))
        for bound in computed:
            for access in bound.node.accesses:
                if access.write:
                    memory = cpu.memory[access.buffer_id]
                    end = access.offset + access.bytes if access.bytes else memory.nbytes
                    gpu.write_buffer(access.buffer_id, access.offset, bytearray(memory[access.offset:end].data))
    return reports


def _own(buffer: graph_pb2.Buffer) -> bool:
    """Scratch of the GPU's kernels alone, which the reference never fills."""
    return buffer.name in ("attention_counters", "triton_scratch") or buffer.name.endswith("_partial")


def _computes(node: graph_pb2.GraphNode, graph_name: str) -> list[int]:
    found = re.search(r"\[([\d ]*)\]$", node.debug_name)
    if found is None:
        raise FormatError("REPLAY_NAMES", "a GPU node does not name the CPU nodes that it computes",
                          where=f"graph {graph_name} node {node.node_id}", got=node.debug_name)
    return [int(word) for word in found[1].split()]


def _compare(gpu: GpuCore, node: graph_pb2.GraphNode, ops: str, reference: list[BoundNode],
             written: set[tuple[int, int]]) -> NodeReport:
    worst_abs = worst_ulp = 0.0
    equal = count = 0
    within = True
    for bound in reference:
        at = {r.param_index: r for r in bound.node.relocations}
        for index, operand in enumerate(bound.op.params):
            if not isinstance(operand, Operand) or not operand.write:
                continue
            where = at[index]
            if (where.buffer_id, where.addend) not in written:
                continue
            element = DType.BF16 if operand.arena else operand.element(bound.args.scalars)
            want = bound.args.array(operand.name).reshape(-1).view(element.numpy)
            got = np.frombuffer(gpu.read_buffer(where.buffer_id, where.addend, want.nbytes), element.numpy)
            same = _bits(want) == _bits(got)
            equal, count = equal + int(same.sum()), count + same.size
            if element not in TOLERANCE:
                within = within and bool(same.all())
                worst_abs = max(worst_abs, 0.0 if same.all() else 1.0)
                continue
            if same.all():
                continue
            top = _largest(want) if element is DType.BF16 else float(np.abs(want[np.isfinite(want)]).max(initial=0))
            a, b = want[~same].astype(np.float64), got[~same].astype(np.float64)
            finite = np.isfinite(a)
            difference = np.abs(a - b)[finite]
            within = within and bool((np.isfinite(a) == np.isfinite(b)).all())
            if difference.size:
                worst_abs = max(worst_abs, float(difference.max()))
                worst_ulp = max(worst_ulp, float((difference / _ulp(a[finite], element)).max()))
                within = within and float(difference.max()) <= TOLERANCE[element] * max(top, 1e-30)
    return NodeReport(node.node_id, node.debug_name, ops, worst_abs, worst_ulp, equal / count if count else 1.0, within)


def _largest(x: Array) -> float:
    """Largest finite magnitude of a bf16 array: the order of its bits without the sign."""
    bits = x.view(np.uint16) & 0x7FFF
    top = bits[bits < 0x7F80].max(initial=0)
    return float(np.uint16(top).reshape(1).view(x.dtype)[0])


def _bits(x: Array) -> Array:
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def _ulp(x: npt.NDArray[np.float64], element: DType) -> npt.NDArray[np.float64]:
    mantissa = 7 if element is DType.BF16 else 23
    exponent: Any = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126)))
    result: npt.NDArray[np.float64] = 2.0 ** (exponent - mantissa)
    return result
