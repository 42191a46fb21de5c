"""Surroundings: trust files that hold keys nobody should accept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa, x25519

from runtime.trust import TrustPolicy
from tests.attacks.limits import refused
from tests.toy_core import ToyKey, toy_key, trust_document, write_trust


@pytest.mark.parametrize("public_key", [
    pytest.param(lambda: ed25519.Ed25519PrivateKey.generate().public_key(), id="Ed25519"),
    pytest.param(lambda: rsa.generate_private_key(65537, 2048).public_key(), id="RSA"),
    pytest.param(lambda: ec.generate_private_key(ec.SECP256K1()).public_key(), id="secp256k1"),
    pytest.param(lambda: ec.generate_private_key(ec.BrainpoolP256R1()).public_key(), id="brainpool"),
    pytest.param(lambda: ec.generate_private_key(ec.SECP224R1()).public_key(), id="P-224"),
    pytest.param(lambda: dsa.generate_private_key(2048).public_key(), id="DSA"),
    pytest.param(lambda: x25519.X25519PrivateKey.generate().public_key(), id="X25519"),
])
def test_rejects_trust_file_with_key_of_another_kind(tmp_path: Path, public_key: Callable[[], Any]) -> None:
    pem = public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    key = ToyKey(toy_key().private, pem.decode(), hashlib.sha256(pem).hexdigest())
    path = write_trust(tmp_path / "trust.json", trust_document(key))

    with refused("KEY_UNSUPPORTED"):
        TrustPolicy.load(path)
