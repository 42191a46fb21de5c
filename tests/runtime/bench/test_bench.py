"""`dflash-run bench` on a tiny core: what it measures, what it signs, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import QualityError
from typer.testing import CliRunner

from runtime import Engine, LoadedCore, Request, TrustPolicy, load
from runtime.bench import measure
from runtime.bench.measure import run_cold_prefill, run_decode
from runtime.bench.result import _kernel_driver, device_document
from runtime.cli import app
from runtime.engine import StepKind
from tests.runtime.gpu.fake_driver import FakeDriver


def run(tiny: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["bench", str(tiny / "core"), "--trust", str(tiny / "keys" / "trust.json"), "--json",
                                    *arguments])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(scope="module")
def core(tiny: Path) -> LoadedCore:
    with load(tiny / "core", trust=TrustPolicy.load(tiny / "keys" / "trust.json")) as core:
        yield core


@pytest.fixture(scope="module")
def result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A signed result of two scenarios, and the document that was printed."""
    out = tmp_path_factory.mktemp("bench") / "result.json"
    code, document = run(tiny, "--scenario", "c1", "--scenario", "c4", "--scenario", "prefill", "--scenario", "startup",
                         "--prefill-tokens", "200", "--max-tokens", "12", "--out", str(out), "--plot",
                         str(out.with_suffix(".svg")), "--sign", str(tiny / "keys" / "key.pem"))
    assert code == 0
    return out, document


def test_samples_are_those_of_the_engine(core: LoadedCore) -> None:
    prompts = [(3, 1, 4), (9, 9), (1,)]

    measured = run_decode(core, prompts, concurrency=1, max_tokens=10)

    for sample, prompt in zip(measured.requests, prompts, strict=True):
        verified = [s for s in Engine(core).generate(prompt, Request(10)).steps if s.kind is StepKind.VERIFY]
        assert sample.accepted == tuple(min(s.accepted, len(s.proposals)) for s in verified)
        assert sample.proposed == tuple(len(s.proposals) for s in verified)
        assert len(sample.itls_ms) == len(verified)
        assert (sample.input_tokens, sample.output_tokens) == (len(prompt), 10)
        assert 0 < sample.ttft_ms < sample.e2el_ms
    assert sum(s.tokens for s in measured.steps) == 27


def test_concurrent_requests_share_steps(core: LoadedCore) -> None:
    measured = run_decode(core, [(i,) for i in range(8)], concurrency=4, max_tokens=20)

    assert max(s.live for s in measured.steps) == 4
    assert sorted(r.prompt for r in measured.requests) == list(range(8))
    assert any(s.mixed for s in measured.steps)
    assert any(not s.mixed for s in measured.steps)


def test_result_names_the_core_and_all_that_shaped_the_run(result: tuple[Path, dict], core: LoadedCore) -> None:
    _, document = result
    own = document["dflash"]

    assert [s["scenario"] for s in document["scenarios"]] == ["c1", "c4"]
    assert [s["completed"] for s in document["scenarios"]] == [4, 4]
    assert own["core_digest"] == core.core_digest
    assert own["prompt_set"]["source"] == "canary"
    assert len(own["signers"]) == 1
    assert len(own["precision"]) == 4
    assert own["settings"] == {"device": "cpu", "max_tokens": 12, "seed": 0, "warmup_requests": 1, "speculation": True}
    assert document["startup_s"].keys() == {"load", "first_tokens"}
    assert [(p["input_tokens"], p["computed_tokens"], p["cached_tokens"]) for p in document["prefill"]] == [
        (200, 200, 0)] * 3


def test_invariants_hold_of_a_real_run(result: tuple[Path, dict]) -> None:
    for scenario in result[1]["scenarios"]:
        own = scenario["dflash"]
        assert own["decode_tok_s"] * own["ms_per_step"] / 1000 == pytest.approx(own["tokens_per_step"], rel=1e-4)
        assert own["tokens_per_step"] >= own["mean_live_seqs"] >= 1
        assert scenario["spec_decode_acceptance_length"] >= 1


def verify(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["verify", str(path), "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def test_signed_result_verifies_and_draws(result: tuple[Path, dict], tiny: Path) -> None:
    path, document = result

    code, told = verify(path, "--trust", str(tiny / "keys" / "trust.json"))

    assert (code, told["core_digest"], told["scenarios"]) == (0, document["dflash"]["core_digest"], ["c1", "c4"])
    assert len(told["signers"]) == 1
    assert path.with_suffix(".svg").read_text().startswith("<svg ")


def faster(document: dict) -> None:
    document["scenarios"][0]["output_throughput"] *= 2


def more_accepted(document: dict) -> None:
    document["scenarios"][0]["spec_decode_acceptance_length"] += 1


def slower_step(document: dict) -> None:
    document["scenarios"][1]["steps"][-1]["ms"] += 5


def other_rate(document: dict) -> None:
    document["scenarios"][0]["dflash"]["decode_tok_s"] += 1


def dropped_request(document: dict) -> None:
    document["scenarios"][0]["requests"].pop()


def warm_prefill(document: dict) -> None:
    document["prefill"][0]["computed_tokens"] -= 64


def accepted_beyond_proposed(document: dict) -> None:
    from runtime.bench.summary import summarize
    scenario = document["scenarios"][0]
    scenario["requests"][0]["accepted"][0] = 9
    scenario.update(summarize(scenario))


@pytest.mark.parametrize(
    ("change", "code"),
    [(faster, "RESULT_SUMMARY"), (more_accepted, "RESULT_SUMMARY"), (slower_step, "RESULT_SUMMARY"),
     (other_rate, "RESULT_SUMMARY"), (dropped_request, "RESULT_SUMMARY"), (warm_prefill, "RESULT_INVARIANT"),
     (accepted_beyond_proposed, "RESULT_INVARIANT")],
)
def test_a_changed_number_is_found(result: tuple[Path, dict], tmp_path: Path, change: Callable, code: str) -> None:
    document = json.loads(result[0].read_text())
    change(document)
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))

    exit_code, told = verify(changed)

    assert (exit_code, told["error"]["code"]) == (7, code)


