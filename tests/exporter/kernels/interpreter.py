"""Run lowered launches in Triton's interpreter, in a process of its own: triton decides when it is first imported.

    case = Case(arrays, [("dflash.tap/1", {"rows": 2, ...})])
    assert same_bits(interpreter.run("rows.lower_tap", case)["features"], case.expected()["features"])

Every buffer lies between guard bytes, and scratch is full of 0xFF. A run fails where a guard, or a buffer that no
launch declares as written, has changed, and where a launch takes a tensor that it neither reads nor writes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from dflash_core.v1 import graph_pb2

from exporter.kernels.dependency import switched
from exporter.program.builder import OpCall, Program, Tensor
from runtime.ops import DType, call, find_op

ROOT = Path(__file__).resolve().parents[3]
GUARD_NBYTES = 256
GUARD_BYTE, SCRATCH_BYTE = 0xA5, 0xFF
ELEMENTS = {DType.F32: "float32", DType.BF16: "bfloat16", DType.I32: "int32", DType.U64: "uint64", DType.U8: "uint8",
            DType.E4M3: "uint8", DType.E2M1: "uint8"}
"""What torch calls the elements of a tensor; codes are bytes."""
DTYPES = {d.numpy: d for d in (DType.F32, DType.BF16, DType.I32, DType.U64, DType.U8)}


@dataclass(frozen=True)
class Case:
    """Arrays by operand name, shared by ops that run one after the other; each op takes the operands that it names."""

    arrays: dict[str, np.ndarray]
    ops: Sequence[tuple[str, dict[str, Any]]]
    codes: dict[str, DType] = field(default_factory=dict)  # arrays of bytes that hold E4M3 or E2M1 codes
    names: dict[int, dict[str, str]] = field(default_factory=dict)  # op index -> operand name -> array name
    tuning: dict[str, int] = field(default_factory=dict)  # thresholds of exporter.kernels.tuning to use instead

    def array_name(self, index: int, operand: str) -> str:
        return self.names.get(index, {}).get(operand, operand)

    def expected(self) -> dict[str, np.ndarray]:
        """The arrays after the CPU ops."""
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        for index, (op, scalars) in enumerate(self.ops):
            given = {p.name: arrays[self.array_name(index, p.name)] for p in find_op(op).operands}
            call(op, given, **scalars)
        return arrays

    def recorded(self) -> tuple[Program, dict[str, Tensor], list[OpCall]]:
        """The same as recorded op calls over buffers named like the arrays."""
        program = Program()
        tensors = {n: program.state(n, DTYPES[a.dtype], a.shape) for n, a in self.arrays.items()}
        typed = {n: replace(t, dtype=self.codes[n], shape=(*t.shape[:-1], t.shape[-1] * 8 // self.codes[n].bits))
                 if n in self.codes else t for n, t in tensors.items()}
        calls = [OpCall(op, {p.name: typed[self.array_name(i, p.name)] for p in find_op(op).operands}, scalars, "case",
                        10 + i)
                 for i, (op, scalars) in enumerate(self.ops)]
        return program, tensors, calls


def lower(name: str, calls: list[OpCall], program: Program, *, chained: bool = False,
          tuning: Mapping[str, int] | None = None) -> list[Any]:
    """Launches of a lowering function, named "module.function", for one call or (`many`) for a sequence; `chained`:
    compiled for a programmatic chain, which the interpreter does not know."""
    module, function = name.split(".")
    lowering = getattr(importlib.import_module(f"exporter.kernels.{module}"), function)
    many = function in ("lower_begin", "lower_accept", "lower_graph")
    with patch.multiple("exporter.kernels.tuning", **tuning) if tuning else nullcontext():
        return [switched(launch, chained) for launch in lowering(calls if many else calls[0], program)]


class Interpreter:
    """A process that interprets; one for all tests of a session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.exporter.kernels.interpreter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)})

    def run(self, lowering: str, case: Case) -> dict[str, np.ndarray]:
        """The arrays after the launches of `lowering`."""
        _send(self._process.stdin, (lowering, case))
        arrays, failure = _receive(self._process.stdout)
        assert failure is None, failure
        return arrays

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _send(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: Any) -> Any:
    (nbytes,) = struct.unpack("<Q", stream.read(8))
    return pickle.loads(stream.read(nbytes))


def _interpret(lowering: str, case: Case) -> dict[str, np.ndarray]:
    program, tensors, calls = case.recorded()
    launches = lower(lowering, calls, program, tuning=case.tuning)
    memory = {}
    for buffer in program.buffers:
        memory[buffer.buffer_id] = np.full(buffer.fixed_bytes + 2 * GUARD_NBYTES, GUARD_BYTE, np.uint8)
        first = 0 if buffer.buffer_class == graph_pb2.STATE else SCRATCH_BYTE  # as the loader provides them
        memory[buffer.buffer_id][GUARD_NBYTES:-GUARD_NBYTES] = first
    for name, array in case.arrays.items():
        inside(memory, tensors[name])[...] = np.frombuffer(array.tobytes(), np.uint8)
    before = {n: inside(memory, t).copy() for n, t in tensors.items()}
    for launch in launches:
        used = {v for v in launch.arguments.values() if isinstance(v, Tensor)}
        declared = {*launch.reads, *launch.writes}
        exact = {t for t in used if t.shape != (0,)}  # a pointer into rows, or into pages, covers what is declared
        name = launch.kernel.function.fn.__name__
        assert exact <= declared, f"{name} declares other accesses"
        assert {t.buffer_id for t in used} == {t.buffer_id for t in declared}, f"{name} declares other buffers"
        arguments = {n: _as_torch(memory, v) if isinstance(v, Tensor) else v for n, v in launch.arguments.items()}
        launch.kernel.function[launch.grid](**arguments, **launch.kernel.constants)
    written = {t.buffer_id for launch in launches for t in launch.writes}
    for name, tensor in tensors.items():
        assert tensor.buffer_id in written or (before[name] == inside(memory, tensor)).all(), f"{name} was written"
    for buffer in program.buffers:
        edges = memory[buffer.buffer_id]
        assert (edges[:GUARD_NBYTES] == GUARD_BYTE).all(), f"written before {buffer.name}"
        assert (edges[-GUARD_NBYTES:] == GUARD_BYTE).all(), f"written behind {buffer.name}"
    return {n: inside(memory, tensors[n]).view(a.dtype).reshape(a.shape).copy() for n, a in case.arrays.items()}


