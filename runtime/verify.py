"""From a path and a trust policy to a core whose every byte is what trusted keys have signed.

    with verify(Path("demo/core"), TrustPolicy.load(Path("trust.json"))) as core:
        weights = memoryview(bytearray(core.entry(blob.file).ref.size_bytes))
        core.read_into(core.entry(blob.file).path, weights, threads=4)

There is one way to verify and no switch that weakens it. Weights are verified when they are read, in the memory they
are then used from; everything that is parsed is verified before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from dflash_core.errors import CompatibilityError, FormatError, PolicyError, VerificationError
from dflash_core.v1.graph_pb2 import GraphFile, GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileEntry, FileRef
from google.protobuf.message import DecodeError, Message

from .archive import open_core
from .bundle import Statement, check_signature, parse_bundle, parse_statement
from .corefiles import SIGNATURES, CoreFiles, OnBytes, mismatch, read_chunks, read_verified
from .manifest_wire import check_manifest_bytes
from .structure import check_graph_bytes, check_graph_set, check_manifest_structure, check_module
from .trust import Signer, TrustPolicy

FORMAT_VERSION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
MANIFEST = "manifest.pb"
MAX_MANIFEST_BYTES = 64 << 20
MAX_SIGNATURE_BYTES = 4 << 20
MAX_EAGER_BYTES = 1 << 30
_EAGER_ROLES = ("module", "graph", "config", "component")

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Contents:
    """The small files of a core, verified and where possible parsed.

    Attributes:
        files: name -> bytes of the modules, graphs, configs and components.
        graph_sets: SHA-256 of a graph file -> what it holds.
    """

    files: Mapping[str, bytes]
    graph_sets: Mapping[bytes, GraphSet]


@dataclass(frozen=True, slots=True)
class VerifiedCore:
    """A core that `verify` accepted; only `verify` makes one. Use it as a context manager: it holds the files open.

    Attributes:
        path: where the core lies, for messages.
        core_digest: SHA-256 of manifest.pb in hex; the name of this exact core.
        manifest: the manifest, parsed from verified bytes.
        signers: the trusted signers that count, by key id.
    """

    path: Path
    core_digest: str
    manifest: RebuildManifest
    signers: tuple[Signer, ...]
    _files: CoreFiles
    _contents: Contents
    _entries: Mapping[str, FileEntry]
    _by_digest: Mapping[bytes, FileEntry]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. What was already read stays usable."""
        self._files.close()

    @property
    def nbytes(self) -> int:
        """Bytes that `read_full` reads: every file outside signatures/."""
        return self._files.size(MANIFEST) + sum(entry.ref.size_bytes for entry in self._entries.values())

    @property
    def names(self) -> list[str]:
        """Every file of the core, signatures included, sorted."""
        return sorted(self._files.files)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """A file in pieces of at most 4 MiB, not compared with anything: for copying. One buffer holds each in turn."""
        return self._files.pieces(name)

    def entry(self, ref: FileRef) -> FileEntry:
        """The listed file that a reference of this manifest means."""
        found = self._by_digest.get(ref.digest)
        if found is None:
            raise FormatError("MANIFEST_TABLE", "no listed file has this digest", where=MANIFEST, got=ref.digest.hex())
        return found

    def graph_set(self, graph_file: GraphFile) -> GraphSet:
        """The graphs of one device target and rank class: verified, parsed and checked. Treat it as read-only."""
        found = self._contents.graph_sets.get(graph_file.file.digest)
        if found is None:
            raise FormatError("MANIFEST_TABLE", "no graph file has this digest", where=MANIFEST,
                              got=graph_file.file.digest.hex())
        return found

    def small_file(self, ref: FileRef) -> bytes:
        """The bytes of a whole file: module, graph, state, config, golden or component.

        Raises:
            VerificationError: DIGEST_MISMATCH or FILE_SIZE, for a state or golden file; the others were verified
                when the core was opened and are held in memory.
        """
        entry = self.entry(ref)
        held = self._contents.files.get(entry.path)
        return _read_whole(self._files, entry) if held is None else held

    def read_into(
        self, path: str, destination: memoryview, *, threads: int = 2, on_bytes: OnBytes | None = None
    ) -> None:
        """Read a listed file into `destination` and verify each 4 MiB chunk there.

        Args:
            path: the file's path in the manifest.
            destination: writable memory of exactly the file's size. Use nothing of it when this raises.
            threads: how many threads read and hash.
            on_bytes: told the size of each chunk that has verified, one call at a time, from any of the threads.
        Raises:
            VerificationError: CHUNK_MISMATCH naming file and chunk; DIGEST_MISMATCH for a file of at most 4 MiB;
                FILE_SIZE when the file became shorter.
            FormatError: MANIFEST_TABLE, the core lists no such file.
            ValueError: `destination` has another size or is read-only.
        """
        entry = self._listed(path)
        read_verified(self._files.file(path), entry, destination, threads=threads, on_bytes=on_bytes)

    def read_chunks(self, path: str, place: Callable[[int, int], memoryview],
                    verified: Callable[[int, memoryview], None], *, threads: int = 2) -> None:
        """Read a listed file in chunks of at most 4 MiB, each into memory that the caller gives, and verify it there.

        Args:
            path: the file's path in the manifest.
            place: (offset, nbytes) -> `nbytes` writable bytes; called by each thread for its next chunk, may block.
            verified: told offset and memory of each chunk that is what was signed, by the thread that read it.
            threads: how many threads read and hash; all have ended when this returns or raises.
        Raises:
            VerificationError, FormatError: as `read_into`; and whatever `place` and `verified` raise.
        """
        entry = self._listed(path)
        read_chunks(self._files.file(path), entry, place, verified, threads=threads)

    def _listed(self, path: str) -> FileEntry:
        entry = self._entries.get(path)
        if entry is None:
            raise FormatError("MANIFEST_TABLE", "the core lists no such file", where=path)
        return entry

    def read_full(self, on_bytes: OnBytes | None = None) -> None:
        """Read every file and check chunk lists and whole-file digests; uses the memory of two chunks.

        Args:
            on_bytes: told the size of each piece that was read.
        Raises:
            VerificationError: CHUNK_MISMATCH or DIGEST_MISMATCH.
        """
        found = self._files.digest(MANIFEST, on_bytes)
        if found.sha256.hex() != self.core_digest:
            raise mismatch(MANIFEST, bytes.fromhex(self.core_digest), found.sha256)
        for path in sorted(self._entries):
            entry = self._entries[path]
            found = self._files.digest(path, on_bytes)
            check_chunks(entry, found.chunks)
            if found.sha256 != entry.ref.digest:
                raise mismatch(path, entry.ref.digest, found.sha256)


