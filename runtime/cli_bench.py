"""`dflash-run bench`, and what `dflash-run verify` does with a result file."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dflash_core.errors import UsageError

from .cli_options import (
    DeviceOption,
    DraftBodyOption,
    DraftHeadOption,
    DraftOption,
    JsonOption,
    NoSpeculationOption,
    ScopeOption,
    TrustOption,
)
from .console import print_json, printable, run_command, stage_line

if TYPE_CHECKING:
    from .bench.prompts import PromptSet
    from .core import Core
    from .serve.core_view import CoreFacts
    from .trust import TrustPolicy


_ROWS = (
    ("tokens/s", "{decode_tok_s:.1f}"), ("ms/step", "{ms_per_step:.2f}"), ("  draft", "{draft_ms:.2f}"),
    ("  verify", "{verify_ms:.2f}"), ("  host", "{host_ms:.2f}"), ("tokens/step", "{tokens_per_step:.2f}"),
    ("live sequences", "{mean_live_seqs:.2f}"), ("acceptance length", "{acceptance:.2f}"),
    ("TTFT median ms", "{median_ttft_ms:.1f}"), ("ITL median ms", "{median_itl_ms:.1f}"),
)
"""What the table shows of each scenario; everything else is in the JSON."""


def register(app: typer.Typer) -> None:
    """Add bench to an app."""
    app.command("bench")(bench)


def bench(
    cores: Annotated[
        list[Path], typer.Argument(metavar="CORE...", help="A core or a checkpoint; two cores to compare.")
    ],
    trust: TrustOption = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", metavar="NAME", help="c1, c4, cN, prefill or startup; repeat for several."),
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="SET", help="canary, synthetic, or a JSONL file.")
    ] = "canary",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="New tokens a request.")] = 64,
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", min=1, metavar="N", help="Length of the prefill scenario's prompts.")
    ] = 32768,
    seed: Annotated[int, typer.Option("--seed", help="Of synthetic prompts and of the bootstrap.")] = 0,
    device: DeviceOption = "cpu",
    no_speculation: NoSpeculationOption = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure two cores on the same prompts, interleaved A B B A.")
    ] = False,
    paired: Annotated[bool, typer.Option("--paired", help="With --compare: intervals from prompt by prompt.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the result here.")] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the result with this private key.")
    ] = None,
    draft: DraftOption = None,
    scope: ScopeOption = None,
    draft_body: DraftBodyOption = None,
    draft_head: DraftHeadOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure a core: raw samples and summaries that anyone can recompute."""
    with run_command(json_output):
        from .cli import trust_path
        from .cli_serve import prepared_core
        from .prepare import PrepareSettings
        from .trust import TrustPolicy

        if compare != paired or len(cores) != (2 if compare else 1):
            raise UsageError("COMPARE", "a comparison is of two cores and is paired", where="--compare",
                             expected="bench CORE, or bench --compare A B --paired", got=f"{len(cores)} cores")
        settings = PrepareSettings(draft, scope, draft_body, draft_head)
        if compare and (scenario or no_speculation or settings.asked or any((out, plot, sign))):
            raise UsageError("COMPARE", "a comparison takes two cores, prompts, tokens and a seed", where="--compare",
                             got="an option that only bench CORE has",
                             hint="leave out --scenario, --no-speculation, --out, --plot, --sign and the precision "
                                  "settings; --json prints every sample")
        if sign is not None and out is None:
            raise UsageError("OPTION_MISSING", "a signature lies beside a result file", where="--out",
                             hint="give --out FILE")
        if not compare:
            cores[0], trust = prepared_core(cores[0], trust, settings, device)
        policy = TrustPolicy.load(trust_path(trust))
        if compare:
            _compare(cores, policy, prompts, max_tokens, seed, device, json_output)
            return
        document = _measure(cores[0], policy, scenario or ["c1", "startup"], prompts, max_tokens, prefill_tokens, seed,
                            device, not no_speculation)
        _write(document, out, plot, sign)
        if json_output:
            print_json(document)
        else:
            _print_table(document)


def verify_results(paths: list[Path], trust: Path | None, json_output: bool) -> None:
    """Check result files for `dflash-run verify`; a signature is asked for when --trust is given."""
    from .bench.result import verify_result
    from .trust import TrustPolicy

    policy = None if trust is None else TrustPolicy.load(trust)
    found = []
    for path in paths:
        document, signers = verify_result(path, policy)
        found.append({"result": str(path), "core_digest": document["dflash"]["core_digest"],
                      "scenarios": [s["scenario"] for s in document["scenarios"]],
                      "signers": [{"keyid": s.keyid, "owner": s.owner} for s in signers]})
        if not json_output:
            signed = ", ".join(printable(s.owner) for s in signers) or "nobody was asked for"
            print(f"holds       {printable(str(path))}   every summary recomputed   signed by {signed}")
    if json_output:
        print_json(found[0] if len(found) == 1 else {"results": found})


