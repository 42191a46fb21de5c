"""A recording is a graph: parameters, relocations and accesses as declared, and edges for every hazard and no other."""

import random

import pytest
from dflash_core.errors import CaptureError, FormatError
from dflash_core.formats import Format
from dflash_core.v1 import graph_pb2 as pb

from exporter.models.context import Forward, StepRows, StoredWeight
from exporter.program.builder import GraphRecorder, Program, Tensor
from runtime.ops import DType

ROWS, COLS = 8, 4
ROW_BYTES = COLS * 4


class Recording:
    """A graph over scratch buffers a to f, of 8 rows each; `copy` reads one range and writes another."""

    def __init__(self) -> None:
        self.program = Program()
        self.weight = self.program.scratch("weight", DType.F32, (COLS,))
        self.buffers = {name: self.program.scratch(name, DType.F32, (ROWS, COLS)) for name in "abcdef"}
        self.graph = GraphRecorder(self.program, "g", role="decode", batch=1, query_tokens=1)

    def range(self, text: str) -> Tensor:
        """ "a" is all of a, "a2:5" its rows 2, 3 and 4."""
        first, _, last = text[1:].partition(":")
        return self.buffers[text[0]].rows(int(first or 0), int(last or ROWS) - int(first or 0))

    def copy(self, source: str, target: str) -> None:
        x, out = self.range(source), self.range(target)
        self.graph.call("dflash.rms_norm/1", {"x": x, "weight": self.weight, "out": out}, rows=x.shape[0], cols=COLS,
                        eps=0.0, act=DType.F32, w=DType.F32)

    def add(self, source: str, target: str) -> None:
        residual, delta = self.range(target), self.range(source)
        self.graph.call("dflash.add/1", {"residual": residual, "delta": delta}, rows=residual.shape[0], cols=COLS,
                        act=DType.F32)

    def edges(self):
        return sorted((getattr(e, "from"), e.to) for e in self.graph.graph.edges)


def edges_of(program: str):
    """Edges of a program such as "a>b, b+c": copy a to b, then add b to c."""
    recording = Recording()
    for step in program.split(", "):
        if ">" in step:
            recording.copy(*step.split(">"))
        else:
            recording.add(*step.split("+"))
    return recording.edges()


HAZARDS = [
    pytest.param("a>b, b>c", [(0, 1)], id="read after write"),
    pytest.param("a>b, c>a", [(0, 1)], id="write after read"),
    pytest.param("a>b, c>b", [(0, 1)], id="write after write"),
    pytest.param("a>b, a>c", [], id="read after read is free"),
    pytest.param("a+b, c+b", [(0, 1)], id="in place after in place"),
    pytest.param("a+b", [], id="a node does not wait for itself"),
    pytest.param("a0:4>b0:4, c0:4>b4:8", [], id="disjoint rows"),
    pytest.param("a0:4>b0:4, c0:4>b4:8, b0:4>d0:4", [(0, 2)], id="reader of the first half waits for its writer"),
    pytest.param("a0:4>b0:4, c0:4>b4:8, b2:6>d0:4", [(0, 2), (1, 2)], id="reader of both halves waits for both"),
    pytest.param("a0:5>b0:5, c0:4>b4:8", [(0, 1)], id="one shared row"),
    pytest.param("a>b, b>c, b+c", [(0, 1), (1, 2)], id="an edge that a path implies is left out"),
    pytest.param("a>b, b>c, b>d, c+d", [(0, 1), (0, 2), (1, 3), (2, 3)], id="diamond"),
    pytest.param("a>b, b>c, b>d, e>b", [(0, 1), (0, 2), (1, 3), (2, 3)], id="writer waits for all readers"),
    pytest.param("a>b, c0:4>b0:4, b>d", [(0, 1), (1, 2)], id="partial overwrite keeps the first writer, by its path"),
    pytest.param("a>b, c0:4>b0:4, b4:8>d0:4", [(0, 1), (0, 2)], id="what was not overwritten waits for its writer"),
    pytest.param("a0:4>b0:4, c0:4>b4:8, d>b, b>e", [(0, 2), (1, 2), (2, 3)], id="full overwrite forgets both halves"),
    pytest.param("a>b, c>d, e>f", [], id="three of their own"),
    pytest.param("a>b, b>c, c>d, d>e, a+e", [(0, 1), (1, 2), (2, 3), (3, 4)], id="chain"),
]


