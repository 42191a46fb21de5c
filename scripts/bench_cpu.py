#!/usr/bin/env python3
"""Speed and memory of the demo pair on this CPU, beside z-lab's own loop in the same run. One JSON document on stdout.

    make bench-cpu                      needs build/demo (make demo makes it)
    python scripts/bench_cpu.py --prompts 4 --repeats 1

Every measurement runs in a process of its own; ours and z-lab's alternate; medians are over --repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "build" / "demo"
DRAFT = ROOT / "examples" / "smollm2-135m-dflash2"
PRECISION = ["--draft-body-quantization", "mxfp8", "--draft-head-quantization", "nvfp4"]
BARS = {"export_s": 60.0, "export_peak_rss_gb": 1.5, "load_s": 2.0, "import_s": 0.35, "speed_ratio": 1.3}

IMPORT = "import time; t = time.perf_counter(); import runtime; print(time.perf_counter() - t)"


def run_python(*args: str) -> str:
    return subprocess.run([sys.executable, *args], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def measure_export(out: Path) -> dict[str, float]:
    """Wall time and peak resident memory of one export of the demo pair."""
    command = [str(Path(sys.executable).parent / "dflash-export"), str(DEMO / "target"), "--draft", str(DRAFT),
               "--out", str(out), "--key", str(DEMO / "key.pem"), *PRECISION]
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"export failed with status {status}")
    return {"export_s": time.perf_counter() - started, "export_peak_rss_gb": usage.ru_maxrss * 1024 / 1e9}


def prompts(count: int) -> tuple[list[list[int]], int]:
    reference = json.loads((DRAFT / "reference.json").read_text())
    return [row["prompt_ids"] for row in reference["rows"][:count]], reference["max_new_tokens"]


def child_ours(core: Path, count: int) -> dict[str, float]:
    """In a child: load a core and generate greedily for every prompt."""
    import runtime
    from runtime.engine import Engine, Request, StepKind

    started = time.perf_counter()
    loaded = runtime.load(core, trust=runtime.TrustPolicy.load(DEMO / "trust.json"))
    load_s = time.perf_counter() - started
    engine = Engine(loaded)
    ids, max_tokens = prompts(count)
    request = Request(max_tokens=max_tokens, stop_token_ids=(2,))
    engine.generate(ids[0], Request(max_tokens=8))
    started = time.perf_counter()
    done = [engine.generate(p, request) for p in ids]
    seconds = time.perf_counter() - started
    steps = [s for c in done for s in c.steps if s.kind is StepKind.VERIFY]
    tokens = sum(len(c.tokens) for c in done)
    return {"load_s": load_s, "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds,
            "tokens_per_step": sum(len(s.tokens) for s in steps) / len(steps),
            "ms_per_step": seconds / len(steps) * 1e3}


def child_load(core: Path) -> dict[str, float]:
    """In a child: load a core, every byte verified, as the first thing it does."""
    started = time.perf_counter()
    import runtime

    with runtime.load(core, trust=runtime.TrustPolicy.load(DEMO / "trust.json")):
        return {"load_s": time.perf_counter() - started}


def child_zlab(count: int) -> dict[str, float]:
    """In a child: z-lab's own loop in fp32 over the same prompts."""
    import dflash.model
    import torch
    from dflash.model import DFlash2DraftModel, dflash_generate
    from transformers import LlamaForCausalLM

    dflash.model._cuda_time = time.perf_counter  # its clock synchronizes CUDA
    torch.set_grad_enabled(False)
    target = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    draft = DFlash2DraftModel.from_pretrained(DRAFT, dtype=torch.float32).eval()
    ids, max_tokens = prompts(count)
    dflash_generate(draft, target, torch.tensor([ids[0]]), 8, [2], 0.0)
    started = time.perf_counter()
    stats = [dflash_generate(draft, target, torch.tensor([p]), max_tokens, [2], 0.0, return_stats=True) for p in ids]
    seconds = time.perf_counter() - started
    tokens = sum(s.num_output_tokens for s in stats)
    steps = [n for s in stats for n in s.acceptance_lengths]
    return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds,
            "tokens_per_step": sum(steps) / len(steps), "ms_per_step": seconds / len(steps) * 1e3}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in runs) for name in runs[0]}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def bench(count: int, repeats: int) -> dict[str, Any]:
    if not (DEMO / "core").is_dir():
        raise SystemExit("build/demo/core is missing; run `make demo` first")
    this = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory(dir=DEMO.parent) as tmp:
        export = measure_export(Path(tmp) / "core")
    imports = [float(run_python("-c", IMPORT)) for _ in range(5)]
    loads = [json.loads(run_python(this, "--child", "load"))["load_s"] for _ in range(5)]
    ours, zlab = [], []
    for _ in range(repeats):
        zlab.append(json.loads(run_python(this, "--child", "zlab", "--prompts", str(count))))
        ours.append(json.loads(run_python(this, "--child", "ours", "--prompts", str(count))))
    result: dict[str, Any] = {
        "machine": machine(), "prompts": count, "repeats": repeats, **export, "import_s": statistics.median(imports),
        "load_s": statistics.median(loads), "ours": medians(ours), "zlab": medians(zlab),
        "raw": {"ours": ours, "zlab": zlab, "import_s": imports, "load_s": loads}}
    result["speed_ratio"] = result["ours"]["tokens_per_s"] / result["zlab"]["tokens_per_s"]
    result["bars"] = {name: {"bar": bar, "got": result[name],
                             "met": result[name] >= bar if name == "speed_ratio" else result[name] <= bar}
                      for name, bar in BARS.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=["load", "ours", "zlab"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "load":
        print(json.dumps(child_load(DEMO / "core")))
    elif args.child == "ours":
        print(json.dumps(child_ours(DEMO / "core", args.prompts)))
    elif args.child == "zlab":
        print(json.dumps(child_zlab(args.prompts)))
    else:
        print(json.dumps(bench(args.prompts, args.repeats), indent=1))


if __name__ == "__main__":
    main()
