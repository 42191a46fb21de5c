"""Load a debug server for a while and count what went wrong: `make soak`.

Many clients on loopback send completions and chats, plain and streamed; some hang up in the middle, some send
malformed bodies. Every finished greedy answer is compared with what the same server gave to that prompt alone. At the
end: pages, slots and memory as before, and a clean end at SIGTERM while requests still run. One JSON document on
stdout; exit status 7 if anything is wrong.

    python scripts/soak.py --requests 200 --clients 16
    python scripts/soak.py --device cuda
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from runtime.gpu.device import is_gpu
from runtime.prepare import export_device

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "build" / "demo"
CORES = ROOT / "build" / "soak"
HANG_UP, MALFORMED = 0.10, 0.05
MAX_TOKENS = (1, 2, 4, 8)
TOPICS = ("the sea", "bread", "a bicycle", "rain", "old maps", "chess", "bees", "a lighthouse")
ASKS = ("Say one thing about {}.", "Name a word that goes with {}.", "{} is", "A question about {}:")
MALFORMED_BODIES = (b"{", b"[]", b"\xff", b'{"model":"x"}', b"[" * 5000, b'{"model":1,"prompt":2}', b"")
MAX_RSS_GROWTH = 0.05
SLOTS = 4


@dataclass(slots=True)
class Report:
    """What the soak counted; `wrong` lists the first few answers that differ from their solo run."""

    requests: int = 0
    finished: int = 0
    hung_up: int = 0
    malformed: int = 0
    retried: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: list[dict[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    pages_lost: float = 0.0
    left_running: float = 0.0
    max_waiting: float = 0.0
    drained: bool = False
    exit_code: int | None = None

    def status(self, code: int) -> None:
        """Count an answer."""
        self.statuses[code] = self.statuses.get(code, 0) + 1

    def problems(self) -> list[str]:
        """What breaks a promise; empty when all was well."""
        found = [f"wrong output: {item}" for item in self.wrong[:5]] + self.errors[:5]
        if self.pages_lost or self.left_running:
            found.append(f"leak: {self.pages_lost} of the K/V pages, {self.left_running} requests")
        if len(self.rss_bytes) >= 4:
            early, late = self.rss_bytes[len(self.rss_bytes) // 3], self.rss_bytes[-1]
            if late > early * (1 + MAX_RSS_GROWTH):
                found.append(f"memory grew from {early} to {late} bytes")
        if not self.drained or self.exit_code != 0:
            found.append(f"SIGTERM: drained {self.drained}, exit status {self.exit_code}")
        return found


def make_core(core: Path, device: str) -> None:
    """Export the demo pair for four sequences at once and a device, unless it is there."""
    if core.exists():
        return
    subprocess.run(
        [sys.executable, "-c", "from exporter.cli import export_main; export_main()", str(DEMO / "target"), "--draft",
         str(ROOT / "examples" / "smollm2-135m-dflash2"), "--out", str(core), "--key", str(DEMO / "key.pem"),
         "--draft-body-quantization", "mxfp8", "--draft-head-quantization", "nvfp4", "--batch", "1", "--batch", "4",
         "--max-context", "512", "--device", export_device(device)], check=True)


def start(core: Path, trust: Path, waiting: int, device: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and its address, once it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", "from runtime.cli import main; main()", "debug-serve", str(core), "--trust", str(trust),
         "--port", "0", "--max-waiting", str(waiting), "--device", device], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    url = ""
    for line in child.stderr:
        found = re.search(r"http://[\d.:]+", line)
        url = found[0] if found else url
        if line.startswith("ready"):
            return child, url
        if line.startswith("error"):
            break
    raise SystemExit(f"the server did not start: exit status {child.wait()}")


def bodies(seed: int) -> list[dict[str, Any]]:
    """Greedy requests of many lengths, by completion and by chat."""
    rng = random.Random(seed)
    made = []
    for topic in TOPICS:
        for ask in ASKS:
            body: dict[str, Any] = {"max_tokens": rng.choice(MAX_TOKENS), "temperature": 0,
                                    "speculation": rng.random() < 0.9}
            text = ask.format(topic)
            body |= {"messages": [{"role": "user", "content": text}]} if rng.random() < 0.5 else {"prompt": text}
            made.append(body)
    return made


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def text_of(document: dict[str, Any]) -> str:
    choice = document["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


async def plain(http: httpx2.AsyncClient, body: dict[str, Any], report: Report) -> str | None:
    """The answer's text; None when the queue was full, after waiting as long as the server asks."""
    answer = await http.post(path_of(body), json=body)
    report.status(answer.status_code)
    if answer.status_code == 429:
        report.retried += 1
        await asyncio.sleep(int(answer.headers["retry-after"]))
        return None
    answer.raise_for_status()
    return text_of(answer.json())