def verify(path: Path, trust: TrustPolicy) -> VerifiedCore:
    """Open a core and check that trusted signers have signed exactly what it holds.

    1. The trust file was checked when `trust` was loaded; here, it must not lie inside the core.
    2. Open the directory and everything below it, once, by descriptor; or the archive, and compare its headers.
    3. Check each signature by a key of the trust file, over the payload bytes as stored.
    4. Parse the statements that count; all state the same files and digests.
    5. Roles are met without revoked keys.
    6. The files present are those stated.
    7. The manifest is the one stated, not revoked, not rolled back, of a known format, and lists the same files.
    8. The manifest keeps the structure rules, before anything is allocated by a number it states.
    9. Modules, graphs, configs and components are read whole, compared with their digests, then parsed. State and
       golden files are compared when `small_file` reads them, weights chunk by chunk when `read_into` does.

    Args:
        path: the core's directory, or an archive of it.
        trust: whose signatures are accepted.
    Returns:
        The verified core, with its files open.
    Raises:
        PolicyError: POLICY_UNSAFE, the trust file lies inside the core.
        VerificationError: the core is not what trusted keys have signed.
        FormatError, CompatibilityError: it is, and breaks a structure rule or needs another runtime. An archive
            whose headers are not the canonical ones is BUNDLE_MALFORMED before anything else.
        ResourceError: a file cannot be read.
    Source: docs/core-format.md.
    """
    # 2.
    files = open_core(path)
    try:
        # 1.
        _refuse_trust_from_inside(files, trust)
        # 3. and 4.
        verified, digests = _check_signatures(files, trust)
        # 5.
        signers = trust.accept(verified)
        # 6.
        check_listing(files, digests)
        # 7.
        data = read_manifest(files)
        core_digest = hashlib.sha256(data).hexdigest()
        if core_digest != digests[MANIFEST]:
            raise mismatch(MANIFEST, bytes.fromhex(digests[MANIFEST]), bytes.fromhex(core_digest))
        _refuse_revoked(digests, trust)
        manifest = parse_manifest(data)
        _refuse_rollback(manifest, trust)
        check_version(manifest)
        check_table(files, manifest, digests)
        # 8.
        check_manifest_structure(manifest, file_sizes(files))
        # 9.
        contents = check_contents(files, manifest)
    except BaseException:
        files.close()
        raise
    by_digest: dict[bytes, FileEntry] = {}
    for entry in manifest.files:
        by_digest.setdefault(entry.ref.digest, entry)
    return VerifiedCore(
        path=path, core_digest=core_digest, manifest=manifest, signers=signers, _files=files, _contents=contents,
        _entries={entry.path: entry for entry in manifest.files}, _by_digest=by_digest,
    )


