"""The commands of `dflash-run` that serve a core; `runtime.cli` adds them to its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from dflash_core.errors import ExitCode, UsageError

from .capacity import capacity_of
from .cli_options import (
    DeviceOption,
    DraftBodyOption,
    DraftHeadOption,
    DraftOption,
    JsonOption,
    ScopeOption,
    TrustOption,
)
from .console import human_bytes, print_json, printable, run_command, stage_line

if TYPE_CHECKING:
    from .prepare import PrepareSettings


def register(app: typer.Typer) -> None:
    """Add debug-serve and replay-requests to an app."""
    app.command("debug-serve")(debug_serve)
    app.command("replay-requests")(replay_requests)


def debug_serve(
    core: Annotated[Path, typer.Argument(metavar="CORE", help="A core or its archive; or a checkpoint.")],
    trust: TrustOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    device: DeviceOption = "cpu",
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="DFLASH_API_KEY", help="Bearer token that clients must send.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Requests that may wait for a slot.")
    ] = 64,
    canary: Annotated[
        bool, typer.Option("--canary/--no-canary", help="Replay the core's acceptance canary first.")
    ] = True,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Keep every step of every request here.")
    ] = None,
    draft: DraftOption = None,
    scope: ScopeOption = None,
    draft_body: DraftBodyOption = None,
    draft_head: DraftHeadOption = None,
    json_output: JsonOption = False,
) -> None:
    """Serve a core over OpenAI's API, with a page that shows what its draft gets accepted."""
    with run_command(json_output):
        try:
            from .serve.server import serve
        except ModuleNotFoundError as e:
            raise UsageError("EXTRA_MISSING", f"serving needs {e.name}",
                             hint="pip install 'dflash-cores[serve]'") from e
        from .cli import core_bytes, trust_path
        from .prepare import PrepareSettings
        from .serve import ServeSettings
        from .serve.app import ServerState
        from .trust import TrustPolicy

        core, trust = prepared_core(core, trust, PrepareSettings(draft, scope, draft_body, draft_head), device)
        settings = ServeSettings(host=host, port=port, api_key=api_key, max_waiting=max_waiting, canary=canary,
                                 record=record, device=device)
        nbytes = core_bytes(core)

        def on_listen(url: str) -> None:
            print(f"listen      {url}   loading {printable(str(core))}   {human_bytes(nbytes)}", file=sys.stderr,
                  flush=True)

        def on_ready(url: str, state: ServerState) -> None:
            assert state.served is not None and state.worker.core is not None
            seconds = state.worker.startup_s["total"]
            if json_output:
                print_json({"url": url, "core_name": state.served.model,
                            "core_digest": state.worker.core.core_digest, "startup_s": state.worker.startup_s,
                            "canary": state.served.canary})
                sys.stdout.flush()
            told = state.served.canary
            checked = (f"canary held: {told['accepted_per_step']:.2f} accepted a step, at least {told['bound']:.2f}"
                       if told else "no canary was replayed")
            room = capacity_of(state.worker.core.manifest, state.worker.core.symbols)
            stage_line("ready", f"{url}   {room}   {checked}", seconds)

        serve(core, TrustPolicy.load(trust_path(trust)), settings, nbytes=nbytes, on_listen=on_listen,
              on_ready=on_ready)


def prepared_core(path: Path, trust: Path | None, settings: PrepareSettings,
                  device: str) -> tuple[Path, Path | None]:
    """The core to use and its trust file: the given ones, or what was prepared from a checkpoint, which is said.

    Args:
        device: what it is to run on; a core is prepared for it.
    Raises:
        UsageError: PRECISION_OF_CORE; a core's precision was settled when it was exported.
    """
    from dataclasses import replace

    from .prepare import cache_folder, export_device, is_checkpoint, prepare

    if not is_checkpoint(path):
        if settings.asked:
            raise UsageError("PRECISION_OF_CORE", "a core's precision was settled when it was exported",
                             where=str(path), hint="leave the precision settings out, or give the checkpoint")
        return path, trust
    began = time.perf_counter()
    found = prepare(path, replace(settings, device=export_device(device)), cache_folder())
    stage_line("prepare", f"{'exported to' if found.made else 'found in the cache:'} {printable(str(found.core))}",
               time.perf_counter() - began)
    return found.core, found.trust


def replay_requests(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What debug-serve --record wrote.")],
    against: Annotated[Path, typer.Option("--against", metavar="CORE", help="The core to run them on.")],
    trust: TrustOption = None,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Run recorded requests again; 7 if a token differs."""
    with run_command(json_output):
        from dataclasses import asdict

        import runtime

        from .cli import trust_path
        from .serve.recording import read_requests
        from .serve.recording import replay_requests as replay
        from .trust import TrustPolicy

        requests = read_requests(directory)
        with runtime.load(against, trust=TrustPolicy.load(trust_path(trust)), device=device) as core:
            report = replay(requests, core)
        if json_output:
            print_json(asdict(report))
        else:
            print(f"replayed    {report.requests} requests, {report.steps} steps   "
                  f"{'the same core' if report.same_core else 'another core'}")
            print(f"accepted    {report.accepted_before:.3f} a step then, {report.accepted_now:.3f} now")
            if report.with_images:
                print(f"left out    {report.with_images} requests with images, which are not recorded")
            found = report.divergence
            print("tokens      all equal" if found is None else
                  f"tokens      differ first in {found.request_id}, step {found.step}: "
                  f"recorded {list(found.recorded)}, now {list(found.replayed)}")
        if report.divergence is not None:
            raise typer.Exit(int(ExitCode.QUALITY))
