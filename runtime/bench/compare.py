"""Two cores on the same prompts, interleaved, with intervals that say what the difference is known to be.

For each prompt the order is A B B A, so that slow drift of the machine falls on both alike. The bootstrap resamples
prompts, not steps: steps of one prompt are not independent.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bench.measure import Measured, run_decode
from runtime.bench.summary import quantile, summarize
from runtime.core import Core

RESAMPLES = 4000
METRICS = ("acceptance_length", "ms_per_step", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class PairedPrompt:
    """One prompt's values by metric, each the mean of a core's two runs."""

    a: dict[str, float]
    b: dict[str, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """B − A of one metric: mean over prompts, 95 % interval, and whether it leaves zero out.

    `prompts_needed` is about how many prompts would settle it if the spread stayed as it is; None when it is settled or
    when there is no difference to find.
    """

    metric: str
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    established: bool
    prompts_needed: int | None

    def line(self, prompts: int) -> str:
        """The finding as a sentence."""
        text = (f"{self.metric:<18} A {self.mean_a:.3f}   B {self.mean_b:.3f}   B − A {self.difference:+.3f} "
                f"[{self.low:+.3f}, {self.high:+.3f}]")
        if self.established:
            return text
        if self.prompts_needed is None:
            return f"{text}   not established at {prompts} prompts"
        return f"{text}   not established at {prompts} prompts, about {self.prompts_needed} would settle it"


def run_paired(a: Core, b: Core, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[PairedPrompt]:
    """Measure both cores on every prompt, in the order A B B A."""
    found = []
    for prompt in prompts:
        runs = [run_decode(core, [prompt], concurrency=1, max_tokens=max_tokens) for core in (a, b, b, a)]
        values = [prompt_values(run) for run in runs]
        found.append(PairedPrompt(_mean(values[0], values[3]), _mean(values[1], values[2])))
    return found


def prompt_values(run: Measured) -> dict[str, float]:
    """The compared metrics of one run."""
    from dataclasses import asdict

    summary = summarize({"duration": run.duration_s, "steps": [asdict(s) for s in run.steps],
                         "requests": [asdict(r) for r in run.requests]})
    own = summary["dflash"]
    return {"acceptance_length": summary.get("spec_decode_acceptance_length", 1.0),
            "ms_per_step": own["ms_per_step"], "tokens_per_s": own["decode_tok_s"]}


def compare(pairs: Sequence[PairedPrompt], seed: int) -> list[Difference]:
    """Paired bootstrap over prompts for every metric."""
    return [_difference(metric, [p.a[metric] for p in pairs], [p.b[metric] for p in pairs], seed)
            for metric in METRICS]


def _difference(metric: str, a: Sequence[float], b: Sequence[float], seed: int) -> Difference:
    rng = random.Random(seed)
    deltas = [y - x for x, y in zip(a, b, strict=True)]
    count = len(deltas)
    means = [statistics.fmean(rng.choices(deltas, k=count)) for _ in range(RESAMPLES)]
    low, high = quantile(means, 2.5), quantile(means, 97.5)
    mean = statistics.fmean(deltas)
    established = count > 1 and (low > 0 or high < 0)
    needed = None
    if not established and mean and high > low:
        needed = max(count + 1, math.ceil(count * ((high - low) / 2 / abs(mean)) ** 2))
    return Difference(metric, statistics.fmean(a), statistics.fmean(b), mean, low, high, established, needed)


def _mean(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: (first[name] + second[name]) / 2 for name in first}