def inside(memory: dict[int, np.ndarray], tensor: Tensor) -> np.ndarray:
    first = GUARD_NBYTES + tensor.offset
    last = -GUARD_NBYTES if tensor.shape == (0,) else first + tensor.nbytes
    return memory[tensor.buffer_id][first:last]


def _as_torch(memory: dict[int, np.ndarray], tensor: Tensor) -> Any:
    import torch

    return torch.from_numpy(inside(memory, tensor)).view(getattr(torch, ELEMENTS[tensor.dtype]))


@dataclass(frozen=True)
class _Results:
    """What an operation with several results gives the interpreter."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def _run_asm(asm: str, codes: np.ndarray, factor: np.ndarray) -> list[np.ndarray]:
    """What inline assembly of `linear_packed` or `experts_product` does to each four bytes, restated with tables."""
    from exporter.kernels import experts_product, linear_packed

    factors = factor.view(ml_dtypes.bfloat16).astype(np.float64)
    swapped = codes.reshape(*codes.shape[:-1], -1, 4)[..., [0, 2, 1, 3]].reshape(codes.shape)
    if asm == linear_packed.E4M3_TIMES_POWER.value:
        values = [swapped.view(ml_dtypes.float8_e4m3fn).astype(np.float64)]
    else:
        unit = {linear_packed.E2M1_TIMES_FACTOR.value: 2.0**-126, experts_product.E2M1_TIMES_POWER.value: 1.0}[asm]
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate([magnitudes, -magnitudes]) * unit
        values = [table[swapped & 15], table[swapped >> 4]]
    return [(v * factors).astype(ml_dtypes.bfloat16).view(np.uint16) for v in values]


def _mend_interpreter() -> None:
    """Where the interpreter differs from a GPU: it truncates fp32 to bf16 where hardware rounds to nearest, ties to
    even; it computes with the bits of bf16 and fp8 values; the result of a comparison of fp32 scalars turns into fp32
    when it meets a block; and a one-element array does not serve as a loop bound."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, splat = interpreter._convert_float, interpreter.InterpreterBuilder.create_splat

    def nearest(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return convert(values, source, target, rounding)

    def splat_as_is(builder: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(block.shape, scalar.data[0]), tl.int1)
        return splat(builder, block, scalar)

    numpy_types = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float32: np.float32}
    cast, binary = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.binary_op
    patch_tensor = interpreter._patch_lang_tensor

    def through_fp32(builder: Any, source: Any, target: Any, *_: Any) -> Any:
        small = (tl.bfloat16, tl.float8e4nv)
        given, wanted = source.dtype.scalar, target.scalar
        if given in numpy_types and wanted in numpy_types and (given in small or wanted in small):
            wide = source.data.view(numpy_types[given]).astype(np.float32).astype(numpy_types[wanted])
            return interpreter.TensorHandle(wide.view(interpreter._get_np_dtype(wanted)), wanted)
        return cast(builder, source, target)

    def bf16_arithmetic(builder: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16 and op in (np.multiply, np.add, np.subtract):
            wide = [h.data.view(ml_dtypes.bfloat16).astype(np.float32) for h in (left, right)]
            return interpreter.TensorHandle(op(*wide).astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return binary(builder, left, right, op)

    def product(builder: Any, a: Any, b: Any, c: Any, precision: Any, imprecise: Any) -> Any:
        wide = [h.data if h.dtype.scalar == tl.float32 else h.data.view(ml_dtypes.bfloat16).astype(np.float32)
                for h in (a, b)]
        return interpreter.TensorHandle(np.matmul(*wide, dtype=np.float32) + c.data, c.dtype.scalar)

    def inline_asm(builder: Any, asm: str, constraints: str, args: list[Any], types: list[Any], pure: bool,
                   pack: int) -> Any:
        return _Results([interpreter.TensorHandle(values, tl.bfloat16) for values in _run_asm(
            asm, *(a.data for a in args))])

    def scalar_bounds(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    builder = interpreter.InterpreterBuilder
    builder.cast_impl, builder.create_fp_to_fp, builder.binary_op = through_fp32, through_fp32, bf16_arithmetic
    builder.create_dot = product
    builder.create_inline_asm = inline_asm
    interpreter._patch_lang_tensor = scalar_bounds
    interpreter._convert_float = nearest
    interpreter.InterpreterBuilder.create_splat = splat_as_is


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _mend_interpreter()
    np.seterr(all="ignore")
    while header := sys.stdin.buffer.read(8):
        lowering, case = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0]))
        try:
            answer = _interpret(lowering, case), None
        except Exception:
            answer = None, traceback.format_exc()
        _send(answers, answer)


if __name__ == "__main__":
    # Under its own name, so that pickled cases are of one class in both processes.
    importlib.import_module("tests.exporter.kernels.interpreter")._serve()
