"""Turn a mapped CPU core into graphs that run: resolve each node's parameters and bind its op.

1. Expand templates: a graph's nodes are its own, or its template's with the bucket's overrides applied.
2. Resolve the kernel: the variant of the device target's first module that has one; its op must be this runtime's,
   and its parameter slots the op's own.
3. Cut the parameter block into scalars, apply SYMBOL_VALUE relocations, and turn BUFFER_ADDRESS relocations into
   arrays that cover exactly the bytes the op declares for these scalars, inside the buffer.
4. Compare the node's declared accesses with the op's.
5. Bind: decode weights, allocate temporaries. Nothing runs yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from dflash_core.errors import CompatibilityError, FormatError
from dflash_core.v1 import graph_pb2 as pb

from runtime.mapping import ByteArray, MappedCore
from runtime.ops import (
    REGISTRY_NAME,
    REGISTRY_VERSION,
    Args,
    Array,
    DType,
    Op,
    Operand,
    Prepared,
    find_op,
)
from runtime.run import BoundNode, LoadedCore, LoadedGraph


def instantiate(mapped: MappedCore) -> LoadedCore:
    """Bind every graph of a mapped core.

    Raises:
        FormatError: KERNEL_PARAMS, OP_UNKNOWN, NODE_ACCESS, RELOC_RANGE; the core does not describe the ops it names.
        CompatibilityError: REGISTRY; the core needs another version of the op registry.
    """
    _check_registry(mapped)
    binder = _Binder(mapped)
    graphs = {g.name: binder.bind(g) for g in mapped.checked.graphs}
    return LoadedCore(mapped, graphs)


def _check_registry(mapped: MappedCore) -> None:
    for module in mapped.checked.verified.manifest.modules:
        if module.kind != pb.CPU_REGISTRY or module.module_id not in mapped.checked.target.module_ids:
            continue
        if (module.registry, module.registry_version) != (REGISTRY_NAME, REGISTRY_VERSION):
            raise CompatibilityError("REGISTRY", "the core names another op registry",
                                     where=f"module {module.module_id}",
                                     expected=f"{REGISTRY_NAME} version {REGISTRY_VERSION}",
                                     got=f"{module.registry} version {module.registry_version}")


def graph_nodes(
    graph: pb.Graph, templates: dict[int, pb.GraphTemplate]
) -> tuple[Sequence[pb.GraphNode], Sequence[pb.GraphEdge]]:
    """A graph's nodes and edges; from its template, with overrides applied, where it names one."""
    if not graph.HasField("template_id"):
        return graph.nodes, graph.edges
    template = templates[graph.template_id]
    nodes = [pb.GraphNode.FromString(n.SerializeToString()) for n in template.nodes]
    for override in graph.overrides:
        _apply(nodes[override.node_id], override)
    return nodes, template.edges


def _apply(node: pb.GraphNode, override: pb.NodeOverride) -> None:
    if override.HasField("grid"):
        node.grid.CopyFrom(override.grid)
    if override.HasField("dynamic_shared_bytes"):
        node.dynamic_shared_bytes = override.dynamic_shared_bytes
    if override.HasField("kernel_id"):
        node.kernel_id = override.kernel_id
    for changed in override.relocations:
        kept = [r for r in node.relocations if (r.param_index, r.offset) != (changed.param_index, changed.offset)]
        del node.relocations[:]
        node.relocations.extend([*kept, changed])


def _nothing() -> None:
    """What an empty node does."""


