"""Verifying a core: what is accepted, in which order things are refused, and what is read afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import DflashError
from dflash_core.v1.graph_pb2 import CUBIN, KernelModule
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileEntry, FileRef

from runtime.trust import TrustPolicy
from runtime.verify import VerifiedCore, verify
from tests.toy_core import (
    BIG_BYTES,
    CHUNK,
    ToyCore,
    ToyKey,
    make_toy_core,
    signed_bundle,
    toy_key,
    trust_document,
    with_root,
    write_trust,
)

BUILDER, PARTNER, STRANGER = toy_key(), toy_key("partner"), toy_key("stranger")


@pytest.fixture
def toy(tmp_path: Path) -> ToyCore:
    return make_toy_core(tmp_path / "core")


def policy(*keys: ToyKey, threshold: int = 1, **fields: object) -> TrustPolicy:
    return TrustPolicy.parse(json.dumps(trust_document(*keys, threshold=threshold) | fields).encode(), "trust.json")


def error_of(act: Callable[[], object]) -> DflashError:
    with pytest.raises(DflashError) as caught:
        act()
    return caught.value


def code_of(act: Callable[[], object]) -> str:
    return error_of(act).code


def read_big(core: VerifiedCore, toy: ToyCore, *, threads: int = 2) -> bytearray:
    memory = bytearray(BIG_BYTES)
    core.read_into(toy.big, memoryview(memory), threads=threads)
    return memory


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_accepts_signed_core(toy: ToyCore) -> None:
    with verify(toy.path, policy()) as core:
        assert core.core_digest == hashlib.sha256((toy.path / "manifest.pb").read_bytes()).hexdigest()
        assert core.manifest == toy.manifest()
        assert [signer.keyid for signer in core.signers] == [BUILDER.keyid]
        assert core.path == toy.path
        assert core.nbytes == sum((toy.path / name).stat().st_size for name in toy.contents)


def test_gives_small_files_and_graphs(toy: ToyCore) -> None:
    with verify(toy.path, policy()) as core:
        entries = {entry.path: entry for entry in core.manifest.files}

        for name in (toy.config, toy.state, toy.graph, toy.small):
            assert core.small_file(entries[name].ref) == (toy.path / name).read_bytes()
        graph_set = core.graph_set(core.manifest.graph_files[0])
        assert [graph.name for graph in graph_set.graphs] == ["decode_1"]
        assert core.graph_set(core.manifest.graph_files[0]) is graph_set
        assert core.entry(core.manifest.weight_blobs[0].file).path == toy.big


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_reads_weights_into_memory(toy: ToyCore, threads: int) -> None:
    with verify(toy.path, policy()) as core:
        assert read_big(core, toy, threads=threads) == (toy.path / toy.big).read_bytes()


def test_reports_each_verified_chunk(toy: ToyCore) -> None:
    seen: list[int] = []

    with verify(toy.path, policy()) as core:
        core.read_into(toy.big, memoryview(bytearray(BIG_BYTES)), on_bytes=seen.append)

    assert sorted(seen) == [BIG_BYTES - CHUNK, CHUNK]


def test_reports_every_byte_of_a_full_read(toy: ToyCore) -> None:
    seen: list[int] = []

    with verify(toy.path, policy()) as core:
        core.read_full(seen.append)

        assert sum(seen) == core.nbytes


@pytest.mark.parametrize("memory", [
    pytest.param(bytearray(BIG_BYTES - 1), id="too small"),
    pytest.param(bytearray(BIG_BYTES + 1), id="too large"),
    pytest.param(bytes(BIG_BYTES), id="read-only"),
])
def test_reads_only_into_memory_that_fits(toy: ToyCore, memory: bytes | bytearray) -> None:
    with verify(toy.path, policy()) as core, pytest.raises(ValueError, match="writable bytes"):
        core.read_into(toy.big, memoryview(memory))


def test_reads_only_listed_files(toy: ToyCore) -> None:
    with verify(toy.path, policy()) as core:
        assert code_of(lambda: core.read_into("signatures/x.sig", memoryview(bytearray(1)))) == "MANIFEST_TABLE"
        assert code_of(lambda: core.small_file(FileRef(digest=bytes(32)))) == "MANIFEST_TABLE"


def test_closed_core_reads_nothing(toy: ToyCore) -> None:
    core = verify(toy.path, policy())
    core.close()
    core.close()

    with pytest.raises(ValueError, match="closed"):
        read_big(core, toy)


def test_callback_error_ends_the_read(toy: ToyCore) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with verify(toy.path, policy()) as core, pytest.raises(KeyboardInterrupt):
        core.read_into(toy.big, memoryview(bytearray(BIG_BYTES)), on_bytes=interrupt)

    assert threading.active_count() == before


@pytest.mark.parametrize(("offset", "chunk"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 1), (BIG_BYTES - 1, 1)])
def test_names_the_chunk_that_differs(toy: ToyCore, offset: int, chunk: int) -> None:
    listed = toy.manifest().files[0].chunk_digests[32 * chunk : 32 * chunk + 32].hex()
    data = bytearray((toy.path / toy.big).read_bytes())
    data[offset] ^= 128
    (toy.path / toy.big).write_bytes(data)
    found = hashlib.sha256(data[CHUNK * chunk : CHUNK * (chunk + 1)]).hexdigest()

    with verify(toy.path, policy()) as core:
        error = error_of(lambda: read_big(core, toy))

    assert (error.code, error.expected, error.got) == ("CHUNK_MISMATCH", listed, found)
    assert error.where == f"{toy.big}, chunk {chunk} (bytes from {chunk * CHUNK})"


def test_names_the_first_of_several_bad_chunks(toy: ToyCore) -> None:
    (toy.path / toy.big).write_bytes(bytes(BIG_BYTES))

    with verify(toy.path, policy()) as core:
        assert ", chunk 0 " in error_of(lambda: read_big(core, toy, threads=4)).where


def test_uses_the_file_that_was_opened_not_its_successor(toy: ToyCore, tmp_path: Path) -> None:
    signed = (toy.path / toy.big).read_bytes()

    with verify(toy.path, policy()) as core:
        (toy.path / toy.big).rename(tmp_path / "moved")
        (toy.path / toy.big).write_bytes(bytes(BIG_BYTES))

        assert read_big(core, toy) == signed


@pytest.mark.parametrize(("change", "code"), [
    pytest.param(lambda path: path.write_bytes(bytes(BIG_BYTES)), "CHUNK_MISMATCH", id="rewritten"),
    pytest.param(lambda path: os.truncate(path, CHUNK + 5), "FILE_SIZE", id="cut off"),
])
def test_rejects_file_changed_after_it_was_opened(
    toy: ToyCore, change: Callable[[Path], object], code: str
) -> None:
    with verify(toy.path, policy()) as core:
        change(toy.path / toy.big)

        assert code_of(lambda: read_big(core, toy)) == code
        assert code_of(core.read_full) == code


def test_maps_no_file(toy: ToyCore) -> None:
    with verify(toy.path, policy()) as core:
        read_big(core, toy)

        assert str(toy.path) not in Path("/proc/self/maps").read_text()


def wrong_whole_digest(toy: ToyCore) -> None:
    """Manifest and statement name a digest that the file does not have, beside the right chunk list."""
    wrong = bytes(31) + b"\1"
    manifest = toy.manifest()
    refs = [entry.ref for entry in manifest.files if entry.path == toy.big]
    refs += [blob.file for blob in manifest.weight_blobs if blob.blob_id == 0]
    for ref in refs:
        ref.digest = wrong
    (toy.path / "manifest.pb").write_bytes(manifest.SerializeToString())
    toy.sign(statement=with_root(lambda resources: [
        entry.update(digest=wrong.hex()) for entry in resources if entry["name"] == toy.big
    ]))


def test_full_read_checks_whole_file_digests(toy: ToyCore) -> None:
    wrong_whole_digest(toy)

    with verify(toy.path, policy()) as core:
        assert code_of(core.read_full) == "DIGEST_MISMATCH"


def test_full_read_checks_chunk_lists(toy: ToyCore) -> None:
    toy.edit_manifest(lambda manifest: setattr(manifest.files[0], "chunk_digests", bytes(64)))

    with verify(toy.path, policy()) as core:
        assert code_of(core.read_full) == "CHUNK_MISMATCH"


def test_full_read_checks_the_manifest(toy: ToyCore) -> None:
    with verify(toy.path, policy()) as core:
        with (toy.path / "manifest.pb").open("r+b") as stream:
            stream.write(b"\0")

        assert code_of(core.read_full) == "DIGEST_MISMATCH"


def test_ignores_signature_by_unknown_key_without_parsing_its_payload(toy: ToyCore) -> None:
    (toy.path / "signatures" / "0.sig").write_text(json.dumps(signed_bundle(b"\0 not JSON", STRANGER)))

    with verify(toy.path, policy()) as core:
        assert [signer.keyid for signer in core.signers] == [BUILDER.keyid]


def test_does_not_parse_what_a_revoked_key_signed(toy: ToyCore) -> None:
    (toy.path / "signatures" / "0.sig").write_text(json.dumps(signed_bundle(b"\0 not JSON", PARTNER)))

    with verify(toy.path, policy(BUILDER, PARTNER, revoked_keys=[PARTNER.keyid])) as core:
        assert [signer.keyid for signer in core.signers] == [BUILDER.keyid]


def test_accepts_two_signers_whose_statements_differ_in_form(toy: ToyCore) -> None:
    toy.sign(PARTNER, statement=with_root(lambda resources: resources.reverse()))

    with verify(toy.path, policy(BUILDER, PARTNER, threshold=2)) as core:
        assert {signer.keyid for signer in core.signers} == {BUILDER.keyid, PARTNER.keyid}


def other_digest(resources: list[dict[str, Any]]) -> None:
    resources[0]["digest"] = "00" * 32


def copied_signature(toy: ToyCore) -> None:
    shutil.copy(toy.signature(), toy.path / "signatures" / "again.sig")


def bad_signature_of_partner(toy: ToyCore) -> None:
    path = toy.sign(PARTNER)
    bundle = json.loads(path.read_text())
    bundle["dsseEnvelope"]["payload"] = "e30="
    path.write_text(json.dumps(bundle))


def many_signatures(count: int) -> Callable[[ToyCore], None]:
    def write(toy: ToyCore) -> None:
        text = json.dumps(signed_bundle(b"x", STRANGER))
        for index in range(count - 1):
            (toy.path / "signatures" / f"{index}.sig").write_text(text)
    return write


def large_signature(toy: ToyCore) -> None:
    path = toy.path / "signatures" / "large.sig"
    path.touch()
    os.truncate(path, (4 << 20) + 1)


@pytest.mark.parametrize(("change", "trust", "code"), [
    pytest.param(lambda toy: toy.sign(PARTNER, statement=with_root(other_digest)), policy(BUILDER, PARTNER),
                 "SIG_CONFLICT", id="signers disagree"),
    pytest.param(bad_signature_of_partner, policy(BUILDER, PARTNER), "SIG_INVALID", id="one of two invalid"),
    pytest.param(bad_signature_of_partner, policy(BUILDER, PARTNER, revoked_keys=[PARTNER.keyid]), "SIG_INVALID",
                 id="invalid under a revoked key"),
    pytest.param(copied_signature, policy(BUILDER, PARTNER, threshold=2), "ROLE_UNMET", id="one signature twice"),
    pytest.param(lambda toy: toy.sign(file_name="again.sig"), policy(BUILDER, PARTNER, threshold=2), "ROLE_UNMET",
                 id="two signatures by one key"),
    pytest.param(lambda toy: None, policy(STRANGER), "ROLE_UNMET", id="signed by another"),
    pytest.param(lambda toy: None, policy(revoked_keys=[BUILDER.keyid]), "KEY_REVOKED", id="only a revoked key"),
    pytest.param(lambda toy: toy.sign(PARTNER),
                 policy(BUILDER, PARTNER, threshold=2, revoked_keys=[PARTNER.keyid]), "KEY_REVOKED",
                 id="revoked key fills a threshold of two"),
    pytest.param(many_signatures(17), policy(), "SIG_LIMIT", id="17 signatures"),
    pytest.param(many_signatures(500), policy(), "SIG_LIMIT", id="500 signatures"),
    pytest.param(large_signature, policy(), "SIG_LIMIT", id="signature above 4 MiB"),
    pytest.param(lambda toy: (toy.path / "signatures" / "0.sig").touch(), policy(), "SIG_MALFORMED",
                 id="empty signature file"),
])
def test_rejects_signatures(
    toy: ToyCore, change: Callable[[ToyCore], object], trust: TrustPolicy, code: str
) -> None:
    change(toy)

    assert code_of(lambda: verify(toy.path, trust)) == code


def test_accepts_16_signatures(toy: ToyCore) -> None:
    many_signatures(16)(toy)

    verify(toy.path, policy()).close()


@pytest.mark.parametrize("place", ["trust.json", "config/trust", "signatures/trust.sig"])
def test_rejects_trust_file_inside_the_core(toy: ToyCore, place: str) -> None:
    trust = TrustPolicy.load(write_trust(toy.path / place, trust_document()))

    assert code_of(lambda: verify(toy.path, trust)) == "POLICY_UNSAFE"


def test_rejects_revoked_core(toy: ToyCore) -> None:
    digest = hashlib.sha256((toy.path / "manifest.pb").read_bytes()).hexdigest()

    assert code_of(lambda: verify(toy.path, policy(revoked_sha256=[digest]))) == "CORE_REVOKED"


def test_rejects_core_with_a_revoked_file(toy: ToyCore) -> None:
    digest = hashlib.sha256((toy.path / toy.graph).read_bytes()).hexdigest()

    error = error_of(lambda: verify(toy.path, policy(revoked_sha256=[digest])))

    assert (error.code, error.where) == ("CORE_REVOKED", toy.graph)


@pytest.mark.parametrize(("lowest", "code"), [(0, None), (6, None), (7, None), (8, "CORE_ROLLBACK")])
def test_rejects_release_below_the_lowest(toy: ToyCore, lowest: int, code: str | None) -> None:
    toy.edit_manifest(lambda manifest: setattr(manifest, "release", 7))
    trust = policy(min_release={"toy": lowest, "other": 99})

    if code is None:
        verify(toy.path, trust).close()
    else:
        assert code_of(lambda: verify(toy.path, trust)) == code


def add_entry(path: str) -> Callable[[RebuildManifest], object]:
    return lambda m: m.files.append(FileEntry(path=path, role="config", ref=m.files[3].ref))


def other_path(manifest: RebuildManifest) -> None:
    manifest.files[3].path = "config/other"


def other_weights(manifest: RebuildManifest) -> None:
    manifest.files[1].ref.digest = manifest.weight_blobs[1].file.digest = bytes(32)


def cut_first_file(manifest: RebuildManifest) -> None:
    del manifest.files[3]


@pytest.mark.parametrize(("edit", "code"), [
    pytest.param(lambda m: m.ClearField("format_version"), "VERSION_UNSUPPORTED", id="format version 0"),
    pytest.param(lambda m: setattr(m, "format_version", 2), "VERSION_UNSUPPORTED", id="format version 2"),
    pytest.param(lambda m: m.required_features.append("x"), "FEATURE_UNSUPPORTED", id="unknown feature"),
    pytest.param(cut_first_file, "MANIFEST_TABLE", id="lacks a file"),
    pytest.param(add_entry("config/absent"), "MANIFEST_TABLE", id="adds a file"),
    pytest.param(add_entry("manifest.pb"), "MANIFEST_TABLE", id="lists itself"),
    pytest.param(lambda m: m.files.append(m.files[3]), "MANIFEST_TABLE", id="lists a file twice"),
    pytest.param(other_path, "MANIFEST_TABLE", id="another path"),
    pytest.param(lambda m: setattr(m.files[3].ref, "digest", bytes(32)), "MANIFEST_TABLE", id="another digest"),
    pytest.param(other_weights, "MANIFEST_TABLE", id="another digest of weights"),
    pytest.param(lambda m: setattr(m.files[3].ref, "size_bytes", 3), "FILE_SIZE", id="another size"),
    pytest.param(lambda m: setattr(m.files[0].ref, "size_bytes", 1 << 62), "FILE_SIZE", id="a huge size"),
    pytest.param(lambda m: m.files[0].ClearField("chunk_digests"), "MANIFEST_TABLE", id="no chunk list"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_digests", bytes(33)), "MANIFEST_TABLE", id="33 bytes"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_digests", bytes(32)), "MANIFEST_TABLE", id="one chunk short"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_digests", bytes(96)), "MANIFEST_TABLE", id="one chunk long"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_bytes", 0), "MANIFEST_TABLE", id="chunks of 0"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_bytes", 1), "MANIFEST_TABLE", id="chunks of 1"),
    pytest.param(lambda m: setattr(m.files[0], "chunk_bytes", 2**32 - 1), "MANIFEST_TABLE", id="chunks of 2^32 - 1"),
    pytest.param(lambda m: setattr(m.files[0].ref, "algorithm", 9), "MANIFEST_UNKNOWN", id="unknown digest"),
    pytest.param(lambda m: setattr(m.files[0].ref, "algorithm", 2), "MANIFEST_UNKNOWN", id="BLAKE3"),
    pytest.param(lambda m: setattr(m.tensor_views[0], "size_bytes", 1 << 40), "VIEW_RANGE", id="view past its blob"),
    pytest.param(lambda m: setattr(m.kernels[0].variants[0], "module_id", 7), "GRAPH_REF", id="unknown module"),
])
def test_rejects_signed_manifest(toy: ToyCore, edit: Callable[[RebuildManifest], object], code: str) -> None:
    toy.edit_manifest(edit)

    assert code_of(lambda: verify(toy.path, policy())) == code


@pytest.mark.parametrize(("data", "code"), [
    pytest.param(b"\x08", "MANIFEST_MALFORMED", id="truncated varint"),
    pytest.param(b"\x12\x02\xff\xfe", "MANIFEST_MALFORMED", id="invalid UTF-8"),
    pytest.param(b"\xf3\x06" * 200 + b"\xf4\x06" * 200, "MANIFEST_MALFORMED", id="groups nested 200 deep"),
    pytest.param(b"\x12\xff\xff\xff\xff\x07", "MANIFEST_MALFORMED", id="length past the end"),
    pytest.param(b"", "VERSION_UNSUPPORTED", id="empty"),
    pytest.param(b"\0" * (65 << 20), "MANIFEST_LIMIT", id="65 MiB"),
])
def test_rejects_signed_bytes_that_are_no_manifest(toy: ToyCore, data: bytes, code: str) -> None:
    (toy.path / "manifest.pb").write_bytes(data)
    toy.sign()

    assert code_of(lambda: verify(toy.path, policy())) == code


def test_rejects_signed_bytes_that_are_no_graph_set(toy: ToyCore) -> None:
    name = toy.replace_graph(b"\x08")

    error = error_of(lambda: verify(toy.path, policy()))

    assert (error.code, error.where) == ("MANIFEST_MALFORMED", f"byte 1 of {name}")


def test_rejects_signed_graph_that_breaks_a_rule(toy: ToyCore) -> None:
    data = (toy.path / toy.graph).read_bytes()
    with verify(toy.path, policy()) as core:
        graph_set = core.graph_set(core.manifest.graph_files[0])
    graph_set.graphs[0].edges[0].to = 9
    assert graph_set.SerializeToString() != data
    toy.replace_graph(graph_set.SerializeToString())

    assert code_of(lambda: verify(toy.path, policy())) == "GRAPH_REF"


def test_rejects_signed_module_that_is_no_kernel_image(toy: ToyCore) -> None:
    digest = hashlib.sha256(b"no cubin")
    name = f"modules/{digest.hexdigest()}.cubin"
    (toy.path / "modules").mkdir()
    (toy.path / name).write_bytes(b"no cubin")
    ref = FileRef(algorithm=1, digest=digest.digest(), size_bytes=8)

    def edit(manifest: RebuildManifest) -> None:
        manifest.files.append(FileEntry(ref=ref, path=name, role="module"))
        manifest.modules.append(KernelModule(module_id=1, kind=CUBIN, target="sm_90a", file=ref))

    toy.edit_manifest(edit)

    assert code_of(lambda: verify(toy.path, policy())) == "KERNEL_IMAGE"


def test_rejects_core_without_a_manifest(toy: ToyCore) -> None:
    (toy.path / "manifest.pb").unlink()
    toy.sign()

    assert code_of(lambda: verify(toy.path, policy())) == "FILE_MISSING"


@pytest.mark.parametrize(("make", "code"), [
    pytest.param(lambda path: None, "FILE_MISSING", id="absent"),
    pytest.param(Path.touch, "BUNDLE_MALFORMED", id="an empty file"),
    pytest.param(Path.mkdir, "SIG_MISSING", id="an empty directory"),
])
def test_rejects_path_that_is_no_core(tmp_path: Path, make: Callable[[Path], object], code: str) -> None:
    make(tmp_path / "core")

    assert code_of(lambda: verify(tmp_path / "core", policy())) == code


def test_closes_every_descriptor(toy: ToyCore) -> None:
    before = open_descriptors()

    verify(toy.path, policy()).close()
    code_of(lambda: verify(toy.path, policy(STRANGER)))
    (toy.path / toy.state).unlink()
    (toy.path / toy.state).symlink_to(toy.path / toy.small)
    code_of(lambda: verify(toy.path, policy()))

    assert open_descriptors() == before


def test_raises_the_descriptor_limit_of_the_process_when_a_core_needs_more(toy: ToyCore) -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 3, old[1]))
    try:
        with verify(toy.path, policy()) as core:
            assert len(read_big(core, toy)) == BIG_BYTES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