def content_names(files: CoreFiles) -> list[str]:
    """The files outside signatures/, sorted."""
    return sorted(name for name in files.files if not name.startswith(f"{SIGNATURES}/"))


def file_sizes(files: CoreFiles) -> dict[str, int]:
    """Bytes of every file that a manifest lists, as they were when the core was opened."""
    return {name: files.size(name) for name in content_names(files) if name != MANIFEST}


def check_listing(files: CoreFiles, stated: Iterable[str]) -> None:
    """Step 6: the files present are the files stated, no more and no fewer, and no directory is empty."""
    expected, present = set(stated), set(content_names(files))
    for name in sorted(expected):
        if name in files.directories:
            raise VerificationError("FILE_TYPE", "a directory stands where a file is listed", where=name,
                                    expected="a regular file", got="a directory")
    for name in sorted(expected - present):
        raise VerificationError("FILE_MISSING", "a listed file is missing", where=name, hint="fetch the core again")
    for name in sorted(present - expected):
        raise _extra(name, "a file is not listed")
    for name in sorted(name for name, empty in files.directories.items() if empty and name != SIGNATURES):
        raise _extra(name, "a directory is empty")
    for name in sorted(name for name in files.files if name.startswith(f"{SIGNATURES}/")):
        if not name.endswith(".sig"):
            raise _extra(name, "signatures/ holds a file that is not a signature")
    if MANIFEST not in present:
        raise VerificationError("FILE_MISSING", "a core has a manifest", where=MANIFEST, hint="fetch the core again")


def read_manifest(files: CoreFiles) -> bytes:
    """The bytes of manifest.pb in private memory; at most 64 MiB of them."""
    nbytes = files.size(MANIFEST)
    if nbytes > MAX_MANIFEST_BYTES:
        raise FormatError("MANIFEST_LIMIT", "the manifest is too large", where=MANIFEST,
                          expected=f"at most {MAX_MANIFEST_BYTES} bytes", got=nbytes)
    return files.read(MANIFEST, nbytes)


def parse(kind: type[M], data: bytes, where: str) -> M:
    """Parse verified bytes as a message. Raises MANIFEST_MALFORMED."""
    try:
        return kind.FromString(data)
    except DecodeError as err:
        raise FormatError("MANIFEST_MALFORMED", f"not a {kind.DESCRIPTOR.name}", where=where,
                          hint="report this core to whoever built it") from err


