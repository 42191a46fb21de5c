"""Export a core for a test, and load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import LoadedCore, TrustPolicy, load
from runtime.keys import PrivateKey, generate_key, load_private_key
from runtime.ops import DType

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
              max_context: int = 512) -> LoadedCore:
    """Export to `out`, sign, verify and load. The caller closes the core."""
    export(ExportRequest(target=target, out=out, draft=draft, settings=settings, batches=batches,
                         max_context=max_context, act=act), signer.key)
    return load(out, trust=signer.trust)
