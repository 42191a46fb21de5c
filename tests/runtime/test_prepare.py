"""A checkpoint given to `bench` becomes a core once, is found again, and is said to have been prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dflash_core.errors import UsageError
from typer.testing import CliRunner

from runtime import prepare
from runtime.cli import app
from runtime.prepare import PrepareSettings, export_device, is_checkpoint
from tests.runtime.gpu.fake_driver import FakeDriver
from tests.served_core import tiny

__all__ = ["tiny"]


def bench(tiny: Path, *options: str):
    return CliRunner().invoke(app, ["bench", str(tiny / "target"), "--draft", str(tiny / "draft"), "--max-tokens", "4",
                                    "--json", *options])


def test_checkpoint_is_exported_once_and_found_again(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    first, second = bench(tiny), bench(tiny)
    other = bench(tiny, "--draft-body-quantization", "mxfp8")

    documents = [json.loads(done.stdout) for done in (first, second, other)]
    precision = {p["role"]: p["effective"] for p in documents[2]["dflash"]["precision"]}
    assert [done.exit_code for done in (first, second, other)] == [0, 0, 0]
    assert "exported to" in first.stderr
    assert "found in the cache" in second.stderr
    assert documents[0]["dflash"]["core_digest"] == documents[1]["dflash"]["core_digest"]
    assert precision["draft body"] == "mxfp8"
    assert len(list((tmp_path / "dflash" / "cores").iterdir())) == 2


def test_core_takes_no_precision_settings(tiny: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(tiny / "core"), "--draft-body-quantization", "mxfp8", "--json"])

    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (2, "PRECISION_OF_CORE")


def test_refused_export_is_told_apart(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    done = bench(tiny, "--draft-head-quantization", "int3")

    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (2, "EXPORT_FAILED")
    assert list((tmp_path / "dflash" / "cores").iterdir()) == []


def test_machine_without_the_exporter_is_told_what_is_missing(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UsageError) as refused:
        prepare.prepare(tiny / "target", PrepareSettings(), tmp_path)

    assert refused.value.code == "EXTRA_MISSING"


def test_a_core_is_no_checkpoint(tiny: Path, tmp_path: Path) -> None:
    assert is_checkpoint(tiny / "target")
    assert not is_checkpoint(tiny / "core")
    assert not is_checkpoint(tmp_path)


def test_checkpoint_is_exported_for_the_gpu_it_is_to_run_on(monkeypatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr("runtime.driver.bindings", lambda: fake)

    named = [export_device(device) for device in ("cpu", "cuda", "cuda:0")]

    assert named == ["cpu", "cuda:sm_90", "cuda:sm_90"]
    assert fake.held == {}
    assert PrepareSettings(device="cuda:sm_90").arguments()[:2] == ["--device", "cuda:sm_90"]
