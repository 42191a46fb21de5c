"""The trust file: what is read, what is refused, and when its roles are met."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import DflashError

from runtime.trust import Signer, TrustPolicy
from tests.toy_core import ToyKey, toy_key, trust_document, write_trust

ALICE, BOB, CAROL = (toy_key(name) for name in ("alice", "bob", "carol"))
Document = dict[str, Any]


def policy(document: Document) -> TrustPolicy:
    return TrustPolicy.parse(json.dumps(document).encode(), "trust.json")


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(DflashError) as caught:
        act()
    return caught.value.code


def test_reads_every_field() -> None:
    document = trust_document(ALICE, BOB, threshold=2)
    document |= {"revoked_keys": ["00" * 32], "revoked_sha256": ["11" * 32], "min_release": {"toy": 7}}

    read = policy(document)

    assert read.keys[ALICE.keyid].owner == "tests"
    assert read.roles["builder"].keyids == {ALICE.keyid, BOB.keyid}
    assert read.roles["builder"].threshold == 2
    assert read.require == ("builder",)
    assert read.revoked_keys == {"00" * 32}
    assert read.revoked_sha256 == {"11" * 32}
    assert read.min_release == {"toy": 7}


@pytest.mark.parametrize("curve", ["p256", "p384", "p521"])
def test_accepts_key_on_each_curve(curve: str) -> None:
    key = toy_key(f"on {curve}", curve)

    assert set(policy(trust_document(key)).keys) == {key.keyid}


def swap_pem(document: Document) -> None:
    document["keys"][ALICE.keyid]["pem"] = BOB.pem


def second_role_with_alice(document: Document) -> None:
    document["roles"]["release"] = {"keys": [ALICE.keyid], "threshold": 1}
    document["require"] = ["builder", "release"]


def cut_pem(document: Document) -> None:
    document["keys"][ALICE.keyid]["pem"] = ALICE.pem[:60]


def role(field: str, value: object) -> Callable[[Document], None]:
    return lambda document: document["roles"]["builder"].update({field: value})


@pytest.mark.parametrize("edit", [
    pytest.param(lambda d: d.update(format="dflash-trust/2"), id="another format"),
    pytest.param(lambda d: d.pop("format"), id="no format"),
    pytest.param(lambda d: d.pop("keys"), id="no keys"),
    pytest.param(lambda d: d.pop("roles"), id="no roles"),
    pytest.param(lambda d: d.pop("require"), id="no require"),
    pytest.param(lambda d: d.update(revoked=[]), id="unknown field"),
    pytest.param(lambda d: d["keys"][ALICE.keyid].update(note=""), id="unknown field of a key"),
    pytest.param(lambda d: d["roles"]["builder"].update(note=""), id="unknown field of a role"),
    pytest.param(lambda d: d.update(keys=[]), id="keys is a list"),
    pytest.param(lambda d: d.update(require=[]), id="require empty"),
    pytest.param(lambda d: d.update(require="builder"), id="require is a string"),
    pytest.param(lambda d: d.update(require=["builder", "builder"]), id="require repeats"),
    pytest.param(lambda d: d.update(require=["nobody"]), id="require undefined"),
    pytest.param(role("threshold", 0), id="threshold 0"),
    pytest.param(role("threshold", -1), id="threshold -1"),
    pytest.param(role("threshold", 9), id="threshold 9"),
    pytest.param(role("threshold", True), id="threshold true"),
    pytest.param(role("threshold", "1"), id="threshold is a string"),
    pytest.param(role("keys", []), id="role without keys"),
    pytest.param(role("keys", [ALICE.keyid, ALICE.keyid]), id="role repeats a key"),
    pytest.param(role("keys", ["22" * 32]), id="role uses undefined key"),
    pytest.param(second_role_with_alice, id="key in two required roles"),
    pytest.param(swap_pem, id="key under another's id"),
    pytest.param(cut_pem, id="pem cut off"),
    pytest.param(lambda d: d["keys"][ALICE.keyid].update(pem=7), id="pem is a number"),
    pytest.param(lambda d: d["keys"][ALICE.keyid].update(pem="\ud800"), id="pem with lone surrogate"),
    pytest.param(lambda d: d.update(revoked_keys=["alice"]), id="revoked key is no id"),
    pytest.param(lambda d: d.update(revoked_sha256=["AA" * 32]), id="revoked digest in capitals"),
    pytest.param(lambda d: d.update(min_release={"toy": -1}), id="negative release"),
    pytest.param(lambda d: d.update(min_release={"toy": "1"}), id="release is a string"),
])
def test_rejects_malformed_document(edit: Callable[[Document], object]) -> None:
    document = trust_document(ALICE, BOB)
    edit(document)

    assert code_of(lambda: policy(document)) == "POLICY_MALFORMED"


@pytest.mark.parametrize("data", [
    pytest.param(b"", id="empty file"),
    pytest.param(b"null", id="null"),
    pytest.param(b'{"format": "dflash-trust/1", "format": "dflash-trust/1"}', id="repeated field"),
    pytest.param(b'{"format": 1.0}', id="float"),
    pytest.param(b" " * (1 << 20) + b"{}", id="larger than 1 MiB"),
])
def test_rejects_file_that_is_not_a_trust_document(data: bytes) -> None:
    assert code_of(lambda: TrustPolicy.parse(data, "trust.json")) == "POLICY_MALFORMED"


def test_accepts_key_in_one_required_and_one_other_role() -> None:
    document = trust_document(ALICE)
    document["roles"]["auditor"] = {"keys": [ALICE.keyid], "threshold": 1}

    assert policy(document).accept({ALICE.keyid})[0].roles == ("auditor", "builder")


def test_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DflashError) as caught:
        TrustPolicy.load(tmp_path / "absent.json")

    assert caught.value.code == "POLICY_MISSING"
    assert "keygen" in caught.value.hint


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o620, 0o602])
def test_rejects_file_that_others_can_write(tmp_path: Path, mode: int) -> None:
    path = write_trust(tmp_path / "trust.json", trust_document(ALICE))
    path.chmod(mode)

    assert code_of(lambda: TrustPolicy.load(path)) == "POLICY_UNSAFE"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_rejects_what_is_not_a_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "trust.json")

    assert code_of(lambda: TrustPolicy.load(tmp_path / "trust.json")) == "POLICY_UNSAFE"


def two_roles() -> Document:
    document = trust_document(ALICE, BOB, CAROL, threshold=2)
    document["roles"] = {
        "builder": {"keys": [ALICE.keyid, BOB.keyid], "threshold": 2},
        "release": {"keys": [CAROL.keyid], "threshold": 1},
    }
    document["require"] = ["builder", "release"]
    return document


@pytest.mark.parametrize(("verified", "revoked", "code"), [
    pytest.param([ALICE, BOB, CAROL], [], None, id="all signed"),
    pytest.param([ALICE, CAROL], [], "ROLE_UNMET", id="one of two builders"),
    pytest.param([ALICE, BOB], [], "ROLE_UNMET", id="no release"),
    pytest.param([], [], "ROLE_UNMET", id="nobody"),
    pytest.param([ALICE, BOB, CAROL], [BOB], "KEY_REVOKED", id="a revoked key fills the threshold"),
    pytest.param([ALICE, CAROL], [BOB], "ROLE_UNMET", id="revoked key did not sign"),
    pytest.param([ALICE, CAROL], [ALICE], "ROLE_UNMET", id="unmet with the revoked key too"),
])
def test_roles_are_met_by_distinct_unrevoked_keys(
    verified: list[ToyKey], revoked: list[ToyKey], code: str | None
) -> None:
    trust = policy(two_roles() | {"revoked_keys": [key.keyid for key in revoked]})
    keyids = {key.keyid for key in verified}

    if code is None:
        assert {signer.keyid for signer in trust.accept(keyids)} == keyids
    else:
        assert code_of(lambda: trust.accept(keyids)) == code


def test_names_the_signers_that_count() -> None:
    trust = policy(trust_document(ALICE, BOB) | {"revoked_keys": [BOB.keyid]})

    assert trust.accept({ALICE.keyid, BOB.keyid}) == (Signer(ALICE.keyid, "tests", ("builder",)),)


def test_unmet_role_is_explained() -> None:
    with pytest.raises(DflashError) as caught:
        policy(two_roles()).accept({ALICE.keyid, CAROL.keyid})

    assert str(caught.value) == (
        "too few trusted keys have signed this core: expected 2 of 2 keys, got 1\n"
        "   at: role builder\n"
        " hint: check that the trust file names the core's signers, or have the core signed by them"
    )
