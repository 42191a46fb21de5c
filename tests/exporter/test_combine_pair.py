"""Combining cores that an exporter wrote: the result runs, and its bits are those of a core exported in one go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_core.errors import CompatibilityError, DflashError
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest

from exporter.combine import CombinedCore, CombineRequest, combine
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import Engine, LoadedCore, Request, load
from runtime.diff import Part, diff_cores
from tests.integration.cores import Signer
from tests.tiny_pair import write_pair

PROMPTS = ([1, 2, 3], [5], [9, 8, 7, 6, 5], [2, 4])
PLAIN = PrecisionSettings()
SCOPE_ALL = PrecisionSettings(online_mxfp8_scope="all")
BOTH_ASKED = PrecisionSettings(online_mxfp8_scope="all", draft_body="mxfp8")
BODY = PrecisionSettings(draft_body="mxfp8")
HEAD = PrecisionSettings(draft_head="nvfp4")


class Pair:
    """A tiny pair, a signer, and the cores exported from it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_pair(folder, seed=1)
        self.signer = Signer.create(folder / "keys")

    def core(self, batches: tuple[int, ...], settings: PrecisionSettings = PLAIN,
             context: int = 128) -> Path:
        name = "core-" + hashlib.sha256(repr((batches, settings, context)).encode()).hexdigest()[:12]
        out = self.folder / name
        if not out.exists():
            export(ExportRequest(target=self.folder / "target", draft=self.folder / "draft", out=out,
                                 batches=batches, settings=settings, max_context=context), self.signer.key)
        return out

    def combine(self, out: Path, *cores: Path) -> CombinedCore:
        return combine(CombineRequest(cores, out), self.signer.trust, self.signer.key)

    def load(self, core: Path) -> LoadedCore:
        return load(core, trust=self.signer.trust)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield Pair(tmp_path_factory.mktemp("pair"))


def graph_names(core: Path) -> list[str]:
    manifest = RebuildManifest.FromString((core / "manifest.pb").read_bytes())
    return list(manifest.graph_files[0].graph_names)


def outputs(core: LoadedCore, prompts: tuple[list[int], ...], speculation: bool = True) -> list[tuple[int, ...]]:
    """What all prompts give when they run together."""
    engine = Engine(core)
    running = [engine.add(p, Request(max_tokens=24, speculation=speculation)) for p in prompts]
    while any(sequence.finish_reason is None for sequence in running):
        engine.step()
    return [tuple(sequence.tokens) for sequence in running]


@pytest.mark.parametrize("order", [pytest.param((0, 1), id="small-first"), pytest.param((1, 0), id="large-first")])
def test_cores_of_different_batches_combine_into_one_that_serves_both(
    pair: Pair, tmp_path: Path, order: tuple[int, int],
) -> None:
    cores = [pair.core((1,)), pair.core((1, 4))]

    combined = pair.combine(tmp_path / "out", *(cores[i] for i in order))

    contract = combined.manifest.contract
    assert contract.max_batch == 4
    assert {b.name: list(b.shape) for b in contract.io if b.name in ("slots", "length", "emitted", "page_table")} == {
        "slots": [4], "length": [4], "emitted": [4, 4], "page_table": [4, 2]}
    assert sorted(graph_names(combined.path)) == sorted(graph_names(cores[1]))
    with pair.load(combined.path) as ours, pair.load(cores[1]) as whole, pair.load(cores[0]) as single:
        assert outputs(ours, PROMPTS) == outputs(whole, PROMPTS) == outputs(single, PROMPTS)
        assert outputs(ours, PROMPTS, speculation=False) == outputs(ours, PROMPTS)


def test_a_graph_that_grew_is_the_graph_of_a_core_exported_for_the_larger_batch(pair: Pair, tmp_path: Path) -> None:
    combined = pair.combine(tmp_path / "out", pair.core((1,)), pair.core((4,)))

    report = diff_cores(combined.path, pair.core((1, 4)), None)

    assert not any(report.differs(part) for part in Part)


def test_every_graph_of_the_combined_core_runs_in_each_of_its_slots(pair: Pair, tmp_path: Path) -> None:
    """The batch-1 graphs come from a core that knew slot 0 alone; a fourth sequence puts them in slot 3."""
    combined = pair.combine(tmp_path / "out", pair.core((1,)), pair.core((4,)))

    with pair.load(combined.path) as core:
        together = outputs(core, PROMPTS)
        engine = Engine(core)
        held = [engine.add([1], Request(max_tokens=100)) for _ in range(3)]
        last = engine.add(PROMPTS[2], Request(max_tokens=24))
        engine.step()
        slots = sorted([*(s.slot for s in held), last.slot])
        for sequence in held:
            engine.abort(sequence)
        while last.finish_reason is None:
            engine.step()

    assert slots == [0, 1, 2, 3]
    assert tuple(last.tokens) == together[2]


