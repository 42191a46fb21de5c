"""A signed core with an image tower: written, loaded, combined with one of more buckets, its embeddings bit for bit.

The language model is a tiny llama that never saw an image: what is shown is that the tower's weights, graphs, buffers
and identity pass signing, loading and combining beside a text model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_core.errors import CompatibilityError
from dflash_core.formats import Format
from dflash_core.v1.manifest_pb2 import RebuildManifest

from exporter.checkpoint import hash_files, open_checkpoint
from exporter.combine import CombineRequest, combine
from exporter.config_fields import Fields
from exporter.convert.stream import convert_weights
from exporter.export import stored_weights
from exporter.models import dense, moonvit
from exporter.package import CoreIdentity, SourceModel, write_core
from exporter.program.builder import Program
from exporter.program.graphs import record_program
from exporter.program.serving import ServingShape
from exporter.program.vision import Vision
from exporter.target_config import read_target_config
from exporter.weights import layout_weights
from runtime import Engine, LoadedCore, Request, load
from runtime.inspect import inspect_core
from runtime.ops import DType
from runtime.sign import sign_core
from runtime.vision.encode import VisionEncoder
from runtime.vision.settings import PREPROCESSOR_CONFIG, read_image_settings
from tests.exporter.small_checkpoints import shard_bytes
from tests.integration.cores import Signer
from tests.oracles.drawn_images import drawn, png_of
from tests.tiny_pair import TARGET_CONFIG, write_pair
from tests.tiny_vision import CONFIG, HIDDEN, VISION, TinyVision, weights_of

SEED = 1
PREPROCESSOR = {"media_proc_cfg": {"in_patch_limit": 40960}}


def write_checkpoint(folder: Path) -> Path:
    """A llama and a tower in one folder, two shards."""
    write_pair(folder, seed=3)
    target = folder / "target"
    (target / "config.json").write_text(json.dumps({**TARGET_CONFIG, **CONFIG, "model_type": "llama"}))
    (target / PREPROCESSOR_CONFIG).write_text(json.dumps(PREPROCESSOR))
    tower = {name: ("BF16", value.shape, value.tobytes()) for name, value in weights_of(SEED, DType.BF16).items()}
    text = (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    (target / "model-00002-of-00002.safetensors").write_bytes(shard_bytes(tower))
    header = json.loads(text.read_bytes()[8:8 + int.from_bytes(text.read_bytes()[:8], "little")])
    weight_map = dict.fromkeys(header, text.name) | dict.fromkeys(tower, "model-00002-of-00002.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def write_vision_core(out: Path, folder: Path, buckets: tuple[int, ...], signer: Signer) -> Path:
    """What an export of a model with vision does, one stage after the other."""
    checkpoint = open_checkpoint(folder)
    config = read_target_config(checkpoint)
    tower = moonvit.read_vision_config(Fields(checkpoint.config["vision_config"], "vision_config"), config.hidden_size)
    formats = dict.fromkeys(checkpoint.tensors, Format.BF16)
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    settings = read_image_settings((folder / PREPROCESSOR_CONFIG).read_bytes())
    layout = layout_weights([*dense.weight_specs(config, formats, shapes, 64),
                             *moonvit.weight_specs(tower, formats, settings)])
    shape = ServingShape(max_batch=1, max_context=64, page_tokens=8, chunk_tokens=16, depth=0, candidates=0,
                         vocab=config.vocab_size)
    program = Program()
    weights = stored_weights(program, layout)
    recorded = record_program(program, config, None, weights, shape, (1,), DType.BF16, Vision(tower, buckets))
    out.mkdir()
    identity = CoreIdentity(
        core_name=out.name, release=1, target=SourceModel(checkpoint, hash_files(checkpoint, lambda _: None), "K3"),
        draft=None, speculation=None, online_quantization=None, online_mxfp8_scope=None, tuning_identity=b"",
        arguments=())
    converted = convert_weights(layout, {"target": checkpoint}, out, lambda _: None)
    write_core(out, identity, converted, recorded, shape)
    sign_core(out, signer.key)
    return out


class Bench:
    """A checkpoint, a signer, and two cores of it: one with a bucket, one with two."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signer = folder, Signer.create(folder / "keys")
        self.checkpoint = write_checkpoint(folder / "models")
        self.one = self.core("one", (64,))
        self.two = self.core("two", (16, 64))

    def core(self, name: str, buckets: tuple[int, ...]) -> Path:
        return write_vision_core(self.folder / name, self.checkpoint, buckets, self.signer)

    def load(self, core: Path) -> LoadedCore:
        return load(core, trust=self.signer.trust)

    def combine(self, out: str, *cores: Path) -> Path:
        combine(CombineRequest(cores, self.folder / out), self.signer.trust, self.signer.key)
        return self.folder / out


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("vision"))


