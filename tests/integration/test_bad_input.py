"""The three commands given bad input: one paragraph, the right exit code, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from exporter.cli import export_app, export_main, interrupts_held
from exporter.export import ExportRequest, export
from exporter.staging import PARTIAL_SUFFIX
from runtime.cli import app, main
from runtime.keys import generate_key, load_private_key
from tests.exporter.small_checkpoints import raw_shard
from tests.tiny_pair import write_pair

CONTEXT = 64
Damage = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Shop:
    """A folder with a pair to export, two signers, and a core of the pair that the first has signed."""

    root: Path
    target: Path
    draft: Path
    key: Path
    trust: Path
    other_trust: Path
    core: Path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root = tmp_path_factory.mktemp("shop")
    write_pair(root, seed=1)
    (root / "target" / "tokenizer.json").write_text(json.dumps(word_tokenizer()))
    for name in ("keys", "others"):
        generate_key(root / name)
    made = Shop(root, root / "target", root / "draft", root / "keys" / "key.pem", root / "keys" / "trust.json",
                root / "others" / "trust.json", root / "core")
    export(ExportRequest(target=made.target, draft=made.draft, out=made.core, max_context=CONTEXT),
           load_private_key(made.key))
    yield made


def word_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the words w0 to w127."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(128)}, "unk_token": "w0"}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}


def run(command: Typer, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def error(result: Result) -> dict[str, Any]:
    """The one document of a command that failed."""
    document = json.loads(result.stdout)
    assert list(document) == ["error"]
    for part in ("what", "where", "hint"):
        assert document["error"][part], f"the error has no {part}"
    return document["error"]


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def relabel(path: Path, tensor: str, **changes: object) -> None:
    """Change what the header says about a tensor, and none of the data."""
    header, data = read_shard(path)
    header[tensor].update(changes)
    (path / "model.safetensors").write_bytes(raw_shard(header, data))


def poison(path: Path, tensor: str, bf16_bits: int) -> None:
    """Put a value into the tensor's second element."""
    header, data = read_shard(path)
    at = header[tensor]["data_offsets"][0] + 2
    changed = data[:at] + bf16_bits.to_bytes(2, "little") + data[at + 2:]
    (path / "model.safetensors").write_bytes(raw_shard(header, changed))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    data = (path / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def cut(path: Path) -> None:
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


NAN, INFINITY = 0x7FC0, 0x7F80
BODY, HEAD = ("--draft-body-quantization", "mxfp8"), ("--draft-head-quantization", "nvfp4")
CHECKPOINTS = [
    pytest.param("target", shutil.rmtree, (), "CHECKPOINT_MISSING", id="no-target"),
    pytest.param("draft", shutil.rmtree, (), "CHECKPOINT_MISSING", id="no-draft"),
    pytest.param("target", lambda p: (p / "config.json").unlink(), (), "CONFIG_MISSING", id="no-config"),
    pytest.param("target", lambda p: (p / "model.safetensors").unlink(), (), "WEIGHTS_MISSING", id="no-weights"),
    pytest.param("target", lambda p: (p / "config.json").write_text("{"), (), "JSON_INVALID", id="cut-config"),
    pytest.param("target", cut, (), "SHARD_TRUNCATED", id="cut-shard"),
    pytest.param("draft", lambda p: relabel(p, "fc.weight", dtype="F32"), (), "TENSOR_NBYTES", id="dtype-too-wide"),
    pytest.param("draft", lambda p: relabel(p, "fc.weight", dtype="I16"), (), "TENSORS", id="dtype-of-numbers"),
    pytest.param("draft", lambda p: relabel(p, "fc.weight", dtype="F16"), (), "FORMAT_F16", id="dtype-as-wide"),
    pytest.param("target", lambda p: edit_config(p, intermediate_size=128), (), "TENSORS", id="shapes-and-config"),
    pytest.param("draft", lambda p: edit_config(p, vocab_size=256), (), "DRAFT_VOCABULARY", id="other-vocabulary"),
    pytest.param("draft", lambda p: edit_config(p, hidden_size=128), (), "DRAFT_HIDDEN_SIZE", id="other-hidden-size"),
    pytest.param("draft", lambda p: edit_config(p, num_target_layers=7), (), "DRAFT_NUM_LAYERS", id="other-depth"),
    pytest.param("draft", lambda p: poison(p, "layers.0.mlp.up_proj.weight", NAN), BODY, "NON_FINITE_WEIGHT",
                 id="nan-in-mxfp8"),
    pytest.param("target", lambda p: poison(p, "lm_head.weight", INFINITY), HEAD, "NON_FINITE_WEIGHT",
                 id="infinity-in-nvfp4"),
]


@pytest.mark.parametrize(("part", "damage", "options", "code"), CHECKPOINTS)
def test_export_refuses_a_damaged_checkpoint(shop: Shop, tmp_path: Path, part: str, damage: Damage,
                                             options: tuple[str, ...], code: str) -> None:
    for name in ("target", "draft"):
        shutil.copytree(shop.root / name, tmp_path / name)
    damage(tmp_path / part)
    before = sorted(tmp_path.iterdir())

    result = run(export_app, tmp_path / "target", "--draft", tmp_path / "draft", "--out", tmp_path / "core", "--key",
                 shop.key, "--json", *options)

    assert (result.exit_code, error(result)["code"]) == (3, code)
    assert sorted(tmp_path.iterdir()) == before


OPTIONS = [
    pytest.param(("--depth", 99), 3, "DEPTH_RANGE", id="depth-beyond-the-block"),
    pytest.param(("--depth", 0, *BODY), 3, "BODY_DEPTH_ZERO", id="body-without-speculation"),
    pytest.param(("--online-mxfp8-scope", "kda-input"), 3, "SCOPE_UNDECLARED", id="scope-of-another-family"),
    pytest.param(("--online-mxfp8-scope", "most"), 3, "SCOPE_UNDECLARED", id="scope-unknown"),
    pytest.param(("--draft-body-quantization", "nvfp4"), 3, "BODY_FORMAT", id="body-format"),
    pytest.param(("--draft-head-quantization", "fp4"), 3, "HEAD_FORMAT", id="head-format"),
    pytest.param(("--recipe", "nope"), 3, "RECIPE_UNKNOWN", id="recipe-unknown"),
    pytest.param(("--max-context", 100_000), 3, "CONTEXT", id="context-beyond-the-target"),
    pytest.param(("--device", "tpu"), 2, "DEVICE", id="device-unknown"),
    pytest.param(("--device", "cuda:sm_999"), 2, "DEVICE", id="device-of-no-kernel"),
    pytest.param(("--name", "two\nlines"), 2, "CORE_NAME", id="name-with-a-line-break"),
    pytest.param(("--name", "bad\udcff"), 2, "CORE_NAME", id="name-that-is-not-utf-8"),
    pytest.param(("--name", " "), 2, "CORE_NAME", id="name-empty"),
    pytest.param(("--name", " ", "--plan"), 2, "CORE_NAME", id="name-empty-in-a-plan"),
]


@pytest.mark.parametrize(("options", "exit_code", "code"), OPTIONS)
def test_export_refuses_an_option(shop: Shop, tmp_path: Path, options: tuple[object, ...], exit_code: int,
                                  code: str) -> None:
    result = run(export_app, shop.target, "--draft", shop.draft, "--out", tmp_path / "core", "--key", shop.key,
                 "--json", *options)

    assert (result.exit_code, error(result)["code"]) == (exit_code, code)
    assert list(tmp_path.iterdir()) == []


ALONE = [
    pytest.param(HEAD, "HEAD_NO_DRAFT", id="head"),
    pytest.param(BODY, "BODY_NO_DRAFT", id="body"),
    pytest.param(("--depth", 2), "DEPTH_NO_DRAFT", id="depth"),
]


@pytest.mark.parametrize(("options", "code"), ALONE)
def test_export_refuses_a_draft_setting_without_a_draft(shop: Shop, tmp_path: Path, options: tuple[object, ...],
                                                        code: str) -> None:
    result = run(export_app, shop.target, "--out", tmp_path / "core", "--key", shop.key, "--json", *options)

    assert (result.exit_code, error(result)["code"]) == (3, code)


def test_export_needs_a_key(shop: Shop, tmp_path: Path) -> None:
    result = run(export_app, shop.target, "--out", tmp_path / "core", "--json")

    assert (result.exit_code, error(result)["where"]) == (2, "--key")


def test_export_refuses_a_key_that_others_can_read(shop: Shop, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(shop.key.read_bytes())
    key.chmod(0o644)

    result = run(export_app, shop.target, "--out", tmp_path / "core", "--key", key, "--json")

    assert (result.exit_code, error(result)["code"], error(result)["got"]) == (4, "KEY_UNSAFE", "mode 0644")
    assert not (tmp_path / "core").exists()


def make_core(path: Path) -> None:
    path.mkdir()
    (path / "manifest.pb").write_text("mine")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


OUTPUTS = [
    pytest.param(make_core, (), id="core"),
    pytest.param(make_folder, (), id="folder"),
    pytest.param(make_folder, ("--force",), id="folder-by-force"),
]


@pytest.mark.parametrize(("make", "options"), OUTPUTS)
def test_export_leaves_an_output_that_exists(shop: Shop, tmp_path: Path, make: Damage,
                                             options: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    make(out)

    result = run(export_app, shop.target, "--out", out, "--key", shop.key, "--json", *options)

    assert (result.exit_code, error(result)["code"]) == (2, "OUTPUT_EXISTS")
    assert [file.read_text() for file in out.iterdir()] == ["mine"]


def test_export_refuses_an_unwritable_output_before_it_reads_a_weight(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    result = run(export_app, shop.target, "--out", tmp_path / "file" / "core", "--key", shop.key)

    assert result.exit_code == 6
    assert re.search(r"^error: cannot write the output: .*\n   at: .*file\n hint: ", result.stderr, re.MULTILINE)
    assert "identify" not in result.stderr


def test_export_that_runs_out_of_space_leaves_nothing(shop: Shop, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    result = run(export_app, shop.target, "--out", tmp_path / "core", "--key", shop.key, "--json")

    assert (result.exit_code, error(result)["code"]) == (6, "NO_SPACE")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """SIGINT raises, also where the tests were started in the background and inherit it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_ends_an_export_with_130_and_leaves_nothing(shop: Shop, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        assert list(tmp_path.glob(f".core.*{PARTIAL_SUFFIX}"))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("exporter.export.convert_weights", interrupted)

    result = run(export_app, shop.target, "--out", tmp_path / "core", "--key", shop.key)

    assert result.exit_code == 130
    assert result.stderr.endswith("\ninterrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_during_an_import_waits_for_its_end() -> None:
    imported = False

    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        imported = True

    assert imported


REQUESTS = [
    pytest.param(("--prompt", "w1 " * 100), 5, "CONTEXT_LENGTH", id="prompt-longer-than-the-context"),
    pytest.param(("--prompt", ""), 2, "PROMPT_EMPTY", id="prompt-empty"),
    pytest.param(("--prompt", "w1 \udcff"), 2, "TEXT", id="prompt-that-is-not-utf-8"),
    pytest.param(("--prompt", "w1", "--chat"), 2, "NO_CHAT_TEMPLATE", id="chat-without-a-template"),
    pytest.param(("--prompt", "w1", "--temperature", -1), 2, "REQUEST", id="temperature-negative"),
    pytest.param(("--prompt", "w1", "--temperature", "nan"), 2, "REQUEST", id="temperature-nan"),
    pytest.param(("--prompt", "w1", "--top-p", 0), 2, "REQUEST", id="top-p-zero"),
    pytest.param(("--prompt", "w1", "--top-k", -1), 2, "REQUEST", id="top-k-negative"),
    pytest.param(("--prompt", "w1", "--seed", 2**70), 2, "REQUEST", id="seed-too-large"),
    pytest.param(("--prompt", "w1", "--max-tokens", 0), 2, "REQUEST", id="no-new-tokens"),
    pytest.param(("--prompt", "w1", "--device", "tpu"), 5, "DEVICE_UNKNOWN", id="device-unknown"),
]


@pytest.mark.parametrize(("options", "exit_code", "code"), REQUESTS)
def test_generate_refuses_a_request(shop: Shop, options: tuple[object, ...], exit_code: int, code: str) -> None:
    result = run(app, "generate", shop.core, "--trust", shop.trust, "--json", *options)

    assert (result.exit_code, error(result)["code"]) == (exit_code, code)


def test_generate_refuses_the_trust_of_others(shop: Shop) -> None:
    result = run(app, "generate", shop.core, "--trust", shop.other_trust, "--prompt", "w1", "--json")

    assert (result.exit_code, error(result)["code"]) == (4, "ROLE_UNMET")


@pytest.mark.parametrize("folder", ["weights", "graphs", "config", "signatures", "."])
def test_generate_refuses_a_core_with_one_bit_changed(shop: Shop, tmp_path: Path, folder: str) -> None:
    core = tmp_path / "core"
    shutil.copytree(shop.core, core)
    file = min(path for path in (core / folder).iterdir() if path.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    result = run(app, "generate", core, "--trust", shop.trust, "--prompt", "w1", "--json")

    assert result.exit_code == 4
    assert error(result)["code"]


def test_generate_puts_one_document_on_stdout(shop: Shop) -> None:
    result = run(app, "generate", shop.core, "--trust", shop.trust, "--prompt", "w5 w6", "--max-tokens", 3, "--json")

    assert (result.exit_code, json.loads(result.stdout)["new_tokens"]) == (0, 3)


def test_plan_puts_one_document_on_stdout_and_writes_nothing(shop: Shop, tmp_path: Path) -> None:
    result = run(export_app, shop.target, "--draft", shop.draft, "--out", tmp_path / "core", "--plan", "--json")

    assert (result.exit_code, json.loads(result.stdout)["can_be_exported"]) == (0, True)
    assert list(tmp_path.iterdir()) == []


LINES = [
    pytest.param(main, ["dflash-run", "nope", "--json"], id="unknown-command"),
    pytest.param(main, ["dflash-run", "generate", "core", "--json"], id="option-missing"),
    pytest.param(main, ["dflash-run", "generate", "core", "--json", "--prompt", "a", "--seed", "x"], id="no-number"),
    pytest.param(export_main, ["dflash-export", "target", "--json", "--depth", "-1"], id="number-too-small"),
    pytest.param(export_main, ["dflash-export", "target", "--json", "--release", str(2**64)], id="number-too-large"),
    pytest.param(export_main, ["dflash-export", "--json"], id="argument-missing"),
]


@pytest.mark.parametrize(("command", "line"), LINES)
def test_a_command_line_that_does_not_parse_gives_a_document(command: Callable[[], None], line: list[str],
                                                             monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", line)

    with pytest.raises(SystemExit) as ended:
        command()

    out, err = capsys.readouterr()
    assert (ended.value.code, json.loads(out)["error"]["code"], err) == (2, "COMMAND_LINE", "")


STDOUT = [
    pytest.param(("inspect", "CORE"), "1", id="document"),
    pytest.param(("inspect", "nowhere"), "1", id="error"),
    pytest.param(("inspect", "nowhere"), "", id="error-when-buffered"),
]


@pytest.mark.parametrize(("arguments", "unbuffered"), STDOUT)
def test_a_full_disk_behind_stdout_is_said_on_stderr(shop: Shop, arguments: tuple[str, ...], unbuffered: str) -> None:
    line = [str(shop.core) if argument == "CORE" else argument for argument in arguments]

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", "from runtime.cli import main; main()", *line, "--json"],
                               env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, stdout=full,
                               stderr=subprocess.PIPE, text=True, check=False)

    assert (ended.returncode, ended.stderr.splitlines()) == (6, [
        "error: the document cannot be written: No space left on device", "   at: stdout",
        " hint: send stdout to a file with room, or to a reader that stays"])
