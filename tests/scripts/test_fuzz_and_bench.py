"""The two scripts about trust run: a short fuzz, and a small bench whose document has every figure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("reader", ["bundle", "statement", "manifest", "graphs", "archive", "safetensors",
                                    "image"])
def test_fuzzer_runs_from_the_committed_corpus(reader: str) -> None:
    done = run("scripts/fuzz.py", "--reader", reader, "--runs", "500", "--seconds", "10")

    if importlib.util.find_spec("atheris") is None:
        assert (done.returncode, done.stderr.startswith("error: atheris is not installed")) == (6, True)
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(reader) and done.stdout.endswith("sound\n")


def test_bench_of_images_prints_every_figure() -> None:
    done = run("scripts/bench_vision.py", "--repeats", "1", "--side", "64", "--patches", "16")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["preprocessing"]["tokens"], found["tower"]["patches"]) == (9, 16)
    assert found["preprocessing"]["decode_s"] > 0 and found["preprocessing"]["patches_s"] > 0
    assert isinstance(found["tower"]["block_s"], float)


def test_bench_prints_every_figure() -> None:
    done = run("scripts/bench_verify.py", "--gib", "0.04", "--repeats", "1")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 33_554_432 < found["core_bytes"] < 33_560_000
    assert found["verify_and_load"]["gb_per_s"] > 0 and found["reference_command"]["gb_per_s"] > 0
    assert found["verify_and_load"]["peak_bytes_above_weights"] < 64 << 20
    assert (found["largest_graph"]["nodes"], found["largest_graph"]["edges"]) == (262_144, 1_048_566)
    assert found["signature_ms"] < 10
    assert not (ROOT / "build" / "bench-verify").exists()
