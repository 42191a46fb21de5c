"""A toy core for a GPU, and the fake driver in place of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
import runtime.driver
from runtime.trust import TrustPolicy
from tests.runtime.gpu.fake_driver import FakeDriver
from tests.runtime.gpu.toy import fake_kernels, make_gpu_core
from tests.toy_core import ToyCore, trust_document, write_trust


@pytest.fixture
def trust(tmp_path: Path) -> TrustPolicy:
    return TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document()))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(kernels=fake_kernels())
    monkeypatch.setattr(runtime.driver, "bindings", lambda: driver)
    monkeypatch.setattr("runtime.gpu.loader.bindings", lambda: driver)
    return driver


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_gpu_core(tmp_path / "core")


@pytest.fixture
def load(toy: ToyCore, trust: TrustPolicy, fake: FakeDriver) -> Iterator[Any]:
    """Loads the toy on the fake; cores are closed at the end, and nothing may stay behind."""
    cores = []

    def load_toy(device: str = "cuda", path: Path = toy.path, **options: Any) -> Any:
        core = runtime.load(path, trust=trust, device=device, **options)
        cores.append(core)
        return core

    yield load_toy
    for core in cores:
        core.close()
    assert fake.held == {}
