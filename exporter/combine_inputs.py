"""The cores that are to be combined: each verified, and taken apart into the exports that it holds.

    with open_inputs([Path("a"), Path("b")], trust) as inputs:
        for part in all_parts(inputs):
            part.manifest.speculation

A core that was itself combined gives one part per component, so that comparisons always see what an exporter recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import UsageError
from dflash_core.v1.manifest_pb2 import CoreComponent, RebuildManifest
from dflash_core.v1.weights_pb2 import SHA256, FileRef

from runtime.bundle import check_signature, parse_bundle, parse_statement
from runtime.corefiles import SIGNATURES, mismatch
from runtime.trust import TrustPolicy
from runtime.verify import MANIFEST, VerifiedCore, parse_manifest, verify

MAX_CORES = 16
COMPONENTS = "components"


@dataclass(frozen=True, slots=True)
class Part:
    """One core as an exporter wrote it: an input, or a component of an input that was combined before.

    Attributes:
        label: how messages call it.
        manifest: what it recorded.
        component: its entry for the combined core; ids are still those of the input that holds it.
    """

    label: str
    manifest: RebuildManifest
    component: CoreComponent


@dataclass(frozen=True, slots=True)
class Input:
    """One core given to combine.

    Attributes:
        label: its path as given; only messages hold it.
        core: verified, with its files open.
        parts: itself, or its components.
        carried: path -> bytes of the manifests and signatures that the combined core keeps under components/.
        parents: manifests of combined cores that it was made from, its own among them if it is one.
    """

    label: str
    core: VerifiedCore
    parts: tuple[Part, ...]
    carried: Mapping[str, bytes]
    parents: tuple[FileRef, ...]

    @property
    def manifest(self) -> RebuildManifest:
        return self.core.manifest

    @property
    def digests(self) -> frozenset[bytes]:
        """SHA-256 of its manifest and of its components'; a parent's components are among these."""
        own = bytes.fromhex(self.core.core_digest)
        return frozenset({own, *(part.component.manifest.digest for part in self.parts)})


@contextmanager
def open_inputs(paths: Sequence[Path], trust: TrustPolicy) -> Iterator[tuple[Input, ...]]:
    """Verify every core as the loader does, and keep their files open while the block runs.

    Raises:
        UsageError: COMBINE_COUNT, fewer than two cores or more than sixteen, components of combined cores included;
            COMBINE_TWICE, two inputs are one core or hold one core.
        PolicyError, VerificationError, FormatError, CompatibilityError: as `runtime.verify.verify`.
        ResourceError: an input cannot be read.
    """
    _check_count(len(paths), "cores")
    with ExitStack() as stack:
        cores = [stack.enter_context(verify(path, trust)) for path in paths]
        inputs = tuple(_input(path, core, trust) for path, core in zip(paths, cores, strict=True))
        _refuse_shared(inputs)
        _check_count(len(all_parts(inputs)), "cores, with the components of combined ones")
        yield inputs


def all_parts(inputs: Sequence[Input]) -> tuple[Part, ...]:
    """Every export in the inputs, in their order."""
    return tuple(part for item in inputs for part in item.parts)


def _check_count(count: int, what: str) -> None:
    if not 2 <= count <= MAX_CORES:
        raise UsageError("COMBINE_COUNT", f"combining takes 2 to {MAX_CORES} {what}", expected=f"2 to {MAX_CORES}",
                         got=count, hint="combine fewer cores, or export one with every batch bucket")


def _refuse_shared(inputs: Sequence[Input]) -> None:
    for index, right in enumerate(inputs):
        for left in inputs[:index]:
            shared = left.digests & right.digests
            if not shared:
                continue
            if left.core.core_digest == right.core.core_digest:
                what, hint = "a core cannot be combined with itself", "give each core once"
            else:
                what, hint = "one core is already part of another", "combine each exported core once"
            raise UsageError("COMBINE_TWICE", what, where=f"{left.label} and {right.label}",
                             got=min(shared).hex(), hint=hint)


def _input(path: Path, core: VerifiedCore, trust: TrustPolicy) -> Input:
    label = str(path)
    data = b"".join(map(bytes, core.pieces(MANIFEST)))
    digest = hashlib.sha256(data).digest()
    if digest.hex() != core.core_digest:
        raise mismatch(MANIFEST, bytes.fromhex(core.core_digest), digest)
    ref = _ref(data)
    name = f"{COMPONENTS}/{digest.hex()}"
    signatures = _signatures(core, trust)
    carried = {f"{name}.pb": data, **{f"{name}.{keyid}.sig": held for keyid, held in signatures.items()}}
    manifest = core.manifest
    if not manifest.components:
        component = CoreComponent(core_name=manifest.core_name, manifest=ref,
                                  signatures=[_ref(held) for held in signatures.values()],
                                  graph_names=_graph_names(manifest))
        if manifest.HasField("speculation"):
            component.recorded_speculation.CopyFrom(manifest.speculation)
        if manifest.HasField("online_quantization"):
            component.recorded_online_quantization = manifest.online_quantization
        if manifest.HasField("online_mxfp8_scope"):
            component.recorded_online_mxfp8_scope = manifest.online_mxfp8_scope
        return Input(label, core, (Part(label, manifest, component),), carried, tuple(manifest.provenance.parents))
    parts = []
    for component in manifest.components:
        held = core.small_file(component.manifest)
        name = f"{label} (component {component.component_id}, {component.core_name})"
        parts.append(Part(name, parse_manifest(held), component))
    for entry in manifest.files:
        if entry.role == "component":
            carried[entry.path] = core.small_file(entry.ref)
    return Input(label, core, tuple(parts), carried, (*manifest.provenance.parents, ref))


def _graph_names(manifest: RebuildManifest) -> list[str]:
    return list(dict.fromkeys(name for file in manifest.graph_files for name in file.graph_names))


def _signatures(core: VerifiedCore, trust: TrustPolicy) -> dict[str, bytes]:
    """The signature files that count, by key id; read again, so checked again."""
    found: dict[str, bytes] = {}
    wanted = {signer.keyid for signer in core.signers}
    for name in core.names:
        if not name.startswith(f"{SIGNATURES}/"):
            continue
        data = b"".join(map(bytes, core.pieces(name)))
        bundle = parse_bundle(data, name)
        if bundle.hint not in wanted or bundle.hint in found:
            continue
        check_signature(bundle, trust.keys[bundle.hint].public_key, name)
        stated = parse_statement(bundle.payload, name).digests[MANIFEST]
        if stated != core.core_digest:
            raise mismatch(name, bytes.fromhex(core.core_digest), bytes.fromhex(stated))
        found[bundle.hint] = data
    return dict(sorted(found.items()))


def _ref(data: bytes) -> FileRef:
    return FileRef(algorithm=SHA256, digest=hashlib.sha256(data).digest(), size_bytes=len(data))
