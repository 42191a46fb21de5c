"""Key files: what keygen writes, and which private keys are used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from dflash_core.errors import DflashError

from runtime.keys import generate_key, keyid, load_private_key
from runtime.trust import TrustPolicy


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(DflashError) as caught:
        act()
    return caught.value.code


def write_key(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def pkcs8(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(("curve", "name"), [("p256", "secp256r1"), ("p384", "secp384r1"), ("p521", "secp521r1")])
def test_keygen_writes_a_key_and_a_trust_file_that_accepts_it(tmp_path: Path, curve: str, name: str) -> None:
    generated = generate_key(tmp_path / "keys", curve)

    key = load_private_key(tmp_path / "keys" / "key.pem")
    trust = TrustPolicy.load(tmp_path / "keys" / "trust.json")
    assert key.curve.name == name
    assert generated.keyid == hashlib.sha256((tmp_path / "keys" / "public.pem").read_bytes()).hexdigest()
    assert generated.keyid == keyid(key.public_key())
    assert trust.accept({generated.keyid})[0].roles == ("builder",)
    assert trust.roles["builder"].threshold == 1


def test_keygen_keeps_the_private_key_to_its_owner(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        generated = generate_key(tmp_path)
    finally:
        os.umask(old)

    assert stat.S_IMODE(generated.private_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(generated.trust_path.stat().st_mode) == 0o644


@pytest.mark.parametrize("name", ["key.pem", "public.pem", "trust.json"])
def test_keygen_overwrites_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")

    assert code_of(lambda: generate_key(tmp_path)) == "KEY_EXISTS"

    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_keygen_rejects_another_curve(tmp_path: Path) -> None:
    assert code_of(lambda: generate_key(tmp_path, "ed25519")) == "KEY_UNSUPPORTED"


def test_keygen_names_a_directory_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert code_of(lambda: generate_key(tmp_path / "file" / "keys")) == "KEY_UNWRITABLE"


def test_keygen_leaves_nothing_of_its_own_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(*arguments: object, **options: object) -> str:
        (tmp_path / "trust.json").touch()
        return "{}"

    monkeypatch.setattr(json, "dumps", overtaken)

    assert code_of(lambda: generate_key(tmp_path)) == "KEY_UNWRITABLE"
    assert [path.name for path in tmp_path.iterdir()] == ["trust.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_rejects_private_key_that_others_can_use(tmp_path: Path, mode: int) -> None:
    path = write_key(tmp_path / "key.pem", pkcs8(ec.generate_private_key(ec.SECP256R1())), mode)

    assert code_of(lambda: load_private_key(path)) == "KEY_UNSAFE"


def sec1(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def encrypted(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )


@pytest.mark.parametrize(("data", "code"), [
    pytest.param(lambda: sec1(ec.generate_private_key(ec.SECP256R1())), "KEY_MALFORMED", id="SEC1"),
    pytest.param(lambda: encrypted(ec.generate_private_key(ec.SECP256R1())), "KEY_MALFORMED", id="encrypted"),
    pytest.param(lambda: pkcs8(ec.generate_private_key(ec.SECP256R1()))[:80], "KEY_MALFORMED", id="cut off"),
    pytest.param(lambda: b"", "KEY_MALFORMED", id="empty"),
    pytest.param(lambda: pkcs8(ec.generate_private_key(ec.SECP256K1())), "KEY_UNSUPPORTED", id="secp256k1"),
    pytest.param(lambda: pkcs8(ed25519.Ed25519PrivateKey.generate()), "KEY_UNSUPPORTED", id="Ed25519"),
    pytest.param(lambda: pkcs8(rsa.generate_private_key(65537, 2048)), "KEY_UNSUPPORTED", id="RSA"),
])
def test_rejects_private_key_of_another_kind(tmp_path: Path, data: Callable[[], bytes], code: str) -> None:
    path = write_key(tmp_path / "key.pem", data())

    assert code_of(lambda: load_private_key(path)) == code


def test_rejects_missing_private_key(tmp_path: Path) -> None:
    assert code_of(lambda: load_private_key(tmp_path / "absent.pem")) == "KEY_MISSING"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_rejects_private_key_that_is_not_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "key.pem")

    assert code_of(lambda: load_private_key(tmp_path / "key.pem")) == "KEY_UNSAFE"
