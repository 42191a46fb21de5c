"""`dflash-run replay`: run one graph of a core node by node, on a GPU beside the CPU reference or on a CPU alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dflash_core.errors import ExitCode, UsageError

from .cli_options import JsonOption, TrustOption
from .console import print_json, printable, run_command

if TYPE_CHECKING:
    from .replay import NodeReport
    from .replay_cpu import CpuReplay
    from .run import LoadedCore
    from .trust import TrustPolicy


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(replay)


def replay(
    core: Annotated[Path, typer.Argument(metavar="CORE", help="Directory of the core, or its archive.")],
    graph: Annotated[str, typer.Option("--graph", metavar="G", help="Name of the graph; `inspect` lists them.")],
    trust: TrustOption = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; absent: cuda with --against, else cpu."),
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="cpu", help="Compare every node with its CPU reference.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Run one graph node by node from the inputs of a real step, and show the first node that computes otherwise."""
    with run_command(json_output):
        from .trust import TrustPolicy

        if against not in (None, "cpu"):
            raise UsageError("REPLAY_AGAINST", "a graph is compared with the CPU reference alone", where="--against",
                             expected="cpu", got=against, hint="give --against cpu")
        chosen = device or ("cuda" if against else "cpu")
        policy = TrustPolicy.load(trust or Path.home() / ".config" / "dflash" / "trust.json")
        failed = (_on_cpu if chosen == "cpu" else _on_gpu)(core, graph, policy, chosen, json_output)
        if failed:
            raise typer.Exit(int(ExitCode.QUALITY))


def _staged(core: Path, graph: str, policy: TrustPolicy) -> LoadedCore:
    """The core on a CPU, in the state before the graph is launched."""
    from . import load
    from .canary import read_canaries
    from .replay_inputs import run_until

    loaded: Any = load(core, trust=policy)
    try:
        prompts = [p.prompt for canary in read_canaries(core, policy, loaded.core_digest) for p in canary.prompts]
        run_until(loaded, graph, prompts)
    except BaseException:
        loaded.close()
        raise
    return loaded  # type: ignore[no-any-return]


def _on_cpu(core: Path, graph: str, policy: TrustPolicy, _: str, json_output: bool) -> bool:
    from .replay_cpu import replay_on_cpu

    with _staged(core, graph, policy) as loaded:
        result = replay_on_cpu(loaded, graph)
    if json_output:
        print_json({"graph": graph, "device": "cpu", "nodes": [asdict(n) for n in result.nodes],
                    "unordered": list(result.unordered)})
    else:
        _print_cpu(result)
    return bool(result.unordered)


def _print_cpu(result: CpuReplay) -> None:
    width = max((len(n.op) for n in result.nodes), default=0)
    for node in result.nodes:
        print(f"{node.node_id:>4}  {node.op:<{width}}  {node.nbytes:>11,} bytes  {node.sha256[:16]}  "
              f"{printable(node.name)}")
    if result.unordered:
        changed = ", ".join(map(printable, result.unordered))
        print(f"NOT ORDERED   another order that the edges allow changes: {changed}")
    else:
        print(f"{len(result.nodes)} nodes; every order tried that the edges allow gives the same bytes")


def _on_gpu(core: Path, graph: str, policy: TrustPolicy, device: str, json_output: bool) -> bool:
    from . import load
    from .replay import replay as replay_graph

    loaded: Any = load(core, trust=policy, device=device)
    with loaded as gpu, _staged(core, graph, policy) as reference:
        reports = replay_graph(gpu, reference, graph)
    if json_output:
        print_json({"graph": graph, "device": device, "against": "cpu", "nodes": [asdict(r) for r in reports]})
    else:
        _print_gpu(reports)
    return not all(r.within for r in reports)


def _print_gpu(reports: list[NodeReport]) -> None:
    print("node  equal bits    max abs    max ulp  ops and name")
    for report in reports:
        mark = " " if report.within else "*"
        print(f"{report.node_id:>4}{mark} {report.equal:>9.2%}  {report.max_abs:>9.2e}  {report.max_ulp:>9.3g}  "
              f"{report.ops}  {printable(report.name)}")
    beyond = next((r for r in reports if not r.within), None)
    if beyond is None:
        print(f"{len(reports)} nodes, all within tolerance of their CPU ops")
    else:
        print(f"FIRST BEYOND  node {beyond.node_id} {printable(beyond.name)}: max abs {beyond.max_abs:.3e}, "
              f"{beyond.max_ulp:.3g} ulp, {beyond.equal:.2%} equal bits")