def test_changed_bytes_are_not_what_was_signed(result: tuple[Path, dict], tiny: Path, tmp_path: Path) -> None:
    path, _ = result
    (tmp_path / "r.json").write_bytes(path.read_bytes() + b"\n")
    (tmp_path / "r.json.sig").write_bytes(path.with_name(f"{path.name}.sig").read_bytes())

    code, told = verify(tmp_path / "r.json", "--trust", str(tiny / "keys" / "trust.json"))

    assert (code, told["error"]["code"]) == (4, "SIG_INVALID")


def test_signature_of_an_unknown_key_is_refused(result: tuple[Path, dict], tmp_path: Path) -> None:
    CliRunner().invoke(app, ["keygen", str(tmp_path / "other")])

    code, told = verify(result[0], "--trust", str(tmp_path / "other" / "trust.json"))

    assert (code, told["error"]["code"]) == (4, "KEY_UNKNOWN")


def test_unsigned_result_is_refused_when_a_signature_is_asked_for(result, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(result[0].read_bytes())

    asked, told = verify(tmp_path / "r.json", "--trust", str(tiny / "keys" / "trust.json"))
    plain, _ = verify(tmp_path / "r.json")

    assert (asked, told["error"]["code"], plain) == (4, "RESULT_UNSIGNED", 0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "dflash-bench/1"}', '{"format": "x"}'])
def test_refuses_what_is_no_result(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)

    code, told = verify(tmp_path / "r.json")

    assert (code, told["error"]["code"]) == (2, "RESULT")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["--scenario", "c5"], 2, "CONCURRENCY"), (["--scenario", "fast"], 2, "SCENARIO"),
        (["--scenario", "prefill"], 2, "PREFILL_TOKENS"), (["--prompts", "absent.jsonl"], 2, "PROMPTS"),
        (["--compare"], 2, "COMPARE"), (["--sign", "k.pem"], 2, "OPTION_MISSING"),
    ],
)
def test_refuses_by_name(tiny: Path, arguments: list[str], exit_code: int, code: str) -> None:
    found, document = run(tiny, *arguments)

    assert (found, document["error"]["code"]) == (exit_code, code)


def test_prefill_that_is_not_computed_is_refused(core: LoadedCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prefix cache would do it: the first chunk is taken as done."""
    class Cached(Engine):
        def _take_pages(self, sequence, prefix):
            taken = super()._take_pages(sequence, prefix)
            sequence.prefilled = 64
            return taken

    monkeypatch.setattr(measure, "Engine", Cached)
    with pytest.raises(QualityError) as refused:
        run_cold_prefill(core, tokens=200, repeats=1, seed=1)

    assert refused.value.code == "PREFILL_NOT_COLD"


def test_prompts_come_from_a_file_in_three_forms(tiny: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "t3 t1 t4"}, {"token_ids": [3, 1, 4]}, {"messages": [{"role": "user", "content": "t9"}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    code, document = run(tiny, "--prompts", str(path), "--max-tokens", "4")

    requests = document["scenarios"][0]["requests"]
    assert code == 0
    assert [r["input_tokens"] for r in requests] == [3, 3, 5]
    assert document["dflash"]["prompt_set"]["source"] == "prompts.jsonl"


@pytest.mark.parametrize(
    "option", [["--scenario", "c4"], ["--no-speculation"], ["--out", "r.json"], ["--plot", "r.svg"],
               ["--draft-head-quantization", "nvfp4"]], ids=lambda option: option[0])
def test_comparison_ignores_no_option(tiny: Path, option: list[str]) -> None:
    core = str(tiny / "core")
    done = CliRunner().invoke(app, ["bench", "--compare", core, core, "--paired", "--trust",
                                    str(tiny / "keys" / "trust.json"), "--json", *option])

    assert (done.exit_code, json.loads(done.stdout)["error"]["code"]) == (2, "COMPARE")


def test_a_gpu_is_named_with_its_driver_and_clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeDriver(attributes={"CLOCK_RATE": 1_980_000, "MEMORY_CLOCK_RATE": 3_201_000})
    monkeypatch.setattr("runtime.driver.bindings", lambda: fake)
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
                       "GCC version:  gcc version 12.2.0\n")

    found = device_document("cuda")["gpu"]

    assert found.pop("driver") == _kernel_driver()
    assert found == {"model": "NVIDIA H200", "architecture": "sm_90", "sm_count": 132, "cuda": "13.0",
                     "max_sm_mhz": 1980.0, "max_memory_mhz": 3201.0}
    assert fake.held == {}
    assert (_kernel_driver(version), _kernel_driver(tmp_path / "absent")) == ("580.95.05", None)
    assert device_document("cpu")["gpu"] is None


def test_core_compared_with_itself_accepts_the_same(tiny: Path) -> None:
    core = str(tiny / "core")
    done = CliRunner().invoke(app, ["bench", "--compare", core, core, "--paired", "--trust",
                                    str(tiny / "keys" / "trust.json"), "--max-tokens", "12", "--json"])

    document = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [d["metric"] for d in document["differences"]] == ["acceptance_length", "ms_per_step", "tokens_per_s"]
    assert document["differences"][0]["difference"] == 0
    assert document["differences"][0]["established"] is False
    assert document["prompts"] == 4
