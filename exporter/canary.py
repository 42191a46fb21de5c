"""Record a core's acceptance canary before it is signed, by running its own packaged CPU graphs in the runtime.

    unsigned = add_canary(unsigned, watch, reference=None)
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_core.errors import CheckpointError, UsageError
from dflash_core.v1 import manifest_pb2, weights_pb2

from exporter.package import UnsignedCore
from exporter.progress import Progress
from exporter.staging import writing
from runtime.archive import open_core
from runtime.canary import Canary, acceptance_by_position, mean_accepted, parse, record, replay
from runtime.check import check, query_device
from runtime.core import Core
from runtime.instantiate import instantiate
from runtime.mapping import map_sections
from runtime.sign import file_entry
from runtime.text import CoreText
from runtime.verify import VerifiedCore, check_contents

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five countries of Europe with their capitals.",
    "If a train travels 60 miles in 45 minutes, how fast does it go?",
)
NEW_TOKENS = 32
TEXTLESS_TOKENS = 12


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
        verified = _opened(unsigned)
        try:
            core = instantiate(map_sections(check(verified, query_device("cpu"))))
            if reference is not None:
                replay(core, _read(reference))
            canary = record(core, prompt_set(core), _new_tokens(core))
        finally:
            verified.close()
        manifest = _listed(unsigned, canary)
    rates = " ".join(f"{rate:.2f}" for rate in acceptance_by_position(canary.prompts, canary.depth))
    watch.done("canary", f"{len(canary.prompts)} prompts   {1 + mean_accepted(canary.prompts):.2f} tokens/step   "
                         f"by position {rates}")
    return UnsignedCore(unsigned.path, manifest)


def prompt_set(core: Core) -> list[list[int]]:
    """The canary's prompts as tokens: chat turns where the core has a template, text where it has a tokenizer."""
    room = core.manifest.contract.max_context - _new_tokens(core)
    if core.file("tokenizer.json") is None:
        vocab = core.manifest.contract.vocab_size
        return [[(7 + 31 * seed + 13 * i * i) % vocab for i in range(min(room, TEXTLESS_TOKENS))]
                for seed in range(len(PROMPTS))]
    text = CoreText(core)
    return [_encode(text, prompt)[:room] for prompt in PROMPTS]


def _encode(text: CoreText, prompt: str) -> list[int]:
    try:
        return text.encode_chat([{"role": "user", "content": prompt}])
    except UsageError:  # no chat template, or one for other conversations
        return text.encode(prompt)


def _new_tokens(core: Core) -> int:
    return min(NEW_TOKENS, int(core.manifest.contract.max_context) // 2)


def _opened(unsigned: UnsignedCore) -> VerifiedCore:
    """The core as verification would give it, without signers: this process wrote every byte of it a moment ago.

    Weights and configs are still compared with their digests as they are read.
    """
    files = open_core(unsigned.path)
    try:
        contents = check_contents(files, unsigned.manifest)
    except BaseException:
        files.close()
        raise
    entries = {entry.path: entry for entry in unsigned.manifest.files}
    return VerifiedCore(
        path=unsigned.path, core_digest="", manifest=unsigned.manifest, signers=(), _files=files, _contents=contents,
        _entries=entries, _by_digest={entry.ref.digest: entry for entry in entries.values()})


def _read(reference: Path) -> Canary:
    try:
        data = reference.read_bytes()
    except OSError as e:
        raise CheckpointError("CANARY_REFERENCE", f"cannot read the canary: {e.strerror}",
                              where=str(reference)) from e
    return parse(data, str(reference))


def _listed(unsigned: UnsignedCore, canary: Canary) -> manifest_pb2.RebuildManifest:
    """Write the canary and the manifest that lists it."""
    data = canary.to_bytes()
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
