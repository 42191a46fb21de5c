"""dflash-run: make a key, verify a core, look into one, compare two, generate text.

Each command is one function; the work is done elsewhere, in modules that are imported inside the command, so that
`dflash-run --help` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from dflash_core.errors import ExitCode

from .console import ByteProgress, human_bytes, print_json, printable, run_command

app = typer.Typer(
    help="Verify, inspect and run signed cores.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)

CoreArgument = Annotated[Path, typer.Argument(metavar="CORE", help="Directory of the core.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
TrustOption = Annotated[
    Path | None,
    typer.Option("--trust", metavar="TRUST", help="Trust file; without it ~/.config/dflash/trust.json."),
]


def main() -> None:
    """Entry point of `dflash-run`."""
    app()


def trust_path(option: Path | None) -> Path:
    """The trust file that a command uses."""
    return option or Path.home() / ".config" / "dflash" / "trust.json"


@app.command()
def keygen(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the three files.")],
    json_output: JsonOption = False,
) -> None:
    """Make a signing key: key.pem, public.pem, and trust.json that accepts it."""
    with run_command(json_output):
        from .keys import generate_key

        key = generate_key(directory)
        paths = {"key": key.private_path, "public": key.public_path, "trust": key.trust_path}
        if json_output:
            print_json({"keyid": key.keyid, **{name: str(path) for name, path in paths.items()}})
            return
        print(f"keyid   {key.keyid}")
        for name, path in paths.items():
            print(f"{name:<7} {path}")


@app.command()
def verify(
    core: CoreArgument,
    trust: TrustOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also read all weights, and check whole-file digests.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Check that trusted keys have signed exactly the bytes of a core."""
    with run_command(json_output):
        from .trust import TrustPolicy
        from .verify import verify as verify_core

        progress = ByteProgress(json_output)
        policy = TrustPolicy.load(trust_path(trust))
        with progress.stage("verify", 0), verify_core(core, policy) as verified:
            manifest, nbytes = verified.manifest, verified.nbytes
            progress.done("verify", f"{len(manifest.files) + 1} files   signatures, digests, structure")
            if full:
                with progress.stage("read", nbytes) as on_bytes:
                    verified.read_full(on_bytes)
                progress.done("read", f"{human_bytes(nbytes)}   every chunk and whole-file digest")
        if json_output:
            print_json({
                "core": str(core), "core_name": manifest.core_name, "release": manifest.release,
                "core_digest": verified.core_digest, "full": full, "nbytes": nbytes,
                "signers": [
                    {"keyid": signer.keyid, "owner": signer.owner, "roles": list(signer.roles)}
                    for signer in verified.signers
                ],
            })
            return
        print(f"authentic   {printable(manifest.core_name)}   release {manifest.release}")
        print(f"digest      {verified.core_digest}")
        for signer in verified.signers:
            print(f"signed by   {printable(signer.owner)} ({', '.join(signer.roles)})   key {signer.keyid[:16]}…")
        if not full:
            print("weights     each chunk is verified as it is loaded; --full reads them all now")


@app.command()
def inspect(
    core: CoreArgument,
    trust: Annotated[
        Path | None,
        typer.Option("--trust", metavar="TRUST", help="Verify first; without it nothing is authenticated."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a core holds: identity, precision, graphs, memory, weights, signers."""
    with run_command(json_output):
        from dataclasses import asdict

        from .inspect import inspect_core
        from .trust import TrustPolicy

        report = inspect_core(core, None if trust is None else TrustPolicy.load(trust))
        if json_output:
            print_json(asdict(report))
            return
        from .inspect_table import print_report

        print_report(report)


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="Directory of a core.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Directory of the core to compare it with.")],
    trust: Annotated[
        Path | None,
        typer.Option("--trust", metavar="TRUST", help="Verify both first; without it nothing is authenticated."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="PART", help="Exit with 7 if target, draft or graphs differ; repeatable."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what differs between two cores: precision, tensors, graphs."""
    with run_command(json_output):
        from .diff import diff_cores, parts_named
        from .trust import TrustPolicy

        parts = parts_named(fail_on or [])
        report = diff_cores(left, right, None if trust is None else TrustPolicy.load(trust))
        if json_output:
            print_json(report.as_dict())
        else:
            from .diff_table import print_diff

            print_diff(report)
        failed = [part.value for part in parts if report.differs(part)]
        if failed:
            print(f"the cores differ in: {', '.join(failed)}", file=sys.stderr)
            raise typer.Exit(int(ExitCode.QUALITY))


@app.command()
def generate(
    core: CoreArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    trust: TrustOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="As a user message, by the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most new tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Probability mass that is kept.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Most likely tokens that are kept; 0: all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of every draw.")] = 0,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Decode without the draft.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Continue a prompt; text goes to stdout as it comes."""
    with run_command(json_output):
        from .engine import Request
        from .generate import generate as generate_text
        from .trust import TrustPolicy

        request = Request(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
                          speculation=not no_speculation)
        done = generate_text(core, TrustPolicy.load(trust_path(trust)), prompt, request, chat=chat,
                             on_text=_ignore_text if json_output else _show_text)
        if json_output:
            print_json(done.as_dict())
            return
        print()
        print(f"generate    {done.summary()}", file=sys.stderr)


def _show_text(piece: str) -> None:
    print(piece, end="", flush=True)


def _ignore_text(piece: str) -> None:
    """What generated text meets when only the final document is wanted."""
