"""Weights taken from a core: what hits, what misses and by which field, and that the bytes are as if converted."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import CompatibilityError, DflashError, VerificationError
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import TensorView
from typer.testing import CliRunner

from exporter.cli import export_app
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from exporter.reuse import Miss, ReuseReport, export_reusing
from runtime.sign import sign_core
from runtime.verify import VerifiedCore
from tests.integration.cores import Signer
from tests.tiny_pair import write_pair

PLAIN = PrecisionSettings()
BODY = PrecisionSettings(draft_body="mxfp8")
ALL = PrecisionSettings(online_mxfp8_scope="all")
ALL_BODY = PrecisionSettings(online_mxfp8_scope="all", draft_body="mxfp8")
BODY_HEAD = PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4")


class Cache:
    """A tiny pair, a signer, and the cores exported from it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_pair(folder, seed=1)
        self.signer = Signer.create(folder / "keys")

    def request(self, out: Path, settings: PrecisionSettings = PLAIN, *, draft: bool = True, context: int = 128,
                pair: Path | None = None) -> ExportRequest:
        source = pair or self.folder
        return ExportRequest(target=source / "target", draft=source / "draft" if draft else None, out=out,
                             settings=settings, max_context=context, core_name="tiny")

    def core(self, settings: PrecisionSettings = PLAIN, *, draft: bool = True) -> Path:
        name = "core-" + hashlib.sha256(repr((settings, draft)).encode()).hexdigest()[:12]
        if not (self.folder / name).exists():
            export(self.request(self.folder / name, settings, draft=draft), self.signer.key)
        return self.folder / name

    def edited(self, to: Path, edit: Callable[[RebuildManifest], object],
               settings: PrecisionSettings = PLAIN) -> Path:
        """A core with another manifest, signed."""
        shutil.copytree(self.core(settings), to)
        manifest = RebuildManifest.FromString((to / "manifest.pb").read_bytes())
        edit(manifest)
        (to / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
        sign_core(to, self.signer.key)
        return to

    def reuse(self, cached: Path, request: ExportRequest) -> ReuseReport:
        return export_reusing(request, cached, self.signer.trust, self.signer.key)[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def files(core: Path) -> dict[str, bytes]:
    return {p.relative_to(core).as_posix(): p.read_bytes() for p in core.rglob("*")
            if p.is_file() and p.parent.name != "signatures"}


@pytest.mark.parametrize(("cached", "wanted", "misses"), [
    pytest.param((PLAIN, True), (PLAIN, True), 0, id="bf16"),
    pytest.param((BODY, True), (BODY, True), 0, id="body"),
    pytest.param((ALL, True), (ALL_BODY, True), 0, id="inherited-body-serves-one-asked-for"),
    pytest.param((BODY, True), (BODY_HEAD, True), 1, id="a-head-more"),
    pytest.param((BODY_HEAD, True), (BODY, True), 0, id="a-head-less"),
    pytest.param((BODY, True), (PLAIN, False), 0, id="target-only-ignores-the-body"),
    pytest.param((PLAIN, False), (BODY, True), 31, id="a-core-without-draft-has-none-to-give"),
])
def test_the_result_is_the_core_that_a_conversion_gives(
    cache: Cache, tmp_path: Path, cached: tuple[PrecisionSettings, bool], wanted: tuple[PrecisionSettings, bool],
    misses: int,
) -> None:
    source = cache.core(cached[0], draft=cached[1])

    report = cache.reuse(source, cache.request(tmp_path / "out", wanted[0], draft=wanted[1]))

    assert files(tmp_path / "out") == files(cache.core(wanted[0], draft=wanted[1]))
    assert len(report.misses) == misses
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_reports_hits_misses_and_bytes(cache: Cache, tmp_path: Path) -> None:
    report = cache.reuse(cache.core(BODY), cache.request(tmp_path / "out", BODY_HEAD))

    assert report.misses == (Miss("head.proposal", "name", "absent", "head.proposal"),)
    assert len(report.hits) == 53
    assert report.nbytes_total - report.nbytes_saved == 64 * 128 // 2 + 64 * 128 // 16 + 4


def view(field: str, value: Any, name: str = "target.layers.1.qkv") -> Callable[[RebuildManifest], object]:
    def edit(manifest: RebuildManifest) -> None:
        found: TensorView = next(v for v in manifest.tensor_views if v.name == name)
        if field in ("shape", "source_tensors"):
            getattr(found, field)[:] = value
        else:
            setattr(found, field, value)
    return edit


def as_f32(manifest: RebuildManifest) -> None:
    view("dtype", "f32")(manifest)
    view("shape", [64, 64])(manifest)


def other_shard(manifest: RebuildManifest) -> None:
    next(f for f in manifest.target.files if f.path == "model.safetensors").sha256 = b"\1" * 32


def without_draft_files(manifest: RebuildManifest) -> None:
    del manifest.speculation.draft.files[:]


QKV = "target.layers.1.qkv"


@pytest.mark.parametrize(("edit", "expected"), [
    pytest.param(as_f32, Miss(QKV, "dtype", "f32", "bf16"), id="dtype"),
    pytest.param(view("shape", [64, 128]), Miss(QKV, "shape", "64, 128", "128, 64"), id="shape"),
    pytest.param(view("recipe", "concat-rows/2"), Miss(QKV, "recipe", "concat-rows/2", "concat-rows/1"), id="recipe"),
    pytest.param(view("owner", "draft"), Miss(QKV, "owner", "draft", "target"), id="owner"),
    pytest.param(view("source_tensors", ["q", "k"]),
                 Miss(QKV, "source_tensors", "q, k",
                      "model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.k_proj.weight,…"),
                 id="sources"),
    pytest.param(view("name", "target.layers.1.renamed"), Miss(QKV, "name", "absent", QKV), id="name"),
])
def test_names_the_first_field_in_which_a_weight_differs(
    cache: Cache, tmp_path: Path, edit: Callable[[RebuildManifest], object], expected: Miss,
) -> None:
    cached = cache.edited(tmp_path / "cached", edit)

    report = cache.reuse(cached, cache.request(tmp_path / "out"))

    assert report.misses == (expected,)
    assert files(tmp_path / "out") == files(cache.core())


def test_a_generated_weight_has_to_have_the_same_bytes(cache: Cache, tmp_path: Path) -> None:
    cached = cache.edited(tmp_path / "cached", view("sha256", b"\1" * 32, "target.rope_table"))

    (miss,) = cache.reuse(cached, cache.request(tmp_path / "out")).misses

    assert (miss.name, miss.field, miss.cached) == ("target.rope_table", "sha256", "0101010101010101")


@pytest.mark.parametrize(("edit", "owner", "field"), [
    pytest.param(other_shard, "target", "source file model.safetensors", id="target-shard"),
    pytest.param(without_draft_files, "draft", "source file model.safetensors", id="draft-files-absent"),
])
def test_weights_of_another_checkpoint_file_are_not_taken(
    cache: Cache, tmp_path: Path, edit: Callable[[RebuildManifest], object], owner: str, field: str,
) -> None:
    cached = cache.edited(tmp_path / "cached", edit)

    report = cache.reuse(cached, cache.request(tmp_path / "out"))

    missed = {miss.name for miss in report.misses}
    assert {miss.field for miss in report.misses} == {field}
    assert {name.partition(".")[0] for name in missed} == {owner}
    assert [name for name in report.hits if name.startswith(owner)] == [f"{owner}.rope_table"]
    assert files(tmp_path / "out") == files(cache.core())


def test_weights_of_other_checkpoints_are_not_taken(cache: Cache, tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", seed=2)

    report = cache.reuse(cache.core(), cache.request(tmp_path / "out", pair=tmp_path / "pair"))

    assert report.hits == ("target.rope_table", "draft.rope_table")


def test_another_context_misses_its_position_table_alone(cache: Cache, tmp_path: Path) -> None:
    report = cache.reuse(cache.core(draft=False), cache.request(tmp_path / "out", draft=False, context=64))

    assert report.misses == (Miss("target.rope_table", "shape", "128, 2, 8", "64, 2, 8"),)


@pytest.mark.parametrize(("cached", "wanted", "hint"), [
    pytest.param(PLAIN, ALL, "leave --reuse-weights or --online-mxfp8-scope out, as the core was exported",
                 id="target-plain"),
    pytest.param(ALL, PLAIN, "leave --reuse-weights out, or export with --online-mxfp8-scope all, as the core was "
                 "exported", id="target-converted"),
    pytest.param(PLAIN, BODY, "leave --reuse-weights or --draft-body-quantization out, as the core was exported",
                 id="body-plain"),
    pytest.param(BODY, PLAIN, "leave --reuse-weights out, or export with --draft-body-quantization mxfp8, as the core "
                 "was exported", id="body-converted"),
])
def test_a_refused_core_says_with_which_option_it_would_be_taken(
    cache: Cache, tmp_path: Path, cached: PrecisionSettings, wanted: PrecisionSettings, hint: str
) -> None:
    with pytest.raises(CompatibilityError) as caught:
        cache.reuse(cache.core(cached), cache.request(tmp_path / "out", wanted))

    assert caught.value.hint == hint


@pytest.mark.parametrize(("cached", "wanted", "code", "expected", "got"), [
    pytest.param(PLAIN, BODY, "REUSE_DRAFT_BODY", "mxfp8 (recorded mxfp8; flag)", "checkpoint (recorded -; checkpoint)",
                 id="body-wanted"),
    pytest.param(BODY, PLAIN, "REUSE_DRAFT_BODY", "checkpoint (recorded -; checkpoint)", "mxfp8 (recorded mxfp8; flag)",
                 id="body-not-wanted"),
    pytest.param(PLAIN, ALL, "REUSE_TARGET_FORMAT", "mxfp8:all (recorded mxfp8:all; flag)",
                 "checkpoint (recorded -; checkpoint)", id="target-wanted"),
    pytest.param(ALL_BODY, BODY, "REUSE_TARGET_FORMAT", "checkpoint (recorded -; checkpoint)",
                 "mxfp8:all (recorded mxfp8:all; flag)", id="target-not-wanted"),
])
def test_refuses_a_core_that_was_converted_in_another_way(
    cache: Cache, tmp_path: Path, cached: PrecisionSettings, wanted: PrecisionSettings, code: str, expected: str,
    got: str,
) -> None:
    with pytest.raises(CompatibilityError) as caught:
        cache.reuse(cache.core(cached), cache.request(tmp_path / "out", wanted))

    assert (caught.value.code, caught.value.expected, caught.value.got) == (code, expected, got)
    assert list(tmp_path.iterdir()) == []


def online(value: str | None, scope: str | None) -> Callable[[RebuildManifest], object]:
    """What a manifest records about the target's conversion; None: the field is absent."""
    def edit(manifest: RebuildManifest) -> None:
        for name, text in (("online_quantization", value), ("online_mxfp8_scope", scope)):
            manifest.ClearField(name)
            if text is not None:
                setattr(manifest, name, text)
    return edit


def speculation(field: str, value: Any) -> Callable[[RebuildManifest], object]:
    return lambda m: setattr(m.speculation, field, value)


@pytest.mark.parametrize(("cached", "edit", "wanted", "draft", "code"), [
    pytest.param(ALL, online("mxfp8", None), ALL, True, None, id="scope-absent"),
    pytest.param(ALL, online("mxfp8", ""), ALL, True, None, id="scope-empty"),
    pytest.param(ALL, online("mxfp8", None), ALL_BODY, True, None, id="scope-absent-and-body-asked-for"),
    pytest.param(ALL, online("mxfp8", "router"), ALL, True, "REUSE_TARGET_FORMAT", id="scope-unknown"),
    pytest.param(ALL, online("mxfp8", "kda-input"), ALL, True, "REUSE_TARGET_FORMAT", id="scope-kda-input"),
    pytest.param(ALL, online("mxfp4", "all"), ALL, True, "REUSE_TARGET_FORMAT", id="format-unknown"),
    pytest.param(PLAIN, online(None, "all"), PLAIN, True, None, id="scope-is-inert-when-off"),
    pytest.param(ALL, speculation("draft_body_quantization", ""), ALL_BODY, True, None, id="body-empty"),
    pytest.param(ALL, speculation("draft_body_quantization", "mxfp6"), ALL, True, "REUSE_DRAFT_BODY",
                 id="body-unknown"),
    pytest.param(ALL, speculation("draft_body_quantization", "mxfp6"), ALL, False, None,
                 id="body-unknown-and-target-only"),
    pytest.param(ALL, speculation("method", "dspark"), ALL, True, "REUSE_DRAFT_BODY", id="dspark-inherits-nothing"),
    pytest.param(ALL, speculation("method", "dspark"), ALL, False, None, id="dspark-and-target-only"),
    pytest.param(ALL, speculation("draft_depth", 0), ALL, True, None, id="depth-0-takes-no-part"),
])
def test_a_core_is_taken_by_what_it_recorded_means(
    cache: Cache, tmp_path: Path, cached: PrecisionSettings, edit: Callable[[RebuildManifest], object],
    wanted: PrecisionSettings, draft: bool, code: str | None,
) -> None:
    core = cache.edited(tmp_path / "cached", edit, cached)
    request = cache.request(tmp_path / "out", wanted, draft=draft)

    if code is None:
        assert cache.reuse(core, request).misses == ()
        assert files(tmp_path / "out") == files(cache.core(wanted, draft=draft))
        return
    with pytest.raises(CompatibilityError) as caught:
        cache.reuse(core, request)
    assert caught.value.code == code


def test_the_target_format_counts_without_a_draft_too(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError) as caught:
        cache.reuse(cache.core(ALL), cache.request(tmp_path / "out", draft=False))

    assert caught.value.code == "REUSE_TARGET_FORMAT"


@pytest.mark.parametrize("edit", [
    pytest.param(view("sha256", b"\1" * 32), id="a-digest-that-is-wrong"),
    pytest.param(None, id="a-flipped-byte"),
])
def test_bytes_that_are_not_those_listed_are_refused(
    cache: Cache, tmp_path: Path, edit: Callable[[RebuildManifest], object] | None,
) -> None:
    cached = cache.edited(tmp_path / "cached", edit or (lambda m: None))
    if edit is None:
        blob = max((cached / "weights").iterdir(), key=lambda p: p.stat().st_size)
        data = bytearray(blob.read_bytes())
        data[1000] ^= 1
        blob.write_bytes(data)

    with pytest.raises(VerificationError) as caught:
        cache.reuse(cached, cache.request(tmp_path / "out"))

    assert caught.value.code == "DIGEST_MISMATCH"
    assert [p.name for p in tmp_path.iterdir()] == ["cached"]


def test_a_weight_may_lie_across_the_pieces_that_are_read(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = VerifiedCore.pieces

    def in_small_pieces(core: VerifiedCore, name: str) -> Iterator[memoryview]:
        for piece in whole(core, name):
            for start in range(0, len(piece), 1000):
                yield piece[start:start + 1000]
    cached = cache.core(BODY)
    monkeypatch.setattr(VerifiedCore, "pieces", in_small_pieces)

    cache.reuse(cached, cache.request(tmp_path / "out", BODY_HEAD))

    assert files(tmp_path / "out") == files(cache.core(BODY_HEAD))


def test_refuses_an_unsigned_core(cache: Cache, tmp_path: Path) -> None:
    shutil.copytree(cache.core(), tmp_path / "cached")
    shutil.rmtree(tmp_path / "cached" / "signatures")

    with pytest.raises(DflashError) as caught:
        cache.reuse(tmp_path / "cached", cache.request(tmp_path / "out"))

    assert caught.value.code == "SIG_MISSING"


def test_the_core_is_only_read(cache: Cache, tmp_path: Path) -> None:
    before = files(cache.core(BODY))

    cache.reuse(cache.core(BODY), cache.request(tmp_path / "out", BODY_HEAD))

    assert files(cache.core(BODY)) == before


def test_the_command_reports_in_json(cache: Cache, tmp_path: Path) -> None:
    keys = cache.folder / "keys"
    arguments = [cache.folder / "target", "--draft", cache.folder / "draft", "--max-context", 128, "--key",
                 keys / "key.pem", "--out", tmp_path / "out", "--draft-body-quantization", "mxfp8",
                 "--draft-head-quantization", "nvfp4", "--reuse-weights", cache.core(BODY), "--trust",
                 keys / "trust.json", "--json"]

    result = CliRunner().invoke(export_app, [str(argument) for argument in arguments])

    reuse = json.loads(result.stdout)["reuse"]
    assert result.exit_code == 0
    assert (len(reuse["hits"]), len(reuse["misses"])) == (53, 1)
    assert "converted head.proposal: name absent there" in result.stderr