class _Binder:
    def __init__(self, mapped: MappedCore) -> None:
        self.mapped = mapped
        checked = mapped.checked
        self.module_ids = list(checked.target.module_ids)
        self.kernels = {k.kernel_id: k for k in checked.verified.manifest.kernels}
        self.variants: dict[int, pb.KernelVariant] = {}
        self.prepared = Prepared()

    def bind(self, graph: pb.Graph) -> LoadedGraph:
        nodes, edges = graph_nodes(graph, self.mapped.checked.templates)
        patches = {(o.node_id, p.param_index): p.value for o in graph.overrides for p in o.params}
        bound = tuple(self._node(graph.name, node, patches) for node in nodes)
        steps = tuple(_nothing if node is None else node.op.bind(node.args) for node in bound)
        return LoadedGraph(graph.name, graph.role, graph.bucket.batch, graph.bucket.query_tokens, steps,
                           tuple((getattr(e, "from"), e.to) for e in edges), bound)

    def _node(
        self, graph_name: str, node: pb.GraphNode, patches: dict[tuple[int, int], bytes]
    ) -> BoundNode | None:
        where = f"graph {graph_name} node {node.node_id} {node.debug_name}".rstrip()
        if node.kind == pb.EMPTY:
            return None
        if node.kind != pb.KERNEL:
            raise CompatibilityError("NODE_KIND", "this runtime does not run this kind of node on a CPU", where=where,
                                     expected="KERNEL", got=pb.NodeKind.Name(node.kind))
        op = self._op(node.kernel_id, where)
        args = self._args(op, node, patches, where)
        _check_accesses(op, node, args, where)
        return BoundNode(op, args, node)

    def _op(self, kernel_id: int, where: str) -> Op:
        if kernel_id not in self.variants:
            kernel = self.kernels[kernel_id]
            by_module = {v.module_id: v for v in kernel.variants}
            found = next((by_module[m] for m in self.module_ids if m in by_module), None)
            if found is None:
                raise FormatError("GRAPH_REF", "the device target has no variant of a kernel", where=where,
                                  got=kernel.name)
            _check_params(find_op(found.symbol), found, where)
            self.variants[kernel_id] = found
        return find_op(self.variants[kernel_id].symbol)

    def _args(self, op: Op, node: pb.GraphNode, patches: dict[tuple[int, int], bytes], where: str) -> Args:
        relocations = {r.param_index: r for r in node.relocations}
        scalars: dict[str, int | float] = {}
        edges = [0]
        for param in op.params:
            edges.append(edges[-1] + (8 if isinstance(param, Operand) else param.type.nbytes))
        if len(node.param_block) != edges[-1]:
            raise FormatError("KERNEL_PARAMS", "a node's parameters are not the op's", where=where,
                              expected=f"{edges[-1]} bytes", got=len(node.param_block))
        for index, (param, (start, end)) in enumerate(zip(op.params, pairwise(edges), strict=True)):
            if isinstance(param, Operand):
                continue
            value = patches.get((node.node_id, index), node.param_block[start:end])
            scalars[param.name] = struct.unpack(param.type.value, value)[0]
            if index in relocations:
                scalars[param.name] = self._symbol(relocations[index], where)
        arrays = {}
        for index, param in enumerate(op.params):
            if isinstance(param, Operand):
                arrays[param.name] = self._array(param, relocations.get(index), scalars, where)
        return Args(op.name, scalars, arrays, self.prepared)

    def _symbol(self, relocation: pb.Relocation, where: str) -> int:
        if relocation.kind != pb.SYMBOL_VALUE:
            raise FormatError("RELOC_RANGE", "a scalar is relocated as a pointer", where=where,
                              got=pb.RelocationKind.Name(relocation.kind))
        return self.mapped.checked.symbols[relocation.symbol_id] + relocation.addend

    def _array(
        self, param: Operand, relocation: pb.Relocation | None, scalars: dict[str, int | float], where: str
    ) -> Array:
        place = f"{where}: {param.name}"
        if relocation is None or relocation.kind != pb.BUFFER_ADDRESS:
            raise FormatError("RELOC_RANGE", "a pointer has no buffer relocation", where=place)
        memory: ByteArray = self.mapped.memory[relocation.buffer_id]
        start = relocation.addend
        if param.arena:
            return memory[start:]
        nbytes = param.nbytes(scalars)
        if not (0 <= start <= memory.nbytes and 0 <= nbytes <= memory.nbytes - start):
            raise FormatError("RELOC_RANGE", "an operand reaches beyond its buffer", where=place,
                              expected=f"at most {memory.nbytes} bytes", got=f"{start} + {nbytes}")
        element, shape = param.element(scalars), param.shape(scalars)
        if element is DType.E2M1:
            shape = (*shape[:-1], shape[-1] // 2)
        if start % element.numpy.itemsize:
            raise FormatError("RELOC_RANGE", "an operand is not aligned to its element type", where=place, got=start)
        return np.ndarray(shape, element.numpy, memory.data, start)


def _check_params(op: Op, variant: pb.KernelVariant, where: str) -> None:
    declared = [(8, pb.POINTER) if isinstance(p, Operand) else (p.type.nbytes, pb.SCALAR) for p in op.params]
    recorded = [(s.size, s.type) for s in variant.params]
    if declared != recorded:
        raise FormatError("KERNEL_PARAMS", "a kernel's parameter slots are not the op's", where=f"{where} {op.name}",
                          expected=f"{len(declared)} slots, {sum(s for s, _ in declared)} bytes",
                          got=f"{len(recorded)} slots, {sum(s for s, _ in recorded)} bytes")


def _check_accesses(op: Op, node: pb.GraphNode, args: Args, where: str) -> None:
    """The accesses that a node declares must be the ones its op makes: edges and hazards rest on them."""
    relocations = {r.param_index: r for r in node.relocations}
    made: set[tuple[int, int, int, bool]] = set()
    for index, param in enumerate(op.params):
        if isinstance(param, Operand):
            at = relocations[index]
            size = param.nbytes(args.scalars)
            made |= {(at.buffer_id, at.addend, size, write) for write in _directions(param)}
    declared = {(a.buffer_id, a.offset, a.bytes, a.write) for a in node.accesses}
    if made != declared:
        raise FormatError("NODE_ACCESS", "a node declares other accesses than its op makes", where=where,
                          expected=sorted(made), got=sorted(declared))


def _directions(param: Operand) -> Iterable[bool]:
    if param.read:
        yield False
    if param.write:
        yield True

