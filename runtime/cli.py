"""dflash-run: make a key, sign, verify and pack cores, look into one, compare two, generate text.

Each command is one function; the work is done elsewhere, in modules that are imported inside the command, so that
`dflash-run --help` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from dflash_core.errors import DflashError, ExitCode

from .cli_bench import register as register_bench
from .cli_bench import verify_results
from .cli_options import DeviceOption, JsonOption, NoSpeculationOption, TrustOption
from .cli_replay import register as register_replay
from .cli_serve import register as register_serving
from .console import ByteProgress, human_bytes, print_json, printable, report_error, run_command
from .entry import run_app

app = typer.Typer(
    help="Verify, inspect and run signed cores.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)

CoreArgument = Annotated[Path, typer.Argument(metavar="CORE", help="Directory of the core, or its archive.")]


def main() -> None:
    """Entry point of `dflash-run`."""
    run_app(app)


def core_bytes(core: Path) -> int:
    """About how many bytes a core has, for a progress bar; 0 when that cannot be told."""
    try:
        if core.is_dir():
            return sum(item.lstat().st_size for item in core.rglob("*"))
        return core.stat().st_size
    except OSError:
        return 0


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
def sign(
    core: CoreArgument,
    key: Annotated[Path, typer.Option("--key", metavar="KEY", help="Private key, PKCS#8 PEM.")],
    json_output: JsonOption = False,
) -> None:
    """Add a signature to a core that exists; no other byte changes."""
    with run_command(json_output):
        from .keys import keyid, load_private_key
        from .sign import sign_core

        progress = ByteProgress(json_output)
        private = load_private_key(key)
        total = core_bytes(core)
        with progress.stage("sign", total) as on_bytes:
            written = sign_core(core, private, on_bytes=on_bytes)
        progress.done("sign", f"{human_bytes(total)}   every file was read and checked")
        if json_output:
            print_json({"signature": str(written), "keyid": keyid(private.public_key())})
            return
        print(f"signed      {printable(str(written))}")


@app.command()
def verify(
    cores: Annotated[
        list[Path], typer.Argument(metavar="CORE...", help="Directories or archives; or bench results, as .json.")
    ],
    trust: TrustOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also read all weights, and check whole-file digests.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Compare requirements with this device, e.g. cpu.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check that trusted keys have signed exactly the bytes of one or more cores."""
    with run_command(json_output):
        if all(path.suffix == ".json" and path.is_file() for path in cores):
            verify_results(cores, trust, json_output)
            return
        from .trust import TrustPolicy
        from .verify_report import refusal, verify_one

        progress = ByteProgress(json_output)
        policy = TrustPolicy.load(trust_path(trust))
        stage = "read" if full else "verify"
        exit_code = ExitCode.OK
        documents: list[dict[str, Any]] = []
        for core in cores:
            try:
                with progress.stage(stage, core_bytes(core) if full else 0) as on_bytes:
                    report = verify_one(core, policy, device=device, full=full, on_bytes=on_bytes)
            except DflashError as err:
                if len(cores) == 1:
                    raise
                exit_code = exit_code or err.exit_code
                documents.append({"core": str(core), "error": err.as_dict()})
                if not json_output:
                    print(refusal(core, err), flush=True)
                    report_error(err, json_output)
                continue
            exit_code = exit_code or (ExitCode.OK if report.fits else ExitCode.INCOMPATIBLE)
            progress.done(stage, f"{human_bytes(report.nbytes)}   every chunk and whole-file digest" if full
                          else f"{report.files} files   signatures, digests, structure")
            documents.append(report.as_dict())
            if not json_output:
                print("\n".join(report.lines() if len(cores) == 1 else [report.line()]), flush=True)
        if json_output:
            print_json(documents[0] if len(cores) == 1 else {"cores": documents})
        if exit_code:
            raise typer.Exit(int(exit_code))


@app.command()
def pack(
    core: CoreArgument,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File to write.")],
    json_output: JsonOption = False,
) -> None:
    """Write a core as one file, which loads and verifies without being unpacked."""
    with run_command(json_output):
        from .pack import pack as pack_core

        progress = ByteProgress(json_output)
        with progress.stage("pack", core_bytes(core)) as on_bytes:
            nbytes = pack_core(core, archive, on_bytes=on_bytes)
        progress.done("pack", human_bytes(nbytes))
        if json_output:
            print_json({"archive": str(archive), "nbytes": nbytes})
            return
        print(f"packed      {printable(str(archive))}   {human_bytes(nbytes)}")


@app.command()
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="Archive of a core.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to make.")],
    trust: TrustOption = None,
    json_output: JsonOption = False,
) -> None:
    """Verify an archive, and write its files into a new directory."""
    with run_command(json_output):
        from .pack import unpack as unpack_core
        from .trust import TrustPolicy

        progress = ByteProgress(json_output)
        with progress.stage("unpack", core_bytes(archive)) as on_bytes:
            digest = unpack_core(archive, directory, TrustPolicy.load(trust_path(trust)), on_bytes=on_bytes)
        progress.done("unpack", "every byte was compared before it was written")
        if json_output:
            print_json({"core": str(directory), "core_digest": digest})
            return
        print(f"unpacked    {printable(str(directory))}   {digest}")


