"""dflash-export and dflash-combine: arguments in, report out. The work is done in exporter.export and
exporter.combine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from dflash_core.errors import ExitCode, UsageError

from runtime.console import ByteProgress, human_bytes, print_json, run_command
from runtime.entry import run_app

export_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
combine_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
CAPABILITIES = (90,)
MAX_RELEASE = 2**64 - 1


class ComputeDType(StrEnum):
    """Element type of activations and K/V cache."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def export_main() -> None:
    """Entry point of `dflash-export`."""
    run_app(export_app)


def combine_main() -> None:
    """Entry point of `dflash-combine`."""
    run_app(combine_app)


@export_app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the model, as published.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="CORE", help="Folder of the core to write.")] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="KEY.pem", help="Private key that signs.")] = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", metavar="DRAFT", help="Folder of the DFlash or DFlash2 draft.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda:sm_90 to add that GPU.")] = "cpu",
    scope: Annotated[
        str | None,
        typer.Option("--online-mxfp8-scope", help="Target inputs that become MXFP8: all, kda-input or kda-input=qkv."),
    ] = None,
    draft_body: Annotated[
        str | None, typer.Option("--draft-body-quantization", help="mxfp8; absent: inherited.")
    ] = None,
    draft_head: Annotated[
        str | None,
        typer.Option("--draft-head-quantization", help="nvfp4 or mxfp8, a head of its own for the draft; "
                                                       "absent: the target's."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, metavar="K", help="Proposals per step; absent: all of the block.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="R", help="Recipe name or file; absent: by the architecture.")
    ] = None,
    compute_dtype: Annotated[
        ComputeDType, typer.Option("--compute-dtype", help="Type of activations and K/V cache.")
    ] = ComputeDType.BFLOAT16,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, max=64, help="A batch bucket; repeat for several.")
    ] = None,
    image_patches: Annotated[
        list[int] | None,
        typer.Option("--image-patches", min=4, help="Patches of a vision graph's largest image, as 1024; repeat for "
                                                    "several. Absent: text alone.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=1, help="Most tokens of a sequence; absent: the model's, "
                                                              "at most 8192.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the core; absent: that of CORE.")] = None,
    release: Annotated[
        int, typer.Option("--release", min=0, max=MAX_RELEASE, help="Number of this build; grows with every "
                                                                    "published one.")
    ] = 1,
    reuse_weights: Annotated[
        Path | None,
        typer.Option("--reuse-weights", metavar="CORE", help="Take converted weights from this core if it has them."),
    ] = None,
    trust: Annotated[
        Path | None, typer.Option("--trust", metavar="TRUST", help="Whose signatures --reuse-weights accepts; "
                                                                   "without it ~/.config/dflash/trust.json.")
    ] = None,
    witness: Annotated[
        bool, typer.Option("--witness", help="Capture every graph on this machine's GPU too, and refuse a difference.")
    ] = False,
    canary: Annotated[
        bool, typer.Option("--canary/--no-canary", help="Record what the core generates and accepts, signed with it.")
    ] = True,
    canary_reference: Annotated[
        Path | None,
        typer.Option("--canary-reference", metavar="FILE", help="An earlier canary that the core must reproduce."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and write nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --plan: every tensor.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the core if it exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Turn a model and its draft into a signed core."""
    with run_command(json_output):
        capability = _capability(device)
        if canary_reference is not None and not canary:
            raise UsageError("CANARY", "--canary-reference goes with recording a canary", where="--canary-reference",
                             hint="leave out --no-canary")
        if not plan and (out is None or key is None):
            missing = "--out" if out is None else "--key"
            raise UsageError("OPTION_MISSING", f"{missing} is needed to write a core", where=missing,
                             hint="give it, or pass --plan to write nothing")
        with interrupts_held():
            from exporter.export import ExportRequest, plan_report
            from exporter.export import export as export_core
        from exporter.plan_report import print_plan
        from exporter.plan_rules import PrecisionSettings
        from runtime.keys import load_private_key
        from runtime.ops import DType

        request = ExportRequest(
            target=target, draft=draft, out=out or Path("core"), recipe=recipe, core_name=name, release=release,
            settings=PrecisionSettings(online_mxfp8_scope=scope, draft_body=draft_body, draft_head=draft_head,
                                       depth=depth),
            batches=tuple(sorted(set(batch or [1]))), max_context=max_context, force=force, capability=capability,
            image_patches=tuple(sorted(set(image_patches or []))), witness=witness,
            canary=canary, canary_reference=canary_reference,
            act=DType.F32 if compute_dtype is ComputeDType.FLOAT32 else DType.BF16)
        progress = ByteProgress(json_output)
        if plan:
            found = plan_report(request, progress)
            if json_output:
                print_json(found.as_dict(verbose=verbose))
            else:
                print_plan(found, verbose=verbose)
            return
        assert out is not None and key is not None
        reused: dict[str, Any] = {}
        if reuse_weights is None:
            core = export_core(request, load_private_key(key), progress)
        else:
            from exporter.reuse import export_reusing
            from runtime.cli import trust_path
            from runtime.trust import TrustPolicy

            core, found_there = export_reusing(request, reuse_weights, TrustPolicy.load(trust_path(trust)),
                                               load_private_key(key), progress)
            reused = {"reuse": asdict(found_there)}
        size = sum(f.ref.size_bytes for f in core.manifest.files)
        if json_output:
            print_json({"core": str(out), "core_name": core.manifest.core_name, "nbytes": size,
                        "core_digest": core.digest, "keyid": core.signature.stem, **reused})
            return
        print(f"{out}   {human_bytes(size)}   {core.digest}")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Around an import of torch, whose native code aborts the process on Ctrl-C: that arrives when the import ends."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for number in came[:1]:
        signal.raise_signal(number)


def _capability(device: str) -> int | None:
    """The compute capability that `--device` names: 90 for cuda:sm_90, None for cpu."""
    if device == "cpu":
        return None
    known = {f"cuda:sm_{capability}": capability for capability in CAPABILITIES}
    if device not in known:
        raise UsageError("DEVICE", "no core can be made for this device", where="--device",
                         expected=" or ".join(["cpu", *known]), got=device,
                         hint="leave --device out for a core that runs on any CPU")
    return known[device]


@combine_app.command()
def combine(
    cores: Annotated[list[Path], typer.Argument(metavar="CORE…", help="The cores to merge, 2 to 16.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="CORE", help="Folder of the core to write.")] = None,
    trust: Annotated[
        Path | None, typer.Option("--trust", metavar="TRUST", help="Whose signatures on the inputs are accepted; "
                                                                   "without it ~/.config/dflash/trust.json.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="KEY.pem", help="Private key that signs.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every rule with both values; without --out, only that.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of the core; absent: that of --out.")] = None,
    release: Annotated[
        int, typer.Option("--release", min=0, max=MAX_RELEASE, help="Number of this build; grows with every "
                                                                    "published one.")
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace the core if it exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Merge cores into one that serves every graph of each."""
    with run_command(json_output):
        if (out is None or key is None) and not (explain and out is None):
            missing = "--out" if out is None else "--key"
            raise UsageError("OPTION_MISSING", f"{missing} is needed to write a core", where=missing,
                             hint="give it, or pass --explain without --out to write nothing")
        with interrupts_held():
            from exporter.combine import CombineRequest, first_failure
            from exporter.combine import combine as combine_cores
        from exporter.combine import explain as explain_rules
        from exporter.combine_report import print_rules, rules_document
        from runtime.cli import trust_path
        from runtime.keys import load_private_key
        from runtime.trust import TrustPolicy

        policy = TrustPolicy.load(trust_path(trust))
        rules = explain_rules(cores, policy) if explain else ()
        failed = first_failure(rules)
        if explain and not json_output:
            print_rules(rules)
        if out is None or failed is not None:
            if json_output:
                print_json({"combines": failed is None, "rules": rules_document(rules)})
            if failed is not None:
                raise typer.Exit(int(ExitCode.INCOMPATIBLE))
            return
        assert key is not None
        core = combine_cores(CombineRequest(tuple(cores), out, name, release, force), policy, load_private_key(key),
                             ByteProgress(json_output))
        size = sum(f.ref.size_bytes for f in core.manifest.files)
        if json_output:
            print_json({"core": str(out), "core_name": core.manifest.core_name, "nbytes": size,
                        "core_digest": core.digest, "keyid": core.signature.stem,
                        **({"combines": True, "rules": rules_document(rules)} if explain else {})})
            return
        print(f"{out}   {human_bytes(size)}   {core.digest}")
