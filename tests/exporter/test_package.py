"""A core's files are named by their digests, listed in the manifest, and equal for equal inputs."""

import errno
import hashlib
import io
import json
from pathlib import Path

import pytest
from dflash_core.errors import ResourceError
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import SHA256

import exporter
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime.keys import PrivateKey, generate_key, load_private_key
from runtime.structure import check_manifest_structure
from tests.tiny_pair import write_pair

SETTINGS = PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4")
SIDE_FILES = {
    "tokenizer.json": b'{"tokens": 1}\n', "tokenizer_config.json": b"{}\n", "generation_config.json": b'{"eos": 2}',
    "chat_template.jinja": b"{{ messages }}", "README.md": b"# not carried",
}  # fmt: skip


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> PrivateKey:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    generate_key(folder)
    return load_private_key(folder / "key.pem")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, seed=4)
    for name, data in SIDE_FILES.items():
        (folder / "target" / name).write_bytes(data)
    return folder


def make(pair, key, out, **changes):
    request = ExportRequest(**{"target": pair / "target", "draft": pair / "draft", "out": out, "core_name": "tiny",
                               "settings": SETTINGS, "batches": (2, 1, 2), **changes})
    return export(request, key)


@pytest.fixture(scope="module")
def core(pair, key, tmp_path_factory):
    return make(pair, key, tmp_path_factory.mktemp("made") / "core")


def contents(core: Path) -> dict[str, bytes]:
    return {p.relative_to(core).as_posix(): p.read_bytes() for p in core.rglob("*")
            if p.is_file() and p.parent.name != "signatures"}


def test_manifest_lists_every_file_with_its_size_and_digest(core):
    found = contents(core.path)
    found.pop("manifest.pb")

    listed = {f.path: (f.ref.algorithm, f.ref.size_bytes, f.ref.digest) for f in core.manifest.files}

    assert listed == {name: (SHA256, len(data), hashlib.sha256(data).digest()) for name, data in found.items()}
    assert [f.path for f in core.manifest.files] == sorted(found)


def test_files_are_named_by_their_digest_and_lie_where_their_role_says(core):
    places = {"weights": ("weights", ".bin"), "graph": ("graphs", ".pb"), "config": ("config", "")}

    for entry in core.manifest.files:
        folder, suffix = places[entry.role]
        assert entry.path == f"{folder}/{entry.ref.digest.hex()}{suffix}"
    assert sorted(f.role for f in core.manifest.files) == ["config"] * 7 + ["graph"] + ["weights"] * 3


def test_manifest_obeys_every_structure_rule(core):
    manifest = RebuildManifest.FromString((core.path / "manifest.pb").read_bytes())

    check_manifest_structure(manifest, {f.path: f.ref.size_bytes for f in manifest.files})

    assert manifest == core.manifest


def test_equal_inputs_give_equal_bytes(core, pair, key, tmp_path):
    again = make(pair, key, tmp_path / "elsewhere" / "other-name")

    assert contents(again.path) == contents(core.path)


def test_order_of_tensors_in_the_checkpoint_changes_nothing_but_its_recorded_digest(core, pair, key, tmp_path):
    """The same tensors, last first: every file of the core but the manifest is equal."""
    for name in ("target", "draft"):
        source = (pair / name / "model.safetensors").read_bytes()
        length = int.from_bytes(source[:8], "little")
        header, data = json.loads(source[8 : 8 + length]), source[8 + length :]
        turned, moved = {}, b""
        for key_name, entry in reversed(header.items()):
            start, end = entry["data_offsets"]
            turned[key_name] = {**entry, "data_offsets": [len(moved), len(moved) + end - start]}
            moved += data[start:end]
        text = json.dumps(turned).encode()
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + moved)
        for side in (*SIDE_FILES, "config.json"):
            if (pair / name / side).exists():
                (tmp_path / name / side).write_bytes((pair / name / side).read_bytes())

    again = make(tmp_path, key, tmp_path / "core")

    def without_manifest(path):
        return {name: data for name, data in contents(path).items() if name != "manifest.pb"}

    assert without_manifest(again.path) == without_manifest(core.path)
    assert again.manifest.target.files != core.manifest.target.files


def test_nothing_in_a_core_tells_where_it_was_made(core, pair):
    for name, data in contents(core.path).items():
        for secret in (str(pair), str(core.path.parent), str(Path.home())):
            assert secret.encode() not in data, name


