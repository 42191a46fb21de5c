"""`dflash-run generate --device cuda`: the same text, and where the load's time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from runtime.cli import app
from tests.runtime.gpu.fake_driver import FakeDriver
from tests.runtime.gpu.toy import VOCAB, make_gpu_core

PHASES = ["import", "verify", "context", "modules", "memory", "graphs", "upload", "total"]


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """The toy, with a tokenizer whose token 7 is "t7"."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return make_gpu_core(tmp_path / "text", tokenizer=tokenizer.to_str().encode()).path


def run(core: Path, trust: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["generate", str(core), "--trust", str(trust), "--prompt", "t1 t4",
                                    "--max-tokens", "4", *arguments])


@pytest.mark.usefixtures("trust")
def test_text_comes_from_the_gpu_and_phases_are_reported(core: Path, tmp_path: Path, fake: FakeDriver) -> None:
    done = run(core, tmp_path / "trust.json", "--device", "cuda", "--json")

    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["tokens"] == [9, 14, 19, 24]
    assert list(document["load_phases"]) == PHASES
    assert fake.held == {}


@pytest.mark.usefixtures("trust")
def test_phases_are_printed_for_a_person(core: Path, tmp_path: Path, fake: FakeDriver) -> None:
    done = run(core, tmp_path / "trust.json", "--device", "cuda:0")

    assert done.exit_code == 0, done.output
    line = next(line for line in done.stderr.splitlines() if line.startswith("load "))
    assert [word for word in line.split()[1:] if word in PHASES] == PHASES


@pytest.mark.usefixtures("trust")
@pytest.mark.parametrize(
    ("device", "exit_code", "code"), [("cuda:7", 5, "DEVICE_UNKNOWN"), ("cuda", 6, "CUDA_ERROR_NO_DEVICE")]
)
def test_refusal_has_the_exit_code_of_its_remedy(
    core: Path, tmp_path: Path, fake: FakeDriver, device: str, exit_code: int, code: str
) -> None:
    fake.devices = 0 if device == "cuda" else 1

    done = run(core, tmp_path / "trust.json", "--device", device, "--json")

    assert done.exit_code == exit_code
    assert code in done.stdout
