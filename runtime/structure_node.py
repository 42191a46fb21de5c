"""Rules for one graph node: what it launches, and that every pointer in its parameters is declared and in range.

Source: docs/core-format.md, "Relocations".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_core.v1.graph_pb2 import (
    BUFFER_ADDRESS,
    CHILD,
    CONDITIONAL,
    CONDITIONAL_HANDLE,
    COPY,
    EMPTY,
    FILL,
    HANDLE,
    KERNEL,
    LOAD_CAPTURE,
    MULTICAST_ADDRESS,
    PEER_ADDRESS,
    POINTER,
    RANK_VALUE,
    SCALAR,
    STRUCT,
    SYMBOL_VALUE,
    TENSOR_MAP,
    TENSOR_MAP_ADDRESS,
    Dim3,
    GraphNode,
    KernelVariant,
    NodeKind,
    ParamType,
    Relocation,
    RelocationKind,
    Symbol,
    TensorMapSpec,
)

from .structure_rules import DTYPE_BITS, MAX_PARAM_BYTES, BufferRange, broken, unsupported

_MAX_GRID = (2**31 - 1, 65_535, 65_535)
_MAX_BLOCK_THREADS = 1024
_MAX_TENSOR_MAP_RANK = 5

_PAYLOAD_FIELDS = {
    "kernel_id": KERNEL, "copy": COPY, "fill": FILL, "child_template": CHILD, "conditional_id": CONDITIONAL,
    "load_capture": LOAD_CAPTURE,
}
_NODE_KINDS = (KERNEL, COPY, FILL, EMPTY, CHILD)
_RELOCATION_BYTES = {BUFFER_ADDRESS: (8,), TENSOR_MAP_ADDRESS: (128,), SYMBOL_VALUE: (4, 8), RANK_VALUE: (4, 8)}
_RELOCATION_SLOTS = {
    BUFFER_ADDRESS: (POINTER, STRUCT), TENSOR_MAP_ADDRESS: (TENSOR_MAP,),
    SYMBOL_VALUE: (SCALAR, STRUCT), RANK_VALUE: (SCALAR, STRUCT),
}
_RELOCATIONS_LATER = (PEER_ADDRESS, MULTICAST_ADDRESS, CONDITIONAL_HANDLE)


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameter block that one kernel variant takes: slot i is bytes [offsets[i], offsets[i] + sizes[i])."""

    symbol: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    types: tuple[ParamType, ...]
    nbytes: int
    pointers: tuple[int, ...]
    """Byte offsets that must each have a relocation."""
    on_cpu: bool
    block: tuple[int, int, int] | None
    max_dynamic_shared_bytes: int | None


@dataclass(frozen=True, slots=True)
class NodeTables:
    """What nodes may refer to: kernel layouts (one per distinct variant in play), buffers, symbols, and which kernels
    wait for what a programmatic edge leads from."""

    layouts: Mapping[int, tuple[Layout, ...]]
    buffers: Mapping[int, BufferRange]
    symbols: Mapping[int, Symbol]
    waiting: frozenset[int]


def layout_of(variant: KernelVariant, *, on_cpu: bool) -> Layout:
    """Where each parameter of `variant` lies; parameters follow each other without padding."""
    sizes = tuple(slot.size for slot in variant.params)
    types = tuple(slot.type for slot in variant.params)
    offsets = tuple(sum(sizes[:index]) for index in range(len(sizes)))
    pointers = tuple(at for at, kind in zip(offsets, types, strict=True) if kind in (POINTER, TENSOR_MAP))
    return Layout(
        symbol=variant.symbol, offsets=offsets, sizes=sizes, types=types, nbytes=sum(sizes), pointers=pointers,
        on_cpu=on_cpu, block=_dims(variant.block) if variant.HasField("block") else None,
        max_dynamic_shared_bytes=(
            variant.max_dynamic_shared_bytes if variant.HasField("max_dynamic_shared_bytes") else None
        ),
    )


