"""Toy cores and commands for the tests of combine: cores that differ in what a test says, and in nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest, RebuildSpeculation
from typer.testing import CliRunner, Result

from exporter.cli import combine_app
from exporter.combine import CombinedCore, CombineRequest, combine
from runtime.keys import load_private_key
from runtime.trust import TrustPolicy
from tests.toy_core import ToyCore, make_toy_core, toy_key, trust_document, write_trust

Edit = Callable[[RebuildManifest], object]


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with a key, a trust file that accepts it, and the cores that a test makes."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_trust(self.trust_path, trust_document())
        self.key_path.write_bytes(toy_key().private_pem())
        self.key_path.chmod(0o600)

    @property
    def trust_path(self) -> Path:
        return self.folder / "trust.json"

    @property
    def key_path(self) -> Path:
        return self.folder / "key.pem"

    @property
    def trust(self) -> TrustPolicy:
        return TrustPolicy.load(self.trust_path)

    def toy(self, name: str, *edits: Edit) -> ToyCore:
        """A signed toy core; its name and release tell it from others."""
        toy = make_toy_core(self.folder / name, signed=False)

        def all_edits(manifest: RebuildManifest) -> None:
            manifest.core_name, manifest.release = name, 7
            for edit in edits:
                edit(manifest)
        toy.edit_manifest(all_edits)
        return toy

    def combine(self, *names: str, out: str = "out", force: bool = False) -> CombinedCore:
        request = CombineRequest(tuple(self.folder / n for n in names), self.folder / out, force=force)
        return combine(request, self.trust, load_private_key(self.key_path))

    def run(self, *names: str, out: str | None = "out", options: tuple[str, ...] = ()) -> Result:
        """`dflash-combine` on cores of the folder."""
        written = [] if out is None else ["--out", str(self.folder / out), "--key", str(self.key_path)]
        arguments = [*(str(self.folder / n) for n in names), "--trust", str(self.trust_path), *written, *options]
        return CliRunner().invoke(combine_app, arguments)

    def explained(self, *names: str) -> dict[str, Any]:
        """Rule name -> rule, as `--explain --json` prints them."""
        result = self.run(*names, out=None, options=("--explain", "--json"))
        return {rule["name"]: rule for rule in json.loads(result.stdout)["rules"]}

    @property
    def left_over(self) -> list[str]:
        """What lies in the folder beside key and trust file, hidden entries included."""
        return sorted(p.name for p in self.folder.iterdir() if p.name not in ("key.pem", "trust.json"))


def precision(method: str | None = "dflash2", depth: int = 7, online: str | None = None, scope: str | None = None,
              body: str | None = None) -> Edit:
    """What a manifest records about precision; None is left absent."""
    def edit(manifest: RebuildManifest) -> None:
        if online is not None:
            manifest.online_quantization = online
        if scope is not None:
            manifest.online_mxfp8_scope = scope
        if method is not None:
            manifest.speculation.CopyFrom(RebuildSpeculation(
                method=method, draft_depth=depth, block_size=8, draft_body_quantization=body,
                draft=ModelIdentity(repository="toy/draft", revision="1" * 40, architecture="Draft")))
    return edit


def digests(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()}


def refusal(bench: Bench, *names: str) -> DflashError:
    with pytest.raises(DflashError) as caught:
        bench.combine(*names)
    return caught.value
