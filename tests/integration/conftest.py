"""Fixtures of the integration tests: a signer, and cores of the demo pair that all workers share."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import LoadedCore, load
from runtime.ops import DType
from tests.integration.cores import CHECKPOINT_PRECISION, DEMO_PRECISION, Signer

ROOT = Path(__file__).resolve().parents[2]
DRAFT = ROOT / "examples" / "smollm2-135m-dflash2"
KEPT = ROOT / "build" / "cache-tests" / "cores"
UNUSED_AFTER_S = 3600


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests already run on every processor."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer.create(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def demo_f32(demo_target: Path) -> Iterator[LoadedCore]:
    """The demo pair in checkpoint precision, computed in float32."""
    with _demo_core("f32", demo_target, CHECKPOINT_PRECISION, DType.F32) as core:
        yield core


@pytest.fixture(scope="module")
def demo_bf16(demo_target: Path) -> Iterator[LoadedCore]:
    """The demo pair as the README exports it: bf16, draft body in MXFP8, proposal head in NVFP4."""
    with _demo_core("bf16", demo_target, DEMO_PRECISION, DType.BF16) as core:
        yield core


def _demo_core(name: str, target: Path, settings: PrecisionSettings, act: DType) -> LoadedCore:
    """Export once for all workers and runs, until a source that could change the core changes."""
    KEPT.mkdir(parents=True, exist_ok=True)
    folder = KEPT / f"{name}-{_sources_digest()}"
    with FileLock(KEPT / f"{name}.lock"):
        if not folder.exists():
            made = KEPT / f"{name}.making"
            shutil.rmtree(made, ignore_errors=True)
            key = Signer.create(made / "keys").key
            export(ExportRequest(target=target, draft=DRAFT, out=made / "core", settings=settings, batches=(1, 4),
                                 max_context=1024, act=act), key)
            made.rename(folder)
        folder.touch()
        _drop_unused(name)
    return load(folder / "core", trust=Signer.read(folder / "keys").trust)


def _drop_unused(name: str) -> None:
    """Remove the cores of other sources, unless another run may be using them now."""
    for other in KEPT.glob(f"{name}-*"):
        if time.time() - other.stat().st_mtime > UNUSED_AFTER_S:
            shutil.rmtree(other)


def _sources_digest() -> str:
    """A digest of all code and data that a core is made from."""
    digest = hashlib.sha256()
    code = [p for top in ("exporter", "runtime", "proto", "manifests") for p in (ROOT / top).rglob("*")
            if p.suffix in (".py", ".txtpb")]
    data = [p for p in DRAFT.iterdir() if p.name not in ("reference.json", "train.json")]
    for path in sorted([*code, *data, ROOT / "examples" / "smollm2-135m" / "tensors.sha256", Path(__file__)]):
        digest.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
