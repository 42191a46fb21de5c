"""A core's graphs are bound only when they describe the ops they name; small graphs by hand, each rule broken once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dflash_core.errors import CompatibilityError, DflashError, FormatError
from dflash_core.v1 import graph_pb2 as pb
from dflash_core.v1 import manifest_pb2

from exporter.program.builder import GraphRecorder, Program, Tensor
from runtime.instantiate import instantiate
from runtime.ops import DType
from tests.tiny_pair import TinyProgram, mapped_core


class Small:
    """x and delta, f32 [2, 4] each, in one IO buffer at 0 and 32; node 0 adds delta to x, node 1 normalizes x to y."""

    def __init__(self) -> None:
        program = Program()
        self.io = program.io("io", DType.F32, (4, 4))
        self.weight = program.io("weight", DType.F32, (4,))
        self.y = program.io("y", DType.F32, (2, 4))
        graph = GraphRecorder(program, "g", role="decode", batch=1, query_tokens=1)
        graph.call("dflash.add/1", {"residual": self.io.rows(0, 2), "delta": self.io.rows(2, 2)}, rows=2, cols=4,
                   act=DType.F32)
        graph.call("dflash.rms_norm/1", {"x": self.io.rows(0, 2), "weight": self.weight, "out": self.y}, rows=2, cols=4,
                   eps=0.0, act=DType.F32, w=DType.F32)
        self.graph = graph.finish([self.io], [self.y])
        self.templates: list[pb.GraphTemplate] = []
        self.manifest = manifest_pb2.RebuildManifest(
            core_name="small", buffers=program.buffers, kernels=program.kernels,
            modules=[pb.KernelModule(module_id=0, kind=pb.CPU_REGISTRY, registry="dflash.cpu", registry_version=1)],
            device_targets=[pb.DeviceTarget(target_id=0, name="cpu", module_ids=[0])])
        self.memory = {b.buffer_id: np.zeros(b.fixed_bytes, np.uint8) for b in program.buffers}

    def load(self):
        return instantiate(mapped_core(self.manifest, [self.graph], self.memory, self.templates))

    def run(self):
        """y after one run with x = 3, 1, ... and delta = 4, 0, ..."""
        self.memory[0].view(np.float32)[:] = [3, 1, 3, 1, 3, 1, 3, 1, 4, 0, 4, 0, 4, 0, 4, 0]
        self.memory[1].view(np.float32)[:] = [1, 1, 1, 10]
        self.load().graphs["g"].run()
        return self.memory[2].view(np.float32).tolist()


def test_bound_graph_computes():
    assert Small().run() == pytest.approx([1.4, 0.2, 1.4, 2.0] * 2, rel=1e-6)


def test_loaded_graph_carries_role_bucket_and_edges():
    graph = Small().load().graphs["g"]

    assert (graph.role, graph.batch, graph.query_tokens, len(graph.steps)) == ("decode", 1, 1, 2)
    assert graph.edges == ((0, 1),)


def test_empty_node_does_nothing():
    small = Small()
    small.graph.nodes.add(node_id=2, kind=pb.EMPTY)

    assert small.run() == pytest.approx([1.4, 0.2, 1.4, 2.0] * 2, rel=1e-6)


def scalar(node: int, index: int, value: int) -> Callable[[Small], None]:
    """Overwrite the four bytes of scalar `index`."""
    def edit(small: Small) -> None:
        block = bytearray(small.graph.nodes[node].param_block)
        block[4 * index : 4 * index + 4] = value.to_bytes(4, "little")
        small.graph.nodes[node].param_block = bytes(block)
    return edit


def node(edit: Callable[[pb.GraphNode], Any], index: int = 0) -> Callable[[Small], None]:
    def apply(small: Small) -> None:
        edit(small.graph.nodes[index])
    return apply


def manifest(edit: Callable[[manifest_pb2.RebuildManifest], Any]) -> Callable[[Small], None]:
    def apply(small: Small) -> None:
        edit(small.manifest)
    return apply


def set_field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda message: setattr(message, name, value)


AT_X, AT_DELTA = "graph g node 0 dflash.add/1: residual", "graph g node 0 dflash.add/1: delta"
ADD_ACCESSES = "[(0, 0, 32, False), (0, 0, 32, True), (0, 32, 32, False)]"
REFUSED = [
    pytest.param(manifest(lambda m: setattr(m.modules[0], "registry_version", 2)), CompatibilityError, "REGISTRY",
                 "module 0", "dflash.cpu version 1", "dflash.cpu version 2", id="other registry version"),
    pytest.param(manifest(lambda m: setattr(m.modules[0], "registry", "their.cpu")), CompatibilityError, "REGISTRY",
                 "module 0", "dflash.cpu version 1", "their.cpu version 1", id="other registry"),
    pytest.param(node(set_field("kind", pb.COPY)), CompatibilityError, "NODE_KIND", "graph g node 0 dflash.add/1",
                 "KERNEL", "COPY", id="kind of node"),
    pytest.param(manifest(lambda m: setattr(m.kernels[0].variants[0], "symbol", "dflash.add/2")), FormatError,
                 "OP_UNKNOWN", "dflash.add/2", None, None, id="op of another version"),
    pytest.param(manifest(lambda m: setattr(m.kernels[0].variants[0], "module_id", 5)), FormatError, "GRAPH_REF",
                 "graph g node 0 dflash.add/1", None, "add", id="no variant for the device target"),
    pytest.param(manifest(lambda m: m.kernels[0].variants[0].params.pop()), FormatError, "KERNEL_PARAMS",
                 "graph g node 0 dflash.add/1 dflash.add/1", "5 slots, 28 bytes", "4 slots, 20 bytes",
                 id="kernel lacks a slot"),
    pytest.param(manifest(lambda m: setattr(m.kernels[0].variants[0].params[2], "size", 8)), FormatError,
                 "KERNEL_PARAMS", "graph g node 0 dflash.add/1 dflash.add/1", "5 slots, 28 bytes", "5 slots, 32 bytes",
                 id="slot of another size"),
    pytest.param(manifest(lambda m: setattr(m.kernels[0].variants[0].params[4], "type", pb.SCALAR)), FormatError,
                 "KERNEL_PARAMS", "graph g node 0 dflash.add/1 dflash.add/1", "5 slots, 28 bytes", "5 slots, 28 bytes",
                 id="slot of another type"),
    pytest.param(node(lambda n: setattr(n, "param_block", n.param_block + b"\0")), FormatError, "KERNEL_PARAMS",
                 "graph g node 0 dflash.add/1", "28 bytes", "29", id="parameter block too long"),
    pytest.param(node(lambda n: setattr(n, "param_block", n.param_block[:-1])), FormatError, "KERNEL_PARAMS",
                 "graph g node 0 dflash.add/1", "28 bytes", "27", id="parameter block too short"),
    pytest.param(scalar(0, 2, 9), FormatError, "OP_DTYPE", "residual", None, "9", id="unknown element type"),
    pytest.param(node(lambda n: n.relocations.pop()), FormatError, "RELOC_RANGE", AT_DELTA, None, None,
                 id="pointer without a relocation"),
    pytest.param(node(lambda n: setattr(n.relocations[0], "kind", pb.SYMBOL_VALUE)), FormatError, "RELOC_RANGE",
                 AT_X, None, None, id="pointer relocated as a symbol"),
    pytest.param(node(lambda n: n.relocations.add(kind=pb.BUFFER_ADDRESS, param_index=1)), FormatError, "RELOC_RANGE",
                 "graph g node 0 dflash.add/1", None, "BUFFER_ADDRESS", id="scalar relocated as a pointer"),
    pytest.param(node(lambda n: setattr(n.relocations[1], "addend", 36)), FormatError, "RELOC_RANGE", AT_DELTA,
                 "at most 64 bytes", "36 + 32", id="operand ends beyond its buffer"),
    pytest.param(node(lambda n: setattr(n.relocations[1], "addend", -4)), FormatError, "RELOC_RANGE", AT_DELTA,
                 "at most 64 bytes", "-4 + 32", id="operand starts before its buffer"),
    pytest.param(scalar(0, 0, 2**31), FormatError, "RELOC_RANGE", AT_X, "at most 64 bytes", "0 + 34359738368",
                 id="huge shape"),
    pytest.param(node(lambda n: setattr(n.relocations[1], "addend", 30)), FormatError, "RELOC_RANGE", AT_DELTA, None,
                 "30", id="operand not aligned to its element"),
    pytest.param(node(lambda n: n.accesses.pop()), FormatError, "NODE_ACCESS", "graph g node 0 dflash.add/1",
                 ADD_ACCESSES, "[(0, 0, 32, False), (0, 0, 32, True)]", id="undeclared read"),
    pytest.param(node(lambda n: n.accesses.pop(1)), FormatError, "NODE_ACCESS", "graph g node 0 dflash.add/1",
                 ADD_ACCESSES, "[(0, 0, 32, False), (0, 32, 32, False)]", id="undeclared write"),
    pytest.param(node(lambda n: n.accesses.add(buffer_id=2, bytes=4, write=True)), FormatError, "NODE_ACCESS",
                 "graph g node 0 dflash.add/1", ADD_ACCESSES, f"{ADD_ACCESSES[:-1]}, (2, 0, 4, True)]",
                 id="declared write that is not made"),
    pytest.param(node(lambda n: setattr(n.accesses[0], "bytes", 16)), FormatError, "NODE_ACCESS",
                 "graph g node 0 dflash.add/1", ADD_ACCESSES,
                 "[(0, 0, 16, False), (0, 0, 32, True), (0, 32, 32, False)]", id="read of another size"),
]


@pytest.mark.parametrize(("edit", "error", "code", "where", "expected", "got"), REFUSED)
def test_refuses_a_graph_that_does_not_describe_its_ops(edit, error, code, where, expected, got):
    small = Small()
    edit(small)

    with pytest.raises(DflashError) as refused:
        small.load()

    found = refused.value
    assert (type(found), found.code, found.where, found.expected, found.got) == (error, code, where, expected, got)


def test_registry_of_a_module_that_the_target_does_not_use_is_not_asked():
    small = Small()
    small.manifest.modules.add(module_id=1, kind=pb.CPU_REGISTRY, registry="their.cpu", registry_version=9)

    small.load()


def test_first_module_of_the_device_target_decides_the_variant():
    small = Small()
    other = small.manifest.kernels[0].variants.add()
    other.CopyFrom(small.manifest.kernels[0].variants[0])
    other.module_id, other.symbol = 1, "dflash.add/9"
    small.load()
    del small.manifest.device_targets[0].module_ids[:]
    small.manifest.device_targets[0].module_ids.extend([1, 0])

    with pytest.raises(FormatError) as refused:
        small.load()

    assert (refused.value.code, refused.value.where) == ("OP_UNKNOWN", "dflash.add/9")


def as_template(small: Small, eps: bytes) -> None:
    """Move the graph's nodes to a template whose node 1 has `eps`, and override it with what the graph had."""
    template = pb.GraphTemplate(template_id=7, nodes=small.graph.nodes, edges=small.graph.edges)
    node_1 = template.nodes[1]
    node_1.param_block = node_1.param_block[:8] + eps + node_1.param_block[12:]
    override = small.graph.overrides.add(node_id=1)
    override.params.add(param_index=2, value=small.graph.nodes[1].param_block[8:12])
    small.templates.append(template)
    small.graph.template_id = 7
    del small.graph.nodes[:], small.graph.edges[:]


