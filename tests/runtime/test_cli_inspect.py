"""keygen, verify and inspect as a person or a script runs them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest, RebuildSpeculation, SourceFile
from dflash_core.v1.weights_pb2 import TensorView
from typer.testing import CliRunner, Result

from runtime.cli import app
from tests.edit_core import edit_graphs
from tests.toy_core import ToyCore, make_toy_core, toy_key, trust_document, write_trust


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    """A toy core with a draft, an NVFP4 head that both models share, and a growing buffer."""
    toy = make_toy_core(tmp_path / "core")
    toy.edit_manifest(_add_draft)
    return toy


@pytest.fixture
def trust(tmp_path: Path) -> str:
    return str(write_trust(tmp_path / "trust.json", trust_document()))


def _add_draft(manifest: RebuildManifest) -> None:
    manifest.online_quantization = "mxfp8"
    manifest.online_mxfp8_scope = "all"
    manifest.target.files.append(SourceFile(path="model.safetensors", size_bytes=16_400_000_000, sha256=bytes(32)))
    manifest.speculation.CopyFrom(RebuildSpeculation(
        method="dflash2", draft_depth=7, block_size=8, draft_head_quantization="nvfp4",
        draft=ModelIdentity(repository="toy/draft", revision="1" * 40, architecture="DFlash2DraftModel"),
    ))
    del manifest.tensor_views[1]
    manifest.tensor_views.extend([
        TensorView(name="head", blob_id=1, size_bytes=256, dtype="f4e2m1", shape=[8, 64], owner="draft",
                   format="nvfp4-e2m1-e4m3-k16", scale_view="head.block_scale"),
        TensorView(name="head.block_scale", blob_id=1, offset_bytes=256, size_bytes=32, dtype="u8", shape=[8, 4]),
        TensorView(name="head.global_scale", blob_id=1, offset_bytes=512, size_bytes=4, dtype="f32", shape=[1]),
        TensorView(name="norm", blob_id=1, offset_bytes=768, size_bytes=256, dtype="bf16", shape=[128], owner="draft"),
        TensorView(name="norm.f16", blob_id=1, offset_bytes=768, size_bytes=256, dtype="bf16", shape=[128],
                   owner="vision"),
    ])
    manifest.symbols.add(symbol_id=1, name="kv_pages", width=4, minimum=1, maximum=100)
    manifest.buffers.append(g.Buffer(buffer_id=4, name="kv", buffer_class=g.KV_ARENA, alignment=256, fixed_bytes=512,
                                     size_terms=[g.SizeTerm(symbol_id=1, bytes=23_040)]))
    manifest.buffers.append(g.Buffer(buffer_id=5, name="big again", buffer_class=g.WEIGHTS, alignment=256, blob_id=0))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)


def test_keygen_writes_a_key_that_its_trust_file_accepts(tmp_path: Path):
    result = run("keygen", tmp_path / "keys", "--json")

    made = document(result)
    assert result.exit_code == 0
    assert made["key"] == str(tmp_path / "keys" / "key.pem")
    assert made["public"] == str(tmp_path / "keys" / "public.pem")
    assert stat.S_IMODE(Path(made["key"]).stat().st_mode) == 0o600
    trusted = json.loads(Path(made["trust"]).read_text())
    assert trusted["roles"]["builder"] == {"keys": [made["keyid"]], "threshold": 1}


def test_keygen_says_where_the_files_are(tmp_path: Path):
    result = run("keygen", tmp_path)

    assert [line.split()[0] for line in result.stdout.splitlines()] == ["keyid", "key", "public", "trust"]
    assert result.stderr == ""


def test_keygen_never_overwrites_a_key(tmp_path: Path):
    run("keygen", tmp_path)

    result = run("keygen", tmp_path, "--json")

    assert result.exit_code == 2
    assert document(result)["error"]["code"] == "KEY_EXISTS"


def test_keygen_says_that_a_path_cannot_be_used(tmp_path: Path):
    (tmp_path / "file").write_text("")

    result = run("keygen", tmp_path / "file" / "keys")

    assert result.exit_code == 6
    assert result.stdout == ""
    assert result.stderr.splitlines()[:2] == [
        "error: cannot write the key: Not a directory", f"   at: {tmp_path / 'file' / 'keys'}",
    ]


def test_verify_names_the_core_and_its_signer(toy: ToyCore, trust: str):
    result = run("verify", toy.path, "--trust", trust)

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "authentic   toy   release 1"
    assert lines[2] == f"signed by   tests (builder)   key {toy_key().keyid[:16]}…"
    assert "--full" in lines[3]
    assert "--full" not in run("verify", toy.path, "--trust", trust, "--full").stdout
    assert result.stderr.startswith("verify      6 files   signatures, digests, structure   0.")


def test_verify_full_reads_every_byte(toy: ToyCore, trust: str):
    result = run("verify", toy.path, "--trust", trust, "--full", "--json")

    found = document(result)
    assert result.exit_code == 0
    assert found["full"] is True
    assert found["nbytes"] == sum((toy.path / name).stat().st_size for name in toy.contents)
    assert found["signers"] == [{"keyid": toy_key().keyid, "owner": "tests", "roles": ["builder"]}]
    assert "read        4.2 MB   every chunk and whole-file digest" in result.stderr


def test_verify_full_finds_the_byte_that_verify_leaves_to_the_load(toy: ToyCore, trust: str):
    weights = bytearray((toy.path / toy.big).read_bytes())
    weights[-1] ^= 1
    (toy.path / toy.big).write_bytes(weights)

    assert run("verify", toy.path, "--trust", trust).exit_code == 0
    result = run("verify", toy.path, "--trust", trust, "--full", "--json")

    assert result.exit_code == 4
    assert document(result)["error"]["code"] == "CHUNK_MISMATCH"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (("verify", "CORE", "--trust", "absent.json", "--json"), 4, "POLICY_MISSING"),
        (("verify", "absent", "--trust", "TRUST", "--json"), 4, "FILE_MISSING"),
        (("inspect", "absent", "--json"), 4, "FILE_MISSING"),
        (("inspect", "CORE", "--trust", "absent.json", "--json"), 4, "POLICY_MISSING"),
    ],
    ids=["verify without a trust file", "verify without a core", "inspect without a core", "inspect without trust"],
)
def test_says_in_json_what_is_missing(
    arguments: tuple[str, ...], exit_code: int, code: str, toy: ToyCore, trust: str
):
    places = {"CORE": str(toy.path), "TRUST": trust}

    result = run(*(places.get(argument, argument) for argument in arguments))

    assert result.exit_code == exit_code
    assert document(result)["error"]["code"] == code


def test_the_trust_file_of_the_user_is_the_default(toy: ToyCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".config" / "dflash").mkdir(parents=True)
    write_trust(tmp_path / "home" / ".config" / "dflash" / "trust.json", trust_document())

    assert run("verify", toy.path).exit_code == 0


@pytest.mark.parametrize("arguments", [("verify",), ("inspect",), ("keygen",), ("verify", "x", "--no-check")], ids=str)
def test_a_command_line_that_makes_no_sense_exits_with_2(arguments: tuple[str, ...]):
    assert run(*arguments).exit_code == 2


def test_inspect_says_first_that_nothing_was_authenticated(toy: ToyCore):
    toy.signature().unlink()

    result = run("inspect", toy.path)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == (
        "NOT AUTHENTICATED: no signature was checked; --trust TRUST verifies the core"
    )
    assert result.stderr == ""


def test_inspect_with_trust_verifies(toy: ToyCore, trust: str):
    assert run("inspect", toy.path, "--trust", trust).stdout.splitlines()[0] == "verified: signed by tests"

    toy.signature().write_text(toy.signature().read_text().replace('"sig": "', '"sig": "AAAA'))
    result = run("inspect", toy.path, "--trust", trust, "--json")

    assert result.exit_code == 4
    assert document(result)["error"]["code"] == "SIG_INVALID"


def test_inspect_without_trust_still_refuses_a_core_that_breaks_a_rule(toy: ToyCore):
    toy.edit_manifest(lambda manifest: manifest.tensor_views[0].shape.append(2))

    result = run("inspect", toy.path, "--json")

    assert result.exit_code == 5
    assert document(result)["error"]["code"] == "VIEW_SHAPE"


def test_inspect_shows_identity_precision_graphs_memory_and_weights(toy: ToyCore, trust: str):
    report = document(run("inspect", toy.path, "--trust", trust, "--json"))

    assert report["authenticated"] is True
    assert (report["core_name"], report["release"]) == ("toy", 1)
    assert report["target"] == {
        "repository": "toy/toy", "revision": "0" * 40, "architecture": "Toy", "files": 1, "nbytes": 16_400_000_000,
    }
    assert report["draft"]["architecture"] == "DFlash2DraftModel"
    assert report["speculation"] == {"method": "dflash2", "depth": 7, "block_size": 8}
    assert sorted(item["path"] for item in report["files"]) == sorted(set(toy.contents) - {"manifest.pb"})
    assert [(item["role"], item["effective"], item["origin"]) for item in report["precision"]] == [
        ("target inputs", "mxfp8:all", "flag"), ("draft body", "mxfp8", "implied by scope"),
        ("proposal head", "nvfp4", "flag"), ("verification head", "checkpoint", "checkpoint"),
    ]
    assert report["graphs"] == [{
        "target": "cpu", "name": "decode_1", "role": "decode", "batch": 1, "query_tokens": 1, "nodes": 2,
        "kernels": {"add": 2},
    }]
    assert report["memory"] == [
        {"buffer_class": "weights", "target": "", "buffers": 3, "nbytes": 4_200_448, "per_symbol": {}},
        {"buffer_class": "kv_arena", "target": "", "buffers": 1, "nbytes": 512, "per_symbol": {"kv_pages": 23_040}},
        {"buffer_class": "state", "target": "", "buffers": 1, "nbytes": 256, "per_symbol": {}},
        {"buffer_class": "io", "target": "", "buffers": 1, "nbytes": 256, "per_symbol": {}},
    ]
    assert report["weights"] == [
        {"owner": "draft", "format": "bf16", "tensors": 1, "weights": 128, "nbytes": 256, "bits_per_weight": 16.0},
        {"owner": "draft", "format": "nvfp4", "tensors": 1, "weights": 512, "nbytes": 292, "bits_per_weight": 4.562},
        {"owner": "target", "format": "bf16", "tensors": 1, "weights": 2_099_712, "nbytes": 4_199_424,
         "bits_per_weight": 16.0},
        {"owner": "vision", "format": "bf16", "tensors": 1, "weights": 0, "nbytes": 0, "bits_per_weight": None},
    ]
    assert report["signers"] == [{"keyid": toy_key().keyid, "owner": "tests", "roles": ["builder"]}]


def test_inspect_counts_the_nodes_that_a_bucket_launches(toy: ToyCore):
    def add_template(graphs: GraphSet) -> None:
        nodes = [*graphs.graphs[0].nodes, g.GraphNode(node_id=2, kind=g.EMPTY)]
        graphs.templates.add(template_id=7, nodes=nodes)
        graphs.graphs.add(name="decode_2", role="decode", template_id=7, bucket=g.Bucket(batch=2, query_tokens=3),
                          overrides=[g.NodeOverride(node_id=1, kernel_id=1)])

    def add_kernel(manifest: RebuildManifest) -> None:
        kernel = manifest.kernels.add()
        kernel.CopyFrom(manifest.kernels[0])
        kernel.kernel_id, kernel.name = 1, "add_wide"
        manifest.graph_files[0].graph_names.append("decode_2")
        manifest.provenance.export_device = "H200"
        manifest.buffers[4].device_target = 0

    toy.edit_manifest(add_kernel)
    edit_graphs(toy, add_template)

    report = document(run("inspect", toy.path, "--json"))

    assert report["graphs"][1] == {
        "target": "cpu", "name": "decode_2", "role": "decode", "batch": 2, "query_tokens": 3, "nodes": 3,
        "kernels": {"add": 1, "add_wide": 1, "empty": 1},
    }
    assert report["export_device"] == "H200"
    assert {"buffer_class": "kv_arena", "target": "cpu", "buffers": 1, "nbytes": 512,
            "per_symbol": {"kv_pages": 23_040}} in report["memory"]
    assert "exported  by dflash (version not recorded), graphs captured on H200" in run("inspect", toy.path).stdout


def test_inspect_shows_a_core_without_a_draft(tmp_path: Path):
    toy = make_toy_core(tmp_path / "core")

    report = document(run("inspect", toy.path, "--json"))
    text = run("inspect", toy.path).stdout

    assert (report["draft"], report["speculation"], report["export_device"]) == (None, None, None)
    assert report["vision"] is None
    assert "draft     none\n" in text
    assert "\nvision " not in text.partition("files  ")[0]
    assert "exported  by dflash (version not recorded), graphs recorded without a device\n" in text
    assert "checkpoint files" not in text
    assert "signers" not in text


@pytest.mark.parametrize(("tokens", "shown"), [(16384, "images of at most 16384 tokens"), (None, None)])
def test_inspect_shows_the_image_encoder(tmp_path: Path, tokens: int | None, shown: str | None):
    toy = make_toy_core(tmp_path / "core")

    def see(manifest: RebuildManifest) -> None:
        encoder = manifest.vision.encoder
        encoder.repository, encoder.revision, encoder.architecture = "toy/k3", "2" * 40, "MoonViT"
        encoder.files.add(path="config.json", size_bytes=1000)
        if tokens is not None:
            manifest.vision.max_image_tokens = tokens

    toy.edit_manifest(see)
    text = run("inspect", toy.path).stdout

    assert document(run("inspect", toy.path, "--json"))["vision"] == {
        "encoder": {"repository": "toy/k3", "revision": "2" * 40, "architecture": "MoonViT", "files": 1,
                    "nbytes": 1000},
        "max_image_tokens": tokens}
    assert "vision    toy/k3   MoonViT\n" in text
    assert ("images of at most" in text) == (shown is not None)
    assert shown is None or shown in text


def test_numbers_stand_under_each_other(toy: ToyCore):
    lines = run("inspect", toy.path).stdout.splitlines()

    assert [line.rstrip() for line in lines if line.startswith(("weights   ", "state "))] == [
        "weights          3   4.2 MB", "state            1    256 B",
    ]


def test_the_text_fits_80_columns_and_needs_no_colour(toy: ToyCore, trust: str):
    text = run("inspect", toy.path, "--trust", trust).stdout

    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    for shown in (
        "core      toy   release 1", "dflash2, 7 proposals per step, block 8", "1 checkpoint files   16.4 GB",
        "implied by scope", "cpu:decode_1", "2×add", "kv_pages × 23.0 kB", "4.56", "shared", "signers\nkey",
    ):
        assert shown in text


def test_a_core_cannot_steer_the_terminal(toy: ToyCore):
    def rename(manifest: RebuildManifest) -> None:
        manifest.core_name = "\x1b[2J[bold]toy"
        manifest.kernels[0].name = "add\x07"

    toy.edit_manifest(rename)

    text = run("inspect", toy.path).stdout

    assert "core      \\x1b[2J[bold]toy   release 1" in text
    assert "2×add\\x07" in text
    assert "\x1b" not in text
