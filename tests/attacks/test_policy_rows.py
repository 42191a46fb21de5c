"""Rows 28, 39, 40 and 41: the surroundings of a load, rollback and revocation, and a file exchanged after opening."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.attacks.tiny_core import MODULE, make_tiny_core
from tests.edit_core import add_file
from tests.toy_core import BIG_BYTES, ToyCore, toy_key, trust_document, write_trust

Document = dict[str, Any]


def role(**fields: object) -> Callable[[Document], object]:
    return lambda document: document["roles"]["builder"].update(fields)


def key_in_two_roles(document: Document) -> None:
    document["roles"]["release"] = dict(document["roles"]["builder"])
    document["require"] = ["builder", "release"]


@pytest.mark.parametrize("edit", [
    pytest.param(lambda d: d.update(require=[]), id="39 require empty"),
    pytest.param(role(threshold=0), id="39 threshold 0"),
    pytest.param(role(threshold=-1), id="39 threshold -1"),
    pytest.param(role(threshold=9), id="39 threshold 9"),
    pytest.param(key_in_two_roles, id="39 key in two roles"),
])
def test_rejects_trust_file_with(tmp_path: Path, edit: Callable[[Document], object]) -> None:
    document = trust_document()
    edit(document)
    path = write_trust(tmp_path / "trust.json", document)

    with refused("POLICY_MALFORMED"):
        TrustPolicy.load(path)


def test_rejects_absent_trust_file(tmp_path: Path) -> None:
    with refused("POLICY_MISSING"):
        TrustPolicy.load(tmp_path / "trust.json")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_rejects_trust_file_that_others_can_write(tmp_path: Path, mode: int) -> None:
    path = write_trust(tmp_path / "trust.json", trust_document())
    path.chmod(mode)

    with refused("POLICY_UNSAFE"):
        TrustPolicy.load(path)


@pytest.mark.parametrize("name", ["trust.json", "config/trust", "signatures/trust.sig"])
def test_rejects_trust_file_inside_the_core(toy: ToyCore, name: str) -> None:
    inside = TrustPolicy.load(write_trust(toy.path / name, trust_document()))

    with refused("POLICY_UNSAFE"):
        verify(toy.path, inside)


@pytest.mark.parametrize(("edit", "code"), [
    pytest.param(lambda m: m.required_features.append("x"), "FEATURE_UNSUPPORTED", id="28 unknown feature"),
    pytest.param(lambda m: setattr(m, "format_version", 0), "VERSION_UNSUPPORTED", id="28 format version 0"),
    pytest.param(lambda m: setattr(m, "format_version", 2), "VERSION_UNSUPPORTED", id="28 format version 2"),
])
def test_rejects_manifest_of_another_age(
    toy: ToyCore, trust: TrustPolicy, edit: Callable[[RebuildManifest], object], code: str
) -> None:
    toy.edit_manifest(edit)

    with refused(code):
        verify(toy.path, trust)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("fields", "code"), [
    pytest.param(lambda core: {"min_release": {"tiny": 2}}, "CORE_ROLLBACK", id="40 release below the lowest"),
    pytest.param(lambda core: {"revoked_sha256": [digest(core.path / "manifest.pb")]}, "CORE_REVOKED",
                 id="40 core revoked"),
    pytest.param(lambda core: {"revoked_sha256": [digest(core.path / MODULE)]}, "CORE_REVOKED",
                 id="40 one module revoked"),
])
def test_rejects_core_that_the_trust_file_excludes(
    tmp_path: Path, fields: Callable[[ToyCore], Document], code: str
) -> None:
    core = make_tiny_core(tmp_path / "core")
    trust = TrustPolicy.parse(json.dumps(trust_document(toy_key()) | fields(core)).encode(), "trust.json")

    with refused(code):
        verify(core.path, trust)


def test_signature_of_a_component_counts_for_nothing(toy: ToyCore) -> None:
    """What a combined core keeps of its parts tells where they came from, and is never a signature of the whole."""
    partner = toy_key("partner")
    bundle = toy.sign(partner).read_bytes()
    toy.signature(partner).unlink()
    toy.edit_manifest(lambda m: add_file(toy, m, "component", f"components/{'0' * 64}.{partner.keyid}.sig", bundle))
    both = TrustPolicy.parse(json.dumps(trust_document(toy_key(), partner, threshold=2)).encode(), "trust.json")

    with refused("ROLE_UNMET"):
        verify(toy.path, both)


def test_loads_the_signed_bytes_of_a_file_that_was_exchanged_after_opening(
    toy: ToyCore, trust: TrustPolicy, tmp_path: Path
) -> None:
    signed = (toy.path / toy.big).read_bytes()
    with verify(toy.path, trust) as core:
        (toy.path / toy.big).rename(tmp_path / "moved")
        (toy.path / toy.big).write_bytes(bytes(BIG_BYTES))
        memory = bytearray(BIG_BYTES)

        core.read_into(toy.big, memoryview(memory))

    assert memory == signed