def test_template_with_overrides_gives_the_steps_of_the_inline_graph():
    inline, shared = Small(), Small()
    as_template(shared, np.float32(75).tobytes())

    assert shared.run() == inline.run()
    assert shared.load().graphs["g"].edges == ((0, 1),)


def test_template_without_its_override_is_another_graph():
    small = Small()
    as_template(small, np.float32(75).tobytes())
    del small.graph.overrides[:]

    assert small.run() == pytest.approx([0.7, 0.1, 0.7, 1.0] * 2, rel=1e-6)


def test_overrides_leave_the_template_as_it_is():
    small = Small()
    as_template(small, np.float32(75).tobytes())
    small.graph.overrides.add(node_id=0, grid=pb.Dim3(x=1, y=1, z=1), dynamic_shared_bytes=5)
    before = small.templates[0].SerializeToString()

    small.run()

    assert small.templates[0].SerializeToString() == before


def test_override_may_replace_the_kernel_of_a_node():
    """The template names a kernel that computes something else; the override restores the first one."""
    small = Small()
    small.manifest.kernels.add().CopyFrom(small.manifest.kernels[0])
    small.manifest.kernels[2].kernel_id = 2
    small.manifest.kernels[2].variants[0].symbol = "dflash.add/7"
    as_template(small, bytes(4))
    small.templates[0].nodes[0].kernel_id = 2
    small.graph.overrides.add(node_id=0, kernel_id=0)

    assert small.run() == Small().run()


