"""A core's parts as a CycloneDX 1.6 document: checkpoints, kernels with their compilers, packages of the export.

    document = sbom(manifest, core_digest)
    json.dumps(document, indent=1)

Everything comes from the manifest, so equal cores give equal documents. Source: the CycloneDX 1.6 JSON reference.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from dflash_core.v1.graph_pb2 import KernelModule, ModuleKind
from dflash_core.v1.manifest_pb2 import ModelIdentity, RebuildManifest

Component = dict[str, Any]

_NAMESPACE = uuid.UUID("6f6d8f0a-61c4-5c0e-9a55-0f6c1b0b9d52")
_SPDX_IDS = ("Apache-2.0", "BSD-3-Clause", "MIT")
"""Licence ids that are written as SPDX; any other text is given as a name."""


def sbom(manifest: RebuildManifest, core_digest: str) -> dict[str, Any]:
    """The document for one core.

    Args:
        manifest: parsed from the bytes with this digest.
        core_digest: SHA-256 of manifest.pb in hex; it names the document too.
    """
    core = f"core:{core_digest}"
    components = [*_models(manifest), *map(_module, manifest.modules), *_packages(manifest)]
    metadata: dict[str, Any] = {
        "component": {
            "type": "application", "bom-ref": core, "name": manifest.core_name, "version": str(manifest.release),
            "hashes": [_sha256(core_digest)],
        },
    }
    if manifest.provenance.HasField("created_unix"):
        metadata["timestamp"] = datetime.fromtimestamp(manifest.provenance.created_unix, UTC).isoformat()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, core_digest)}",
        "version": 1,
        "metadata": metadata,
        "components": components,
        "dependencies": [{"ref": core, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _models(manifest: RebuildManifest) -> Iterator[Component]:
    if manifest.HasField("target"):
        yield _model("target", manifest.target)
    if manifest.HasField("speculation") and manifest.speculation.HasField("draft"):
        yield _model("draft", manifest.speculation.draft)
    if manifest.HasField("vision"):
        yield _model("vision", manifest.vision.encoder)


def _model(role: str, identity: ModelIdentity) -> Component:
    component: Component = {
        "type": "machine-learning-model", "bom-ref": f"model:{role}",
        "name": identity.repository or identity.architecture or role,
        "components": [
            {"type": "file", "bom-ref": f"model:{role}:{item.path}", "name": item.path,
             "hashes": [_sha256(item.sha256.hex())], "properties": _properties([("size_bytes", str(item.size_bytes))])}
            for item in identity.files
        ],
        "properties": _properties([("role", role), ("architecture", identity.architecture),
                                   ("checkpoint_dtype", identity.checkpoint_dtype)]),
    }
    if identity.revision:
        component["version"] = identity.revision
    if identity.license in _SPDX_IDS:
        component["licenses"] = [{"license": {"id": identity.license}}]
    elif identity.license:
        component["licenses"] = [{"license": {"name": identity.license}}]
    return component


def _module(module: KernelModule) -> Component:
    component: Component = {
        "type": "library", "bom-ref": f"module:{module.module_id}",
        "name": module.registry or f"kernels for {module.target}",
        "properties": _properties([
            ("kind", ModuleKind.Name(module.kind).lower()), ("target", module.target),
            ("compiler", f"{module.toolchain.compiler} {module.toolchain.version}".strip()),
            ("assembler", module.toolchain.assembler), ("source_sha256", module.source_sha256.hex()),
            *((f"compiler_option:{name}", value) for name, value in sorted(module.toolchain.options.items())),
        ]),
    }
    if module.HasField("registry_version"):
        component["version"] = str(module.registry_version)
    if module.HasField("file"):
        component["hashes"] = [_sha256(module.file.digest.hex())]
    return component


def _packages(manifest: RebuildManifest) -> Iterator[Component]:
    """The exporter, and what it pinned. A pin's version is a commit, or the version within a package URL."""
    provenance = manifest.provenance
    if provenance.exporter_version:
        purl = f"pkg:pypi/dflash-cores@{provenance.exporter_version}"
        yield {
            "type": "application", "bom-ref": purl, "name": "dflash-cores", "version": provenance.exporter_version,
            "purl": purl, "properties": _properties([("source_commit", provenance.source_commit)]),
        }
    for index, pin in enumerate(provenance.pins):
        component: Component = {"type": "library", "bom-ref": f"pin:{index}:{pin.name}", "name": pin.name}
        version = pin.commit or pin.url.partition("@")[2]
        if version:
            component["version"] = version
        if pin.url.startswith("pkg:"):
            component["purl"] = pin.url
        elif pin.url:
            component["externalReferences"] = [{"type": "vcs", "url": pin.url}]
        yield component


def _properties(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": f"dflash:{name}", "value": value} for name, value in pairs if value]


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}
