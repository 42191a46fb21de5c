"""The vision graphs: a bucket each, the ops in order, what the host gives and gets, and a prompt's rows spliced in."""

import numpy as np
import pytest
from dflash_core.errors import PlanError
from dflash_core.formats import Format
from dflash_core.v1 import graph_pb2 as pb
from dflash_core.v1.manifest_pb2 import ModelIdentity, SourceFile

from exporter.checkpoint import open_checkpoint
from exporter.models.context import Forward, ImageRows, StoredWeight
from exporter.program.builder import GraphRecorder, Program
from exporter.program.vision import HOST_INPUTS, Vision, vision_buffers, vision_identity
from runtime.instantiate import instantiate
from runtime.ops import DType
from runtime.structure_graph import check_graph_set
from tests.tiny_pair import mapped_core
from tests.tiny_vision import CHUNK_TOKENS, HIDDEN, TinyVision, vision_config, write_tower

BLOCK = ["linear", "rope_grid", "image_attention", "linear", "add_rms_norm_once", "linear", "gelu_tanh", "linear",
         "add_rms_norm_once"]
OPS = ["pixel_patches", "linear", "grid_embedding", "rms_norm_once", *BLOCK, *BLOCK, "merge_patches", "linear", "gelu",
       "linear", "rms_norm_once", "store_image"]


@pytest.fixture(scope="module")
def tower():
    return TinyVision.record(buckets=(16, 64))


def test_each_bucket_has_a_graph(tower):
    found = [(g.name, g.role, g.bucket.batch, g.bucket.query_tokens, g.load_priority) for g in tower.recorded.graphs]

    assert found == [("vision.p16", "vision", 1, 16, 4), ("vision.p64", "vision", 1, 64, 4)]


def test_graphs_hold_these_ops_in_this_order(tower):
    names = {k.kernel_id: k.op.removeprefix("dflash.").removesuffix("/1") for k in tower.manifest.kernels}

    for graph in tower.recorded.graphs:
        assert [names[node.kernel_id] for node in graph.nodes] == OPS


def test_graphs_obey_every_structure_rule(tower):
    check_graph_set(pb.GraphSet(format_version=1, graphs=tower.recorded.graphs), tower.manifest)


def test_graphs_declare_what_they_read_and_write(tower):
    names = {b.buffer_id: b.name for b in tower.manifest.buffers}

    for graph in tower.recorded.graphs:
        assert [names[b] for b in graph.input_buffers] == ["image_pixels", "image_grid", "image_first"]
        assert [names[b] for b in graph.output_buffers] == ["image_embeddings"]


def test_contract_binds_what_the_host_writes_and_reads(tower):
    classes = {b.name: b.buffer_class for b in tower.manifest.buffers}

    assert {b.name: (b.dtype, tuple(b.shape), b.output) for b in tower.manifest.contract.io} == {
        "image_pixels": ("u8", (64, 588), False), "image_grid": ("i32", (2,), False),
        "image_first": ("i32", (1,), False), "image_embeddings": ("f32", (16, HIDDEN), True),
        "chunk_images": ("i32", (CHUNK_TOKENS,), False)}
    assert {name for name, kind in classes.items() if kind == pb.IO} == set(HOST_INPUTS)
    assert classes["image_embeddings"] == pb.STATE


@pytest.mark.parametrize("buckets", [(), (0,), (18,), (64, 16), (16, 16), (-4, 16)])
def test_refuses_buckets_that_are_none(buckets):
    with pytest.raises(PlanError) as refused:
        vision_buffers(Program(), Vision(vision_config(), buckets), 16, DType.F32)

    assert (refused.value.code, refused.value.expected) == ("VISION_BUCKETS", "ascending multiples of 4")


def test_prompt_takes_the_rows_of_images_that_were_encoded_before():
    """A graph that only embeds, over the buffers of the vision graphs; every token's own row is 60000."""
    program = Program()
    buffers = vision_buffers(program, Vision(vision_config(), (16,)), 4, DType.BF16)
    tokens, table = program.io("tokens", DType.I32, (4,)), program.io("table", DType.BF16, (1, HIDDEN))
    embedded = program.io("embedded", DType.BF16, (4, HIDDEN))
    graph = GraphRecorder(program, "prefill.c4", role="prefill", batch=1, query_tokens=4)
    Forward(graph, {"embedding": StoredWeight(Format.BF16, table)}, DType.BF16, ImageRows(4, buffers.image_grid),
            buffers.sources()).embedding(tokens, "embedding", embedded)
    recorded = graph.finish([tokens, table, buffers.chunk_images, buffers.image_embeddings], [embedded])
    manifest = TinyVision.record(buckets=(16,), act=DType.BF16).manifest
    del manifest.buffers[:], manifest.kernels[:], manifest.contract.io[:]
    manifest.buffers.extend(program.buffers)
    manifest.kernels.extend(program.kernels)
    memory = {b.buffer_id: np.zeros(b.fixed_bytes, np.uint8) for b in program.buffers}
    rows = memory[buffers.image_embeddings.buffer_id].view(np.uint16).reshape(-1, HIDDEN)
    words = memory[embedded.buffer_id].view(np.uint16).reshape(-1, HIDDEN)
    rows[:] = np.arange(rows.size).reshape(rows.shape)
    memory[table.buffer_id].view(np.uint16)[:] = 60000
    core = instantiate(mapped_core(manifest, [recorded], memory))

    core.graph("prefill", 1).run()
    assert (words == 60000).all()
    memory[buffers.chunk_images.buffer_id].view(np.int32)[:] = [0, 4, 1, 0]
    core.graph("prefill", 1).run()

    assert (words[[0, 3]] == 60000).all()
    assert np.array_equal(words[[1, 2]], rows[[3, 0]])


def test_identity_names_the_files_that_decide_the_embeddings(tower, tmp_path):
    write_tower(tmp_path / "k3", seed=1)
    names = ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json", "other.safetensors")
    target = ModelIdentity(repository="owner/k3", revision="1" * 40, architecture="KimiK3ForConditionalGeneration",
                           files=[SourceFile(path=name, size_bytes=1, sha256=bytes(32)) for name in names])

    vision = vision_identity(target, open_checkpoint(tmp_path / "k3"), tower.recorded.vision)

    assert (vision.encoder.repository, vision.encoder.revision) == ("owner/k3", "1" * 40)
    assert (vision.encoder.architecture, vision.max_image_tokens) == ("MoonViT3dPretrainedModel", 16)
    assert [f.path for f in vision.encoder.files] == list(names[:3])