def _measure(path: Path, policy: TrustPolicy, scenarios: list[str], prompts: str, max_tokens: int, prefill_tokens: int,
             seed: int, device: str, speculation: bool) -> dict[str, Any]:
    import runtime

    from .bench.measure import run_cold_prefill, run_decode
    from .bench.result import BenchSettings, check_result, result_document
    from .serve.core_view import read_facts

    wanted = [_concurrency(name) for name in scenarios]
    started = time.perf_counter()
    with runtime.load(path, trust=policy, device=device) as core:
        startup = {"load": time.perf_counter() - started, **getattr(core, "phases", {})}
        facts = read_facts(path, policy, core.core_digest, device)
        prompt_set = _prompt_set(prompts, core, facts, seed)
        began = time.perf_counter()
        run_decode(core, prompt_set.prompts[:1], concurrency=1, max_tokens=2)
        startup["first_tokens"] = time.perf_counter() - began
        measured = []
        for concurrency in filter(None, wanted):
            measured.append(run_decode(core, prompt_set.prompts, concurrency=concurrency, max_tokens=max_tokens,
                                       speculation=speculation))
            stage_line(f"c{concurrency}", f"{len(prompt_set.prompts)} prompts", measured[-1].duration_s)
        prefills = run_cold_prefill(core, tokens=prefill_tokens, repeats=3, seed=seed) if "prefill" in scenarios else ()
        document = result_document(core, facts, prompt_set, BenchSettings(device, max_tokens, seed, 1, speculation),
                                   measured, prefills, startup if "startup" in scenarios else {})
    check_result(document, "this run")
    return document


def _compare(cores: list[Path], policy: TrustPolicy, prompts: str, max_tokens: int, seed: int, device: str,
             json_output: bool) -> None:
    import runtime

    from .bench.compare import compare, run_paired
    from .serve.core_view import read_facts

    with (runtime.load(cores[0], trust=policy, device=device) as a,
          runtime.load(cores[1], trust=policy, device=device) as b):
        prompt_set = _prompt_set(prompts, a, read_facts(cores[0], policy, a.core_digest, device), seed)
        pairs = run_paired(a, b, prompt_set.prompts, max_tokens)
        differences = compare(pairs, seed)
        if json_output:
            print_json({"a": a.core_digest, "b": b.core_digest, "prompts": len(pairs),
                        "prompt_set": {"source": prompt_set.source, "sha256": prompt_set.digest}, "seed": seed,
                        "differences": [asdict(d) for d in differences], "samples": [asdict(p) for p in pairs]})
            return
        print(f"A           {printable(str(cores[0]))}   {a.core_digest[:16]}…")
        print(f"B           {printable(str(cores[1]))}   {b.core_digest[:16]}…")
        for difference in differences:
            print(difference.line(len(pairs)))


def _prompt_set(name: str, core: Core, facts: CoreFacts, seed: int) -> PromptSet:
    from .bench.prompts import canary_prompts, jsonl_prompts, synthetic_prompts

    if name == "canary":
        return canary_prompts(facts.canaries)
    if name == "synthetic":
        contract = core.manifest.contract
        return synthetic_prompts(contract.vocab_size, seed)
    return jsonl_prompts(Path(name), core)


def _concurrency(name: str) -> int:
    """Sequences at once that a scenario asks for; 0 for those that do not decode."""
    if name in ("prefill", "startup"):
        return 0
    if name[:1] == "c" and name[1:].isdecimal() and 1 <= int(name[1:]) <= 1024:
        return int(name[1:])
    raise UsageError("SCENARIO", "no such scenario", where="--scenario", expected="c1, c4, cN, prefill or startup",
                     got=name)


def _write(document: dict[str, Any], out: Path | None, plot: Path | None, sign: Path | None) -> None:
    from .bench.plot import plot as draw
    from .bench.result import write_result
    from .keys import load_private_key

    if out is not None:
        write_result(document, out, None if sign is None else load_private_key(sign))
    if plot is not None:
        plot.write_text(draw(document), "utf-8")


def _print_table(document: dict[str, Any]) -> None:
    from rich.table import Table

    from .table_console import TableConsole

    decoded = [s for s in document["scenarios"] if s["dflash"]["steps"]]
    table = Table("", *(s["scenario"] for s in decoded))
    for name, form in _ROWS:
        table.add_row(name, *(form.format(acceptance=s.get("spec_decode_acceptance_length", 1.0),
                                          **{k: v for k, v in s.items() if k != "dflash"}, **s["dflash"])
                              for s in decoded))
    TableConsole().print(table)
    for sample in document["prefill"]:
        print(f"prefill     {sample['input_tokens']} tokens, all computed   {sample['seconds']:.2f} s   "
              f"{sample['input_tokens'] / sample['seconds']:.0f} tokens/s")
    if document["startup_s"]:
        print("startup     " + "   ".join(f"{name} {value:.2f} s" for name, value in document["startup_s"].items()))
