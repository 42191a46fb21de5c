"""Record a core's acceptance canary before it is signed, by running its own packaged CPU graphs in the runtime.

    unsigned = add_canary(unsigned, watch, reference=None)
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_core.v1 import manifest_pb2, weights_pb2

from exporter.canary_run import record_apart
from exporter.package import UnsignedCore
from exporter.progress import Progress
from exporter.staging import writing
from runtime.canary import acceptance_by_position, mean_accepted, parse
from runtime.sign import file_entry


def add_canary(unsigned: UnsignedCore, watch: Progress, reference: Path | None) -> UnsignedCore:
    """Run the core's CPU graphs on the prompt set, and list what came out among its files.

    Args:
        reference: an earlier canary, as stored in a core's golden/, that this core must reproduce first.
    Raises:
        QualityError: CANARY_TOKENS, CANARY_PROPOSALS or CANARY_ACCEPTANCE; the core does not do what `reference` says.
        CheckpointError: CANARY_REFERENCE; the reference cannot be read.
        ResourceError: the golden file cannot be written.
    """
    with watch.stage("canary", 0):
        data = record_apart(unsigned.path, reference)
        manifest = _listed(unsigned, data)
    canary = parse(data, "canary")
    rates = " ".join(f"{rate:.2f}" for rate in acceptance_by_position(canary.prompts, canary.depth))
    watch.done("canary", f"{len(canary.prompts)} prompts   {1 + mean_accepted(canary.prompts):.2f} tokens/step   "
                         f"by position {rates}")
    return UnsignedCore(unsigned.path, manifest)


def _listed(unsigned: UnsignedCore, data: bytes) -> manifest_pb2.RebuildManifest:
    """Write the canary and the manifest that lists it."""
    name = f"golden/{hashlib.sha256(data).hexdigest()}.json"
    path = unsigned.path / name
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    manifest = manifest_pb2.RebuildManifest()
    manifest.CopyFrom(unsigned.manifest)
    entries: list[weights_pb2.FileEntry] = [*manifest.files, file_entry(path, name, "golden")]
    del manifest.files[:]
    manifest.files.extend(sorted(entries, key=lambda entry: entry.path))
    manifest_path = unsigned.path / "manifest.pb"
    with writing(manifest_path):
        manifest_path.write_bytes(manifest.SerializeToString(deterministic=True))
    return manifest
