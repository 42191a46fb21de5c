"""The parts list of a core: valid CycloneDX by that project's own library, and nothing left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from dflash_core.v1.graph_pb2 import CPU_REGISTRY, CUBIN
from dflash_core.v1.manifest_pb2 import RebuildManifest
from dflash_core.v1.weights_pb2 import FileRef
from typer.testing import CliRunner

from runtime.cli import app
from runtime.sbom import sbom
from tests.runtime.sound_core import sound_manifest
from tests.toy_core import make_toy_core, trust_document, write_trust

DIGEST = "ab" * 32


def full_manifest() -> RebuildManifest:
    manifest = RebuildManifest(core_name="qwen3-8b.nvfp4", release=7)
    target, draft = manifest.target, manifest.speculation.draft
    target.repository, target.revision, target.architecture = "Qwen/Qwen3-8B", "1" * 40, "Qwen3ForCausalLM"
    target.license, target.checkpoint_dtype = "Apache-2.0", "bf16"
    target.files.add(path="model-00001-of-00002.safetensors", size_bytes=5, sha256=bytes.fromhex("11" * 32))
    target.files.add(path="model-00002-of-00002.safetensors", size_bytes=6, sha256=bytes.fromhex("22" * 32))
    draft.repository, draft.license = "z-lab/Qwen3-8B-DFlash2", "A licence of their own"
    draft.files.add(path="model.safetensors", size_bytes=7, sha256=bytes.fromhex("33" * 32))
    manifest.modules.add(module_id=0, kind=CPU_REGISTRY, target="cpu", registry="dflash.cpu", registry_version=1)
    module = manifest.modules.add(module_id=1, kind=CUBIN, target="sm_90a", source_sha256=bytes.fromhex("44" * 32),
                                  file=FileRef(algorithm=1, digest=bytes.fromhex("55" * 32), size_bytes=9))
    module.toolchain.compiler, module.toolchain.version, module.toolchain.assembler = "triton", "3.6.0", "ptxas 12.9"
    module.toolchain.options["num_warps"] = "4"
    provenance = manifest.provenance
    provenance.exporter_version, provenance.source_commit, provenance.created_unix = "0.1.0", "f" * 40, 1767225600
    provenance.pins.add(name="torch", url="pkg:pypi/torch@2.13.0")
    provenance.pins.add(name="cutlass", url="https://github.com/NVIDIA/cutlass", commit="c" * 40)
    return manifest


def problems(document: dict[str, Any]) -> object:
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document))


@pytest.mark.parametrize("manifest", [full_manifest(), sound_manifest(), RebuildManifest(core_name="x")],
                         ids=["full", "sound", "empty"])
def test_document_is_valid_cyclonedx(manifest: RebuildManifest) -> None:
    assert problems(sbom(manifest, DIGEST)) is None


def test_the_validator_sees_a_defect() -> None:
    document = sbom(full_manifest(), DIGEST)
    document["components"][0]["type"] = "checkpoint"

    assert problems(document) is not None


def test_names_every_part() -> None:
    document = sbom(full_manifest(), DIGEST)
    parts = {part["bom-ref"]: part for part in document["components"]}

    assert document["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": DIGEST}]
    assert document["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
    assert list(parts) == ["model:target", "model:draft", "module:0", "module:1", "pkg:pypi/dflash-cores@0.1.0",
                           "pin:0:torch", "pin:1:cutlass"]
    assert [(item["name"], item["hashes"][0]["content"]) for item in parts["model:target"]["components"]] == [
        ("model-00001-of-00002.safetensors", "11" * 32), ("model-00002-of-00002.safetensors", "22" * 32),
    ]
    assert parts["model:target"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert parts["model:draft"]["licenses"] == [{"license": {"name": "A licence of their own"}}]
    assert parts["module:1"]["hashes"] == [{"alg": "SHA-256", "content": "55" * 32}]
    assert {item["name"]: item["value"] for item in parts["module:1"]["properties"]} == {
        "dflash:kind": "cubin", "dflash:target": "sm_90a", "dflash:compiler": "triton 3.6.0",
        "dflash:assembler": "ptxas 12.9", "dflash:source_sha256": "44" * 32, "dflash:compiler_option:num_warps": "4",
    }
    assert (parts["pin:0:torch"]["version"], parts["pin:0:torch"]["purl"]) == ("2.13.0", "pkg:pypi/torch@2.13.0")
    assert parts["pin:1:cutlass"]["externalReferences"] == [
        {"type": "vcs", "url": "https://github.com/NVIDIA/cutlass"}]
    assert document["dependencies"] == [{"ref": f"core:{DIGEST}", "dependsOn": list(parts)}]


def test_equal_cores_give_equal_documents_and_others_do_not() -> None:
    first, second = sbom(full_manifest(), DIGEST), sbom(full_manifest(), DIGEST)

    assert first == second
    assert sbom(full_manifest(), "cd" * 32)["serialNumber"] != first["serialNumber"]


def test_inspect_prints_it_and_verifies_when_asked(tmp_path: Path) -> None:
    toy = make_toy_core(tmp_path / "core")
    trust = write_trust(tmp_path / "trust.json", trust_document())

    printed = CliRunner().invoke(app, ["inspect", str(toy.path), "--sbom", "--trust", str(trust)])
    (toy.path / toy.config).write_bytes(b"{}")
    refused = CliRunner().invoke(app, ["inspect", str(toy.path), "--sbom", "--trust", str(trust)])

    assert printed.exit_code == 0
    assert json.loads(printed.stdout)["metadata"]["component"]["name"] == "toy"
    assert refused.exit_code == 4
