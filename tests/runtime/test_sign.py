"""Signing: what is refused, what is written, and that the reference tool and we verify each other."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.errors import DflashError
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import SHA256, FileEntry, FileRef

from runtime.sign import file_entry, sign_core
from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.toy_core import CHUNK, ToyCore, ToyKey, make_toy_core, toy_key, trust_document

CURVES = ["p256", "p384", "p521"]
KEY = toy_key()


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core", signed=False)


def policy(*keys: ToyKey, threshold: int = 1) -> TrustPolicy:
    return TrustPolicy.parse(json.dumps(trust_document(*keys, threshold=threshold)).encode(), "trust.json")


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(DflashError) as caught:
        act()
    return caught.value.code


def tree(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in root.rglob("*") if path.is_file()}


def reference(verb: str, toy: ToyCore, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", verb, "key", str(toy.path), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def reference_signs(toy: ToyCore, key: ToyKey, directory: Path) -> None:
    private = directory / f"{key.keyid}.pem"
    private.write_bytes(key.private_pem())
    done = reference("sign", toy, "--private_key", private, "--signature", toy.path / "signatures" / "partner.sig",
                     "--ignore-paths", toy.path / "signatures")
    assert done.returncode == 0, done.stdout + done.stderr


def reference_verifies(toy: ToyCore, key: ToyKey, directory: Path) -> bool:
    public = directory / f"{key.keyid}.public.pem"
    public.write_text(key.pem)
    done = reference("verify", toy, "--signature", toy.signature(key), "--public_key", public)
    return done.returncode == 0


@pytest.mark.parametrize("curve", CURVES)
def test_reference_tool_verifies_what_we_sign(toy: ToyCore, tmp_path: Path, curve: str) -> None:
    key = toy_key(f"ours {curve}", curve)

    sign_core(toy.path, key.private)

    assert reference_verifies(toy, key, tmp_path)
    verify(toy.path, policy(key)).close()


@pytest.mark.parametrize("curve", CURVES)
def test_we_verify_what_the_reference_tool_signs(toy: ToyCore, tmp_path: Path, curve: str) -> None:
    key = toy_key(f"theirs {curve}", curve)
    (toy.path / "signatures").mkdir()

    reference_signs(toy, key, tmp_path)

    with verify(toy.path, policy(key)) as core:
        assert [signer.keyid for signer in core.signers] == [key.keyid]


def test_the_reference_tool_and_we_sign_one_core(toy: ToyCore, tmp_path: Path) -> None:
    partner = toy_key("partner", "p384")
    sign_core(toy.path, KEY.private)

    reference_signs(toy, partner, tmp_path)

    with verify(toy.path, policy(KEY, partner, threshold=2)) as core:
        assert {signer.keyid for signer in core.signers} == {KEY.keyid, partner.keyid}
    assert reference_verifies(toy, KEY, tmp_path)


def test_reference_tool_rejects_what_we_sign_once_it_is_changed(toy: ToyCore, tmp_path: Path) -> None:
    sign_core(toy.path, KEY.private)
    (toy.path / toy.config).write_bytes(b"{}")

    assert not reference_verifies(toy, KEY, tmp_path)


def test_signing_adds_one_file_and_changes_no_other(toy: ToyCore) -> None:
    before = tree(toy.path)

    written = sign_core(toy.path, KEY.private)

    assert written == toy.path / "signatures" / f"{KEY.keyid}.sig"
    after = tree(toy.path)
    assert set(after) - set(before) == {f"signatures/{KEY.keyid}.sig"}
    assert {name: after[name] for name in before} == before


def test_equal_cores_give_equal_signatures(tmp_path: Path) -> None:
    signatures = [sign_core(make_toy_core(tmp_path / name, signed=False).path, KEY.private).read_bytes()
                  for name in ("one", "two")]

    assert signatures[0] == signatures[1]
    assert b"one" not in signatures[0]


def test_signing_again_replaces_the_same_keys_signature(toy: ToyCore) -> None:
    sign_core(toy.path, KEY.private)
    toy.edit_manifest(lambda manifest: setattr(manifest, "release", 5))

    sign_core(toy.path, KEY.private)

    with verify(toy.path, policy()) as core:
        assert core.manifest.release == 5


def test_statement_names_the_core_and_not_its_directory(toy: ToyCore) -> None:
    written = json.loads(sign_core(toy.path, KEY.private).read_text())

    assert b'"name":"toy"' in base64.b64decode(written["dsseEnvelope"]["payload"])


def test_progress_counts_every_byte(toy: ToyCore) -> None:
    seen: list[int] = []

    sign_core(toy.path, KEY.private, on_bytes=seen.append)

    assert sum(seen) == sum((toy.path / name).stat().st_size for name in toy.contents if name != "manifest.pb")


def test_signs_with_a_function(toy: ToyCore) -> None:
    asked: list[bytes] = []

    def key_service(data: bytes) -> bytes:
        asked.append(data)
        return KEY.private.sign(data, ec.ECDSA(hashes.SHA256()))

    sign_core(toy.path, key_service, public_key=KEY.private.public_key())

    verify(toy.path, policy()).close()
    assert len(asked) == 1
    assert asked[0].startswith(b"DSSEv1 28 application/vnd.in-toto+json ")


def test_function_without_its_public_key_is_refused(toy: ToyCore) -> None:
    with pytest.raises(ValueError, match="public key"):
        sign_core(toy.path, lambda data: b"")


def test_function_that_signs_with_another_key_leaves_no_signature(toy: ToyCore) -> None:
    other = toy_key("other").private.public_key()

    code = code_of(lambda: sign_core(toy.path, lambda data: KEY.private.sign(data, ec.ECDSA(hashes.SHA256())),
                                     public_key=other))

    assert code == "SIG_INVALID"
    assert not (toy.path / "signatures").exists()


def edit_only(edit: Callable[[RebuildManifest], object]) -> Callable[[ToyCore], None]:
    return lambda toy: toy.edit_manifest(edit, sign=False)


def change_byte(part: Callable[[ToyCore], str]) -> Callable[[ToyCore], None]:
    def apply(toy: ToyCore) -> None:
        path = toy.path / part(toy)
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    return apply


def list_file_with_bad_name(toy: ToyCore) -> None:
    (toy.path / "config" / "README").write_bytes(b"x")
    ref = FileRef(algorithm=SHA256, digest=hashlib.sha256(b"x").digest(), size_bytes=1)
    edit_only(lambda m: m.files.append(FileEntry(ref=ref, path="config/README", role="config")))(toy)


def link(toy: ToyCore) -> None:
    (toy.path / "link").symlink_to(toy.path / toy.config)


@pytest.mark.parametrize(("change", "code"), [
    pytest.param(lambda toy: (toy.path / "config" / "notes").touch(), "MANIFEST_TABLE", id="unlisted file"),
    pytest.param(lambda toy: (toy.path / toy.small).unlink(), "MANIFEST_TABLE", id="listed file missing"),
    pytest.param(lambda toy: (toy.path / "manifest.pb").unlink(), "FILE_MISSING", id="no manifest"),
    pytest.param(lambda toy: (toy.path / "modules").mkdir(), "FILE_EXTRA", id="empty directory"),
    pytest.param(link, "FILE_TYPE", id="symbolic link"),
    pytest.param(list_file_with_bad_name, "MANIFEST_TABLE", id="name in capitals"),
    pytest.param(change_byte(lambda toy: toy.small), "DIGEST_MISMATCH", id="small weights changed"),
    pytest.param(change_byte(lambda toy: toy.big), "CHUNK_MISMATCH", id="large weights changed"),
    pytest.param(lambda toy: os.truncate(toy.path / toy.state, 255), "FILE_SIZE", id="state shorter"),
    pytest.param(edit_only(lambda m: setattr(m.files[0], "chunk_digests", bytes(64))), "CHUNK_MISMATCH",
                 id="wrong chunk list"),
    pytest.param(edit_only(lambda m: setattr(m, "format_version", 2)), "VERSION_UNSUPPORTED", id="version"),
    pytest.param(edit_only(lambda m: m.required_features.append("x")), "FEATURE_UNSUPPORTED", id="feature"),
    pytest.param(edit_only(lambda m: setattr(m.tensor_views[0], "offset_bytes", 256)), "VIEW_RANGE", id="view"),
    pytest.param(lambda toy: toy.replace_graph(b"\x08", sign=False), "MANIFEST_MALFORMED", id="graph"),
    pytest.param(lambda toy: (toy.path / "manifest.pb").write_bytes(b"\x08"), "MANIFEST_MALFORMED",
                 id="manifest cut off"),
])
def test_signs_no_core_that_would_be_refused(toy: ToyCore, change: Callable[[ToyCore], object], code: str) -> None:
    change(toy)

    assert code_of(lambda: sign_core(toy.path, KEY.private)) == code
    assert not (toy.path / "signatures").exists()


def test_rejects_file_in_place_of_the_signatures_directory(toy: ToyCore) -> None:
    (toy.path / "signatures").touch()

    assert code_of(lambda: sign_core(toy.path, KEY.private)) == "FILE_TYPE"


def test_rejects_key_on_another_curve(toy: ToyCore) -> None:
    assert code_of(lambda: sign_core(toy.path, ec.generate_private_key(ec.SECP256K1()))) == "KEY_UNSUPPORTED"


def test_full_disk_leaves_the_earlier_signature(toy: ToyCore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sign_core(toy.path, KEY.private).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    assert code_of(lambda: sign_core(toy.path, KEY.private)) == "SIGNATURE_UNWRITABLE"
    assert [path.read_bytes() for path in (toy.path / "signatures").iterdir()] == [before]


def test_signs_after_a_run_that_was_killed(toy: ToyCore) -> None:
    left = toy.path / "signatures" / f"{KEY.keyid}.sig.part"
    left.parent.mkdir()
    left.write_bytes(b"half")

    sign_core(toy.path, KEY.private)

    verify(toy.path, policy()).close()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 7])
def test_file_entry_digests_the_whole_and_each_chunk(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []

    entry = file_entry(tmp_path / "file", "weights/file.bin", "weights", seen.append)

    assert (entry.path, entry.role) == ("weights/file.bin", "weights")
    assert (entry.ref.algorithm, entry.ref.size_bytes) == (SHA256, size)
    assert entry.ref.digest == hashlib.sha256(data).digest()
    assert sum(seen) == size
    if size <= 4194304:
        assert not entry.HasField("chunk_bytes") and not entry.HasField("chunk_digests")
    else:
        parts = [data[start : start + 4194304] for start in range(0, size, 4194304)]
        assert entry.chunk_bytes == 4194304
        assert entry.chunk_digests == b"".join(hashlib.sha256(part).digest() for part in parts)


def test_file_entry_hashes_chunks_in_order_however_slow_a_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowThread(threading.Thread):
        def run(self) -> None:
            time.sleep(0.05)
            super().run()

    data = os.urandom(3 * CHUNK + 7)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(threading, "Thread", SlowThread)

    entry = file_entry(tmp_path / "file", "weights/file.bin", "weights")

    assert entry.ref.digest == hashlib.sha256(data).digest()


def test_file_entry_uses_the_memory_of_two_chunks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 64 << 20)

    tracemalloc.start()
    try:
        file_entry(tmp_path / "file", "weights/file.bin", "weights")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < (8 << 20) + 65536


@pytest.mark.parametrize("name", ["/weights/x", "weights/X", "a/b/c/d", "weights/x.", ""])
def test_file_entry_rejects_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    assert code_of(lambda: file_entry(tmp_path / "file", name, "weights")) == "MANIFEST_TABLE"


def test_file_entry_names_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    assert code_of(lambda: file_entry(tmp_path / "absent", "weights/x", "weights")) == "FILE_UNREADABLE"
    assert code_of(lambda: file_entry(tmp_path, "weights/x", "weights")) == "FILE_UNREADABLE"