def parse_manifest(data: bytes) -> RebuildManifest:
    """Parse the verified bytes of manifest.pb. Raises MANIFEST_MALFORMED, or MANIFEST_LIMIT before it takes memory."""
    check_manifest_bytes(data)
    return parse(RebuildManifest, data, MANIFEST)


def check_version(manifest: RebuildManifest) -> None:
    """The format is one that this runtime reads, and needs nothing that it does not know."""
    if manifest.format_version != FORMAT_VERSION:
        raise CompatibilityError("VERSION_UNSUPPORTED", "the core has another format version", where=MANIFEST,
                                 expected=FORMAT_VERSION, got=manifest.format_version, hint="use a newer dflash")
    for feature in manifest.required_features:
        if feature not in KNOWN_FEATURES:
            raise CompatibilityError("FEATURE_UNSUPPORTED", "the core needs a feature that this runtime does not have",
                                     where=MANIFEST, got=ascii(feature)[:200], hint="use a newer dflash")


def check_table(files: CoreFiles, manifest: RebuildManifest, digests: Mapping[str, str]) -> None:
    """The manifest lists exactly the stated files, with the stated digests and the sizes found on disk.

    Args:
        digests: name -> SHA-256 in hex of every file outside signatures/, manifest.pb included.
    Raises:
        FormatError: MANIFEST_TABLE.
        VerificationError: FILE_SIZE.
    """
    listed: set[str] = set()
    for entry in manifest.files:
        where = ascii(entry.path)[1:-1]
        if entry.path in listed:
            raise FormatError("MANIFEST_TABLE", "the manifest lists a file twice", where=where)
        listed.add(entry.path)
        if entry.path == MANIFEST or entry.path not in digests:
            raise FormatError("MANIFEST_TABLE", "the manifest lists a file that the signers did not", where=where)
        if entry.ref.digest.hex() != digests[entry.path]:
            raise FormatError("MANIFEST_TABLE", "manifest and statement disagree about a digest", where=where,
                              expected=digests[entry.path], got=entry.ref.digest.hex())
        if entry.ref.size_bytes != files.size(entry.path):
            raise VerificationError("FILE_SIZE", "a file has another size than the manifest states", where=where,
                                    expected=entry.ref.size_bytes, got=files.size(entry.path),
                                    hint="fetch the core again")
    for name in sorted(digests.keys() - listed - {MANIFEST}):
        raise FormatError("MANIFEST_TABLE", "the manifest does not list a file that the signers did", where=name)


def check_contents(files: CoreFiles, manifest: RebuildManifest) -> Contents:
    """Step 9: read the small files whole, compare them with their digests, and only then parse and check them."""
    eager = [entry for entry in manifest.files if entry.role in _EAGER_ROLES]
    nbytes = sum(entry.ref.size_bytes for entry in eager)
    if nbytes > MAX_EAGER_BYTES:
        raise FormatError("MANIFEST_LIMIT", "the files that are read whole are too large", where=MANIFEST,
                          expected=f"at most {MAX_EAGER_BYTES} bytes of {', '.join(_EAGER_ROLES)}", got=nbytes,
                          hint="report this core to whoever built it; it is signed but not well formed")
    held = {entry.path: _read_whole(files, entry) for entry in eager}
    paths = {entry.ref.digest: entry.path for entry in manifest.files if entry.path in held}
    symbols: dict[int, list[str]] = {}
    for kernel in manifest.kernels:
        for variant in kernel.variants:
            symbols.setdefault(variant.module_id, []).append(variant.symbol)
    for module in manifest.modules:
        if module.HasField("file"):
            check_module(held[paths[module.file.digest]], module, symbols.get(module.module_id, []))
    graph_sets: dict[bytes, GraphSet] = {}
    for graph_file in manifest.graph_files:
        digest = graph_file.file.digest
        check_graph_bytes(held[paths[digest]], paths[digest])
        graph_set = parse(GraphSet, held[paths[digest]], paths[digest])
        check_graph_set(graph_set, manifest, graph_file.target_id)
        graph_sets[digest] = graph_set
    return Contents(held, graph_sets)