@pytest.mark.parametrize(("program", "edges"), HAZARDS)
def test_edges_follow_hazards(program, edges):
    assert edges_of(program) == edges


@pytest.mark.parametrize("seed", range(40))
def test_random_program_orders_every_hazard_and_has_no_edge_to_spare(seed):
    rng = random.Random(seed)
    steps = []
    for _ in range(14):
        first = rng.randrange(ROWS)
        span = f"{first}:{rng.randint(first + 1, ROWS)}"
        source, target = rng.sample("abcd", 2)
        steps.append(f"{source}{span}{rng.choice('>+')}{target}{span}")

    edges = edges_of(", ".join(steps))

    def touched(step):
        source, target = step.replace("+", ">").split(">")
        rows = range(*map(int, source[1:].split(":")))
        return {(source[0], r) for r in rows}, {(target[0], r) for r in rows}

    def reachable(arrows):
        found = {(i, i) for i in range(len(steps))}
        for i in range(len(steps)):
            for source, sink in arrows:
                if (i, source) in found:
                    found.add((i, sink))
        return found

    hazards = set()
    for late, after in enumerate(steps):
        for early, before in enumerate(steps[:late]):
            (reads, writes), (reads_after, writes_after) = touched(before), touched(after)
            if writes & (reads_after | writes_after) or reads & writes_after:
                hazards.add((early, late))
    assert set(edges) <= hazards
    assert hazards <= reachable(sorted(edges, key=lambda e: e[1]))
    for edge in edges:
        assert edge not in reachable(sorted(set(edges) - {edge}, key=lambda e: e[1]))


def record_attention(graph, program, kv, name):
    """An attention node over an arena, with operands of its own."""
    act = DType.F32
    tensors = {"q": program.scratch(f"{name}.q", act, (1, 8)), "out": program.scratch(f"{name}.out", act, (1, 8)),
               "positions": program.scratch(f"{name}.positions", DType.I32, (1,)),
               "slots": program.scratch(f"{name}.slots", DType.I32, (1,)),
               "page_table": program.scratch(f"{name}.table", DType.I32, (1, 2))}
    graph.call("dflash.attention/1", {**tensors, "kv": kv}, groups=1, block_rows=1, heads=1, kv_heads=1, head_dim=8,
               scale=1.0, act=act, page_tokens=2, page_bytes=256, kv_pages=program.pages, max_slots=1, max_pages=2)


def record_rope(graph, program, kv, name):
    """A node that writes an arena, with operands of its own."""
    act = DType.F32
    tensors = {"qkv": program.scratch(f"{name}.qkv", act, (1, 24)), "q": program.scratch(f"{name}.q", act, (1, 8)),
               "rope_table": program.scratch(f"{name}.rope", act, (4, 2, 4)),
               "positions": program.scratch(f"{name}.positions", DType.I32, (1,)),
               "slots": program.scratch(f"{name}.slots", DType.I32, (1,)),
               "page_table": program.scratch(f"{name}.table", DType.I32, (1, 2))}
    graph.call("dflash.rope_cache/1", {**tensors, "kv": kv}, rows=1, heads=1, kv_heads=1, head_dim=8, rotary_dims=8,
               interleaved=0, context=4, act=act, block_rows=1, page_tokens=2, page_bytes=256, kv_pages=program.pages,
               max_slots=1, max_pages=2)


