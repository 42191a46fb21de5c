"""Export a core for a test, and load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_core.v1 import recipe_pb2
from google.protobuf import text_format

from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import LoadedCore, TrustPolicy, load
from runtime.keys import PrivateKey, generate_key, load_private_key
from runtime.ops import DType

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT_PRECISION = PrecisionSettings()
DEMO_PRECISION = PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4")


@dataclass(frozen=True, slots=True)
class Signer:
    """A key, and the policy that accepts what it signs."""

    key: PrivateKey
    trust: TrustPolicy

    @classmethod
    def create(cls, folder: Path) -> Signer:
        generate_key(folder)
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Signer:
        return cls(load_private_key(folder / "key.pem"), TrustPolicy.load(folder / "trust.json"))


def make_core(signer: Signer, out: Path, target: Path, draft: Path | None = None, *, act: DType = DType.F32,
              settings: PrecisionSettings = CHECKPOINT_PRECISION, batches: tuple[int, ...] = (1,),
              max_context: int = 512, recipe: Path | None = None) -> LoadedCore:
    """Export to `out`, sign, verify and load. The caller closes the core."""
    export(ExportRequest(target=target, out=out, draft=draft, settings=settings, batches=batches,
                         max_context=max_context, act=act, recipe=str(recipe) if recipe else None), signer.key)
    return load(out, trust=signer.trust)


def recipe_without_conversion(name: str, folder: Path) -> Path:
    """A copy of a shipped recipe by which no target tensor is converted, for families that convert some by default."""
    recipe = text_format.Parse((ROOT / "manifests" / "recipes" / f"{name}.txtpb").read_text(), recipe_pb2.Recipe())
    kept = [c for c in recipe.conversions if c.group != "online_mxfp8"]
    del recipe.conversions[:]
    recipe.conversions.extend(kept)
    for row in recipe.tensors:
        row.keep_reason = row.keep_reason or "no conversion is declared"
        del row.groups[:]
    path = folder / f"{name}-plain.txtpb"
    path.write_text(text_format.MessageToString(recipe))
    return path