def test_model_files_are_carried_byte_for_byte(core, pair):
    target = core.manifest.target

    carried = {s.path: core.path / "config" / s.sha256.hex() for s in target.files}

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "chat_template.jinja"):
        assert carried[name].read_bytes() == (pair / "target" / name).read_bytes()
    assert not (core.path / "config" / hashlib.sha256(SIDE_FILES["README.md"]).hexdigest()).exists()
    assert target.config.digest == hashlib.sha256((pair / "target" / "config.json").read_bytes()).digest()
    assert target.tokenizer.digest == hashlib.sha256(SIDE_FILES["tokenizer.json"]).digest()


def test_models_are_identified_by_every_file(core, pair):
    for identity, name, architecture in ((core.manifest.target, "target", "LlamaForCausalLM"),
                                         (core.manifest.speculation.draft, "draft", "DFlash2DraftModel")):
        weights = (pair / name / "model.safetensors").read_bytes()
        recorded = {s.path: (s.size_bytes, s.sha256) for s in identity.files}
        assert recorded["model.safetensors"] == (len(weights), hashlib.sha256(weights).digest())
        assert identity.architecture == architecture
        assert identity.checkpoint_dtype == "bf16"


def test_speculation_is_recorded_as_asked(core):
    recorded = core.manifest.speculation

    assert (recorded.method, recorded.draft_depth, recorded.block_size, recorded.acceptance_rule) == (
        "dflash2", 3, 4, "rejection")
    assert (recorded.candidate_top_k, recorded.conv_taps, recorded.conv_group_size) == (4, 2, 16)
    assert (recorded.draft_body_quantization, recorded.draft_head_quantization) == ("mxfp8", "nvfp4")
    assert not recorded.HasField("verify_head_precision")
    assert not recorded.HasField("output_multiplier")


def test_contract_module_target_and_provenance_are_recorded(core):
    manifest = core.manifest
    contract, module, target = manifest.contract, manifest.modules[0], manifest.device_targets[0]

    assert (contract.max_batch, contract.max_query_tokens, contract.max_context, contract.vocab_size,
            contract.page_tokens) == (2, 64, 256, 128, 64)
    assert list(contract.sampling_modes) == ["greedy", "temperature", "top_k", "top_p"]
    assert (module.registry, module.registry_version, module.HasField("file")) == ("dflash.cpu", 1, False)
    assert (target.name, list(target.module_ids)) == ("cpu", [0])
    assert manifest.provenance.exporter_version == exporter.__version__
    assert not manifest.provenance.HasField("export_device")
    assert not manifest.provenance.HasField("created_unix")
    assert (manifest.format_version, manifest.core_name, manifest.release) == (1, "tiny", 1)


def test_graph_file_holds_the_graphs_that_the_manifest_names(core):
    listed = core.manifest.graph_files[0]
    graphs = GraphSet.FromString((core.path / "graphs" / f"{listed.file.digest.hex()}.pb").read_bytes())

    assert (listed.target_id, graphs.format_version) == (0, 1)
    assert list(listed.graph_names) == [g.name for g in graphs.graphs] == [
        "prefill.c64", "draft.b1", "verify.b1", "decode.b1", "draft.b2", "verify.b2", "decode.b2"]


def test_views_have_the_digest_of_their_bytes(core):
    blobs = {b.blob_id: (core.path / "weights" / f"{b.file.digest.hex()}.bin").read_bytes()
             for b in core.manifest.weight_blobs}

    for view in core.manifest.tensor_views:
        data = blobs[view.blob_id][view.offset_bytes : view.offset_bytes + view.size_bytes]
        assert hashlib.sha256(data).digest() == view.sha256, view.name
    assert {v.owner for v in core.manifest.tensor_views} == {"target", "draft"}


def test_target_alone_records_no_speculation(pair, key, tmp_path):
    made = make(pair, key, tmp_path / "core", draft=None, settings=PrecisionSettings())

    assert not made.manifest.HasField("speculation")
    assert [f.role for f in made.manifest.files].count("weights") == 1


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "NO_SPACE"), (errno.EACCES, "NOT_WRITABLE"), (errno.EIO, "WRITE_FAILED")]
)
@pytest.mark.parametrize("name", ["graphs", "config", "manifest.pb"])
def test_full_disk_is_told_with_the_file_and_leaves_nothing(name, number, code, pair, key, tmp_path, monkeypatch):
    opened = Path.open

    def refuse(self, mode="r", *arguments, **options):
        if mode == "wb" and (self.name == name or self.parent.name == name):
            class Full(io.BytesIO):
                def write(self, data):
                    raise OSError(number, "no")
            return Full()
        return opened(self, mode, *arguments, **options)
    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(ResourceError) as refused:
        make(pair, key, tmp_path / "core")

    assert refused.value.code == code
    assert f"/{name}" in refused.value.where
    assert list(tmp_path.iterdir()) == []