class ArenaProgram(Program):
    def __init__(self) -> None:
        super().__init__()
        self.pages = self.symbol("kv_pages", minimum=3, maximum=9, default=5)
        self.first = self.arena("kv", self.pages, 256)
        self.second = Tensor(self.first.buffer_id, 128, DType.U8, (0,), "kv[1]")


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        pytest.param([("write", 0), ("read", 0)], [(0, 1)], id="read after write"),
        pytest.param([("read", 0), ("write", 0)], [(0, 1)], id="write after read"),
        pytest.param([("read", 0), ("read", 1)], [], id="two readers"),
        pytest.param([("write", 0), ("read", 1)], [(0, 1)], id="first layer reaches over the second"),
        pytest.param([("write", 1), ("read", 0)], [(0, 1)], id="second layer lies in the first one's reach"),
        pytest.param([("write", 0), ("write", 1), ("read", 1)], [(0, 1), (1, 2)], id="layers are ordered"),
    ],
)
def test_arena_access_reaches_to_the_end_of_its_buffer(nodes, edges):
    program = ArenaProgram()
    graph = GraphRecorder(program, "g", role="decode", batch=1, query_tokens=1)

    for index, (kind, layer) in enumerate(nodes):
        record = record_rope if kind == "write" else record_attention
        record(graph, program, (program.first, program.second)[layer], f"node{index}")

    assert [(getattr(e, "from"), e.to) for e in graph.graph.edges] == edges
    arena = [a for n in graph.graph.nodes for a in n.accesses if a.buffer_id == program.first.buffer_id]
    assert [(a.offset, a.bytes, a.write) for a in arena] == [(128 * layer, 0, kind == "write") for kind, layer in nodes]


def test_node_holds_scalars_relocations_and_accesses():
    recording = Recording()
    recording.copy("a2:4", "b6:8")

    node = recording.graph.graph.nodes[0]

    assert (node.node_id, node.kind, node.kernel_id, node.debug_name) == (0, pb.KERNEL, 0, "dflash.rms_norm/1")
    scalars = b"\x02\0\0\0" + b"\x04\0\0\0" + bytes(4) + b"\x01\0\0\0" + b"\x01\0\0\0"
    assert node.param_block == scalars + bytes(24)
    assert [(r.kind, r.param_index, r.buffer_id, r.addend) for r in node.relocations] == [
        (pb.BUFFER_ADDRESS, 5, 1, 32), (pb.BUFFER_ADDRESS, 6, 0, 0), (pb.BUFFER_ADDRESS, 7, 2, 96)]
    assert [(a.buffer_id, a.offset, a.bytes, a.write) for a in node.accesses] == [
        (1, 32, 32, False), (0, 0, 16, False), (2, 96, 32, True)]


def test_operand_in_place_is_declared_read_and_written():
    recording = Recording()
    recording.add("a", "b")

    accesses = recording.graph.graph.nodes[0].accesses

    assert [(a.buffer_id, a.bytes, a.write) for a in accesses] == [(2, 128, False), (2, 128, True), (1, 128, False)]


def test_symbol_becomes_a_relocation_over_zeros():
    program = ArenaProgram()
    graph = GraphRecorder(program, "g", role="decode", batch=1, query_tokens=1)
    record_attention(graph, program, program.second, "n")

    node = graph.graph.nodes[0]

    symbols = [r for r in node.relocations if r.kind == pb.SYMBOL_VALUE]
    assert [(r.param_index, r.symbol_id, r.width) for r in symbols] == [(9, 0, 4)]
    assert node.param_block[36:40] == bytes(4)
    assert node.param_block[32:36] == b"\0\1\0\0"
    assert program.symbols == [pb.Symbol(symbol_id=0, name="kv_pages", width=4, minimum=3, maximum=9, default_value=5)]
    assert program.buffers[0] == pb.Buffer(buffer_id=0, name="kv", buffer_class=pb.KV_ARENA, alignment=256,
                                           size_terms=[pb.SizeTerm(symbol_id=0, bytes=256)])


def test_kernel_table_has_one_row_per_op_with_its_parameter_slots():
    recording = Recording()
    for step in ("a>b", "c>d"):
        recording.copy(*step.split(">"))
    recording.add("a", "b")

    kernels = recording.program.kernels

    assert [(k.kernel_id, k.name, k.op) for k in kernels] == [
        (0, "rms_norm", "dflash.rms_norm/1"), (1, "add", "dflash.add/1")]
    assert [(s.name, s.size, s.type) for s in kernels[1].variants[0].params] == [
        ("rows", 4, pb.SCALAR), ("cols", 4, pb.SCALAR), ("act", 4, pb.SCALAR), ("residual", 8, pb.POINTER),
        ("delta", 8, pb.POINTER)]
    assert [n.kernel_id for n in recording.graph.graph.nodes] == [0, 0, 1]


