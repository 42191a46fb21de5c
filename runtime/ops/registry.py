"""How a CPU op is declared: its parameters, what it reads and writes, and the function that runs it.

An op has one meaning, rounding points included, and its name carries a version: a changed result is a new version.
The declaration is what the exporter records from, what a core's kernel table must equal, and what bounds the memory
an op can reach, since an operand's shape follows from the node's scalars alone.

    @op("dflash.scale/1", Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32), Scalar("factor", F32),
        reads("x", ACT, "rows", "cols"), writes("out", ACT, "rows", "cols"))
    def scale(a: Args) -> Step:
        x, out, factor = a.array("x"), a.array("out"), np.float32(a.real("factor"))
        def run() -> None:
            out[...] = x.astype(np.float32) * factor
        return run
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from dflash_core.errors import FormatError

Array = npt.NDArray[Any]
F32Array = npt.NDArray[np.float32]
Step = Callable[[], None]

REGISTRY_NAME = "dflash.cpu"
REGISTRY_VERSION = 1


class ScalarType(Enum):
    """Type of a scalar parameter; the value is its `struct` code, little-endian."""

    U32 = "<I"
    I32 = "<i"
    F32 = "<f"

    @property
    def nbytes(self) -> int:
        return struct.calcsize(self.value)


U32, I32, F32 = ScalarType.U32, ScalarType.I32, ScalarType.F32


class DType(IntEnum):
    """Element type of an operand; the number is what a dtype scalar holds in a node's parameters."""

    F32 = 1
    BF16 = 2
    I32 = 3
    U8 = 4
    U64 = 5
    E4M3 = 6
    E2M1 = 7

    @property
    def bits(self) -> int:
        return {1: 32, 2: 16, 3: 32, 4: 8, 5: 64, 6: 8, 7: 4}[int(self)]

    @property
    def view_name(self) -> str:
        """The name that `TensorView.dtype` and `IoBinding.dtype` use."""
        return {1: "f32", 2: "bf16", 3: "i32", 4: "u8", 5: "u64", 6: "f8e4m3", 7: "f4e2m1"}[int(self)]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Array element type; E4M3 and E2M1 codes are read as bytes (E2M1: two codes a byte, low nibble first)."""
        elements: dict[int, type[Any]] = {1: np.float32, 2: ml_dtypes.bfloat16, 3: np.int32, 4: np.uint8, 5: np.uint64,
                                    6: np.uint8, 7: np.uint8}
        element: np.dtype[Any] = np.dtype(elements[int(self)])
        return element


DTYPE_BY_NAME = {d.view_name: d for d in DType}


@dataclass(frozen=True, slots=True)
class Scalar:
    name: str
    type: ScalarType


@dataclass(frozen=True, slots=True)
class DTypeOf:
    """An operand's element type is the one that this scalar names."""

    scalar: str


ACT = DTypeOf("act")


@dataclass(frozen=True, slots=True)
class Operand:
    """A pointer parameter: a contiguous array whose shape is a product of scalars and numbers per axis.

    An axis is a number, or a sum of products of names and numbers, each product evaluated left to right:
    "heads*head_dim", "cols/32", "heads*head_dim+2*kv_heads*head_dim".
    `arena`: the operand reaches from its address to the end of a buffer whose size a symbol decides.
    """

    name: str
    dtype: DType | DTypeOf
    axes: tuple[int | str, ...]
    read: bool
    write: bool
    arena: bool = False

    def shape(self, scalars: Mapping[str, int | float]) -> tuple[int, ...]:
        return tuple(_axis(axis, scalars) for axis in self.axes)

    def element(self, scalars: Mapping[str, int | float]) -> DType:
        if isinstance(self.dtype, DType):
            return self.dtype
        code = scalars[self.dtype.scalar]
        try:
            return DType(int(code))
        except ValueError as e:
            raise FormatError("OP_DTYPE", "unknown element type in a node", where=self.name, got=code) from e

    def nbytes(self, scalars: Mapping[str, int | float]) -> int:
        """Bytes that the operand covers; 0 for an arena."""
        if self.arena:
            return 0
        count = 1
        for n in self.shape(scalars):
            count *= n
        return count * self.element(scalars).bits // 8


