#!/usr/bin/env python
"""The Kimi family on this CPU: planning all of Kimi K3, its state in bytes, ops at its shapes. JSON on stdout.

    scripts/bench_kimi.py                   # about a minute

Times are the median of five; ops run alone, at the shapes of Kimi K3 (96 heads x 128) and 8 rows of one sequence.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exporter.kimi_config import KdaShape  # noqa: E402
from exporter.models.kimi import state_slots  # noqa: E402
from exporter.plan import PrecisionSettings, plan_precision  # noqa: E402
from exporter.program.builder import Program  # noqa: E402
from exporter.recipe import load_recipe  # noqa: E402
from runtime.ops import DType, call  # noqa: E402
from tests.exporter.kimi_inventory import kimi_k3  # noqa: E402

HEADS, DIM, TAPS, KDA_LAYERS, ROWS, REPEATS = 96, 128, 4, 69, 8, 5
WIDTH = HEADS * DIM


def main() -> None:
    print(json.dumps({"plan": plan_row(), "state": state_row(), "ops_8_rows": ops_row()}, indent=2))


def plan_row() -> dict[str, Any]:
    """Processor seconds to plan every tensor of Kimi K3, by scope: the median."""
    whole, recipe = kimi_k3(), load_recipe("kimi-k3")

    def plan(scope: str) -> float:
        started = time.process_time()
        plan_precision(whole, recipe, None, None, PrecisionSettings(online_mxfp8_scope=scope))
        return time.process_time() - started

    seconds = {scope: statistics.median(plan(scope) for _ in range(REPEATS))
               for scope in recipe.conversions["online_mxfp8"]}
    return {"num_tensors": len(whole.tensors), "seconds": {scope: round(value, 3) for scope, value in seconds.items()}}


def state_row() -> dict[str, int]:
    """Bytes per sequence at the shapes of Kimi K3."""
    shape = SimpleNamespace(kda=KdaShape(HEADS, DIM, TAPS, -5.0, True), kda_layers=range(KDA_LAYERS))
    slots: Any = state_slots(Program(), shape, 1, DType.BF16)  # type: ignore[arg-type]
    state = sum(layer.bytes_per_slot for layer in slots.values())
    records = KDA_LAYERS * ROWS * (3 * 4 * WIDTH + 2 * 3 * WIDTH)
    return {"state_bytes_per_slot": state, "records_bytes_8_rows": records, "snapshots_bytes_8_rows": ROWS * state}


def ops_row() -> dict[str, float]:
    """Milliseconds of one layer's ops."""
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    where = {"positions": np.arange(8, 8 + ROWS, dtype=np.int32), "slots": np.zeros(1, np.int32)}
    shape = {"groups": 1, "block_rows": ROWS, "max_slots": 1}
    heads = {"heads": HEADS, "head_dim": DIM}
    state, records = f32(1, HEADS, DIM, DIM), {n: f32(ROWS, WIDTH) for n in ("keys", "changes")}
    log_decay, x = -np.abs(f32(ROWS, WIDTH)), f32(ROWS, 3 * WIDTH)
    window, weight = f32(1, TAPS - 1, 3 * WIDTH), f32(3 * WIDTH, TAPS)
    conv = {"channels": 3 * WIDTH, "history": TAPS - 1, "act": DType.F32, **shape}
    return {
        "short_conv_ms": milliseconds(lambda: call(
            "dflash.short_conv/1", {"x": x, "window": window, "weight": weight, "out": np.empty_like(x), **where},
            w=DType.F32, **conv)),
        "kda_scan_ms": milliseconds(lambda: call(
            "dflash.kda_scan/1",
            {"qkv": x, "log_decay": log_decay, "strength": np.abs(f32(ROWS, HEADS)), "state": state,
             "out": f32(ROWS, WIDTH), **records, **where}, act=DType.F32, **shape, **heads)),
        "kda_commit_ms": milliseconds(lambda: call(
            "dflash.kda_commit/1", {"log_decay": log_decay, "state": state.copy(), **records, **where}, **shape,
            **heads)),
    }


def milliseconds(run: Callable[[], None]) -> float:
    run()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e3, 2)


if __name__ == "__main__":
    main()