def check_node(node: GraphNode, tables: NodeTables, place: str) -> None:
    """Check one node by itself; edges and child templates are checked with its graph.

    Raises:
        FormatError: MANIFEST_UNKNOWN, GRAPH_REF, GRAPH_LIMIT or RELOC_RANGE.
        CompatibilityError: FEATURE_UNSUPPORTED.
    """
    kind = node.kind
    if kind not in _NODE_KINDS:
        if kind in (CONDITIONAL, LOAD_CAPTURE):
            raise unsupported(f"node kind {NodeKind.Name(kind)}", place)
        raise broken("MANIFEST_UNKNOWN", "unknown NodeKind", place, got=kind)
    for field, owner in _PAYLOAD_FIELDS.items():
        if node.HasField(field) != (kind == owner):
            raise broken("GRAPH_REF", f"{field} does not fit the node kind", place,
                         expected="absent" if node.HasField(field) else "present", got=NodeKind.Name(kind))
    if kind == KERNEL:
        _check_kernel_node(node, tables, place)
    elif node.param_block or node.relocations:
        raise broken("GRAPH_REF", "only kernel nodes have parameters", place, got=NodeKind.Name(kind))
    elif kind == COPY:
        _check_span(node.copy.source, node.copy.bytes, tables.buffers, f"source of {place}")
        _check_span(node.copy.destination, node.copy.bytes, tables.buffers, f"destination of {place}")
    elif kind == FILL:
        _check_fill(node, tables, place)
    for access in node.accesses:
        buffer = tables.buffers.get(access.buffer_id)
        if buffer is None:
            raise broken("GRAPH_REF", "access to an unknown buffer", place, got=access.buffer_id)
        offset, nbytes = access.offset, access.bytes
        if offset > buffer.nbytes or nbytes > buffer.nbytes - offset or (nbytes == 0 and not buffer.grows):
            raise broken("RELOC_RANGE", "access leaves its buffer", place,
                         expected=f"1 to {max(buffer.nbytes - offset, 0)} bytes of {buffer.name}",
                         got=f"{nbytes} bytes at {offset}")


def _check_kernel_node(node: GraphNode, tables: NodeTables, place: str) -> None:
    layouts = tables.layouts.get(node.kernel_id)
    if layouts is None:
        raise broken("GRAPH_REF", "unknown kernel, or none for this device target", place, got=node.kernel_id)
    if len(node.param_block) > MAX_PARAM_BYTES:
        raise broken("GRAPH_LIMIT", "too many parameter bytes", place, expected=f"at most {MAX_PARAM_BYTES}",
                     got=len(node.param_block))
    for layout in layouts:
        _check_parameters(node, layout, tables, place)
        _check_launch(node, layout, place)


def _check_launch(node: GraphNode, layout: Layout, place: str) -> None:
    grid = _dims(node.grid) if node.HasField("grid") else None
    block = _dims(node.block) if node.HasField("block") else layout.block
    if layout.on_cpu:
        if grid not in (None, (1, 1, 1)) or block not in (None, (1, 1, 1)):
            raise broken("GRAPH_LIMIT", "a CPU op has one block of one thread", place, expected="(1, 1, 1)",
                         got=f"grid {grid}, block {block}")
        return
    if grid is None or not all(1 <= size <= most for size, most in zip(grid, _MAX_GRID, strict=True)):
        raise broken("GRAPH_LIMIT", "grid cannot be launched", place, expected=f"1 to {_MAX_GRID}", got=grid)
    if block is None or min(block) < 1 or block[0] * block[1] * block[2] > _MAX_BLOCK_THREADS:
        raise broken("GRAPH_LIMIT", "block cannot be launched", place, expected=f"1 to {_MAX_BLOCK_THREADS} threads",
                     got=block)
    most = layout.max_dynamic_shared_bytes
    if most is not None and node.dynamic_shared_bytes > most:
        raise broken("GRAPH_LIMIT", "too much dynamic shared memory", place, expected=f"at most {most}",
                     got=node.dynamic_shared_bytes)


def _check_parameters(node: GraphNode, layout: Layout, tables: NodeTables, place: str) -> None:
    params = node.param_block
    if len(params) != layout.nbytes:
        raise broken("RELOC_RANGE", f"parameters do not fit {layout.symbol}", place, expected=f"{layout.nbytes} bytes",
                     got=f"{len(params)} bytes")
    if HANDLE in layout.types:
        raise unsupported("parameter type HANDLE", place)
    spans: list[tuple[int, int]] = []
    for relocation in node.relocations:
        spans.append(_check_relocation(relocation, layout, tables, place))
    spans.sort()
    end = 0
    for start, stop in spans:
        if start < end:
            raise broken("RELOC_RANGE", "relocations overlap", place, expected=f"at or after byte {end}",
                         got=f"byte {start}")
        if params.count(0, start, stop) != stop - start:
            raise broken("RELOC_RANGE", "bytes under a relocation are not zero", place, expected="zeros",
                         got=params[start:stop].hex())
        end = stop
    starts = {start for start, _ in spans}
    for at in layout.pointers:
        if at not in starts:
            raise broken("RELOC_RANGE", "pointer parameter has no relocation", place,
                         expected=f"a relocation of parameter {layout.offsets.index(at)}")