def test_cores_with_disjoint_buckets_combine(pair: Pair, tmp_path: Path) -> None:
    combined = pair.combine(tmp_path / "out", pair.core((2,)), pair.core((3,)))

    assert graph_names(combined.path) == [
        "prefill.c64", "draft.b2", "verify.b2", "decode.b2", "draft.b3", "verify.b3", "decode.b3"]
    assert combined.manifest.symbols[0].default_value == 6


def test_a_body_inherited_and_a_body_asked_for_combine_and_stay_distinguishable(pair: Pair, tmp_path: Path) -> None:
    combined = pair.combine(tmp_path / "out", pair.core((1,), SCOPE_ALL), pair.core((1, 2), BOTH_ASKED))

    recorded = [c.recorded_speculation.draft_body_quantization for c in combined.manifest.components]
    assert recorded == ["", "mxfp8"]
    assert [f.role for f in combined.manifest.files].count("weights") == 2
    with pair.load(combined.path) as core:
        assert len(outputs(core, PROMPTS)) == 4


@pytest.mark.parametrize(("left", "right", "code", "where"), [
    pytest.param({}, {"settings": BODY}, "COMBINE_DRAFT_BODY", "", id="bf16-and-mxfp8-bodies"),
    pytest.param({}, {"settings": SCOPE_ALL}, "COMBINE_ONLINE_QUANTIZATION", "", id="target-formats"),
    pytest.param({}, {"settings": HEAD}, "COMBINE_DRAFT_HEAD", "graph draft.b1", id="proposal-heads"),
    pytest.param({}, {"settings": PrecisionSettings(depth=2)}, "COMBINE_BINDING", "emitted", id="depths"),
    pytest.param({}, {"settings": PrecisionSettings(depth=0)}, "COMBINE_KV_BYTES_PER_PAGE", "", id="without-draft"),
    pytest.param({}, {"context": 256}, "COMBINE_TENSOR", "target.rope_table, shape", id="contexts"),
])
def test_refuses_exports_that_differ_in(
    pair: Pair, tmp_path: Path, left: dict[str, object], right: dict[str, object], code: str, where: str,
) -> None:
    cores = [pair.core((1,), **left), pair.core((1, 2), **right)]  # type: ignore[arg-type]

    with pytest.raises(CompatibilityError) as caught:
        pair.combine(tmp_path / "out", *cores)

    assert caught.value.code == code
    assert where in caught.value.where
    assert list(tmp_path.iterdir()) == []


def test_heads_that_serve_other_buckets_combine(pair: Pair, tmp_path: Path) -> None:
    combined = pair.combine(tmp_path / "out", pair.core((1,)), pair.core((2,), HEAD))

    assert [b.name for b in combined.manifest.buffers if b.HasField("blob_id")] == [
        "weights.target", "weights.draft", "weights.head"]
    with pair.load(combined.path) as ours, pair.load(pair.core((2,), HEAD)) as headed:
        assert outputs(ours, PROMPTS[:2]) == outputs(headed, PROMPTS[:2])


def test_refuses_a_pair_made_from_other_weights(pair: Pair, tmp_path: Path) -> None:
    write_pair(tmp_path / "other", seed=2)
    export(ExportRequest(target=tmp_path / "other" / "target", draft=tmp_path / "other" / "draft",
                         out=tmp_path / "core", max_context=128), pair.signer.key)

    with pytest.raises(DflashError) as caught:
        pair.combine(tmp_path / "out", pair.core((1,)), tmp_path / "core")

    assert caught.value.code == "COMBINE_TARGET_FILES"
    assert caught.value.where.endswith(": model.safetensors")


def test_three_cores_and_a_combined_one_give_the_same_graphs(pair: Pair, tmp_path: Path) -> None:
    one, two, three = pair.core((1,)), pair.core((2,)), pair.core((3,))
    flat = pair.combine(tmp_path / "flat", one, two, three)
    inner = pair.combine(tmp_path / "inner", one, two)
    nested = pair.combine(tmp_path / "nested", inner.path, three)

    sets = [GraphSet.FromString(next((core.path / "graphs").iterdir()).read_bytes()) for core in (flat, nested)]

    assert sets[0] == sets[1]
    assert [c.core_name for c in nested.manifest.components] == [c.core_name for c in flat.manifest.components]
    assert [c.buffer_ids for c in nested.manifest.components] == [c.buffer_ids for c in flat.manifest.components]
