"""An image through the vision graphs of a tiny Kimi K3: the fp64 oracle's embeddings, the same bits in every bucket."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from dflash_core.errors import CompatibilityError, FormatError, ImageError
from PIL import Image

from exporter.models.moonvit import grid_rope_table
from runtime.ops import DType, call
from runtime.vision.encode import VisionEncoder
from runtime.vision.preprocess import ImagePatches, image_patches
from runtime.vision.settings import ImageSettings
from tests.oracles import moonvit_oracle as oracle
from tests.oracles.drawn_images import drawn, jpeg_of, png_of
from tests.tiny_vision import HIDDEN, PLACEHOLDER, VISION, TinyVision, weights_of

BUCKETS = (16, 64, 256)
SIZES = [(28, 28), (56, 28), (56, 56), (100, 60), (160, 130), (500, 20), (224, 224)]


@pytest.fixture(scope="module")
def tower():
    return TinyVision.record(buckets=BUCKETS)


@pytest.fixture
def encoder(tower):
    return VisionEncoder.of(tower.load(seed=1))


def patches(width, height):
    return image_patches(Image.fromarray(drawn(width, height)), ImageSettings(), 64)


def encoded(encoder, image, first=0):
    encoder.encode(image, first)
    return encoder.rows(first, image.tokens)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("seed", [1, 2])
def test_embeddings_are_the_oracles(tower, width, height, seed):
    """fp32 against fp64: at most 1e-5 of the largest value, which is about 4; 3e-6 was measured."""
    image = patches(width, height)

    found = encoded(VisionEncoder.of(tower.load(seed)), image)
    expected = oracle.embeddings(VISION, weights_of(seed), image.levels, image.rows, image.cols)

    assert found.shape == (image.tokens, HIDDEN)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(expected).max() > 2


def test_no_size_stands_in_for_another():
    """Every size is its own: hidden, head and inner widths, and a table of positions that is not square."""
    changes = {"vt_hidden_size": 40, "qkv_hidden_size": 48, "vt_num_attention_heads": 3, "vt_intermediate_size": 56,
               "vt_num_hidden_layers": 3, "init_pos_emb_height": 6, "init_pos_emb_width": 10, "projector_ln_eps": 0.01}
    encoder, image = VisionEncoder.of(TinyVision.record(buckets=(64,), **changes).load(seed=3)), patches(100, 60)

    found = encoded(encoder, image)
    expected = oracle.embeddings({**VISION, **changes}, weights_of(3, **changes), image.levels, image.rows, image.cols)

    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_bf16_follows_the_oracle_as_far_as_its_bits_go():
    """Two layers of 8 bits: 0.09 of values up to 4.3 was measured."""
    encoder, image = VisionEncoder.of(TinyVision.record(act=DType.BF16).load(seed=1)), patches(100, 60)

    found = encoded(encoder, image)
    expected = oracle.embeddings(VISION, weights_of(1, DType.BF16), image.levels, image.rows, image.cols)

    assert np.abs(found - expected).max() <= 0.15
    assert np.sqrt(((found - expected) ** 2).mean()) <= 0.02


@pytest.mark.parametrize("act", [DType.F32, DType.BF16])
def test_image_has_equal_bits_in_every_bucket_and_over_any_scratch(act):
    """The bucket, what scratch held before (0xFF is NaN), and what a larger image left in the patches change no bit."""
    image = patches(56, 56)
    found = set()
    for buckets in ((16,), (20, 256), (64,), (256,)):
        for scratch in (0, 0xFF):
            core = TinyVision.record(buckets=buckets, act=act).load(seed=1, scratch=scratch)
            core.io["image_pixels"][:] = 0xAB
            found.add(encoded(VisionEncoder.of(core), image).tobytes())

    assert len(found) == 1


def test_smallest_bucket_runs(encoder, monkeypatch):
    ran = []
    for name, graph in list(encoder.core.graphs.items()):
        monkeypatch.setitem(encoder.core.graphs, name,
                            dataclasses.replace(graph, steps=((lambda name=name: ran.append(name)),)))
    for size in ((56, 56), (57, 56), (112, 112), (224, 224)):
        encoder.encode(patches(*size), 0)

    assert ran == ["vision.p16", "vision.p64", "vision.p64", "vision.p256"]


def test_result_is_the_same_in_any_order_that_keeps_the_edges(encoder):
    image = patches(100, 60)
    expected = encoded(encoder, image).tobytes()
    graph = encoder.core.graphs["vision.p64"]

    for seed in range(5):
        encoder.core.io["image_embeddings"][:] = 7
        graph.run(graph.shuffled_order(seed))
        assert encoder.rows(0, image.tokens).tobytes() == expected


def test_images_lie_side_by_side_and_do_not_touch_each_other(encoder):
    small, large = patches(28, 28), patches(100, 60)
    alone = [encoded(encoder, image).copy() for image in (small, large)]
    encoder.core.io["image_embeddings"][:] = 7

    encoder.encode(large, 5)
    encoder.encode(small, 5 + large.tokens)

    assert encoder.rows(5, large.tokens).tobytes() == alone[1].tobytes()
    assert encoder.rows(5 + large.tokens, 1).tobytes() == alone[0].tobytes()
    rest = np.r_[encoder.rows(0, 5), encoder.rows(6 + large.tokens, 58 - large.tokens)]
    assert (rest == 7).all()


def test_files_become_patches_of_the_size_the_core_has_room_for(encoder):
    assert (encoder.max_tokens, encoder.capacity, encoder.placeholder) == (64, 64, PLACEHOLDER)
    assert encoder.patches(png_of(drawn(28, 56))).tokens == 2
    large = encoder.patches(jpeg_of(drawn(1000, 1000)))
    assert (large.tokens, large.width, large.height) == (64, 1000, 1000)
    with pytest.raises(ImageError, match="image 2"):
        encoder.patches(b"no image", where="image 2")


@pytest.mark.parametrize("first", [-1, 64, 60])
def test_refuses_rows_that_do_not_fit(encoder, first):
    before = encoder.core.io["image_embeddings"].copy()

    with pytest.raises(CompatibilityError) as refused:
        encoder.encode(patches(100, 60), first)

    assert (refused.value.code, refused.value.got) == ("IMAGE_ROWS", f"12 rows from {first}")
    assert np.array_equal(encoder.core.io["image_embeddings"], before)


def test_refuses_more_patches_than_any_bucket_has():
    encoder = VisionEncoder.of(TinyVision.record(buckets=(16, 64)).load())
    image = ImagePatches(np.zeros((68, 588), np.uint8), 2, 34, 16, 476, 28)

    with pytest.raises(CompatibilityError) as refused:
        encoder.encode(image, 0)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("NO_GRAPH", "at most 64", "68")


def test_refuses_a_core_without_vision(tower):
    core = tower.load()
    core.manifest = type(core.manifest)(core_name="text")

    with pytest.raises(CompatibilityError) as refused:
        VisionEncoder.of(core)

    assert (refused.value.code, refused.value.where, bool(refused.value.hint)) == ("NO_VISION", "text", True)


@pytest.mark.parametrize(("field", "value", "got"), [("patch_size", 16, "768 values, 2 x 2"),
                                                      ("merge_kernel_size", 4, "588 values, 4 x 4")])
def test_refuses_settings_that_are_not_the_graphs(tower, monkeypatch, field, value, got):
    core = tower.load()
    settings = json.dumps({"media_proc_cfg": {field: value}}).encode()
    monkeypatch.setattr(core, "file", lambda path: settings if path == "preprocessor_config.json" else None)

    with pytest.raises(FormatError) as refused:
        VisionEncoder.of(core)

    assert (refused.value.code, refused.value.expected, refused.value.got) == (
        "IMAGE_SETTINGS", "patches of 588 values, 2 x 2 a token", got)


@pytest.mark.parametrize("config", [b"", b"{}", b"[]", b"{", b'{"media_placeholder_token_id": "250"}',
                                    b'{"media_placeholder_token_id": -1}', b'{"media_placeholder_token_id": true}'])
def test_refuses_a_core_that_names_no_placeholder(tower, monkeypatch, config):
    core = tower.load()
    monkeypatch.setattr(core, "file", lambda path: config if path == "config.json" else None)

    with pytest.raises(FormatError, match="no token that stands for an image") as refused:
        VisionEncoder.of(core)

    assert refused.value.code == "IMAGE_TOKEN"


def test_rope_attention_and_merge_are_those_of_transformers_where_the_two_towers_agree():
    """Kimi K2.5 in fp64: the same 2-D rope, attention and merge; its norms, biases, interpolation and projector are
    others. Its rope splits a head in halves, so that the rows of q and k are put in that order."""
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
    from transformers.vision_utils import get_vision_position_ids

    config = Kimi_K25VisionConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64,
                                  attn_implementation="eager")
    tower = Kimi_K25VisionModel(config).double()
    attention, (rows, cols), generator = tower.layers[0].attn, (4, 6), np.random.default_rng(5)
    x, wqkv, wo = generator.normal(size=(rows * cols, 64)), generator.normal(size=(3, 64, 64)) * 0.2, np.eye(64)
    halves = np.r_[np.arange(0, 32, 2), np.arange(1, 32, 2)]
    order = np.r_[halves, 32 + halves]
    for module, weight in ((attention.q_proj, wqkv[0][order]), (attention.k_proj, wqkv[1][order]),
                           (attention.v_proj, wqkv[2]), (attention.proj, wo)):
        module.weight.data, module.bias.data = torch.from_numpy(weight), torch.zeros(64).double()
    grid = torch.tensor([[1, rows, cols]])
    with torch.no_grad():
        turn = tower.rotary_emb(torch.from_numpy(x), get_vision_position_ids(grid, spatial_merge_size=1))
        expected = attention(torch.from_numpy(x), torch.tensor([0, rows * cols], dtype=torch.int32), turn)
        merged = tower.temporal_merge(expected, grid, 2, 2)

    found = attended(np.concatenate([x @ w.T for w in wqkv], axis=1).astype(np.float32), rows, cols)
    assert np.abs(found - expected.numpy()).max() <= 5e-6
    assert np.abs(merge(found, rows, cols) - merged.numpy().reshape(-1, 256)).max() <= 5e-6


def attended(qkv, rows, cols):
    """rope_grid and image_attention of two heads of 32."""
    table, grid = grid_rope_table(32, 64).numpy(), np.array([rows, cols], np.int32)
    q, k, out = (np.empty((rows * cols, 64), np.float32) for _ in range(3))
    shape = {"rows": rows * cols, "heads": 2, "head_dim": 32, "act": DType.F32}
    call("dflash.rope_grid/1", {"qkv": qkv, "rope_table": table, "grid": grid, "q": q, "k": k}, positions=64, **shape)
    call("dflash.image_attention/1", {"q": q, "k": k, "qkv": qkv, "grid": grid, "out": out}, scale=32**-0.5, **shape)
    return out


def merge(x, rows, cols):
    out = np.empty((len(x) // 4, 4 * x.shape[1]), np.float32)
    call("dflash.merge_patches/1", {"x": x, "grid": np.array([rows, cols], np.int32), "out": out}, rows=len(x),
         cols=x.shape[1], act=DType.F32)
    return out