policy_app = typer.Typer(help="Rules of a team about its cores.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


@policy_app.command("check")
def policy_check(
    core: CoreArgument,
    policy: Annotated[Path, typer.Option("--policy", metavar="POLICY", help="Rules, as TOML or JSON.")],
    trust: TrustOption = None,
    json_output: JsonOption = False,
) -> None:
    """Hold a verified core against the rules that a team has written down."""
    with run_command(json_output):
        from dataclasses import asdict

        from .policy import check_policy, read_policy
        from .trust import TrustPolicy
        from .verify import verify as verify_core

        rules = read_policy(policy)
        with verify_core(core, TrustPolicy.load(trust_path(trust))) as verified:
            findings = check_policy(verified, rules)
        passed = all(finding.met for finding in findings)
        if json_output:
            print_json({"core": str(core), "passed": passed, "findings": [asdict(finding) for finding in findings]})
        else:
            for finding in findings:
                print(f"{'met' if finding.met else 'NOT MET':<10}  {finding.rule}: "
                      f"expected {printable(finding.expected)}, found {printable(finding.found)}")
        if not passed:
            raise typer.Exit(int(ExitCode.QUALITY))


@app.command("verify-pins")
def verify_pins(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds published checkpoints.")],
    json_output: JsonOption = False,
) -> None:
    """Hash local checkpoints and compare them with the pinned published ones."""
    with run_command(json_output):
        from dataclasses import asdict

        from . import pins

        known = pins.read_pins()
        progress = ByteProgress(json_output)
        with progress.stage("pins", pins.local_nbytes(folder, known)) as on_bytes:
            found = pins.verify_pins(folder, known, on_bytes)
        if json_output:
            print_json({"files": [asdict(file) for file in found]})
            return
        progress.done("pins", f"{len(found)} files   {human_bytes(sum(file.nbytes for file in found))}")
        for file in found:
            tensors = "" if file.num_tensors is None else f"   {file.num_tensors} tensors"
            print(f"{file.repository}   {file.path}   {human_bytes(file.nbytes)}{tensors}")


@app.command()
def inspect(
    core: CoreArgument,
    trust: Annotated[
        Path | None,
        typer.Option("--trust", metavar="TRUST", help="Verify first; without it nothing is authenticated."),
    ] = None,
    sbom: Annotated[bool, typer.Option("--sbom", help="Print the core's parts as CycloneDX JSON.")] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="What conversion cost each weight, worst first, and nothing else.")
    ] = False,
    dot: Annotated[
        str | None, typer.Option("--dot", metavar="G", help="Print graph G as Graphviz text, for `dot -Tsvg`.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a core holds: identity, precision, graphs, memory, weights, signers."""
    with run_command(json_output or sbom):
        from dataclasses import asdict

        from .inspect import inspect_core, inspect_dot, inspect_sbom
        from .trust import TrustPolicy

        policy = None if trust is None else TrustPolicy.load(trust)
        if sbom:
            print_json(inspect_sbom(core, policy))
            return
        if dot is not None:
            print(inspect_dot(core, policy, dot), end="")
            return
        if errors:
            from .error_report import print_errors, read_errors, worst_first

            found = worst_first(read_errors(core, policy))
            if json_output:
                print_json({"authenticated": policy is not None, "weights": [asdict(entry) for entry in found]})
            else:
                print_errors(found, authenticated=policy is not None)
            return
        report = inspect_core(core, policy)
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
    no_speculation: NoSpeculationOption = False,
    device: DeviceOption = "cpu",
    json_output: JsonOption = False,
) -> None:
    """Continue a prompt; text goes to stdout as it comes."""
    with run_command(json_output):
        from .engine import Request
        from .generate import generate as generate_text
        from .trust import TrustPolicy

        request = Request(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
                          speculation=not no_speculation)
        done = generate_text(core, TrustPolicy.load(trust_path(trust)), prompt, request, chat=chat, device=device,
                             on_text=_ignore_text if json_output else _show_text)
        if json_output:
            print_json(done.as_dict())
            return
        print()
        if done.phases:
            print(f"load        {done.phase_summary()}", file=sys.stderr)
        if done.capacity.snapshot_slots:
            print(f"room        {done.capacity}", file=sys.stderr)
        print(f"generate    {done.summary()}", file=sys.stderr)


def _show_text(piece: str) -> None:
    print(piece, end="", flush=True)


def _ignore_text(piece: str) -> None:
    """What generated text meets when only the final document is wanted."""


register_replay(app)
register_serving(app)
register_bench(app)