async def streamed(http: httpx2.AsyncClient, body: dict[str, Any], report: Report,
                   leave_after: int | None) -> str | None:
    """The text of a stream; leaves after some events if told to, with what came until then."""
    text, seen = "", 0
    async with http.stream("POST", path_of(body), json={**body, "stream": True}) as answer:
        report.status(answer.status_code)
        if answer.status_code == 429:
            report.retried += 1
            await asyncio.sleep(int(answer.headers["retry-after"]))
            return None
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            seen += 1
            if leave_after is not None and seen > leave_after:
                return text
    return text


async def client(number: int, url: str, work: list[dict[str, Any]], solo: dict[str, str], report: Report,
                 left: list[int]) -> None:
    rng = random.Random(number)
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
        while left[0] > 0:
            left[0] -= 1
            report.requests += 1
            body = rng.choice(work)
            expected = solo[json.dumps(body)]
            try:
                draw = rng.random()
                if draw < MALFORMED:
                    answer = await http.post(path_of(body), content=rng.choice(MALFORMED_BODIES),
                                             headers={"content-type": "application/json"})
                    report.status(answer.status_code)
                    report.malformed += 1
                    if not 400 <= answer.status_code < 500:
                        report.errors.append(f"a malformed body was answered with {answer.status_code}")
                    continue
                if draw < MALFORMED + HANG_UP:
                    if await streamed(http, {**body, "max_tokens": 64}, report, rng.randrange(2)) is not None:
                        report.hung_up += 1
                    continue
                text = None
                while text is None:
                    text = await (plain(http, body, report) if rng.random() < 0.5
                                  else streamed(http, body, report, None))
                report.finished += 1
                if text != expected:
                    report.wrong.append({"body": json.dumps(body), "expected": expected, "got": text})
            except httpx2.HTTPError as e:
                report.errors.append(f"{type(e).__name__}: {e}")


def gauge(metrics: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(f"{name}{{"))


async def watch(url: str, process: psutil.Process, report: Report) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        while True:
            metrics = (await http.get("/metrics")).text
            report.max_waiting = max(report.max_waiting, gauge(metrics, "vllm:num_requests_waiting"))
            report.rss_bytes.append(process.memory_info().rss)
            await asyncio.sleep(2)


async def run(arguments: argparse.Namespace, child: subprocess.Popen[str], url: str) -> Report:
    report, work = Report(), bodies(1)
    solo: dict[str, str] = {}
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        work = [{"model": model, **body} for body in work]
        for body in work:
            solo[json.dumps(body)] = await plain(http, body, Report()) or ""
        started = time.monotonic()
        watching = asyncio.create_task(watch(url, psutil.Process(child.pid), report))
        left = [arguments.requests]
        await asyncio.gather(*(client(i, url, work, solo, report, left) for i in range(arguments.clients)))
        watching.cancel()
        report.seconds = time.monotonic() - started
        for _ in range(100):
            metrics = (await http.get("/metrics")).text
            report.pages_lost = gauge(metrics, "vllm:kv_cache_usage_perc")
            report.left_running = (gauge(metrics, "vllm:num_requests_running")
                                   + gauge(metrics, "vllm:num_requests_waiting"))
            if not report.pages_lost and not report.left_running:
                break
            await asyncio.sleep(0.1)
        report.drained = await drain(http, child, model)
    report.exit_code = await asyncio.to_thread(child.wait, 60)
    return report


async def drain(http: httpx2.AsyncClient, child: subprocess.Popen[str], model: str) -> bool:
    """Whether a stream that runs at SIGTERM is still brought to its end."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "stream": True,
            "ignore_eos": True}
    last = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not last:
                child.send_signal(signal.SIGTERM)
            last = line or last
    return last == "data: [DONE]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=Path, help="without it, the demo pair is exported to build/soak")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--trust", type=Path, default=DEMO / "trust.json")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=32, help="the server's bound on its queue")
    arguments = parser.parse_args()
    core = arguments.core or CORES / ("core-cuda" if is_gpu(arguments.device) else "core")
    make_core(core, arguments.device)
    child, url = start(core, arguments.trust, arguments.waiting, arguments.device)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        report = asyncio.run(run(arguments, child, url))
    finally:
        child.kill()
    problems = report.problems()
    if report.max_waiting > arguments.waiting + SLOTS:
        problems.append(f"{report.max_waiting} requests waited, {arguments.waiting} may beyond those of a step")
    document = {**asdict(report), "rss_bytes": report.rss_bytes[::max(1, len(report.rss_bytes) // 20)],
                "problems": problems}
    print(json.dumps(document, indent=1))
    sys.exit(7 if problems else 0)


if __name__ == "__main__":
    main()
