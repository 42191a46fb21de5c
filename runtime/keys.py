"""Signing keys: make one, read one, name one.

    generated = generate_key(Path("build/demo"))
    key = load_private_key(generated.private_path)
    assert keyid(key.public_key()) == generated.keyid

Only ECDSA on three curves is used, because the `key` method of OpenSSF Model Signing knows no other. The hash
follows from the curve and is never read from a file that an attacker could have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import PolicyError, ResourceError, UsageError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

MAX_KEY_FILE_BYTES = 65536
_OPENSSL_HINT = "make one with `dflash-run keygen DIR`, or with `openssl genpkey -algorithm EC`"


class Curve(StrEnum):
    """The elliptic curves a signer may use."""

    P256 = "p256"
    P384 = "p384"
    P521 = "p521"


_CURVES: dict[Curve, ec.EllipticCurve] = {
    Curve.P256: ec.SECP256R1(), Curve.P384: ec.SECP384R1(), Curve.P521: ec.SECP521R1(),
}
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512(),
}


@dataclass(frozen=True, slots=True)
class GeneratedKey:
    """What `generate_key` wrote."""

    keyid: str
    private_path: Path
    public_path: Path
    trust_path: Path


def generate_key(directory: Path, curve: str = Curve.P256) -> GeneratedKey:
    """Write a new key pair and a trust file that accepts it.

    Args:
        directory: made if it is absent. Receives key.pem (PKCS#8, mode 0600), public.pem, and trust.json, which asks
            for one signature by this key in the role "builder".
        curve: "p256", "p384" or "p521".
    Returns:
        The key id and the three paths.
    Raises:
        UsageError: one of the three files exists (KEY_EXISTS), or the curve is another (KEY_UNSUPPORTED).
        ResourceError: KEY_UNWRITABLE; no file is left.
    """
    if curve not in list(Curve):
        raise UsageError(
            "KEY_UNSUPPORTED", "signing keys use one of three curves", expected="p256, p384 or p521", got=curve
        )
    paths = [directory / name for name in ("key.pem", "public.pem", "trust.json")]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise UsageError(
                "KEY_EXISTS", "a key is never overwritten", where=str(path), hint="choose another directory"
            )
    key = ec.generate_private_key(_CURVES[Curve(curve)])
    name = keyid(key.public_key())
    public_pem = encode_public_key(key.public_key())
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    trust = {
        "format": "dflash-trust/1",
        "keys": {name: {"pem": public_pem.decode("ascii"), "owner": "this developer"}},
        "roles": {"builder": {"keys": [name], "threshold": 1}},
        "require": ["builder"],
        "revoked_keys": [], "revoked_sha256": [], "min_release": {},
    }
    trust_json = (json.dumps(trust, indent=1) + "\n").encode("ascii")
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, data, mode in zip(paths, (private_pem, public_pem, trust_json), (0o600, 0o644, 0o644), strict=True):
            _write_new(path, data, mode)
            written.append(path)
    except OSError as err:
        for path in written:
            path.unlink()
        raise ResourceError("KEY_UNWRITABLE", f"cannot write the key: {err.strerror}", where=str(directory),
                            hint="choose a directory that you can write") from err
    return GeneratedKey(name, *paths)


def load_private_key(path: Path) -> PrivateKey:
    """Read a private key that only its owner can read.

    Raises:
        PolicyError: KEY_MISSING; KEY_UNSAFE when group or others have any right to the file or it is not a regular
            file; KEY_MALFORMED when it is not an unencrypted PKCS#8 PEM; KEY_UNSUPPORTED for another kind of key.
    """
    where = str(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise PolicyError("KEY_MISSING", f"cannot open the private key: {err.strerror}", where=where,
                          hint=_OPENSSL_HINT) from err
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise PolicyError("KEY_UNSAFE", "the private key is not a regular file", where=where)
        if mode & 0o077:
            raise PolicyError("KEY_UNSAFE", "others can use the private key", where=where, expected="mode 0600",
                              got=f"mode {stat.S_IMODE(mode):04o}", hint=f"chmod 600 {path}")
        pem = os.read(fd, MAX_KEY_FILE_BYTES)
    finally:
        os.close(fd)
    if not pem.lstrip().startswith(b"-----BEGIN PRIVATE KEY-----"):
        raise PolicyError("KEY_MALFORMED", "the private key is not an unencrypted PKCS#8 PEM", where=where,
                          expected="-----BEGIN PRIVATE KEY-----",
                          hint="convert it with `openssl pkcs8 -topk8 -nocrypt`")
    try:
        key = serialization.load_pem_private_key(pem, None)
    except UnsupportedAlgorithm as err:
        raise _unsupported(where, str(err)) from err
    except (ValueError, TypeError) as err:
        raise PolicyError("KEY_MALFORMED", f"the private key cannot be read: {err}", where=where,
                          hint=_OPENSSL_HINT) from err
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _unsupported(where, type(key).__name__)
    require_supported(key.public_key(), where)
    return key


def load_public_key(pem: bytes, where: str) -> PublicKey:
    """Read a public key in PEM.

    Raises:
        PolicyError: KEY_UNSUPPORTED when it is not on one of the three curves; POLICY_MALFORMED when it is no key.
    """
    try:
        key = serialization.load_pem_public_key(pem)
    except UnsupportedAlgorithm as err:
        raise _unsupported(where, str(err)) from err
    except ValueError as err:
        raise PolicyError("POLICY_MALFORMED", f"the public key cannot be read: {err}", where=where) from err
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise _unsupported(where, type(key).__name__)
    require_supported(key, where)
    return key


def require_supported(key: PublicKey, where: str) -> None:
    """Raise KEY_UNSUPPORTED unless the key is on one of the three curves."""
    if key.curve.name not in _HASHES:
        raise _unsupported(where, key.curve.name)


def signature_hash(key: PublicKey) -> hashes.HashAlgorithm:
    """The hash that goes with the key's curve. The key must have passed `require_supported`."""
    return _HASHES[key.curve.name]


def encode_public_key(key: PublicKey) -> bytes:
    """The SubjectPublicKeyInfo of `key` as PEM text with a final newline."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def keyid(public_key: PublicKey) -> str:
    """The name of a key: lowercase hex SHA-256 of its PEM text, final newline included.

    Source: OpenSSF Model Signing v1.0, the `hint` of method `key`.
    """
    return hashlib.sha256(encode_public_key(public_key)).hexdigest()


def _unsupported(where: str, got: str) -> PolicyError:
    return PolicyError("KEY_UNSUPPORTED", "only ECDSA keys on three curves sign cores", where=where,
                       expected="P-256, P-384 or P-521", got=got, hint=_OPENSSL_HINT)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
    except OSError:
        path.unlink()
        raise