def _axis(axis: int | str, scalars: Mapping[str, int | float]) -> int:
    if isinstance(axis, int):
        return axis
    return sum(_product(term, scalars) for term in axis.split("+"))


def _product(term: str, scalars: Mapping[str, int | float]) -> int:
    value, op = 1, "*"
    for token in term.replace("*", " * ").replace("/", " / ").split():
        if token in "*/":
            op = token
            continue
        n = int(token) if token.isdigit() else int(scalars[token])
        if op == "*":
            value *= n
        elif n == 0:
            return 0
        else:
            value //= n
    return value


def reads(name: str, dtype: DType | DTypeOf, *axes: int | str) -> Operand:
    return Operand(name, dtype, axes, read=True, write=False)


def writes(name: str, dtype: DType | DTypeOf, *axes: int | str) -> Operand:
    return Operand(name, dtype, axes, read=False, write=True)


def updates(name: str, dtype: DType | DTypeOf, *axes: int | str) -> Operand:
    return Operand(name, dtype, axes, read=True, write=True)


def arena(name: str, *, read: bool = False, write: bool = False) -> Operand:
    return Operand(name, DType.U8, (), read=read, write=write, arena=True)


class Prepared:
    """Arrays derived from read-only weights (decoded, packed for the GEMM), made once and shared by all nodes."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Array] = {}

    def get(self, sources: tuple[Array, ...], form: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        key = (*((a.__array_interface__["data"][0], a.shape, a.dtype.str) for a in sources), *form)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found


@dataclass(frozen=True, slots=True)
class Args:
    """A node's parameters, resolved: scalars by value, operands as arrays over the buffers' memory."""

    op_name: str
    scalars: Mapping[str, int | float]
    arrays: Mapping[str, Array]
    prepared: Prepared = field(default_factory=Prepared)

    def int(self, name: str) -> int:
        return int(self.scalars[name])

    def real(self, name: str) -> float:
        return float(self.scalars[name])

    def array(self, name: str) -> Array:
        return self.arrays[name]

    def dtype(self, name: str) -> DType:
        return DType(int(self.scalars[name]))


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    params: tuple[Scalar | Operand, ...]
    bind: Callable[[Args], Step]
    doc: str

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(p for p in self.params if isinstance(p, Operand))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(p for p in self.params if isinstance(p, Scalar))


OPS: dict[str, Op] = {}

_Bind = TypeVar("_Bind", bound=Callable[[Args], Step])


def op(name: str, *params: Scalar | Operand) -> Callable[[_Bind], _Bind]:
    """Declare an op. The decorated function binds a node's arguments and returns the step that runs it."""

    def register(bind: _Bind) -> _Bind:
        assert name not in OPS, name
        OPS[name] = Op(name, params, bind, bind.__doc__ or "")
        return bind

    return register


def find_op(name: str) -> Op:
    """The op of this name and version.

    Raises:
        FormatError: OP_UNKNOWN; this runtime does not have it.
    """
    found = OPS.get(name)
    if found is None:
        raise FormatError("OP_UNKNOWN", "the core names an op that this runtime does not have", where=name,
                          hint="use a newer runtime, or export the core again")
    return found


def call(name: str, arrays: Mapping[str, Array], **scalars: int | float) -> None:
    """Run one op on arrays, outside a graph: for tests and comparisons. Arrays must have the declared shapes."""
    found = find_op(name)
    for operand in found.operands:
        array = arrays[operand.name]
        if not operand.arena:
            expected = operand.shape(scalars)
            element = operand.element(scalars)
            if element is DType.E2M1:
                expected = (*expected[:-1], expected[-1] // 2)
            assert array.shape == expected, (name, operand.name, array.shape, expected)
            assert array.dtype == element.numpy, (name, operand.name, array.dtype, element)
    found.bind(Args(name, scalars, arrays))()


def to_f32(x: Array) -> npt.NDArray[np.float32]:
    """The array in fp32; exact for every type an activation can have."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def round_to(x: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> npt.NDArray[np.float32]:
    """fp32 values rounded to `dtype` (nearest, ties to even) and back: one rounding point."""
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)
