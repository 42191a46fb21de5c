"""Summaries of raw samples: pure functions, so that whoever holds a result file can recompute all of it.

Names are those of vLLM's `bench serve` where the meaning is the same; what is ours stands under `dflash`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 6


def summarize(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """Every summary of one decode scenario, from its `duration`, `steps` and `requests` samples."""
    requests, duration = scenario["requests"], scenario["duration"]
    inputs = sum(r["input_tokens"] for r in requests)
    outputs = sum(r["output_tokens"] for r in requests)
    tpots = [(r["e2el_ms"] - r["ttft_ms"]) / (r["output_tokens"] - 1) for r in requests if r["output_tokens"] > 1]
    summary: dict[str, Any] = {
        "completed": len(requests), "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(requests) / duration, "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        **_spread("ttft_ms", [r["ttft_ms"] for r in requests]), **_spread("tpot_ms", tpots),
        **_spread("itl_ms", [value for r in requests for value in r["itls_ms"]]),
        **_spread("e2el_ms", [r["e2el_ms"] for r in requests]),
        **_acceptance(requests), "dflash": _decode(scenario["steps"])}
    rounded: dict[str, Any] = _rounded(summary)
    return rounded


def _decode(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Decode rates over the steps that only decoded; tokens_per_step is the batch's total."""
    pure = [s for s in steps if not s["mixed"]]
    if not pure:
        return {"steps": 0, "mixed_steps": len(steps)}
    total_ms, tokens = sum(s["ms"] for s in pure), sum(s["tokens"] for s in pure)
    return {
        "steps": len(pure), "mixed_steps": len(steps) - len(pure),
        "mean_live_seqs": sum(s["live"] for s in pure) / len(pure), "tokens_per_step": tokens / len(pure),
        "ms_per_step": total_ms / len(pure), "decode_tok_s": tokens / total_ms * 1e3,
        "draft_ms": statistics.fmean(s["draft_ms"] for s in pure),
        "verify_ms": statistics.fmean(s["verify_ms"] for s in pure),
        "host_ms": statistics.fmean(s["host_ms"] for s in pure),
        "p99_ms_per_step": quantile([s["ms"] for s in pure], 99)}


def _acceptance(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [pair for r in requests for pair in zip(r["proposed"], r["accepted"], strict=True)]
    if not steps:
        return {}
    depth = max(proposed for proposed, _ in steps)
    kept = [accepted for _, accepted in steps]
    proposed_total = sum(proposed for proposed, _ in steps)
    rates = []
    for position in range(depth):
        took_part = [accepted > position for proposed, accepted in steps if proposed > position]
        rates.append(sum(took_part) / len(took_part))
    return {
        "spec_decode_num_drafts": len(steps), "spec_decode_draft_tokens": proposed_total,
        "spec_decode_accepted_tokens": sum(kept), "spec_decode_acceptance_length": 1 + sum(kept) / len(kept),
        "spec_decode_acceptance_rate": sum(kept) / proposed_total if proposed_total else 0.0,
        "spec_decode_per_position_acceptance_rates": rates,
        "acceptance_histogram": [kept.count(n) for n in range(depth + 1)]}


def quantile(values: Sequence[float], percent: float) -> float:
    """A percentile by linear interpolation between order statistics."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"mean_{name}": statistics.fmean(values), f"median_{name}": statistics.median(values),
            f"std_{name}": statistics.pstdev(values), f"p99_{name}": quantile(values, 99)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
