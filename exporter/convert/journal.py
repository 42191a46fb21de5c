"""What a conversion has finished so far, so that one that was killed goes on where it stood.

One line of JSON for each weight whose bytes are all written, after a first line that says what is being converted. The
journal is a hint, not a promise: a weight is taken over only if the bytes in the file have the digests it gives.

    journal = Journal.open(staging, conversion_digest(layout, checkpoints))
    journal.written("target.layers.0.qkv")
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from exporter.checkpoint import Checkpoint
from exporter.convert.blob_file import writing
from exporter.convert.errors import ErrorStats
from exporter.weights import WeightLayout

JOURNAL_NAME = "conversion.journal"
CONVERTER_VERSION = 1  # grows when equal inputs come to give other bytes


@dataclass(frozen=True, slots=True)
class WrittenWeight:
    """A weight that is in the file: the SHA-256 of each of its views, and the errors of its conversion."""

    digests: list[bytes]
    errors: ErrorStats | None


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of one conversion.

    Attributes:
        earlier: what a run that was killed had written, by weight.
        finished: names of the files that it had finished, by blob.
    """

    path: Path
    earlier: Mapping[str, WrittenWeight] = field(default_factory=dict)
    finished: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, staging: Path, digest: str) -> Journal:
        """Go on with the journal in `staging` if it is of the same conversion; else begin a new one.

        Raises:
            ResourceError: it cannot be written.
        """
        path = staging / JOURNAL_NAME
        if is_resumable(staging, digest):
            return _read(path)
        with writing(path):
            _write(path, os.O_TRUNC, {"conversion": digest})
        return cls(path)

    def add(self, name: str, weight: WrittenWeight) -> None:
        """Note that all bytes of a weight are in the file."""
        line: dict[str, Any] = {"weight": name, "views": [digest.hex() for digest in weight.digests]}
        if weight.errors is not None:
            line["errors"] = asdict(weight.errors)
        with writing(self.path):
            _write(self.path, os.O_APPEND, line)

    def add_blob(self, key: str, name: str) -> None:
        """Note that a file is whole and has its final name."""
        with writing(self.path):
            _write(self.path, os.O_APPEND, {"blob": key, "file": name})

    def remove(self) -> None:
        """Forget everything: the conversion is done, or has failed for good."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def conversion_digest(layout: WeightLayout, checkpoints: Mapping[str, Checkpoint]) -> str:
    """Stands for everything that decides the bytes: what is stored where, made from which files as they are now."""
    digest = hashlib.sha256(f"dflash conversion {CONVERTER_VERSION}\n".encode())
    for key in sorted(checkpoints):
        checkpoint = checkpoints[key]
        digest.update(repr((key, str(checkpoint.path.resolve()), checkpoint.shards)).encode())
        digest.update(hashlib.sha256(checkpoint.config_bytes).digest())
    for blob in layout.blobs:
        for placed in blob.weights:
            spec = placed.spec
            digest.update(repr((spec.name, spec.checkpoint, spec.sources, spec.recipe, placed.views)).encode())
            if spec.data is not None:
                digest.update(spec.data.contiguous().numpy().tobytes())
    return digest.hexdigest()


def is_resumable(staging: Path, digest: str) -> bool:
    """Whether a folder that a killed export left holds a part of this conversion."""
    try:
        with (staging / JOURNAL_NAME).open("rb") as file:
            return bool(file.readline() == _line({"conversion": digest}))
    except OSError:
        return False


def _read(path: Path) -> Journal:
    """The journal at `path`. A last line that was cut short is removed."""
    weights: dict[str, WrittenWeight] = {}
    finished: dict[str, str] = {}
    lines = path.read_bytes().splitlines(keepends=True)
    whole = lines[:-1] if not lines[-1].endswith(b"\n") else lines
    with writing(path):
        os.truncate(path, sum(map(len, whole)))
    for text in whole[1:]:
        line = json.loads(text)
        if "blob" in line:
            finished[line["blob"]] = line["file"]
            continue
        errors = ErrorStats(**line["errors"]) if "errors" in line else None
        weights[line["weight"]] = WrittenWeight([bytes.fromhex(digest) for digest in line["views"]], errors)
    return Journal(path, weights, finished)


def _write(path: Path, flags: int, line: Mapping[str, Any]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
    try:
        os.write(fd, _line(line))
    finally:
        os.close(fd)


def _line(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