def test_scratch_of_one_name_is_one_buffer_as_large_as_its_largest_request():
    program = Program()

    tensors = [program.scratch("x", DType.BF16, shape) for shape in ((2, 8), (4, 64), (1, 8))]

    assert [t.buffer_id for t in tensors] == [0, 0, 0]
    assert [t.shape for t in tensors] == [(2, 8), (4, 64), (1, 8)]
    assert [(b.name, b.fixed_bytes, b.buffer_class) for b in program.buffers] == [("x", 512, pb.SCRATCH)]


def test_weights_state_and_io_have_their_class_and_size():
    program = Program()
    program.weights("w", 7, 1000)
    program.state("s", DType.U64, (3,))
    program.io("i", DType.I32, (2, 2))

    assert [(b.buffer_id, b.buffer_class, b.fixed_bytes, b.alignment) for b in program.buffers] == [
        (0, pb.WEIGHTS, 1000, 256), (1, pb.STATE, 24, 256), (2, pb.IO, 16, 256)]
    assert [b.blob_id if b.HasField("blob_id") else None for b in program.buffers] == [7, None, None]


def test_finished_graph_names_its_inputs_and_outputs_once_in_order():
    recording = Recording()
    a, b, c = (recording.buffers[name] for name in "abc")

    graph = recording.graph.finish([c, a, a.rows(0, 2)], [b])

    assert list(graph.input_buffers) == [1, 3]
    assert list(graph.output_buffers) == [2]


SMALL = Tensor(0, 64, DType.E2M1, (6, 32), "codes")


def test_rows_of_a_tensor_are_found_by_bytes_of_a_row():
    part = SMALL.rows(2, 3)

    assert (part.offset, part.shape, part.nbytes) == (64 + 2 * 16, (3, 32), 48)
    assert SMALL.reshape(3, 64).shape == (3, 64)


@pytest.mark.parametrize(("first", "count"), [(0, 7), (6, 1), (-1, 2), (3, -1)])
def test_refuses_rows_outside_a_tensor(first, count):
    with pytest.raises(CaptureError) as refused:
        SMALL.rows(first, count)

    assert (refused.value.code, refused.value.where, refused.value.expected) == ("TENSOR_ROWS", "codes",
                                                                                 "within 6 rows")


def test_refuses_two_buffers_of_one_name():
    program = Program()
    program.io("x", DType.I32, (1,))

    with pytest.raises(CaptureError) as refused:
        program.state("x", DType.I32, (1,))

    assert (refused.value.code, refused.value.where) == ("BUFFER_NAME", "x")


X, DELTA = Tensor(0, 0, DType.F32, (2, 4), "x"), Tensor(1, 0, DType.F32, (2, 4), "delta")
ADD = {"rows": 2, "cols": 4, "act": DType.F32}


@pytest.mark.parametrize(
    ("code", "operands", "scalars", "where", "expected", "got"),
    [
        pytest.param("OP_PARAMS", {"residual": X}, ADD, "g node 0 dflash.add/1 here", "['delta', 'residual']",
                     "['residual']", id="operand is missing"),
        pytest.param("OP_PARAMS", {"residual": X, "delta": DELTA, "y": X}, ADD, "g node 0 dflash.add/1 here",
                     "['delta', 'residual']", "['delta', 'residual', 'y']", id="operand is unknown"),
        pytest.param("OP_PARAMS", {"residual": X, "delta": DELTA}, {"rows": 2, "cols": 4},
                     "g node 0 dflash.add/1 here", "['act', 'cols', 'rows']", "['cols', 'rows']",
                     id="scalar is missing"),
        pytest.param("OP_PARAMS", {"residual": X, "delta": DELTA}, {**ADD, "eps": 1}, "g node 0 dflash.add/1 here",
                     "['act', 'cols', 'rows']", "['act', 'cols', 'eps', 'rows']", id="scalar is unknown"),
        pytest.param("OP_OPERAND", {"residual": X, "delta": Tensor(1, 0, DType.BF16, (2, 4), "d16")}, ADD,
                     "g node 0 dflash.add/1 here: delta = d16", "f32 [2, 4]", "bf16 [2, 4]", id="other element type"),
        pytest.param("OP_OPERAND", {"residual": X, "delta": Tensor(1, 0, DType.F32, (3, 4), "d3")}, ADD,
                     "g node 0 dflash.add/1 here: delta = d3", "f32 [2, 4]", "f32 [3, 4]", id="other size"),
    ],
)
def test_refuses_a_call_that_is_not_the_ops(code, operands, scalars, where, expected, got):
    graph = GraphRecorder(Program(), "g", role="decode", batch=1, query_tokens=1)

    with pytest.raises(CaptureError) as refused:
        graph.call("dflash.add/1", operands, label="here", **scalars)

    error = refused.value
    assert (error.code, error.where, error.expected, error.got) == (code, where, expected, got)