def embeddings(core: Any, width: int, height: int, first: int = 0) -> bytes:
    encoder = VisionEncoder.of(core)
    image = encoder.patches(png_of(drawn(width, height)))
    encoder.encode(image, first)
    return encoder.rows(first, image.tokens).tobytes()


def manifest_of(core: Path) -> RebuildManifest:
    return RebuildManifest.FromString((core / "manifest.pb").read_bytes())


def test_signed_core_gives_the_embeddings_of_its_program(bench: Bench) -> None:
    expected = TinyVision.record(buckets=(64,), act=DType.BF16).load(SEED)

    with bench.load(bench.one) as core:
        for size in ((28, 28), (100, 60), (300, 200)):
            assert embeddings(core, *size) == embeddings(expected, *size)


def test_cores_with_other_buckets_give_equal_bits_alone_and_combined(bench: Bench) -> None:
    found = set()
    for path in (bench.one, bench.two, bench.combine("both", bench.one, bench.two)):
        with bench.load(path) as core:
            found.add((embeddings(core, 56, 56), embeddings(core, 100, 60)))

    assert len(found) == 1
    combined = manifest_of(bench.folder / "both")
    assert {n for f in combined.graph_files for n in f.graph_names} >= {"vision.p16", "vision.p64", "decode.b1"}
    assert combined.vision == manifest_of(bench.one).vision


def test_text_is_what_it_was_whatever_image_was_seen(bench: Bench) -> None:
    with bench.load(bench.one) as core:
        before = Engine(core).generate([1, 2, 3], Request(max_tokens=8)).tokens
        embeddings(core, 100, 60)
        after = Engine(core).generate([1, 2, 3], Request(max_tokens=8)).tokens

    assert before == after


def test_manifest_identifies_the_encoder_and_its_weights(bench: Bench) -> None:
    manifest = manifest_of(bench.one)
    owned = [view for view in manifest.tensor_views if view.owner == "vision"]

    assert manifest.vision.max_image_tokens == 16
    assert [f.path for f in manifest.vision.encoder.files] == [
        "config.json", "model-00002-of-00002.safetensors", PREPROCESSOR_CONFIG]
    assert {v.dtype for v in owned if v.source_tensors} == {"bf16"}
    assert len(owned) == len(weights_of(SEED)) + 2
    report = inspect_core(bench.one, bench.signer.trust)
    assert ("vision.p64", "vision", 1, 64) in [(g.name, g.role, g.batch, g.query_tokens) for g in report.graphs]


def test_settings_of_the_core_are_those_of_its_checkpoint(bench: Bench) -> None:
    with bench.load(bench.one) as core:
        encoder = VisionEncoder.of(core)

    assert (encoder.settings.max_patches, encoder.max_tokens, encoder.placeholder) == (40960, 16, 250)


def test_cores_whose_images_differ_in_size_are_not_combined(bench: Bench) -> None:
    with pytest.raises(CompatibilityError) as refused:
        bench.combine("apart", bench.one, bench.core("larger", (64, 128)))

    assert refused.value.code == "COMBINE_VISION"


def test_image_is_refused_by_a_text_core(bench: Bench) -> None:
    with bench.load(bench.one) as core:
        core.manifest.ClearField("vision")
        with pytest.raises(CompatibilityError, match="no vision"):
            VisionEncoder.of(core)


def test_width_of_the_rows_is_the_language_models(bench: Bench) -> None:
    with bench.load(bench.one) as core:
        assert core.shape("image_embeddings") == (16, HIDDEN)
        assert np.frombuffer(embeddings(core, 28, 28), np.float32).shape == (VISION["text_hidden_size"],)
