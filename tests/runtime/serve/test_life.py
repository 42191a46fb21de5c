"""A server's life: 503 until warm, refused cores, metrics, recordings, and what /server_info shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.keys import load_private_key
from runtime.sign import file_entry, sign_core
from tests.served_core import Server


@contextmanager
def process(tiny: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`dflash-run debug-serve` as its own process, once it listens, and its address."""
    code = "from runtime.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "debug-serve", str(tiny / "core"), "--trust", str(tiny / "keys" / "trust.json"),
         "--port", "0", *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            line = child.stderr.readline()
            yield child, re.search(r"http://[\d.:]+", line)[0]
        finally:
            child.kill()


def wait_ready(url: str) -> list[str]:
    """Poll until the server is ready; the phases that were seen."""
    seen: list[str] = []
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            phase = httpx2.get(f"{url}/startupz").json()["phase"]
        except httpx2.TransportError:
            time.sleep(0.02)
            continue
        if phase not in seen:
            seen.append(phase)
        if phase == "ready":
            return seen
        assert httpx2.get(f"{url}/health").status_code in (503, 200)
        time.sleep(0.01)
    raise AssertionError(seen)


def test_server_answers_503_until_warm_and_drains_at_sigterm(tiny: Path) -> None:
    with process(tiny, "--json") as (child, url):
        seen = wait_ready(url)
        told = json.loads(child.stdout.read(1) + child.stdout.readline() + "".join(iter_document(child)))
        with httpx2.stream("POST", f"{url}/v1/completions", timeout=30, json={
                "model": "tiny", "prompt": [1], "max_tokens": 250, "temperature": 0, "stream": True,
                "ignore_eos": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        child.wait(30)

    assert seen[-1] == "ready"
    assert told["url"] == url
    assert told["canary"]["agreement"] == 1.0
    assert last == "data: [DONE]"
    assert child.returncode == 0


def iter_document(child: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of the one JSON document, which ends with a brace of its own."""
    for line in child.stdout:
        yield line
        if line.startswith("}"):
            return


def test_killed_server_starts_again_on_the_same_port(tiny: Path) -> None:
    with process(tiny, "--no-canary") as (child, url):
        wait_ready(url)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        port = url.rpartition(":")[2]
        with process(tiny, "--no-canary", "--port", port) as (_, again):
            assert again == url
            wait_ready(again)
            body = {"model": "tiny", "prompt": [1], "max_tokens": 2}
            assert httpx2.post(f"{again}/v1/completions", json=body).status_code == 200


def test_core_whose_canary_does_not_hold_is_not_served(tiny: Path, tmp_path: Path) -> None:
    """The canary of another text, signed as it should be."""
    import shutil

    from dflash_core.v1.manifest_pb2 import RebuildManifest

    core = tmp_path / "core"
    shutil.copytree(tiny / "core", core)
    (golden,) = (core / "golden").iterdir()
    document = json.loads(golden.read_bytes())
    document["prompts"][1]["tokens"][2] = 127 - document["prompts"][1]["tokens"][2]
    document["prompts"][1]["top"][2] = [[127, -9.0]] * 8
    changed = golden.with_name("0" * 64 + ".json")
    golden.unlink()
    changed.write_bytes(json.dumps(document).encode())
    import hashlib
    final = changed.rename(changed.with_name(hashlib.sha256(changed.read_bytes()).hexdigest() + ".json"))
    manifest = RebuildManifest.FromString((core / "manifest.pb").read_bytes())
    kept = [entry for entry in manifest.files if entry.role != "golden"]
    del manifest.files[:]
    manifest.files.extend(sorted([*kept, file_entry(final, f"golden/{final.name}", "golden")], key=lambda e: e.path))
    (core / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    sign_core(core, load_private_key(tiny / "keys" / "key.pem"))

    arguments = ["debug-serve", str(core), "--trust", str(tiny / "keys" / "trust.json"), "--port", "0", "--json"]
    done = CliRunner().invoke(app, arguments)

    error = json.loads(done.stdout)["error"]
    assert done.exit_code == 7
    assert (error["code"], error["where"]) == ("CANARY_TOKENS", "canary prompt 1, token 2")


def test_core_of_an_unknown_signer_is_not_served(tiny: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["keygen", str(tmp_path / "other")]).exit_code == 0

    done = CliRunner().invoke(app, ["debug-serve", str(tiny / "core"), "--trust",
                                    str(tmp_path / "other" / "trust.json"), "--port", "0"])

    assert done.exit_code == 4


def test_port_in_use_is_refused(tiny: Path, server: Server) -> None:
    port = server.url.rpartition(":")[2]

    done = CliRunner().invoke(app, ["debug-serve", str(tiny / "core"), "--trust", str(tiny / "keys" / "trust.json"),
                                    "--port", port, "--json"])

    assert done.exit_code == 6
    assert json.loads(done.stdout)["error"]["code"] == "PORT"


def test_metrics_count_what_was_served_under_vllms_names(start: Callable[..., Any]) -> None:
    with start() as server:
        answer = server.client().completions.create(model="tiny", prompt=[3, 1, 4], max_tokens=20, temperature=0)
        with server.http() as http:
            text = http.get("/metrics").text
    told = answer.model_extra["metrics"]["speculative_decoding"]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
              for line in text.splitlines() if line and not line.startswith("#")}
    labels = '{engine="0",model_name="tiny"}'

    assert {name: values[f"vllm:{name}{labels}"] for name in (
        "prompt_tokens_total", "generation_tokens_total", "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "num_requests_running",
        "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
        "inter_token_latency_seconds_count", "prefix_cache_hits_total")} == {
            "prompt_tokens_total": 3, "generation_tokens_total": 20,
            "spec_decode_num_drafts_total": told["num_spec_steps"],
            "spec_decode_num_draft_tokens_total": told["num_draft_tokens"],
            "spec_decode_num_accepted_tokens_total": told["num_accepted_draft_tokens"], "num_requests_running": 0,
            "num_requests_waiting": 0, "kv_cache_usage_perc": 0, "time_to_first_token_seconds_count": 1,
            "e2e_request_latency_seconds_count": 1, "request_queue_time_seconds_count": 1,
            "inter_token_latency_seconds_count": told["num_spec_steps"], "prefix_cache_hits_total": 0}
    positions = [values[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",'
                        f'position="{i}"}}'] for i in range(3)]
    histogram = told["acceptance_histogram"]
    assert positions == [sum(histogram[i + 1:]) for i in range(3)]
    assert values['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 1
    assert values["dflash:acceptance_below_canary"] == 0
    assert any(name.startswith('dflash:core_info{core_digest="') for name in values)
    assert {part for part in ("prefill", "draft", "verify", "host")
            if values[f'dflash:step_seconds_count{{part="{part}"}}'] > 0} == {"prefill", "draft", "verify", "host"}
    assert values['dflash:startup_seconds{phase="load"}'] > 0
    edges = re.findall(r'vllm:time_to_first_token_seconds_bucket{engine="0",le="([^"]+)"', text)
    assert edges[:3] == ["0.001", "0.005", "0.01"]
    assert edges[-2:] == ["2560.0", "+Inf"]


def test_server_info_shows_identity_precision_and_graphs(server: Server) -> None:
    with server.http() as http:
        info = http.get("/server_info").json()
        graphs = {g["name"]: http.get(f"/dflash/graphs/{g['name']}").json() for g in info["core"]["graphs"]}

    assert info["core"]["core_digest"] == server.state.worker.core.core_digest
    assert (info["core"]["core_name"], info["core"]["depth"], info["core"]["max_context"]) == ("tiny", 3, 256)
    assert len(info["core"]["signers"]) == 1
    assert [p["role"] for p in info["core"]["precision"]] == [
        "target inputs", "draft body", "proposal head", "verification head"]
    assert info["canary"]["agreement"] == 1.0
    assert set(graphs) >= {"draft.b1", "verify.b4", "decode.b2"}
    for graph in graphs.values():
        ids = [node["id"] for node in graph["nodes"]]
        assert ids == list(range(len(ids)))
        assert all(a in ids and b in ids for a, b in graph["edges"])
    assert any(node["name"] == "grouped_conv" or "conv" in node["name"] for node in graphs["draft.b1"]["nodes"])


def test_recorded_requests_replay_without_divergence(start: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    with start(record=folder, canary=False) as server:
        client = server.client(strict=False)
        client.completions.create(model="tiny", prompt=[3, 1, 4], max_tokens=12, temperature=0)
        client.completions.create(model="tiny", prompt=[9], max_tokens=12, temperature=1.0, seed=4)
        stream = client.completions.create(model="tiny", prompt=[5], max_tokens=240, temperature=0, stream=True,
                                           extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()

    def replay() -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(app, ["replay-requests", str(folder), "--against", str(tiny / "core"), "--trust",
                                        str(tiny / "keys" / "trust.json"), "--json"])
        return done.exit_code, json.loads(done.stdout)

    code, report = replay()
    (file,) = folder.iterdir()
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"verify"' in line)
    step = json.loads(lines[at])
    step["tokens"][0] ^= 1
    lines[at] = json.dumps(step)
    file.write_text("\n".join(lines))
    changed_code, changed = replay()

    assert (code, report["requests"], report["same_core"], report["divergence"]) == (0, 3, True, None)
    assert report["accepted_now"] == report["accepted_before"]
    assert changed_code == 7
    assert (changed["divergence"]["request_id"], changed["divergence"]["step"]) == (step["id"], 1)


@pytest.mark.parametrize(("content", "where"), [(None, ""), ("{}\n", ":1"), ('{"id":"x","kind":"verify"}\n', ":1")],
                         ids=["no file", "no format", "a step of no request"])
def test_refuses_what_is_no_recording(tiny: Path, tmp_path: Path, content: str | None, where: str) -> None:
    if content is not None:
        (tmp_path / "requests-1.jsonl").write_text(content)

    done = CliRunner().invoke(app, ["replay-requests", str(tmp_path), "--against", str(tiny / "core"), "--trust",
                                    str(tiny / "keys" / "trust.json"), "--json"])

    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["code"]) == (2, "RECORDING")
    assert error["where"].endswith(where)
