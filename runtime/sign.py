"""Sign a core, and make the entries that its manifest lists files with.

    entry = file_entry(core / "weights/3f….bin", "weights/3f….bin", "weights")
    signature = sign_core(core, load_private_key(Path("key.pem")))

Signing adds one file and changes no other byte, so a core can be signed again, or by others, at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import FormatError, ResourceError
from dflash_core.v1.weights_pb2 import SHA256, FileEntry, FileRef

from .bundle import PAYLOAD_TYPE, Bundle, check_signature, encode_bundle, encode_statement, is_name, signed_bytes
from .corefiles import CHUNK_BYTES, SIGNATURES, CoreFiles, OnBytes, digest_descriptor, mismatch
from .keys import PrivateKey, PublicKey, keyid, require_supported, signature_hash
from .structure import check_manifest_structure
from .verify import (
    MANIFEST,
    check_chunks,
    check_contents,
    check_listing,
    check_table,
    check_version,
    content_names,
    file_sizes,
    parse_manifest,
    read_manifest,
)

SignBytes = Callable[[bytes], bytes]


def file_entry(path: Path, name: str, role: str, on_bytes: OnBytes | None = None) -> FileEntry:
    """The manifest's entry for a file: size, SHA-256, and a digest per 4 MiB if it is larger than that.

    The file is read once, in the memory of two chunks.

    Args:
        path: the file to read.
        name: its path in the core.
        role: "module", "graph", "weights", "state", "config", "golden" or "component".
        on_bytes: told the size of each piece that was read.
    Raises:
        FormatError: MANIFEST_TABLE, `name` cannot be a path in a core.
        ResourceError: FILE_UNREADABLE.
    """
    _require_name(name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        raise ResourceError("FILE_UNREADABLE", f"cannot open a file: {err.strerror}", where=str(path)) from err
    try:
        size = os.fstat(fd).st_size
        digests = digest_descriptor(fd, size, name, on_bytes)
    finally:
        os.close(fd)
    entry = FileEntry(ref=FileRef(algorithm=SHA256, digest=digests.sha256, size_bytes=size), path=name, role=role)
    if size > CHUNK_BYTES:
        entry.chunk_bytes = CHUNK_BYTES
        entry.chunk_digests = b"".join(digests.chunks)
    return entry


def sign_core(
    core: Path, key: PrivateKey | SignBytes, *, public_key: PublicKey | None = None, on_bytes: OnBytes | None = None
) -> Path:
    """Sign what a core holds; refuses a core that the runtime would refuse.

    Every file is read and hashed. The signature is written beside its final name and renamed, replacing an earlier
    one by the same key. With a private key it is deterministic (RFC 6979) where the installed OpenSSL can do that.

    Args:
        core: the core's directory, complete but for this signature.
        key: a private key, or a function from the bytes to sign to a DER signature, for keys that live elsewhere.
        public_key: required with a function, and only then.
        on_bytes: told the size of each piece that was read.
    Returns:
        Path of the signature, signatures/<keyid>.sig.
    Raises:
        FormatError, CompatibilityError, VerificationError: as `verify` raises them; SIG_INVALID when the function's
            signature does not verify under `public_key`.
        PolicyError: KEY_UNSUPPORTED.
        ResourceError: SIGNATURE_UNWRITABLE or FILE_UNREADABLE.
    """
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signer, sign = key.public_key(), _signing_function(key)
    else:
        if public_key is None:
            raise ValueError("a signing function needs the public key that it signs for")
        signer, sign = public_key, key
    require_supported(signer, "signing key")
    name = keyid(signer)
    target = core / SIGNATURES / f"{name}.sig"
    partial = target.with_name(f"{target.name}.part")
    with contextlib.suppress(NotADirectoryError):  # refused with its own error below
        partial.unlink(missing_ok=True)  # of a run that was killed
    payload = _checked_statement(core, on_bytes)
    bundle = Bundle(name, PAYLOAD_TYPE, payload, sign(signed_bytes(PAYLOAD_TYPE, payload)))
    check_signature(bundle, signer, str(target))
    _write(partial, target, encode_bundle(bundle))
    return target


def _checked_statement(core: Path, on_bytes: OnBytes | None) -> bytes:
    """Check the core as the runtime will, but for signatures, and state its files."""
    with CoreFiles.open(core) as files:
        check_listing(files, content_names(files))
        data = read_manifest(files)
        manifest = parse_manifest(data)
        check_version(manifest)
        check_manifest_structure(manifest, file_sizes(files))
        found = {name: files.digest(name, on_bytes) for name in file_sizes(files)}
        for entry in manifest.files:
            check_chunks(entry, found[entry.path].chunks)
            if found[entry.path].sha256 != entry.ref.digest:
                raise mismatch(entry.path, entry.ref.digest, found[entry.path].sha256)
        digests = {name: file.sha256.hex() for name, file in found.items()}
        digests[MANIFEST] = hashlib.sha256(data).hexdigest()
        for name in digests:
            _require_name(name)
        check_table(files, manifest, digests)
        check_contents(files, manifest)
        return encode_statement(manifest.core_name, digests)


def _require_name(name: str) -> None:
    if not is_name(name):
        raise FormatError("MANIFEST_TABLE", "a file name is not allowed in a core", where=ascii(name)[1:-1],
                          expected="one to three parts of a-z 0-9 . _ - joined by /")


def _signing_function(key: PrivateKey) -> SignBytes:
    def sign(data: bytes) -> bytes:
        digest = signature_hash(key.public_key())
        try:
            algorithm = ec.ECDSA(digest, deterministic_signing=True)
        except UnsupportedAlgorithm:
            algorithm = ec.ECDSA(digest)
        return key.sign(data, algorithm)

    return sign


def _write(partial: Path, target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    except OSError as err:
        partial.unlink(missing_ok=True)
        raise ResourceError("SIGNATURE_UNWRITABLE", f"cannot write the signature: {err.strerror}", where=str(target),
                            hint="free some space, or make the core's directory writable") from err
