"""Launches become the graphs, kernels and modules of a GPU target: what the loader rebuilds, node by node.

Where the architecture has programmatic launch, the nodes of a graph form one chain: each starts while its predecessor
runs and waits for its results (docs/decisions/0009). Elsewhere edges follow from what nodes read and write.

Pointers are declared: every one is a relocation to a buffer, the two hidden Triton pointers too. Kernels are numbered
after the program's CPU kernels, and modules after the CPU registry.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from dflash_core.v1 import graph_pb2 as pb
from dflash_core.v1 import weights_pb2

from exporter.capture.compile import HIDDEN_POINTERS, Argument, CompiledKernel, Compiler
from exporter.capture.target import GpuTarget
from exporter.kernels.dependency import MIN_CAPABILITY, switched
from exporter.kernels.launch import Launch
from exporter.kernels.lower import lower_graph
from exporter.program.builder import Hazards, OpCall, Program, Symbol, Tensor
from runtime.ops import DType

HIDDEN_SCRATCH_BYTES = 256
PROGRAMMATIC = 1  # of GraphEdge.type, and of GraphEdge.from_port
SCALAR_CODES = {"i32": "<i", "fp32": "<f"}


def record_gpu(program: Program, graphs: Iterable[tuple[pb.Graph, Sequence[OpCall]]], capability: int, *,
               first_module_id: int, on_kernel: Callable[[int], None] | None = None,
               witness: Callable[[pb.Graph, Sequence[tuple[Launch, CompiledKernel]]], None] | None = None,
               ) -> GpuTarget:
    """Lower, compile and record every graph.

    Args:
        program: gains the scratch and counters that kernels need beyond the ops' own buffers.
        graphs: CPU graphs with their op calls.
        capability: 90 for sm_90.
        on_kernel: told the size of each cubin when it is compiled.
        witness: told each recorded graph and what its nodes launch (`exporter.capture.witness`).
    """
    chained = capability >= MIN_CAPABILITY
    recorder = _Recorder(program, Compiler(capability), first_module_id, on_kernel, witness)
    recorded = tuple(recorder.graph(graph, [switched(launch, chained) for launch in lower_graph(calls, program)])
                     for graph, calls in graphs)
    name = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    for module, _ in recorder.modules:
        module.target = name
    return GpuTarget(name, tuple(recorder.modules), tuple(recorder.kernels), recorded, ("pdl",) if chained else (),
                     max(compiled.shared_bytes for compiled in recorder.kept))


class _Recorder:
    def __init__(self, program: Program, compiler: Compiler, first_module_id: int,
                 on_kernel: Callable[[int], None] | None,
                 witness: Callable[[pb.Graph, Sequence[tuple[Launch, CompiledKernel]]], None] | None) -> None:
        self.witness = witness
        self.program, self.compiler, self.on_kernel = program, compiler, on_kernel
        self.next_module_id = first_module_id
        self.modules: list[tuple[pb.KernelModule, bytes]] = []
        self.kernels: list[pb.Kernel] = []
        self.known: dict[int, int] = {}  # id of a compiled kernel to its kernel id
        self.kept: list[CompiledKernel] = []
        self.hidden = program.scratch("triton_scratch", DType.U8, (HIDDEN_SCRATCH_BYTES,))

    def graph(self, source: pb.Graph, launches: Sequence[Launch]) -> pb.Graph:
        graph = pb.Graph(name=source.name, role=source.role, bucket=source.bucket,
                         input_buffers=source.input_buffers, output_buffers=source.output_buffers)
        if source.HasField("load_priority"):
            graph.load_priority = source.load_priority
        hazards, launched = Hazards(), [(launch, self.compiler.compile(launch)) for launch in launches]
        for node_id, (launch, compiled) in enumerate(launched):
            node = graph.nodes.add(node_id=node_id, kind=pb.KERNEL, kernel_id=self._kernel_id(launch, compiled))
            node.grid.x, node.grid.y, node.grid.z = launch.grid
            node.dynamic_shared_bytes = compiled.shared_bytes
            node.debug_name = _debug_name(launch)
            self._params(node, compiled.arguments, launch.arguments)
            for tensors, write in ((launch.reads, False), (launch.writes, True)):
                for buffer_id, offset, nbytes in sorted({(t.buffer_id, t.offset, t.nbytes) for t in tensors}):
                    node.accesses.add(buffer_id=buffer_id, offset=offset, bytes=nbytes, write=write)
            before = hazards.follow(node)
            if compiled.chained:
                if node_id:
                    graph.edges.add(**{"from": node_id - 1, "to": node_id}, from_port=PROGRAMMATIC, type=PROGRAMMATIC)
            else:
                for first in before:
                    graph.edges.add(**{"from": first, "to": node_id})
        if self.witness is not None:
            self.witness(graph, launched)
        return graph

    def _kernel_id(self, launch: Launch, compiled: CompiledKernel) -> int:
        if id(compiled) not in self.known:
            module_id = self.next_module_id
            self.next_module_id += 1
            ref = weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=hashlib.sha256(compiled.cubin).digest(),
                                      size_bytes=len(compiled.cubin))
            module = pb.KernelModule(module_id=module_id, kind=pb.CUBIN, file=ref, min_driver=12000,
                                     source_sha256=compiled.source_sha256)
            module.toolchain.compiler, module.toolchain.version = "triton", compiled.compiler_version
            module.toolchain.assembler = compiled.assembler
            for key, value in compiled.options.items():
                module.toolchain.options[key] = value
            variant = pb.KernelVariant(module_id=module_id, symbol=compiled.entry,
                                       block=pb.Dim3(x=32 * compiled.num_warps, y=1, z=1),
                                       max_dynamic_shared_bytes=compiled.shared_bytes)
            if compiled.chained:
                variant.waits_on_dependency = variant.triggers_dependents = True
            for argument in compiled.arguments:
                kind = pb.POINTER if argument.triton_type.startswith("*") else pb.SCALAR
                variant.params.add(size=argument.size, type=kind, name=argument.name)
            for name in HIDDEN_POINTERS:
                variant.params.add(size=8, type=pb.POINTER, name=name)
            kernel_id = len(self.program.kernels) + len(self.kernels)
            self.kernels.append(pb.Kernel(kernel_id=kernel_id, name=f"{compiled.entry}.{module_id}",
                                          variants=[variant], op="+".join(launch.kernel.ops)))
            self.modules.append((module, compiled.cubin))
            self.known[id(compiled)] = kernel_id
            self.kept.append(compiled)
            if self.on_kernel is not None:
                self.on_kernel(len(compiled.cubin))
        return self.known[id(compiled)]

    def _params(self, node: pb.GraphNode, arguments: Sequence[Argument],
                values: Mapping[str, Tensor | int | float | Symbol]) -> None:
        block = bytearray()
        for index, argument in enumerate(arguments):
            value = values[argument.name]
            if isinstance(value, Tensor):
                node.relocations.add(kind=pb.BUFFER_ADDRESS, param_index=index, buffer_id=value.buffer_id,
                                     addend=value.offset)
                block += bytes(8)
            elif isinstance(value, Symbol):
                node.relocations.add(kind=pb.SYMBOL_VALUE, param_index=index, symbol_id=value.symbol_id, width=4)
                block += bytes(4)
            else:
                block += struct.pack(SCALAR_CODES[argument.triton_type], value)
        for offset in range(len(HIDDEN_POINTERS)):
            node.relocations.add(kind=pb.BUFFER_ADDRESS, param_index=len(arguments) + offset,
                                 buffer_id=self.hidden.buffer_id)
            block += bytes(8)
        node.param_block = bytes(block)


def _debug_name(launch: Launch) -> str:
    """The label, and the CPU nodes that this launch computes: `target.layers.0.qkv [12 13]`."""
    return f"{launch.label} [{' '.join(str(n) for n in launch.nodes)}]"
