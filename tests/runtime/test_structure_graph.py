"""Every rule for graphs and nodes: one change to a sound graph set breaks it, with its code."""

from __future__ import annotations

import time

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1 import graph_pb2
from dflash_core.v1.graph_pb2 import GraphEdge, GraphNode, GraphSet, GraphTemplate, TensorMapSpec
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.structure import check_graph_set
from tests.runtime.sound_core import cpu_graphs, empty_nodes, gpu_graphs, sound_manifest

UNKNOWN = b"\xa0\x1f\x01"

# g: the set, t: its first template, n: that template's kernel node, d and v: the graphs "decode" and "verify", m: the
# manifest.
CPU_ROWS = [
    ("another format version", "g.format_version = 2", "VERSION_UNSUPPORTED"),
    ("no format version", "g.format_version = 0", "VERSION_UNSUPPORTED"),
    ("two templates of one id", "g.templates[1].template_id = 1", "GRAPH_REF"),
    ("two graphs of one name", "v.name = 'decode'", "GRAPH_REF"),
    ("a graph that the manifest does not name", "v.name = 'prefill'", "GRAPH_REF"),
    ("1025 graphs", "g.graphs.extend([v] * 1023)", "GRAPH_LIMIT"),
    ("2^18 + 1 nodes", "t.nodes.extend(empty_nodes(2**18 - 3))", "GRAPH_LIMIT"),
    ("2^20 + 1 edges", "t.edges.extend([GraphEdge(to=3)] * (2**20 - 2))", "GRAPH_LIMIT"),
    # nodes
    ("a node id that is not its place", "t.nodes[3].node_id = 4", "GRAPH_REF"),
    ("an unknown node kind", "t.nodes[3].kind = 99", "MANIFEST_UNKNOWN"),
    ("no node kind", "t.nodes[3].kind = 0", "MANIFEST_UNKNOWN"),
    ("a conditional node", "t.nodes[3].kind = graph_pb2.CONDITIONAL", "FEATURE_UNSUPPORTED"),
    ("a load-capture node", "t.nodes[3].kind = graph_pb2.LOAD_CAPTURE", "FEATURE_UNSUPPORTED"),
    ("a kernel id on a copy", "t.nodes[1].kernel_id = 1", "GRAPH_REF"),
    ("a copy without its parameters", "t.nodes[1].ClearField('copy')", "GRAPH_REF"),
    ("a child template on an empty node", "t.nodes[3].child_template = 2", "GRAPH_REF"),
    ("parameters on an empty node", "t.nodes[3].param_block = b'1'", "GRAPH_REF"),
    ("a relocation on an empty node", "t.nodes[3].relocations.add()", "GRAPH_REF"),
    ("an unknown kernel", "n.kernel_id = 3", "GRAPH_REF"),
    ("a kernel that this target lacks", "n.kernel_id = 2", "GRAPH_REF"),
    ("a grid on a CPU", "n.grid.x = 2", "GRAPH_LIMIT"),
    ("a block on a CPU", "n.block.x = 32", "GRAPH_LIMIT"),
    ("a 1 MiB parameter block", "n.param_block = bytes(2**20)", "GRAPH_LIMIT"),
    ("a parameter block one byte short", "n.param_block = bytes(19)", "RELOC_RANGE"),
    ("a parameter block one byte long", "n.param_block = bytes(21)", "RELOC_RANGE"),
    ("a copy past its source", "t.nodes[1].copy.bytes = 257", "RELOC_RANGE"),
    ("a copy past its destination", "t.nodes[1].copy.destination.addend = 3841", "RELOC_RANGE"),
    ("a copy of 2^64 - 1 bytes", "t.nodes[1].copy.bytes = 2**64 - 1", "RELOC_RANGE"),
    ("a copy from an unknown buffer", "t.nodes[1].copy.source.buffer_id = 9", "GRAPH_REF"),
    ("a copy to no address", "t.nodes[1].copy.destination.kind = 4", "RELOC_RANGE"),
    ("a fill past its buffer", "t.nodes[2].fill.count = 65", "RELOC_RANGE"),
    ("a fill of 2^64 - 1 elements", "t.nodes[2].fill.count = 2**64 - 1", "RELOC_RANGE"),
    ("a fill of three-byte elements", "t.nodes[2].fill.element_bytes = 3; t.nodes[2].fill.count = 1", "RELOC_RANGE"),
    ("a fill value of 17 bits in two bytes", "t.nodes[2].fill.value = 65536", "RELOC_RANGE"),
    ("an access to an unknown buffer", "n.accesses[0].buffer_id = 9", "GRAPH_REF"),
    ("an access one byte past its buffer", "n.accesses[0].bytes = 289", "RELOC_RANGE"),
    ("an access that starts past its buffer", "n.accesses[0].offset = 801", "RELOC_RANGE"),
    ("an access of 2^64 - 1 bytes", "n.accesses[0].bytes = 2**64 - 1", "RELOC_RANGE"),
    ("an access of no bytes to a fixed buffer", "n.accesses[0].bytes = 0", "RELOC_RANGE"),
    ("an access past the smallest size of a buffer", "n.accesses[1].bytes = 8193", "RELOC_RANGE"),
    # relocations
    ("an unknown relocation kind", "n.relocations[0].kind = 99", "MANIFEST_UNKNOWN"),
    ("no relocation kind", "n.relocations[0].kind = 0", "MANIFEST_UNKNOWN"),
    ("a peer address", "n.relocations[0].kind = graph_pb2.PEER_ADDRESS", "FEATURE_UNSUPPORTED"),
    ("a multicast address", "n.relocations[0].kind = graph_pb2.MULTICAST_ADDRESS", "FEATURE_UNSUPPORTED"),
    ("a conditional handle", "n.relocations[0].kind = graph_pb2.CONDITIONAL_HANDLE", "FEATURE_UNSUPPORTED"),
    ("a handle parameter", "m.kernels[0].variants[0].params[2].type = graph_pb2.HANDLE", "FEATURE_UNSUPPORTED"),
    ("a relocation of an absent parameter", "n.relocations[0].param_index = 3", "RELOC_RANGE"),
    ("an address in a scalar", "n.relocations[0].param_index = 2", "RELOC_RANGE"),
    ("a relocation one byte past its parameter", "n.relocations[0].offset = 1", "RELOC_RANGE"),
    ("a relocation that starts past its parameter", "n.relocations[0].offset = 9", "RELOC_RANGE"),
    ("an address of four bytes", "n.relocations[0].width = 4", "RELOC_RANGE"),
    ("an addend past its buffer", "n.relocations[0].addend = 801", "RELOC_RANGE"),
    ("a negative addend", "n.relocations[0].addend = -1", "RELOC_RANGE"),
    ("an addend past the smallest size of a buffer", "n.relocations[1].addend = 8193", "RELOC_RANGE"),
    ("a relocation to an unknown buffer", "n.relocations[0].buffer_id = 9", "GRAPH_REF"),
    ("two relocations over one slot", "n.relocations[1].param_index = 0", "RELOC_RANGE"),
    ("a pointer without a relocation", "del n.relocations[1]", "RELOC_RANGE"),
    ("bytes under a relocation", "n.param_block = bytes(15) + b'\\1' + bytes(4)", "RELOC_RANGE"),
    ("a symbol that is unknown", "d.nodes[0].relocations[2].symbol_id = 2", "GRAPH_REF"),
    ("a symbol that is not named", "d.nodes[0].relocations[2].ClearField('symbol_id')", "GRAPH_REF"),
    ("a symbol of eight bytes in four", "d.nodes[0].relocations[2].ClearField('width')", "RELOC_RANGE"),
    ("a symbol of two bytes", "d.nodes[0].relocations[2].width = 2", "RELOC_RANGE"),
    ("a symbol that overflows its parameter", "d.nodes[0].relocations[2].addend = 2**31 - 1000", "RELOC_RANGE"),
    # edges
    ("an edge to an absent node", "t.edges[0].to = 4", "GRAPH_REF"),
    ("an edge from an absent node", "setattr(t.edges[0], 'from', 4)", "GRAPH_REF"),
    ("one edge twice", "t.edges.append(t.edges[0])", "GRAPH_REF"),
    ("an edge to itself", "t.edges[0].to = 0", "GRAPH_CYCLE"),
    ("a cycle of two", "t.edges.append(GraphEdge(to=0, **{'from': 1}))", "GRAPH_CYCLE"),
    ("a cycle behind other nodes", "t.edges.append(GraphEdge(to=1, **{'from': 2}))", "GRAPH_CYCLE"),
    ("a cycle in a graph of its own", "d.edges.append(GraphEdge(to=0, **{'from': 1}))", "GRAPH_CYCLE"),
    ("a programmatic edge from the end of a kernel", "t.edges[0].type = 1", "FEATURE_UNSUPPORTED"),
    ("a full edge from inside a kernel", "t.edges[0].from_port = 1", "FEATURE_UNSUPPORTED"),
    ("an edge in launch order", "t.edges[0].from_port = 2; t.edges[0].type = 1", "FEATURE_UNSUPPORTED"),
    ("a programmatic edge to a copy", "t.edges[0].from_port = t.edges[0].type = 1", "GRAPH_REF"),
    ("an unknown type of edge", "t.edges[0].type = 2", "MANIFEST_UNKNOWN"),
    ("an unknown port", "t.edges[0].from_port = 3", "MANIFEST_UNKNOWN"),
    # templates
    ("a template whose child is itself", "g.templates[1].nodes[0].child_template = 2", "GRAPH_CYCLE"),
    (
        "two templates that hold each other",
        "t.nodes[3].kind = graph_pb2.CHILD; t.nodes[3].child_template = 2",
        "GRAPH_CYCLE",
    ),
    ("an unknown child template", "g.templates[1].nodes[0].child_template = 3", "GRAPH_REF"),
    ("an unknown child in a graph", "d.nodes[1].child_template = 3", "GRAPH_REF"),
    ("nested templates that expand to 2^40 nodes", "g.templates.extend(doubling_templates(40))", "GRAPH_LIMIT"),
    (
        "a graph whose children expand past 2^18 nodes",
        "g.templates.extend(doubling_templates(17)); d.nodes.extend("
        "[GraphNode(node_id=i, kind=5, child_template=116) for i in (2, 3)])",
        "GRAPH_LIMIT",
    ),
    # graphs
    ("a template and nodes of its own", "v.nodes.extend(empty_nodes(1))", "GRAPH_REF"),
    ("a template and edges of its own", "v.edges.add()", "GRAPH_REF"),
    ("an unknown template", "v.template_id = 3", "GRAPH_REF"),
    ("an unknown input buffer", "d.input_buffers.append(9)", "GRAPH_REF"),
    ("an unknown output buffer", "d.output_buffers.append(9)", "GRAPH_REF"),
    ("an unknown component", "d.component_id = 2", "GRAPH_REF"),
    ("a conditional", "d.conditionals.add()", "FEATURE_UNSUPPORTED"),
    ("overrides without a template", "v.ClearField('template_id')", "GRAPH_REF"),
    ("one node overridden twice", "v.overrides.append(v.overrides[0])", "GRAPH_REF"),
    ("an override of an absent node", "v.overrides[0].node_id = 4", "GRAPH_REF"),
    ("an override to an unknown kernel", "v.overrides[0].kernel_id = 3", "GRAPH_REF"),
    ("an override to a grid on a CPU", "v.overrides[0].grid.x = 2", "GRAPH_LIMIT"),
    ("a patch of an absent parameter", "v.overrides[0].params[0].param_index = 3", "RELOC_RANGE"),
    ("a patch one byte short", "v.overrides[0].params[0].value = bytes(3)", "RELOC_RANGE"),
    ("a patch of a pointer", "v.overrides[0].params.add(param_index=0, value=b'12345678')", "RELOC_RANGE"),
    ("a relocation that replaces none", "v.overrides[0].relocations[0].offset = 4", "RELOC_RANGE"),
    ("one relocation replaced twice", "o = v.overrides[0].relocations; o.append(o[0])", "RELOC_RANGE"),
    ("a replaced relocation past its buffer", "v.overrides[0].relocations[0].addend = 801", "RELOC_RANGE"),
    # unknown fields
    ("unknown field in the set", "g.MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in an access", "n.accesses[1].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in an edge", "d.edges[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
    ("unknown field in a patch", "v.overrides[0].params[0].MergeFromString(UNKNOWN)", "MANIFEST_UNKNOWN"),
]

# n: the node that launches "attend"; o: the one that launches "add"; d: their graph.
GPU_ROWS = [
    ("a programmatic edge to a kernel that does not wait", "join(d)", "GRAPH_REF"),
    ("a programmatic edge to a kernel of which one variant does not wait",
     "join(d); m.kernels[1].variants[0].waits_on_dependency = True; v = m.kernels[1].variants.add(); "
     "v.CopyFrom(m.kernels[1].variants[0]); v.waits_on_dependency = False", "GRAPH_REF"),
    ("no grid", "n.ClearField('grid')", "GRAPH_LIMIT"),
    ("an empty grid", "n.grid.y = 0", "GRAPH_LIMIT"),
    ("a grid too high", "n.grid.z = 65536", "GRAPH_LIMIT"),
    ("a block of 1025 threads", "n.block.x = 1025; n.block.y = n.block.z = 1", "GRAPH_LIMIT"),
    ("an empty block", "n.block.x = 0", "GRAPH_LIMIT"),
    ("a kernel without a block", "m.kernels[1].variants[0].ClearField('block')", "GRAPH_LIMIT"),
    ("too much shared memory", "o.dynamic_shared_bytes = 1025", "GRAPH_LIMIT"),
    ("a struct relocation past the struct", "n.relocations[2].offset = 17", "RELOC_RANGE"),
    ("two relocations of one struct that overlap", "n.relocations[2].offset = 9", "RELOC_RANGE"),
    ("an address in place of a descriptor", "n.relocations[0].kind = graph_pb2.BUFFER_ADDRESS", "RELOC_RANGE"),
    ("a descriptor without a relocation", "del n.relocations[0]", "RELOC_RANGE"),
    ("a descriptor of an unknown dtype", "n.relocations[0].tensor_map.dtype = 'x'", "MANIFEST_UNKNOWN"),
    ("a descriptor of no dimensions", "n.relocations[0].ClearField('tensor_map')", "MANIFEST_UNKNOWN"),
    ("a descriptor that lacks a stride", "n.relocations[0].tensor_map.stride_bytes.pop()", "RELOC_RANGE"),
    ("a descriptor that lacks a box", "n.relocations[0].tensor_map.box.pop()", "RELOC_RANGE"),
    ("a descriptor of six dimensions", "add_dimensions(n.relocations[0].tensor_map, 4)", "RELOC_RANGE"),
    ("a descriptor of an unknown symbol", "n.relocations[0].tensor_map.dim_symbols[1] = 2", "GRAPH_REF"),
    ("a descriptor with a symbol past its rank", "n.relocations[0].tensor_map.dim_symbols[2] = 1", "GRAPH_REF"),
    ("a descriptor one byte past its buffer", "n.relocations[0].addend = 8192 - 4096 - 127", "RELOC_RANGE"),
    ("a descriptor longer than its buffer", "n.relocations[0].tensor_map.dims[0] = 2049", "RELOC_RANGE"),
]


def doubling_templates(count: int) -> list[GraphTemplate]:
    """Templates 100, 101, …: each holds the one before it twice, the first an empty node twice."""
    first = GraphTemplate(template_id=100, nodes=empty_nodes(2))
    rest = [
        GraphTemplate(template_id=100 + i, nodes=[GraphNode(node_id=k, kind=5, child_template=99 + i) for k in (0, 1)])
        for i in range(1, count)
    ]
    return [first, *rest]


def add_dimensions(spec: TensorMapSpec, count: int) -> None:
    for sizes in (spec.dims, spec.stride_bytes, spec.box, spec.element_strides):
        sizes.extend([1] * count)


def join(graph: graph_pb2.Graph) -> None:
    """Let the graph's second node start while its first still runs."""
    graph.edges.add(to=1, from_port=1, type=1, **{"from": 0})


def refusal(graphs: GraphSet, manifest: RebuildManifest, target_id: int | None) -> DflashError:
    with pytest.raises(DflashError) as caught:
        check_graph_set(graphs, manifest, target_id)
    return caught.value


def test_accepts_sound_graph_sets():
    check_graph_set(cpu_graphs(), sound_manifest(), 0)
    check_graph_set(gpu_graphs(), sound_manifest(), 1)


def waiting(manifest: RebuildManifest, kernel_id: int) -> RebuildManifest:
    """The manifest with a kernel that waits for what a programmatic edge leads from."""
    for variant in next(k for k in manifest.kernels if k.kernel_id == kernel_id).variants:
        variant.waits_on_dependency = True
    return manifest


def test_accepts_a_programmatic_edge_to_a_kernel_that_waits():
    graphs = gpu_graphs()
    join(graphs.graphs[0])

    check_graph_set(graphs, waiting(sound_manifest(), 1), 1)


def test_a_kernel_that_a_bucket_puts_behind_a_programmatic_edge_waits_as_well():
    graphs, manifest = cpu_graphs(), waiting(sound_manifest(), 1)
    template, verify = graphs.templates[0], graphs.graphs[1]
    other = manifest.kernels.add()
    other.CopyFrom(next(k for k in manifest.kernels if k.kernel_id == 1))
    other.kernel_id = 77
    second = template.nodes.add()
    second.CopyFrom(template.nodes[0])
    second.node_id = len(template.nodes) - 1
    template.edges.add(to=second.node_id, from_port=1, type=1, **{"from": 0})
    verify.overrides.add(node_id=second.node_id, kernel_id=77)
    check_graph_set(graphs, manifest, 0)
    for variant in other.variants:
        variant.waits_on_dependency = False

    error = refusal(graphs, manifest, 0)

    assert (error.code, error.got) == ("GRAPH_REF", "kernel id 77")


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in CPU_ROWS], ids=[row[0] for row in CPU_ROWS])
def test_refuses_a_graph_set_with(change: str, code: str):
    graphs, manifest = cpu_graphs(), sound_manifest()
    exec(change, {
        "g": graphs, "t": graphs.templates[0], "n": graphs.templates[0].nodes[0], "d": graphs.graphs[0],
        "v": graphs.graphs[1], "m": manifest, "GraphEdge": GraphEdge, "GraphNode": GraphNode, "graph_pb2": graph_pb2,
        "UNKNOWN": UNKNOWN, "empty_nodes": empty_nodes, "doubling_templates": doubling_templates,
    })

    error = refusal(graphs, manifest, 0)

    assert error.code == code
    assert error.where
    assert error.hint


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in GPU_ROWS], ids=[row[0] for row in GPU_ROWS])
def test_refuses_a_gpu_graph_set_with(change: str, code: str):
    graphs, manifest = gpu_graphs(), sound_manifest()
    exec(change, {
        "n": graphs.graphs[0].nodes[0], "o": graphs.graphs[0].nodes[1], "m": manifest, "graph_pb2": graph_pb2,
        "add_dimensions": add_dimensions, "d": graphs.graphs[0], "join": join,
    })

    assert refusal(graphs, manifest, 1).code == code


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("n.relocations[3].offset = 1", "relocation leaves its parameter"),
        ("n.relocations[3].offset = 9", "relocation leaves its parameter"),
        ("n.relocations[2].offset = 9", "relocations overlap"),
        ("n.param_block = bytes(159) + b'1'", "bytes under a relocation are not zero"),
        ("del n.relocations[0]", "pointer parameter has no relocation"),
        ("n.relocations[3].kind = 1", "BUFFER_ADDRESS does not fit the parameter type"),
        ("n.relocations[3].width = 2", "relocation has an impossible width"),
    ],
    ids=lambda text: text,
)
def test_says_what_is_wrong_with_a_relocation(change: str, what: str):
    graphs = gpu_graphs()
    exec(change, {"n": graphs.graphs[0].nodes[0]})

    assert refusal(graphs, sound_manifest(), 1).what == what


