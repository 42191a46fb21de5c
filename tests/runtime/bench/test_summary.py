"""Summaries of hand-made samples, by hand; and the paired bootstrap on differences that are known."""

from __future__ import annotations

import pytest

from runtime.bench.compare import PairedPrompt, compare
from runtime.bench.plot import plot
from runtime.bench.summary import quantile, summarize


def step(ms: float, live: int, tokens: int, mixed: bool = False) -> dict:
    return {"ms": ms, "draft_ms": 1.0, "verify_ms": ms - 2.0, "host_ms": 1.0, "live": live, "tokens": tokens,
            "mixed": mixed}


SCENARIO = {
    "scenario": "c2", "duration": 2.0,
    "steps": [step(10.0, 2, 6), step(20.0, 2, 4), step(500.0, 1, 2, mixed=True)],
    "requests": [
        {"prompt": 0, "input_tokens": 10, "output_tokens": 5, "ttft_ms": 100.0, "e2el_ms": 140.0,
         "itls_ms": [10.0, 30.0], "proposed": [3, 3], "accepted": [3, 0]},
        {"prompt": 1, "input_tokens": 30, "output_tokens": 1, "ttft_ms": 200.0, "e2el_ms": 200.0, "itls_ms": [],
         "proposed": [1], "accepted": [1]}],
}


def test_summary_of_known_samples() -> None:
    found = summarize(SCENARIO)

    assert {name: found[name] for name in (
        "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
        "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
        "mean_itl_ms", "mean_e2el_ms")} == {
            "completed": 2, "total_input_tokens": 40, "total_output_tokens": 6, "request_throughput": 1.0,
            "output_throughput": 3.0, "total_token_throughput": 23.0, "mean_ttft_ms": 150.0, "median_ttft_ms": 150.0,
            "std_ttft_ms": 50.0, "p99_ttft_ms": 199.0, "mean_tpot_ms": 10.0, "mean_itl_ms": 20.0,
            "mean_e2el_ms": 170.0}


def test_decode_rates_leave_mixed_steps_out() -> None:
    own = summarize(SCENARIO)["dflash"]

    assert own == {"steps": 2, "mixed_steps": 1, "mean_live_seqs": 2.0, "tokens_per_step": 5.0, "ms_per_step": 15.0,
                   "decode_tok_s": 333.333333, "draft_ms": 1.0, "verify_ms": 13.0, "host_ms": 1.0,
                   "p99_ms_per_step": 19.9}


def test_acceptance_counts_positions_that_took_part() -> None:
    found = summarize(SCENARIO)

    assert found["spec_decode_num_drafts"] == 3
    assert found["spec_decode_draft_tokens"] == 7
    assert found["spec_decode_accepted_tokens"] == 4
    assert found["spec_decode_acceptance_length"] == 2.333333
    assert found["spec_decode_per_position_acceptance_rates"] == [0.666667, 0.5, 0.5]
    assert found["acceptance_histogram"] == [1, 1, 0, 1]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (25, 1.75)])
def test_quantile_interpolates(percent: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], percent) == value


def pairs(deltas: list[float]) -> list[PairedPrompt]:
    base = {"acceptance_length": 2.0, "ms_per_step": 10.0, "tokens_per_s": 100.0}
    return [PairedPrompt(base, {**base, "acceptance_length": 2.0 + delta}) for delta in deltas]


def test_difference_that_every_prompt_shows_is_established() -> None:
    found = compare(pairs([0.5, 0.6, 0.55, 0.45]), seed=1)[0]

    assert found.metric == "acceptance_length"
    assert found.difference == pytest.approx(0.525)
    assert 0.45 <= found.low <= found.difference <= found.high <= 0.6
    assert (found.established, found.prompts_needed) == (True, None)


def test_difference_within_the_noise_says_how_many_prompts_would_settle_it() -> None:
    found = compare(pairs([1.0, -0.9, 0.8, -0.7]), seed=1)[0]

    assert found.established is False
    assert found.low < 0 < found.high
    assert found.prompts_needed == pytest.approx(4 * ((found.high - found.low) / 2 / 0.05) ** 2, abs=1)
    assert found.line(4).endswith(f"not established at 4 prompts, about {found.prompts_needed} would settle it")


@pytest.mark.parametrize("deltas", [[0.0, 0.0, 0.0], [0.3]], ids=["no difference", "one prompt"])
def test_difference_that_cannot_be_judged_is_not_established(deltas: list[float]) -> None:
    found = compare(pairs(deltas), seed=1)[0]

    assert (found.established, found.prompts_needed) == (False, None)


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    import random
    rng = random.Random(3)
    covered = 0
    for trial in range(60):
        found = compare(pairs([rng.gauss(0.2, 1.0) for _ in range(30)]), seed=trial)[0]
        covered += found.low <= 0.2 <= found.high

    assert 51 <= covered <= 60


def test_plot_is_one_document_with_a_bar_per_position_and_part() -> None:
    import xml.etree.ElementTree as ET
    document = {"model_id": "a<b", "dflash": {"core_digest": "0" * 64},
                "scenarios": [{**SCENARIO, **summarize(SCENARIO)}]}

    svg = plot(document)

    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a<b   000000000000"
    assert {"position 1", "67 %", "position 3", "50 %", "draft", "verify", "host", "13.00 ms"} <= set(texts)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