def check_chunks(entry: FileEntry, found: tuple[bytes, ...]) -> None:
    """Compare the chunk digests found with those listed, if the file has a list. Raises CHUNK_MISMATCH."""
    if not entry.HasField("chunk_digests"):
        return
    for index, got in enumerate(found):
        expected = entry.chunk_digests[32 * index : 32 * index + 32]
        if got != expected:
            raise mismatch(entry.path, expected, got, index)


def _read_whole(files: CoreFiles, entry: FileEntry) -> bytes:
    data = files.read(entry.path, entry.ref.size_bytes)
    got = hashlib.sha256(data).digest()
    if got != entry.ref.digest:
        raise mismatch(entry.path, entry.ref.digest, got)
    return data


def _refuse_trust_from_inside(files: CoreFiles, trust: TrustPolicy) -> None:
    for name, file in files.files.items():
        if file.identity == trust.source:
            raise PolicyError("POLICY_UNSAFE", "the trust file lies inside the core", where=name,
                              hint="a core cannot say whom to trust; keep the trust file elsewhere")


def _check_signatures(files: CoreFiles, trust: TrustPolicy) -> tuple[set[str], Mapping[str, str]]:
    """Steps 3 and 4: ids of the keys of `trust` that signed (revoked ones too), and what those that count state."""
    names = sorted(name for name in files.files if name.startswith(f"{SIGNATURES}/") and name.endswith(".sig"))
    if not names:
        raise VerificationError("SIG_MISSING", "the core is not signed", where=f"{SIGNATURES}/",
                                hint="ask for a signed core; an unsigned one is never loaded")
    verified: set[str] = set()
    agreed: tuple[str, Statement] | None = None
    for name in names:
        where = ascii(name)[1:-1]
        if files.size(name) > MAX_SIGNATURE_BYTES:
            raise VerificationError("SIG_LIMIT", "a signature file is too large", where=where,
                                    expected=f"at most {MAX_SIGNATURE_BYTES} bytes", got=files.size(name))
        bundle = parse_bundle(files.read(name, files.size(name)), where)
        key = trust.keys.get(bundle.hint)
        if key is None:
            continue
        check_signature(bundle, key.public_key, where)
        verified.add(key.keyid)
        if key.keyid in trust.revoked_keys:
            continue
        statement = parse_statement(bundle.payload, where)
        if agreed is not None and statement.digests != agreed[1].digests:
            raise VerificationError("SIG_CONFLICT", "two signers state different files", where=where,
                                    expected=f"what {agreed[0]} states", hint="have the core signed again by both")
        agreed = agreed or (where, statement)
    return verified, {} if agreed is None else agreed[1].digests


def _refuse_revoked(digests: Mapping[str, str], trust: TrustPolicy) -> None:
    for name in sorted(digests):
        if digests[name] in trust.revoked_sha256:
            what = "this core is revoked" if name == MANIFEST else "the core holds a revoked file"
            raise VerificationError("CORE_REVOKED", what, where=name, got=digests[name],
                                    hint="use a later release; the trust file names this digest as revoked")


def _refuse_rollback(manifest: RebuildManifest, trust: TrustPolicy) -> None:
    lowest = trust.min_release.get(manifest.core_name, 0)
    if manifest.release < lowest:
        raise VerificationError("CORE_ROLLBACK", "the core is older than the trust file allows", where=MANIFEST,
                                expected=f"release {lowest} or later", got=manifest.release, hint="use a later release")


def _extra(name: str, what: str) -> VerificationError:
    return VerificationError("FILE_EXTRA", what, where=ascii(name)[1:-1],
                             hint="a core holds what its signers listed and nothing else; remove it or fetch it again")