def test_an_override_of_shared_memory_obeys_the_limit_of_the_kernel():
    graphs = gpu_graphs()
    graph = graphs.graphs[0]
    graphs.templates.add(template_id=1, nodes=graph.nodes)
    graph.ClearField("nodes")
    graph.template_id = 1
    override = graph.overrides.add(node_id=1, dynamic_shared_bytes=512)
    check_graph_set(graphs, sound_manifest(), 1)
    override.dynamic_shared_bytes = 1025

    error = refusal(graphs, sound_manifest(), 1)

    assert (error.code, error.where) == ("GRAPH_LIMIT", "override of node 1 of graph attend")


def test_names_what_this_runtime_does_not_implement():
    graphs = cpu_graphs()
    graphs.templates[0].nodes[0].relocations[1].kind = graph_pb2.PEER_ADDRESS

    error = refusal(graphs, sound_manifest(), 0)

    assert str(error) == (
        "relocation PEER_ADDRESS is not implemented by this runtime\n"
        "   at: node 0 of template 1\n"
        " hint: use a newer dflash, or export the core without it"
    )


def test_names_the_nodes_of_a_cycle():
    graphs = cpu_graphs()
    graphs.templates[0].edges.add(to=1, **{"from": 2})

    assert refusal(graphs, sound_manifest(), 0).where == "template 1, nodes 1, 2"