def test_override_that_moves_an_operand_must_fit_the_accesses_that_order_it():
    """An override cannot change accesses, and edges rest on them: a moved operand is refused, not run unordered."""
    small = Small()
    as_template(small, bytes(4))
    moved = small.graph.overrides.add(node_id=0)
    moved.relocations.add(kind=pb.BUFFER_ADDRESS, param_index=4, buffer_id=0, addend=0)

    with pytest.raises(FormatError) as refused:
        small.load()

    assert (refused.value.code, refused.value.got) == ("NODE_ACCESS", ADD_ACCESSES)


def kv_graph(kv_pages: int, addend: int = 0):
    """One node that writes an arena of three pages of 256 bytes; `kv_pages` is what the symbol says."""
    program = Program()
    pages = program.symbol("kv_pages", minimum=1, maximum=99, default=kv_pages)
    kv = program.arena("kv", pages, 256)
    tensors = {"qkv": program.io("qkv", DType.F32, (1, 24)), "q": program.io("q", DType.F32, (1, 8)),
               "rope_table": program.io("rope", DType.F32, (1, 2, 4)), "positions": program.io("p", DType.I32, (1,)),
               "slots": program.io("s", DType.I32, (1,)), "page_table": program.io("t", DType.I32, (1, 1)),
               "kv": Tensor(kv.buffer_id, addend, DType.U8, (0,), "kv")}
    graph = GraphRecorder(program, "g", role="decode", batch=1, query_tokens=1)
    graph.call("dflash.rope_cache/1", tensors, rows=1, heads=1, kv_heads=1, head_dim=8, rotary_dims=8, interleaved=0,
               context=1, act=DType.F32, block_rows=1, page_tokens=2, page_bytes=256, kv_pages=pages, max_slots=1,
               max_pages=1)
    found = manifest_pb2.RebuildManifest(
        buffers=program.buffers, kernels=program.kernels, symbols=program.symbols,
        modules=[pb.KernelModule(module_id=0, kind=pb.CPU_REGISTRY, registry="dflash.cpu", registry_version=1)],
        device_targets=[pb.DeviceTarget(target_id=0, name="cpu", module_ids=[0])])
    memory = {b.buffer_id: np.zeros(b.fixed_bytes or 768, np.uint8) for b in program.buffers}
    return mapped_core(found, [graph.graph], memory)


