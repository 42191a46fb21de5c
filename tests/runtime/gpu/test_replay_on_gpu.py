"""`dflash-run replay --against cpu`: every node of a small pair on a real GPU beside its CPU op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from exporter.export import ExportRequest, export
from runtime.cli import app
from runtime.keys import generate_key, load_private_key
from tests.runtime.gpu.fake_driver import FakeDriver
from tests.tiny_pair import write_pair


def exported(folder: Path, capability: int | None) -> Path:
    """The small pair as a signed core, beside its keys."""
    write_pair(folder, seed=3, draft_head_dim=32)
    generate_key(folder / "keys")
    export(ExportRequest(target=folder / "target", draft=folder / "draft", out=folder / "core", batches=(1, 2),
                         core_name="tiny", capability=capability), load_private_key(folder / "keys" / "key.pem"))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("replay"), None)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("replay"), 90)


def run(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", str(folder / "core"), "--trust", str(folder / "keys" / "trust.json"),
                                    *arguments])


@pytest.mark.parametrize("arguments", [["--against", "cpu"], ["--device", "cuda"]])
def test_a_machine_without_a_gpu_is_refused(tiny: Path, fake: FakeDriver, arguments: list[str]) -> None:
    fake.devices = 0

    done = run(tiny, "--graph", "decode.b1", *arguments, "--json")

    assert done.exit_code == 6, done.output
    assert json.loads(done.stdout)["error"]["code"] == "CUDA_ERROR_NO_DEVICE"


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["prefill.c256", "draft.b1", "verify.b1", "decode.b1", "verify.b2"])
def test_every_node_computes_what_its_cpu_ops_say(on_gpu: Path, graph: str) -> None:
    done = run(on_gpu, "--graph", graph, "--against", "cpu", "--json")

    assert done.exit_code == 0, done.output
    assert all(node["within"] for node in json.loads(done.stdout)["nodes"])
