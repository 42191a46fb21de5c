"""A signed toy core and the policy that accepts it, for every attack test."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.trust import TrustPolicy
from tests.toy_core import ToyCore, make_toy_core, trust_document, write_trust


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core")


@pytest.fixture
def trust(tmp_path: Path) -> TrustPolicy:
    return TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document()))
