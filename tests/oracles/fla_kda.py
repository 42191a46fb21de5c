"""What flash-linear-attention computes for Kimi delta attention, recorded in fla_kda.json.

It is recorded and no test dependency, because transformers takes to its GPU kernels wherever `fla` can be imported, and
then its own CPU path, another oracle of ours, fails. To record again, in an environment of its own:

    pip install fla-core==0.6.0 einops==0.8.2 torch triton numpy && python tests/oracles/fla_kda.py
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")
ROWS, HEADS, DIM = 16, 2, 8


def read() -> dict[str, Any]:
    """Arrays by name, as flat lists of fp32: q, k, v, g [ROWS, HEADS, DIM] and beta [ROWS, HEADS]; out and state;
    raw, a_log and dt_bias, and the log-decays gate and bounded (lower bound -5) made from them."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def record() -> None:
    import torch

    gates, naive = (importlib.import_module(f"fla.ops.kda.{name}") for name in ("gate", "naive"))
    torch.manual_seed(0)
    q, k, v, raw = (torch.randn(1, ROWS, HEADS, DIM) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = -torch.rand(1, ROWS, HEADS, DIM), torch.rand(1, ROWS, HEADS)
    initial = torch.randn(1, HEADS, DIM, DIM)
    out, state = naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=initial, output_final_state=True)
    a_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS * DIM)
    gate = gates.naive_kda_gate(raw * 4, a_log, dt_bias)
    bounded = gates.naive_kda_lowerbound_gate(raw * 4, a_log, dt_bias, lower_bound=-5.0)
    made = {"q": q[0], "k": k[0], "v": v[0], "g": g[0], "beta": beta[0], "initial": initial[0], "out": out[0],
            "state": state[0], "raw": raw[0] * 4, "a_log": a_log, "dt_bias": dt_bias, "gate": gate[0],
            "bounded": bounded[0]}
    rounded = {name: [float(f"{x:.9g}") for x in value.reshape(-1).tolist()] for name, value in made.items()}
    RECORDED.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record()