def test_without_a_target_the_nodes_must_fit_every_target():
    graphs, manifest = cpu_graphs(), sound_manifest()
    manifest.kernels[0].variants[1].params[2].size = 8
    check_graph_set(graphs, manifest, 0)

    error = refusal(graphs, manifest, None)

    assert (error.code, error.expected, error.got) == ("RELOC_RANGE", "24 bytes", "20 bytes")


def test_the_first_module_of_a_target_that_has_the_kernel_decides():
    graphs, manifest = cpu_graphs(), sound_manifest()
    manifest.kernels[0].variants[1].params[2].size = 8
    manifest.device_targets[0].module_ids[:] = [2, 1]

    assert refusal(graphs, manifest, 0).code == "RELOC_RANGE"


def chain_of(count: int) -> GraphSet:
    """A graph of so many kernels, each behind the one before it."""
    graphs = cpu_graphs()
    nodes = graphs.graphs[0].nodes
    kernel = GraphNode()
    kernel.CopyFrom(graphs.templates[0].nodes[0])
    for index in range(2, count):
        kernel.node_id = index
        nodes.append(kernel)
        graphs.graphs[0].edges.add(to=index, **{"from": index - 1})
    return graphs


def test_time_grows_with_the_nodes_and_no_faster():
    """`make bench-verify` times the largest legal graph; here: no rule compares every node with every other."""
    seconds = []
    for count in (25_000, 200_000):
        graphs, manifest = chain_of(count), sound_manifest()
        started = time.process_time()
        check_graph_set(graphs, manifest, 0)
        seconds.append(time.process_time() - started)

    assert seconds[1] < 3 * 8 * seconds[0]