def test_refuses_an_unknown_op():
    with pytest.raises(FormatError) as refused:
        GraphRecorder(Program(), "g", role="decode", batch=1, query_tokens=1).call("dflash.magic/1", {})

    assert refused.value.code == "OP_UNKNOWN"


def forward(weights):
    program = Program()
    rows = StepRows(1, 2, program.scratch("positions", DType.I32, (2,)), program.scratch("slots", DType.I32, (1,)))
    return Forward(GraphRecorder(program, "g", role="decode", batch=1, query_tokens=1), weights, DType.BF16, rows)


def test_refuses_a_weight_that_was_not_laid_out():
    with pytest.raises(CaptureError) as refused:
        forward({}).weight("target.norm")

    assert (refused.value.code, refused.value.where) == ("WEIGHT_NAME", "target.norm")


def test_refuses_a_quantized_weight_where_it_is_read_as_it_is():
    stored = StoredWeight(Format.MXFP8, Tensor(0, 0, DType.E4M3, (4, 32), "w"), Tensor(0, 256, DType.U8, (4, 1), "s"))

    with pytest.raises(CaptureError) as refused:
        forward({"draft.norm": stored}).plain("draft.norm")

    error = refused.value
    assert (error.code, error.where, error.expected, error.got) == ("WEIGHT_FORMAT", "draft.norm", "bf16 or f32",
                                                                    "mxfp8")


W = {
    "bf16": StoredWeight(Format.BF16, Tensor(0, 0, DType.BF16, (6, 32), "w")),
    "f32": StoredWeight(Format.F32, Tensor(0, 0, DType.F32, (6, 32), "w")),
    "mxfp8": StoredWeight(Format.MXFP8, Tensor(0, 0, DType.E4M3, (6, 32), "w"), Tensor(0, 256, DType.U8, (6, 1), "s")),
    "nvfp4": StoredWeight(Format.NVFP4, Tensor(0, 0, DType.E2M1, (6, 32), "w"), Tensor(0, 256, DType.U8, (6, 2), "s"),
                          Tensor(0, 512, DType.F32, (1,), "g")),
}


@pytest.mark.parametrize(
    ("fmt", "op", "addends"),
    [
        ("bf16", "dflash.linear/1", [0, 2 * 64, 0]), ("f32", "dflash.linear/1", [0, 2 * 128, 0]),
        ("mxfp8", "dflash.linear_mxfp8/1", [0, 2 * 32, 256 + 2, 0]),
        ("nvfp4", "dflash.linear_nvfp4/1", [0, 2 * 16, 256 + 4, 512, 0]),
    ],
)  # fmt: skip
def test_op_of_a_linear_layer_follows_the_format_and_its_rows_their_scales(fmt, op, addends):
    fwd = forward({"w": W[fmt]})
    x = fwd.scratch("x", 32)

    out = fwd.linear(x, "w", "y", part=(2, 3))

    node = fwd.graph.graph.nodes[0]
    assert (fwd.graph.program.kernels[0].op, node.debug_name, out.shape) == (op, "w", (2, 3))
    assert [r.addend for r in node.relocations] == addends
