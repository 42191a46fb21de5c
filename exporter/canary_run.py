"""Run an unsigned core's CPU graphs on the canary's prompts; imports no torch.

The exporter runs this in a process of its own: the core's decoded weights then never share memory with the tensors of
the conversion, and are gone when the canary is done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dflash_core.errors import CheckpointError, UsageError
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.archive import open_core
from runtime.canary import Canary, parse, record, replay
from runtime.check import check, query_device
from runtime.core import Core
from runtime.instantiate import instantiate
from runtime.mapping import map_sections
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


def record_apart(path: Path, reference: Path | None) -> bytes:
    """The canary of an unsigned core, recorded in a fresh process.

    Args:
        reference: an earlier canary that the core must reproduce first.
    Raises:
        QualityError: CANARY_TOKENS, CANARY_PROPOSALS or CANARY_ACCEPTANCE; the core does not do what `reference` says.
        CheckpointError: CANARY_REFERENCE; the reference cannot be read.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_follow_parent) as pool:
        return pool.submit(_record, path, reference).result()


def _follow_parent() -> None:
    """End with the exporter however it ends, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="dflash-parent").start()


def _record(path: Path, reference: Path | None) -> bytes:
    verified = _opened(path)
    try:
        core = instantiate(map_sections(check(verified, query_device("cpu"))))
        if reference is not None:
            replay(core, read_reference(reference))
        return record(core, prompt_set(core), _new_tokens(core)).to_bytes()
    finally:
        verified.close()


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


def _opened(path: Path) -> VerifiedCore:
    """The core as verification would give it, without signers: the exporter wrote every byte of it a moment ago.

    Weights and configs are still compared with their digests as they are read.
    """
    manifest = RebuildManifest.FromString((path / "manifest.pb").read_bytes())
    files = open_core(path)
    try:
        contents = check_contents(files, manifest)
    except BaseException:
        files.close()
        raise
    entries = {entry.path: entry for entry in manifest.files}
    return VerifiedCore(
        path=path, core_digest="", manifest=manifest, signers=(), _files=files, _contents=contents,
        _entries=entries, _by_digest={entry.ref.digest: entry for entry in entries.values()})


def read_reference(reference: Path) -> Canary:
    """An earlier canary, as stored in a core's golden/. Raises CheckpointError CANARY_REFERENCE."""
    try:
        data = reference.read_bytes()
    except OSError as e:
        raise CheckpointError("CANARY_REFERENCE", f"cannot read the canary: {e.strerror}",
                              where=str(reference), hint="name a file of a core's golden/ folder") from e
    return parse(data, str(reference))
