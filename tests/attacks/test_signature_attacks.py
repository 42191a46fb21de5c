"""Attackers without a key: they remove, alter or replace signatures."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.toy_core import ToyCore, toy_key

Envelope = dict[str, Any]


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def flipped(text: str, bit: int) -> str:
    data = bytearray(base64.b64decode(text))
    data[(bit // 8) % len(data)] ^= 1 << (bit % 8)
    return base64.b64encode(data).decode()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(envelope: Envelope) -> bytes:
    return base64.b64decode(envelope["signatures"][0]["sig"])


def raw_pair(envelope: Envelope) -> bytes:
    r, s = decode_dss_signature(decoded(envelope))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def signature_over(data: bytes) -> bytes:
    return toy_key().private.sign(data, ec.ECDSA(hashes.SHA256()))


def test_rejects_core_without_signatures_directory(toy: ToyCore, trust: TrustPolicy) -> None:
    shutil.rmtree(toy.path / "signatures")

    with refused("SIG_MISSING"):
        verify(toy.path, trust)


def test_rejects_core_with_empty_signatures_directory(toy: ToyCore, trust: TrustPolicy) -> None:
    toy.signature().unlink()

    with refused("SIG_MISSING"):
        verify(toy.path, trust)


@pytest.mark.parametrize("bit", [0, 7, 8, 35, 200, 301, -1], ids=lambda bit: f"bit {bit}")
@pytest.mark.parametrize("part", ["signature", "payload"])
def test_rejects_one_flipped_bit(toy: ToyCore, trust: TrustPolicy, part: str, bit: int) -> None:
    def flip(bundle: dict[str, Any]) -> None:
        envelope = bundle["dsseEnvelope"]
        holder, field = (envelope, "payload") if part == "payload" else (envelope["signatures"][0], "sig")
        holder[field] = flipped(holder[field], bit)

    rewrite(toy.signature(), flip)

    with refused("SIG_INVALID"):
        verify(toy.path, trust)


@pytest.mark.parametrize("forge", [
    pytest.param(lambda envelope: b"", id="empty"),
    pytest.param(lambda envelope: bytes(64), id="64 zero bytes"),
    pytest.param(lambda envelope: bytes.fromhex("3006020100020100"), id="r = s = 0"),
    pytest.param(raw_pair, id="raw r and s"),
    pytest.param(lambda envelope: decoded(envelope) + b"\0", id="one byte after the DER"),
    pytest.param(lambda envelope: signature_over(base64.b64decode(envelope["payload"])), id="over the bare payload"),
    pytest.param(lambda envelope: signature_over(envelope["payload"].encode()), id="over the base64 text"),
])
def test_rejects_forged_signature(toy: ToyCore, trust: TrustPolicy, forge: Callable[[Envelope], bytes]) -> None:
    def replace(bundle: dict[str, Any]) -> None:
        envelope = bundle["dsseEnvelope"]
        envelope["signatures"][0]["sig"] = encoded(forge(envelope))

    rewrite(toy.signature(), replace)

    with refused("SIG_INVALID"):
        verify(toy.path, trust)


@pytest.mark.parametrize("file_name", [None, "mallory.sig"], ids=["in place of the signer's", "under another name"])
def test_rejects_attackers_signature_under_trusted_hint(
    toy: ToyCore, trust: TrustPolicy, file_name: str | None
) -> None:
    def claim(bundle: dict[str, Any]) -> None:
        bundle["verificationMaterial"]["publicKey"]["hint"] = toy_key().keyid

    toy.sign(toy_key("mallory"), bundle=claim, file_name=file_name or toy.signature().name)

    with refused("SIG_INVALID"):
        verify(toy.path, trust)


def test_rejects_core_signed_by_unknown_key(toy: ToyCore, trust: TrustPolicy) -> None:
    toy.signature().unlink()
    toy.sign(toy_key("mallory"))

    with refused("ROLE_UNMET"):
        verify(toy.path, trust)
