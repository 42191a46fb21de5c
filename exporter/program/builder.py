"""Record model code as graph nodes.

Model code is written once over ops on named buffers of fixed shape. A `Program` holds what all graphs of a core share
(buffers, symbols, kernels); a `GraphRecorder` turns each op call into a node: kernel, scalars, buffer references, and
the declared reads and writes, from which the edges follow. The recording is the graph: nothing is traced.

    program = Program()
    x = program.scratch("x", DType.BF16, (8, 64))
    graph = GraphRecorder(program, "decode.b8", role="decode", batch=8, query_tokens=1)
    graph.call("dflash.add/1", {"residual": x, "delta": y}, rows=8, cols=64, act=DType.BF16)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from dflash_core.errors import CaptureError
from dflash_core.v1 import graph_pb2 as pb

from runtime.ops import DType, Op, Operand, Scalar, find_op

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Symbol:
    """A number that is known only at load; stands in for a scalar."""

    symbol_id: int
    name: str
    minimum: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A typed range of a buffer: what an op's operand points at. Contiguous, row-major."""

    buffer_id: int
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    name: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.bits // 8

    def rows(self, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` along the outermost axis."""
        if not 0 <= first <= first + count <= self.shape[0]:
            raise CaptureError("TENSOR_ROWS", "rows outside a tensor", where=self.name,
                               expected=f"within {self.shape[0]} rows", got=f"{first} to {first + count}")
        row_bytes = self.nbytes // self.shape[0]
        return replace(self, offset=self.offset + first * row_bytes, shape=(count, *self.shape[1:]))

    def reshape(self, *shape: int) -> Tensor:
        assert prod(shape) == prod(self.shape), (self, shape)
        return replace(self, shape=shape)


class Program:
    """Buffers, symbols and kernels of one core, for one device target."""

    def __init__(self) -> None:
        self.buffers: list[pb.Buffer] = []
        self.symbols: list[pb.Symbol] = []
        self.kernels: list[pb.Kernel] = []
        self._by_name: dict[str, Tensor] = {}
        self._kernel_ids: dict[str, int] = {}

    def symbol(self, name: str, *, minimum: int, maximum: int, default: int) -> Symbol:
        symbol_id = len(self.symbols)
        self.symbols.append(pb.Symbol(symbol_id=symbol_id, name=name, width=4, minimum=minimum, maximum=maximum,
                                      default_value=default))
        return Symbol(symbol_id, name, minimum)

    def weights(self, name: str, blob_id: int, nbytes: int) -> int:
        """A WEIGHTS buffer that maps a blob; returns its buffer id."""
        return self._add(name, pb.WEIGHTS, nbytes, blob_id=blob_id)

    def arena(self, name: str, symbol: Symbol, bytes_per_unit: int) -> Tensor:
        """A KV_ARENA whose size is symbol x bytes_per_unit."""
        buffer_id = self._add(name, pb.KV_ARENA, 0)
        self.buffers[buffer_id].size_terms.add(symbol_id=symbol.symbol_id, bytes=bytes_per_unit)
        return Tensor(buffer_id, 0, DType.U8, (symbol.minimum * bytes_per_unit,), name)

    def state(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """A STATE buffer, zero at load; survives launches and belongs to all graphs."""
        return self._named(name, pb.STATE, dtype, shape)

    def once(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """The STATE buffer of this name, added on the first call."""
        return self._by_name.get(name) or self.state(name, dtype, shape)

    def io(self, name: str, dtype: DType, shape: tuple[int, ...], *, host_mapped: bool = False) -> Tensor:
        """An IO buffer, read and written by the host between launches.

        Args:
            host_mapped: on a GPU it lies in host memory that kernels write directly: for small results that the host
                reads after every launch.
        """
        tensor = self._named(name, pb.IO, dtype, shape)
        if host_mapped:
            self.buffers[tensor.buffer_id].host_mapped = True
        return tensor

    def scratch(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """A SCRATCH range. Graphs never run at the same time, so all graphs share the buffer of one name; it is as
        large as the largest request."""
        wanted = Tensor(-1, 0, dtype, shape, name)
        known = self._by_name.get(name)
        if known is None:
            return self._named(name, pb.SCRATCH, dtype, shape)
        buffer = self.buffers[known.buffer_id]
        assert buffer.buffer_class == pb.SCRATCH, name
        buffer.fixed_bytes = max(buffer.fixed_bytes, wanted.nbytes)
        return replace(wanted, buffer_id=known.buffer_id)

    def _named(self, name: str, buffer_class: pb.BufferClass, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        tensor = Tensor(-1, 0, dtype, shape, name)
        tensor = replace(tensor, buffer_id=self._add(name, buffer_class, tensor.nbytes))
        self._by_name[name] = tensor
        return tensor

    def _add(self, name: str, buffer_class: pb.BufferClass, nbytes: int, *, blob_id: int | None = None) -> int:
        if any(b.name == name for b in self.buffers):
            raise CaptureError("BUFFER_NAME", "two buffers of one name", where=name)
        buffer_id = len(self.buffers)
        self.buffers.append(pb.Buffer(buffer_id=buffer_id, name=name, buffer_class=buffer_class, fixed_bytes=nbytes,
                                      alignment=ALIGNMENT, blob_id=blob_id))
        return buffer_id

    def kernel_id(self, op: Op) -> int:
        """The kernel that computes `op` on the CPU, added to the table on first use."""
        if op.name not in self._kernel_ids:
            kernel_id = len(self.kernels)
            variant = pb.KernelVariant(module_id=0, symbol=op.name, block=pb.Dim3(x=1, y=1, z=1))
            for param in op.params:
                if isinstance(param, Operand):
                    variant.params.add(size=8, type=pb.POINTER, name=param.name)
                else:
                    variant.params.add(size=param.type.nbytes, type=pb.SCALAR, name=param.name)
            short = op.name.removeprefix("dflash.").split("/")[0]
            self.kernels.append(pb.Kernel(kernel_id=kernel_id, name=short, variants=[variant], op=op.name))
            self._kernel_ids[op.name] = kernel_id
        return self._kernel_ids[op.name]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One recorded op call.

    Attributes:
        op: name and version.
        operands: tensor of each operand.
        scalars: value of each scalar.
        label: which part of the model it belongs to.
        node_id: its node in the CPU graph, which a GPU node that computes it is compared with.
    """

    op: str
    operands: Mapping[str, Tensor]
    scalars: Mapping[str, int | float | Symbol]
    label: str
    node_id: int

    def number(self, name: str) -> int:
        value = self.scalars[name]
        assert not isinstance(value, Symbol), name
        return int(value)

    def real(self, name: str) -> float:
        value = self.scalars[name]
        assert not isinstance(value, Symbol), name
        return float(value)


@dataclass(frozen=True, slots=True)
class _Range:
    node_id: int
    start: int
    end: int | None  # None: to the end of the buffer
    write: bool

    def overlaps(self, other: _Range) -> bool:
        return (self.end is None or other.start < self.end) and (other.end is None or self.start < other.end)

    def covers(self, other: _Range) -> bool:
        return self.start <= other.start and (self.end is None or (other.end is not None and other.end <= self.end))


class Hazards:
    """Which earlier nodes each node must follow: read after write, write after read, write after write."""

    def __init__(self) -> None:
        self._touched: dict[int, list[_Range]] = {}
        self._ancestors: list[int] = []  # bit set of node ids that precede node i

    def follow(self, node: pb.GraphNode) -> list[int]:
        """The next node's direct predecessors, ascending; those that a longer path implies are left out."""
        before: set[int] = set()
        for access in node.accesses:
            end = access.offset + access.bytes if access.bytes else None
            mine = _Range(node.node_id, access.offset, end, access.write)
            earlier = self._touched.setdefault(access.buffer_id, [])
            before |= {r.node_id for r in earlier
                       if r.node_id != node.node_id and (mine.write or r.write) and mine.overlaps(r)}
            if mine.write:
                earlier[:] = [r for r in earlier if r.node_id == node.node_id or not mine.covers(r)]
            earlier.append(mine)
        implied = 0
        for other in before:
            implied |= self._ancestors[other]
        direct = sorted(n for n in before if not implied >> n & 1)
        reach = 0
        for other in direct:
            reach |= self._ancestors[other] | 1 << other
        self._ancestors.append(reach)
        return direct


class GraphRecorder:
    """Records the nodes of one graph, in the order in which they are called."""

    def __init__(self, program: Program, name: str, *, role: str, batch: int, query_tokens: int,
                 load_priority: int | None = None) -> None:
        self.program = program
        self.graph = pb.Graph(name=name, role=role, bucket=pb.Bucket(batch=batch, query_tokens=query_tokens),
                              load_priority=load_priority)
        self.calls: list[OpCall] = []
        self._hazards = Hazards()

    def call(self, op_name: str, operands: Mapping[str, Tensor], *, label: str = "",
             **scalars: int | float | Symbol) -> None:
        """Record one op call.

        Args:
            op_name: a CPU op of `runtime.ops`.
            operands: a tensor for each operand, of the declared dtype and number of elements.
            scalars: a value for each scalar; a `Symbol` becomes a relocation.
        Raises:
            CaptureError: a parameter is missing, unknown, or of another shape than the op declares.
        """
        op = find_op(op_name)
        node_id = len(self.graph.nodes)
        where = f"{self.graph.name} node {node_id} {op_name} {label}".rstrip()
        _check_names(op, operands, scalars, where)
        node = self.graph.nodes.add(node_id=node_id, kind=pb.KERNEL, kernel_id=self.program.kernel_id(op),
                                    grid=pb.Dim3(x=1, y=1, z=1), debug_name=label or op.name)
        numbers = {k: v.minimum if isinstance(v, Symbol) else v for k, v in scalars.items()}
        block = bytearray()
        for index, param in enumerate(op.params):
            if isinstance(param, Operand):
                tensor = operands[param.name]
                _check_operand(param, tensor, numbers, where)
                block += bytes(8)
                node.relocations.add(kind=pb.BUFFER_ADDRESS, param_index=index, buffer_id=tensor.buffer_id,
                                     addend=tensor.offset)
                if param.read:
                    node.accesses.add(buffer_id=tensor.buffer_id, offset=tensor.offset, bytes=param.nbytes(numbers))
                if param.write:
                    node.accesses.add(buffer_id=tensor.buffer_id, offset=tensor.offset, bytes=param.nbytes(numbers),
                                      write=True)
            else:
                block += self._scalar(node, index, param, scalars[param.name])
        node.param_block = bytes(block)
        self.calls.append(OpCall(op_name, dict(operands), dict(scalars), label, node_id))
        for before in self._hazards.follow(node):
            self.graph.edges.add(**{"from": before, "to": node_id})

    def _scalar(self, node: pb.GraphNode, index: int, param: Scalar, value: int | float | Symbol) -> bytes:
        if isinstance(value, Symbol):
            node.relocations.add(kind=pb.SYMBOL_VALUE, param_index=index, symbol_id=value.symbol_id,
                                 width=param.type.nbytes)
            return bytes(param.type.nbytes)
        return struct.pack(param.type.value, value)

    def finish(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> pb.Graph:
        """The recorded graph, with the buffers that the host sets before a launch and reads after it."""
        self.graph.input_buffers.extend(sorted({t.buffer_id for t in inputs}))
        self.graph.output_buffers.extend(sorted({t.buffer_id for t in outputs}))
        return self.graph


def _check_names(op: Op, operands: Mapping[str, object], scalars: Mapping[str, object], where: str) -> None:
    for kind, given, declared in (("operands", operands, op.operands), ("scalars", scalars, op.scalars)):
        names = {p.name for p in declared}
        if given.keys() != names:
            raise CaptureError("OP_PARAMS", f"{kind} are not the op's", where=where, expected=sorted(names),
                               got=sorted(given))


def _check_operand(param: Operand, tensor: Tensor, numbers: Mapping[str, int | float], where: str) -> None:
    if param.arena:
        return
    dtype, shape = param.element(numbers), param.shape(numbers)
    if tensor.dtype is not dtype or prod(shape) != prod(tensor.shape):
        raise CaptureError("OP_OPERAND", "operand is not of the declared type and size",
                           where=f"{where}: {param.name} = {tensor.name}", expected=f"{dtype.view_name} {list(shape)}",
                           got=f"{tensor.dtype.view_name} {list(tensor.shape)}")
