"""A loaded core: buffers by name, graphs by role and batch, and orders that keep every edge."""

import hashlib
from dataclasses import dataclass

import pytest
from dflash_core.errors import CompatibilityError
from dflash_core.v1 import weights_pb2

from runtime.core import smallest_bucket
from runtime.run import LoadedCore, LoadedGraph
from tests.tiny_pair import TinyProgram


@pytest.fixture(scope="module")
def pair():
    return TinyProgram.record(batches=(1, 4))


@pytest.fixture
def core(pair):
    return pair.load(seed=1)


def graph(count, edges=(), ran=None):
    steps = tuple((lambda i=i: ran.append(i)) for i in range(count))
    return LoadedGraph("g", "decode", 1, 1, steps, tuple(edges))


def test_runs_nodes_in_list_order_or_in_the_order_given():
    ran = []

    graph(3, ran=ran).run()
    graph(3, ran=ran).run([2, 0, 1])

    assert ran == [0, 1, 2, 2, 0, 1]


DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))


@pytest.mark.parametrize("edges", [(), DIAMOND, ((0, 4), (4, 2)), ((3, 0),)], ids=str)
def test_shuffled_orders_hold_every_node_once_and_keep_every_edge(edges):
    for seed in range(50):
        order = graph(5, edges).shuffled_order(seed)

        assert sorted(order) == [0, 1, 2, 3, 4]
        assert all(order.index(first) < order.index(second) for first, second in edges)


def test_shuffled_orders_differ_between_seeds_and_repeat_for_one():
    orders = {tuple(graph(5, DIAMOND).shuffled_order(seed)) for seed in range(400)}

    assert len(orders) == 10  # 0 first, then 1 and 2 before 3, and 4 anywhere: 2 x 5
    assert graph(5).shuffled_order(7) == graph(5).shuffled_order(7)


def test_buffers_are_bound_by_name_with_their_type_and_shape(core):
    assert {name: (array.dtype.name, array.shape) for name, array in core.io.items() if name != "logits"} == {
        "slots": ("int32", (4,)), "limit": ("int32", (4,)), "page_table": ("int32", (4, 8)),
        "temperature": ("float32", (4,)), "top_p": ("float32", (4,)), "top_k": ("int32", (4,)),
        "seed": ("uint64", (4,)), "chunk_tokens": ("int32", (16,)), "chunk_count": ("int32", (1,)),
        "length": ("int32", (4,)), "anchor": ("int32", (4,)), "sampled": ("int32", (4,)), "emitted": ("int32", (4, 4)),
        "produced": ("int32", (4,)), "accepted": ("int32", (4,)), "proposals": ("int32", (4, 3)),
        "proposal_ids": ("int32", (4, 3, 4)), "proposal_probs": ("float32", (4, 3, 4)),
    }  # fmt: skip
    assert core.symbols == {"kv_pages": 32}


def test_what_the_host_writes_is_what_the_graphs_read(core):
    core.io["slots"][:], core.io["limit"][:] = [2, -1, -1, -1], 9
    core.io["length"][2], core.io["anchor"][2] = 3, 77

    core.graph("draft", 1).run()

    assert core.io["proposals"][0].tolist() != [0, 0, 0]
    assert not core.io["proposals"][1:].any()


@pytest.mark.parametrize(("batch", "name"), [(1, "decode.b1"), (2, "decode.b4"), (3, "decode.b4"), (4, "decode.b4")])
def test_smallest_graph_that_serves_the_batch_is_chosen(core, batch, name):
    assert core.graph("decode", batch).name == name


@dataclass(frozen=True)
class Named:
    name: str
    batch: int
    query_tokens: int


@pytest.mark.parametrize(("tokens", "found"), [(1, "p64"), (64, "p64"), (65, "p128"), (128, "p128"), (129, "p1024")])
def test_smallest_graph_that_holds_the_rows_is_chosen(tokens, found):
    buckets = [Named("p1024", 1, 1024), Named("p64", 1, 64), Named("p128", 1, 128), Named("wide", 2, 64)]

    assert smallest_bucket(buckets, "vision", 1, tokens, "tiny").name == found


def test_refuses_more_rows_than_any_graph_holds(core):
    with pytest.raises(CompatibilityError) as refused:
        core.graph("prefill", 1, 17)

    error = refused.value
    assert (error.code, error.what, error.expected, error.got) == (
        "NO_GRAPH", "the core has no prefill graph for this many rows", "at most 16", "17")


@pytest.mark.parametrize(("role", "batch", "expected"), [("verify", 5, "at most 4"), ("vision", 1, "at most 0")])
def test_refuses_a_batch_without_a_graph(core, role, batch, expected):
    with pytest.raises(CompatibilityError) as refused:
        core.graph(role, batch)

    error = refused.value
    assert (error.code, error.where, error.expected, error.got) == ("NO_GRAPH", "tiny", expected, str(batch))


def test_context_manager_closes_the_files_even_after_a_failure(pair):
    closed = []
    mapped = pair.mapped(pair.memory(seed=1))
    mapped.checked.verified.close = lambda: closed.append(True)

    with pytest.raises(KeyboardInterrupt), LoadedCore(mapped, {}):
        raise KeyboardInterrupt

    assert closed == [True]


def test_model_file_is_found_by_its_published_path():
    data = b'{"model": 1}'
    digest = hashlib.sha256(data).digest()
    ref = weights_pb2.FileRef(algorithm=weights_pb2.SHA256, digest=digest, size_bytes=len(data))
    pair = TinyProgram.record(drafted=False)
    pair.manifest.target.files.add(path="tokenizer.json", size_bytes=len(data), sha256=digest)
    pair.manifest.target.files.add(path="model.safetensors", size_bytes=9, sha256=bytes(32))
    pair.manifest.files.add(path=f"config/{digest.hex()}", ref=ref, role="config")
    mapped = pair.mapped(pair.memory(seed=1))
    mapped.checked.verified.small_file = lambda asked: data if asked == ref else None

    core = LoadedCore(mapped, {})

    assert core.file("tokenizer.json") == data
    assert core.file("model.safetensors") is None
    assert core.file("chat_template.jinja") is None


def test_core_knows_its_manifest_and_digest(pair):
    mapped = pair.mapped(pair.memory(seed=1))
    mapped.checked.verified.core_digest = b"\x07" * 32

    core = LoadedCore(mapped, {})

    assert core.core_digest == b"\x07" * 32
    assert core.manifest is mapped.checked.verified.manifest


def test_arrays_are_views_of_the_mapped_memory(pair):
    memory = pair.memory(seed=1)
    core = LoadedCore(pair.mapped(memory), {})
    binding = next(b for b in pair.manifest.contract.io if b.name == "limit")

    core.io["limit"][1] = 0x01020304

    assert memory[binding.buffer_id][4:8].tolist() == [4, 3, 2, 1]
