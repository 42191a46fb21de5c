"""Compare local copies of published checkpoints with their pins: repository, revision, file, bytes and SHA-256.

    for file in verify_pins(Path("checkpoints"), read_pins()):
        print(file.repository, file.path, file.sha256)

A hub's own metadata is not asked: what counts are the bytes on this disk. A safetensors file is then looked into as
well: its tensors are as many and of the dtypes that the pin states, and the last one ends the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dflash_core.errors import CheckpointError

SOURCE_KIND = "huggingface"
WEIGHTS_SUFFIX = ".safetensors"
READ_NBYTES = 4 << 20
MAX_HEADER_NBYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One file of a published checkpoint.

    Attributes:
        path: inside the repository, "/" separated.
        sha256: lower-case hex, over the file's bytes.
        num_tensors, dtypes: of a safetensors file, where the pin states them.
    """

    path: str
    nbytes: int
    sha256: str
    num_tensors: int | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """A published checkpoint at one revision."""

    name: str
    repository: str
    revision: str
    files: tuple[PinnedFile, ...]


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A local file that is the pinned one; `num_tensors` is None for anything but safetensors."""

    repository: str
    revision: str
    path: str
    nbytes: int
    sha256: str
    num_tensors: int | None


def read_pins() -> tuple[Pin, ...]:
    """The pins of published checkpoints in manifests/pins, by name."""
    folder = resources.files("manifests") / "pins"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    documents = (json.loads((folder / name).read_text("utf-8")) for name in names)
    return tuple(_pin(document) for document in documents if document["source"]["kind"] == SOURCE_KIND)


def verify_pins(
    folder: Path, pins: Sequence[Pin], on_bytes: Callable[[int], None] | None = None
) -> tuple[VerifiedFile, ...]:
    """Check every pinned file that is found below a folder.

    A checkpoint is looked for in `folder/<owner>/<repository>`, `folder/<repository>` and, when it bears the
    repository's name, `folder` itself. A checkpoint that is not there is passed over, and so is a pinned file that is
    not in its folder: copies are often of one file.

    Args:
        on_bytes: told the number of bytes just hashed.
    Returns:
        One entry for each file that was found, in the order of the pins.
    Raises:
        CheckpointError: PIN_NONE when no pinned file is there; PIN_SIZE, PIN_DIGEST; PIN_HEADER, PIN_TENSORS, PIN_DTYPE
            or PIN_END for what a safetensors file holds; PIN_UNREADABLE.
    """
    found: list[VerifiedFile] = []
    for pin in pins:
        home = _home(folder, pin)
        if home is None:
            continue
        for file in pin.files:
            path = home / file.path
            if path.is_file():
                found.append(_verify(path, pin, file, on_bytes or _nobody))
    if not found:
        raise CheckpointError(
            "PIN_NONE", "no pinned file is here", where=str(folder),
            expected=" or ".join(pin.repository for pin in pins) or "a pin",
            hint="give the folder that holds the checkpoints, each in a folder of its repository's name",
        )
    return tuple(found)


def local_nbytes(folder: Path, pins: Sequence[Pin]) -> int:
    """Bytes that `verify_pins` will hash: the length of its progress bar."""
    homes = ((pin, _home(folder, pin)) for pin in pins)
    paths = (home / file.path for pin, home in homes if home is not None for file in pin.files)
    return sum(path.stat().st_size for path in paths if path.is_file())


def _pin(document: Mapping[str, Any]) -> Pin:
    source = document["source"]
    files = tuple(PinnedFile(file["path"], file["bytes"], file["sha256"], file.get("tensors"),
                             tuple(file.get("dtypes", ()))) for file in document["files"])
    return Pin(document["name"], source["repository"], source["revision"], files)


def _home(folder: Path, pin: Pin) -> Path | None:
    repository = pin.repository.rpartition("/")[2]
    places = [folder / pin.repository, folder / repository]
    if folder.resolve().name == repository:
        places.append(folder)
    return next((place for place in places if place.is_dir()), None)


def _verify(path: Path, pin: Pin, file: PinnedFile, on_bytes: Callable[[int], None]) -> VerifiedFile:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes != file.nbytes:
                raise _other(path, pin, "PIN_SIZE", f"{file.nbytes} bytes", f"{nbytes} bytes")
            sha256 = _sha256(fd, on_bytes)
            if sha256 != file.sha256:
                raise _other(path, pin, "PIN_DIGEST", f"sha256 {file.sha256}", sha256)
            num_tensors = _check_tensors(fd, path, pin, file) if path.suffix == WEIGHTS_SUFFIX else None
        finally:
            os.close(fd)
    except OSError as cause:
        raise CheckpointError("PIN_UNREADABLE", f"file cannot be read ({cause.strerror})", where=str(path)) from cause
    return VerifiedFile(pin.repository, pin.revision, file.path, nbytes, sha256, num_tensors)


def _sha256(fd: int, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(READ_NBYTES)
    view = memoryview(buffer)
    offset = 0
    while count := os.preadv(fd, [buffer], offset):
        digest.update(view[:count])
        offset += count
        on_bytes(count)
    return digest.hexdigest()


def _check_tensors(fd: int, path: Path, pin: Pin, file: PinnedFile) -> int:
    """What the header says: as many tensors as pinned, of the pinned dtypes, the last of which ends the file."""
    header_nbytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < header_nbytes <= min(MAX_HEADER_NBYTES, file.nbytes - 8):
        raise _other(path, pin, "PIN_HEADER", "a safetensors header", f"a header of {header_nbytes} bytes")
    try:
        header = json.loads(os.pread(fd, header_nbytes, 8))
        header.pop("__metadata__", None)
        dtypes = {str(tensor["dtype"]) for tensor in header.values()}
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as cause:
        raise _other(path, pin, "PIN_HEADER", "a safetensors header", f"{type(cause).__name__}") from cause
    if file.num_tensors is not None and len(header) != file.num_tensors:
        raise _other(path, pin, "PIN_TENSORS", f"{file.num_tensors} tensors", len(header))
    if file.dtypes and dtypes != set(file.dtypes):
        raise _other(path, pin, "PIN_DTYPE", " ".join(file.dtypes), " ".join(sorted(dtypes)))
    if 8 + header_nbytes + end != file.nbytes:
        raise _other(path, pin, "PIN_END", f"the last tensor to end at byte {file.nbytes}", 8 + header_nbytes + end)
    return len(header)


def _other(path: Path, pin: Pin, code: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        code, f"file is not the pinned one of {pin.repository} at {pin.revision[:12]}", where=str(path),
        expected=expected, got=got, hint="fetch that revision again; do not use this copy",
    )


def _nobody(nbytes: int) -> None:
    """What bytes are told to when nobody watches."""
