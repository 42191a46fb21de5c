#!/usr/bin/env python3
"""The demo pair on an NVIDIA GPU: four precisions, cold start, and z-lab's own loop in the same run. JSON on stdout.

    make bench-gpu                      needs build/demo/target (make demo makes it) and a GPU

Rates are new tokens over wall time of whole generations, prefill included; medians over --repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "build" / "demo"
CORES = ROOT / "build" / "bench-gpu"
DRAFT = ROOT / "examples" / "smollm2-135m-dflash2"
PRECISIONS = {
    "bf16": [],
    "body-mxfp8": ["--draft-body-quantization", "mxfp8"],
    "head-nvfp4": ["--draft-head-quantization", "nvfp4"],
    "both": ["--draft-body-quantization", "mxfp8", "--draft-head-quantization", "nvfp4"],
}
BUCKETS = ["--batch", "1", "--batch", "4", "--batch", "8"]
STOP = (2,)
BARS = {"cold_start_s": (1.0, "at most"), "spec_tokens_per_s": (2000, "at least"), "over_zlab": (40, "at least"),
        "plain_tokens_per_s": (1300, "at least"), "batch4_tokens_per_s": (6000, "at least"),
        "first_graphs_s": (0.040, "at most"), "all_graphs_s": (0.300, "at most"),
        "equal_prompts": (12, "at least"), "equal_logit_rows": (1.0, "at least"), "rss_mb": (300, "at most"),
        "divergence_ulp": (2.0, "at most")}

FIRST_TOKEN = """
import json, re, sys, time
started = time.perf_counter()
from pathlib import Path
import runtime
imported = time.perf_counter()
core = runtime.load(Path(sys.argv[1]), trust=runtime.TrustPolicy.load(Path(sys.argv[2])), device="cuda")
loaded = time.perf_counter()
from runtime.engine import Engine, Request
Engine(core, record_candidates=False).generate(json.loads(sys.argv[3]), Request(max_tokens=1))
print(json.dumps({"import_s": imported - started, "load_s": loaded - imported, "phases": core.phases,
                  "first_token_s": time.perf_counter() - loaded,
                  "rss_mb": int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024}))