@pytest.mark.parametrize(("kv_pages", "addend"), [(3, 0), (3, 128), (2, 256)])
def test_arena_takes_as_many_pages_as_the_symbol_says(kv_pages, addend):
    instantiate(kv_graph(kv_pages, addend))


@pytest.mark.parametrize(("kv_pages", "addend"), [(4, 0), (3, 132), (0, 0), (1, 768)])
def test_refuses_pages_that_the_arena_does_not_have(kv_pages, addend):
    with pytest.raises(FormatError) as refused:
        instantiate(kv_graph(kv_pages, addend))

    assert refused.value.code == "KV_RANGE"


PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2])


def serve(core, *, order_seed=None):
    """Prefill two lanes, draft, verify and decode once; every output and the state, as bytes.

    `order_seed`: run the nodes of each graph in a random order that its edges allow.
    """
    def launch(role, batch):
        graph = core.graph(role, batch)
        graph.run(None if order_seed is None else graph.shuffled_order(order_seed))

    io = core.io
    io["limit"][:] = 40
    io["page_table"][:] = np.arange(io["page_table"].size).reshape(io["page_table"].shape)
    io["temperature"][:], io["seed"][:], io["top_p"][:] = [0, 0.8], [5, 6], 0.9
    for lane, tokens in enumerate(PROMPTS):
        io["slots"][:] = -1
        io["slots"][0] = lane
        io["chunk_tokens"][: len(tokens)], io["chunk_count"][0] = tokens, len(tokens)
        launch("prefill", 1)
    io["slots"][:] = [0, 1]
    results = []
    for role in ("draft", "verify", "decode"):
        launch(role, 2)
        results += [io[name].tobytes() for name in sorted(io)]
    return results


@pytest.fixture(scope="module")
def pair():
    return TinyProgram.record(batches=(1, 2))


def test_core_gives_equal_bytes_at_three_addresses(pair):
    runs, places = [], []
    for page in (0, 256, 13 * 256):
        memory = pair.memory(seed=1, page=page)
        places.append({b: m.__array_interface__["data"][0] for b, m in memory.items()})
        runs.append((serve(instantiate(pair.mapped(memory))), {b: m.tobytes() for b, m in memory.items()}))

    assert all(len({p[b] for p in places}) == 3 for b in places[0])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("seed", range(8))
def test_every_order_that_respects_the_edges_gives_equal_bytes(pair, seed):
    """A missing edge would let a node run before what it reads is written."""
    expected = serve(instantiate(pair.mapped(pair.memory(seed=1))))
    core = instantiate(pair.mapped(pair.memory(seed=1)))

    assert serve(core, order_seed=seed) == expected


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F], ids=hex)
def test_first_contents_of_scratch_and_arenas_do_not_matter(pair, fill):
    expected = serve(instantiate(pair.mapped(pair.memory(seed=1))))
    memory = pair.memory(seed=1)
    for buffer in pair.manifest.buffers:
        if buffer.buffer_class in (pb.SCRATCH, pb.KV_ARENA):
            memory[buffer.buffer_id][:] = fill

    assert serve(instantiate(pair.mapped(memory))) == expected