def _check_relocation(relocation: Relocation, layout: Layout, tables: NodeTables, place: str) -> tuple[int, int]:
    """The bytes of the parameter block that `relocation` writes, start and stop."""
    kind = relocation.kind
    index = relocation.param_index
    widths = _RELOCATION_BYTES.get(kind)
    if widths is None:
        if kind in _RELOCATIONS_LATER:
            raise unsupported(f"relocation {RelocationKind.Name(kind)}", place)
        raise broken("MANIFEST_UNKNOWN", "unknown RelocationKind", place, got=kind)
    if index >= len(layout.sizes):
        raise broken("RELOC_RANGE", "relocation of an absent parameter", place,
                     expected=f"below {len(layout.sizes)}", got=index)
    if layout.types[index] not in _RELOCATION_SLOTS[kind]:
        raise broken("RELOC_RANGE", f"{RelocationKind.Name(kind)} does not fit the parameter type", place,
                     expected=" or ".join(ParamType.Name(t) for t in _RELOCATION_SLOTS[kind]),
                     got=f"parameter {index}, {ParamType.Name(layout.types[index])}")
    nbytes = relocation.width if relocation.HasField("width") else widths[-1]
    if nbytes not in widths:
        raise broken("RELOC_RANGE", "relocation has an impossible width", place, expected=widths, got=nbytes)
    offset, size = relocation.offset, layout.sizes[index]
    if offset > size or nbytes > size - offset:
        raise broken("RELOC_RANGE", "relocation leaves its parameter", place,
                     expected=f"within the {size} bytes of parameter {index}", got=f"{nbytes} bytes at {offset}")
    if kind == BUFFER_ADDRESS:
        _check_span(relocation, 0, tables.buffers, place)
    elif kind == TENSOR_MAP_ADDRESS:
        _check_span(relocation, _tensor_map_bytes(relocation.tensor_map, tables.symbols, place), tables.buffers, place)
    elif kind == SYMBOL_VALUE:
        _check_symbol(relocation, nbytes, tables.symbols, place)
    start = layout.offsets[index] + offset
    return start, start + nbytes


def _check_symbol(relocation: Relocation, nbytes: int, symbols: Mapping[int, Symbol], place: str) -> None:
    symbol = symbols.get(relocation.symbol_id) if relocation.HasField("symbol_id") else None
    if symbol is None:
        raise broken("GRAPH_REF", "relocation from an unknown symbol", place, got=relocation.symbol_id)
    bound = 1 << (8 * nbytes - 1)
    low, high = symbol.minimum + relocation.addend, symbol.maximum + relocation.addend
    if not -bound <= low <= high < bound:
        raise broken("RELOC_RANGE", f"symbol {symbol.name} does not fit its parameter", place,
                     expected=f"{nbytes} signed bytes", got=f"{low} to {high}")


def _check_span(relocation: Relocation, nbytes: int, buffers: Mapping[int, BufferRange], place: str) -> None:
    """`nbytes` at the relocated address lie in the buffer."""
    buffer = buffers.get(relocation.buffer_id)
    if buffer is None:
        raise broken("GRAPH_REF", "relocation to an unknown buffer", place, got=relocation.buffer_id)
    if relocation.kind not in (BUFFER_ADDRESS, TENSOR_MAP_ADDRESS):
        raise broken("RELOC_RANGE", "not an address of a buffer", place, expected="BUFFER_ADDRESS", got=relocation.kind)
    addend = relocation.addend
    if not 0 <= addend <= buffer.nbytes or nbytes > buffer.nbytes - addend:
        raise broken("RELOC_RANGE", "address leaves its buffer", place,
                     expected=f"within the {buffer.nbytes} bytes of {buffer.name}", got=f"{nbytes} bytes at {addend}")


def _check_fill(node: GraphNode, tables: NodeTables, place: str) -> None:
    fill = node.fill
    if fill.element_bytes not in (1, 2, 4) or fill.value >= 1 << (8 * fill.element_bytes):
        raise broken("RELOC_RANGE", "fill value does not fit its element", place, expected="1, 2 or 4 bytes",
                     got=f"{fill.value} in {fill.element_bytes} bytes")
    _check_span(fill.destination, fill.count * fill.element_bytes, tables.buffers, place)


def _tensor_map_bytes(spec: TensorMapSpec, symbols: Mapping[int, Symbol], place: str) -> int:
    """Bytes from the base that a descriptor covers, with symbols at their minimum."""
    rank = len(spec.dims)
    bits = DTYPE_BITS.get(spec.dtype)
    if bits is None:
        raise broken("MANIFEST_UNKNOWN", "unknown dtype of a tensor map", place, got=repr(spec.dtype))
    lengths = (len(spec.stride_bytes) + 1, len(spec.box), len(spec.element_strides))
    if not 1 <= rank <= _MAX_TENSOR_MAP_RANK or lengths != (rank, rank, rank):
        raise broken("RELOC_RANGE", "tensor map has the wrong number of dimensions", place,
                     expected=f"1 to {_MAX_TENSOR_MAP_RANK}, equal in all lists", got=f"{rank}, {lengths}")
    dims = list(spec.dims)
    for index, symbol_id in spec.dim_symbols.items():
        if symbol_id not in symbols or index >= rank:
            raise broken("GRAPH_REF", "tensor map is sized by an unknown symbol", place, got=f"{index}: {symbol_id}")
        dims[index] = symbols[symbol_id].minimum
    outer = sum((dim - 1) * stride for dim, stride in zip(dims[1:], spec.stride_bytes, strict=True))
    return max(outer + -(-dims[0] * bits // 8), 0)


def _dims(dims: Dim3) -> tuple[int, int, int]:
    return dims.x, dims.y, dims.z