"""


MANY = "many-buckets"
MANY_BATCHES = [part for batch in range(1, 14) for part in ("--batch", str(batch))]
"""Thirteen buckets of three roles, and a prefill: forty graphs."""

GRAPH_PHASE = """
import json, sys, time
from pathlib import Path
import runtime
core = runtime.load(Path(sys.argv[1]), trust=runtime.TrustPolicy.load(Path(sys.argv[2])), device="cuda")
started = time.perf_counter()
core._pool._thread.join()
names = [g.name for g in core._recorded]
[core._pool.executable(name) for name in names]
print(json.dumps({"graphs": len(names), "first_s": core.phases["graphs"], "rest_s": time.perf_counter() - started}))
"""


def export(name: str) -> Path:
    """The demo pair's core in one precision, made once."""
    core = CORES / name
    if not core.is_dir():
        command = [str(Path(sys.executable).parent / "dflash-export"), str(DEMO / "target"), "--draft", str(DRAFT),
                   "--out", str(core), "--key", str(DEMO / "key.pem"), "--device", "cuda:sm_90", "--no-canary",
                   *(MANY_BATCHES if name == MANY else BUCKETS), *PRECISIONS.get(name, [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return core


def reference() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of the published trace, and the fp32 reference's tokens."""
    rows = json.loads((DRAFT / "reference.json").read_text())["rows"]
    return [row["prompt_ids"] for row in rows], [row["new_tokens"] for row in rows]


def measure(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Everything about one precision that needs its core loaded."""
    import runtime
    from runtime.engine import Engine, Request

    prompts, _ = reference()
    trust = runtime.TrustPolicy.load(DEMO / "trust.json")
    with runtime.load(export(name), trust=trust, device="cuda") as core:
        engine = Engine(core, record_candidates=False)
        result: dict[str, Any] = {"weight_bytes": sum(b.file.size_bytes for b in core.manifest.weight_blobs)}
        texts: dict[bool, list[tuple[int, ...]]] = {}
        for speculation in (True, False):
            request = Request(max_tokens=tokens, stop_token_ids=STOP, speculation=speculation)
            engine.generate(prompts[0], request)
            rates, steps, made = [], 0, 0
            for _ in range(repeats):
                started = time.perf_counter()
                done = [engine.generate(p, request) for p in prompts]
                seconds = time.perf_counter() - started
                rates.append(sum(len(c.tokens) for c in done) / seconds)
            steps = sum(len(c.steps) - 1 for c in done)
            made = sum(len(s.tokens) for c in done for s in c.steps[1:])
            texts[speculation] = [c.tokens for c in done]
            result["spec" if speculation else "plain"] = {
                "tokens_per_s": statistics.median(rates), "raw": rates, "ms_per_step": seconds / steps * 1e3,
                "tokens_per_step": made / steps}
        result["texts"] = [list(tokens) for tokens in texts[False]]
        result["equal_prompts"] = sum(a == b for a, b in zip(texts[True], texts[False], strict=True))
        for batch in (4, 8):
            result[f"batch{batch}"] = measure_batch(engine, prompts, texts[True], tokens, batch)
        result["equal_logit_rows"] = equal_logits(core, engine, prompts[:3], tokens)
    return result


def measure_batch(engine: Any, prompts: Sequence[list[int]], solo: Sequence[tuple[int, ...]], tokens: int,
                  batch: int) -> dict[str, Any]:
    """Total rate with up to `batch` sequences at a time, and how many give the tokens they give alone.

    The next prompt joins when a sequence ends, as in a server; `grouped` waits for all of a group before the next one.
    """
    refilled = [run_batch(engine, [prompts], tokens, batch) for _ in range(3)]
    groups = [prompts[first:first + batch] for first in range(0, len(prompts), batch)]
    grouped = run_batch(engine, groups, tokens, batch)
    middle = sorted(refilled, key=lambda run: run["tokens_per_s"])[1]
    return {"tokens_per_s": middle["tokens_per_s"], "mean_live_seqs": middle["mean_live_seqs"],
            "raw": [run["tokens_per_s"] for run in refilled], "grouped_tokens_per_s": grouped["tokens_per_s"],
            "equal_prompts": min(sum(a == b for a, b in zip(run["texts"], solo, strict=True))
                                 for run in (*refilled, grouped))}


def run_batch(engine: Any, groups: Sequence[Sequence[list[int]]], tokens: int, batch: int) -> dict[str, Any]:
    """Rate, mean number of sequences in a step, and texts of groups of prompts that run one after another."""
    from runtime.engine import Request

    request = Request(max_tokens=tokens, stop_token_ids=STOP)
    sequences, live, steps = [], 0, 0
    started = time.perf_counter()
    for group in groups:
        waiting = list(group)
        while waiting or not engine.idle:
            while waiting and engine.running + engine.waiting < batch:
                sequences.append(engine.add(waiting.pop(0), request))
            engine.step()
            live, steps = live + engine.running, steps + 1
    seconds = time.perf_counter() - started
    return {"tokens_per_s": sum(len(s.tokens) for s in sequences) / seconds, "mean_live_seqs": live / steps,
            "texts": [tuple(s.tokens) for s in sequences]}


def equal_logits(core: Any, engine: Any, prompts: Sequence[list[int]], tokens: int) -> float:
    """Share of positions at which verify's logits and decode's, from one state, are equal bytes."""
    from runtime.engine import Request

    vocab, lanes = core.manifest.contract.vocab_size, core.manifest.contract.max_batch
    equal = total = 0
    for prompt in prompts:
        sequence = engine.add(prompt, Request(max_tokens=tokens, stop_token_ids=STOP))
        while sequence.prefilled < len(sequence.prompt):
            engine.step()
        for _ in range(12):
            slot = sequence.slot
            before = core.get("length", slot, 1), core.get("anchor", slot, 1)
            (output,) = engine.step()
            rows = [array("f", core.get("logits", i * vocab, vocab)) for i in range(len(output.record.tokens))]
            after = core.get("length", slot, 1), core.get("anchor", slot, 1)
            _set(core, slot, before)
            core.put("slots", 0, [slot] + [-1] * (lanes - 1))
            for row in rows:
                core.graph("decode", 1).run()
                total += 1
                equal += array("f", core.get("logits", 0, vocab)).tobytes() == row.tobytes()
            if sequence.finish_reason is not None:
                break
            _set(core, slot, after)
        engine.abort(sequence)
    return equal / total


def _set(core: Any, slot: int, state: tuple[list[int], list[int]]) -> None:
    core.put("length", slot, state[0])
    core.put("anchor", slot, state[1])


def cold_start(core: Path, repeats: int) -> list[dict[str, Any]]:
    """Process start to first token, in processes of their own, the page cache warm."""
    prompts, _ = reference()
    runs = []
    for _ in range(repeats):
        started = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(core), str(DEMO / "trust.json"),
                              json.dumps(prompts[0])], check=True, capture_output=True, text=True, cwd=ROOT).stdout
        runs.append({**json.loads(out), "wall_s": time.perf_counter() - started})
    return runs


def graph_phase(core: Path, repeats: int) -> list[dict[str, Any]]:
    """Seconds to build the first graph of each role, and then all others in the background; new processes."""
    return [json.loads(subprocess.run([sys.executable, "-c", GRAPH_PHASE, str(core), str(DEMO / "trust.json")],
                                      check=True, capture_output=True, text=True, cwd=ROOT).stdout)
            for _ in range(repeats)]


def child(name: str, stdin: str = "") -> Any:
    """What this script prints as that child: torch never shares a process with the runtime that is measured."""
    done = subprocess.run([sys.executable, __file__, "--child", name], check=True, capture_output=True, text=True,
                          input=stdin)
    return json.loads(done.stdout.strip().splitlines()[-1])


def child_zlab(tokens: int) -> dict[str, float]:
    """In a child: z-lab's own loop in bf16, four of the prompts."""
    import dflash.model
    import torch
    from dflash.model import DFlash2DraftModel
    from transformers import LlamaForCausalLM

    torch.set_grad_enabled(False)
    target = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.bfloat16).eval().cuda()
    draft = DFlash2DraftModel.from_pretrained(DRAFT, dtype=torch.bfloat16).eval().cuda()
    prompts, _ = reference()

    def run(prompt: list[int], count: int) -> Any:
        return dflash.model.dflash_generate(draft, target, torch.tensor([prompt]).cuda(), count, list(STOP), 0.0,
                                            return_stats=True)

    run(prompts[0], 16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    stats = [run(p, tokens) for p in prompts[::3]]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    made = sum(s.num_output_tokens for s in stats)
    return {"tokens_per_s": made / seconds, "tokens_per_step": made / sum(len(s.acceptance_lengths) for s in stats)}


def child_divergence(texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """In a child: where the bf16 core's greedy tokens first leave those of transformers' fp32 model on the CPU.

    The fp32 model reads each prompt with the core's own tokens, so that every position has one history. `margin_ulp` is
    how much more the fp32 model likes its token than the core's, in steps of bf16 at the size of that logit.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.set_grad_enabled(False)
    target = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    prompts, _ = reference()
    rows, differing, positions = [], 0, 0
    for index, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        logits = target(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1:-1]
        ours = torch.tensor(tokens)
        best, chosen = logits.max(-1), logits.gather(-1, ours[:, None])[:, 0]
        left = (best.indices != ours).nonzero().flatten().tolist()
        differing, positions = differing + len(left), positions + len(tokens)
        if left:
            at = left[0]
            margin, size = float(best.values[at] - chosen[at]), float(best.values[at].abs())
            rows.append({"prompt": index, "position": at, "core": tokens[at], "reference": int(best.indices[at]),
                         "margin": margin, "margin_ulp": margin / 2.0 ** (math.floor(math.log2(size)) - 7)})
    return {"positions": positions, "differing_positions": differing, "first": rows}


def machine() -> dict[str, str]:
    query = "name,driver_version,clocks.sm,clocks.mem"
    found = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], check=True,
                           capture_output=True, text=True).stdout.strip().splitlines()[0]
    return dict(zip(query.split(","), (part.strip() for part in found.split(",")), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=list(PRECISIONS), nargs="+", default=list(PRECISIONS),
                        help="which of the four; bf16 is among them")
    parser.add_argument("--child", choices=["zlab", "divergence"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "divergence":
        print(json.dumps(child_divergence(json.load(sys.stdin))))
        return
    if args.child:
        print(json.dumps(child_zlab(96)))
        return
    if not (DEMO / "target").is_dir():
        raise SystemExit("build/demo/target is missing; run `make demo` first")
    result: dict[str, Any] = {"machine": machine(), "tokens": args.tokens, "repeats": args.repeats}
    result["precisions"] = {name: measure(name, args.tokens, args.repeats) for name in args.precision}
    result["cold"] = cold_start(export(args.precision[-1]), 5)
    result["graph_phase"] = graph_phase(export(MANY), 3)
    result["zlab"] = child("zlab")
    bf16 = result["precisions"]["bf16"]
    result["divergence"] = child("divergence", json.dumps(bf16["texts"]))
    found = {"cold_start_s": statistics.median(r["wall_s"] for r in result["cold"]),
             "rss_mb": max(r["rss_mb"] for r in result["cold"]),
             "spec_tokens_per_s": bf16["spec"]["tokens_per_s"], "plain_tokens_per_s": bf16["plain"]["tokens_per_s"],
             "over_zlab": bf16["spec"]["tokens_per_s"] / result["zlab"]["tokens_per_s"],
             "batch4_tokens_per_s": bf16["batch4"]["tokens_per_s"], "equal_prompts": bf16["equal_prompts"],
             "equal_logit_rows": bf16["equal_logit_rows"],
             "first_graphs_s": statistics.median(r["first_s"] for r in result["graph_phase"]),
             "all_graphs_s": statistics.median(r["rest_s"] for r in result["graph_phase"]),
             "divergence_ulp": max((row["margin_ulp"] for row in result["divergence"]["first"]), default=0.0)}
    result["bars"] = {name: {"bar": bar, "got": found[name],
                             "met": found[name] <= bar if side == "at most" else found[name] >= bar}
                      for name, (bar, side) in BARS.items()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
