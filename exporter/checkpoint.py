"""Open a Hugging Face checkpoint by name, shape and byte range, without loading a weight.

Everything later reads through here: a tensor costs its own bytes and no more, and a file that changed since it was
opened is an error rather than other weights under the same name.

    checkpoint = open_checkpoint(Path("smollm2-135m"))
    weight = read_tensor(checkpoint, "model.norm.weight")
    files = hash_files(checkpoint, progress.advance)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from dflash_core.errors import CheckpointError

from exporter.json_object import parse_json_object
from exporter.safetensors_header import GGUF_MAGIC, TensorEntry, gguf_refused, read_header

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
IDENTITY_NAMES = (
    CONFIG_NAME, "generation_config.json", INDEX_NAME, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HASH_CHUNK_NBYTES = 4 << 20
HASH_THREADS = 2

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file as it was when the checkpoint was opened."""

    name: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that identifies a model, hashed from the local bytes: path inside the checkpoint, size, digest."""

    path: str
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as published: its config, and where each tensor lies.

    Attributes:
        path: the folder.
        config: config.json, parsed; `config_bytes` holds it as stored.
        tensors: entry by tensor name, in name order.
        shards: the safetensors files, in name order.
    """

    path: Path
    config: Mapping[str, Any]
    config_bytes: bytes
    tensors: Mapping[str, TensorEntry]
    shards: tuple[Shard, ...]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the Hugging Face folder at `path`, reading its config and the headers of its shards.

    Takes a single `model.safetensors` or the shards of `model.safetensors.index.json`; the index and the shards must
    name exactly the same tensors. Pickle files are never opened.

    Raises:
        CheckpointError: the folder, its config or its weights are missing (CHECKPOINT_MISSING, CHECKPOINT_NOT_FOLDER,
            CONFIG_MISSING, WEIGHTS_MISSING, WEIGHTS_AMBIGUOUS), of a kind that is not read (PICKLE, GGUF), or damaged
            (INDEX_INVALID, INDEX_SHARD_PATH, INDEX_SHARD_MISSING, INDEX_TENSORS, TENSOR_DUPLICATE, and the codes of
            `read_header`).
    """
    _check_folder(path)
    index_path = path / INDEX_NAME
    has_index, has_single = index_path.is_file(), (path / SINGLE_NAME).is_file()
    if not has_index and not has_single:
        _refuse_other_weights(path)
    if not (path / CONFIG_NAME).is_file():
        raise CheckpointError("CONFIG_MISSING", f"checkpoint has no {CONFIG_NAME}", where=str(path),
                              hint="download the model again with its JSON files, or pass the folder that holds them")
    if not has_index and not has_single:
        raise _weights_missing(path)
    config_bytes = _read_file(path / CONFIG_NAME)
    config = parse_json_object(config_bytes, str(path / CONFIG_NAME))
    weight_map = _read_weight_map(index_path) if has_index else None
    if weight_map is not None and has_single and SINGLE_NAME not in weight_map.values():
        raise CheckpointError(
            "WEIGHTS_AMBIGUOUS", f"checkpoint has both {SINGLE_NAME} and an index that does not name it",
            where=str(path), hint="remove the one that is not the model",
        )
    shard_names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    shards, entries = _read_shards(path, shard_names)
    if weight_map is not None:
        _check_index(weight_map, entries)
    tensors = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}
    return Checkpoint(path, MappingProxyType(config), config_bytes, MappingProxyType(tensors), shards)


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read one whole tensor, in its own dtype and shape; the caller owns the memory.

    Raises:
        CheckpointError: TENSOR_DTYPE for a dtype without a torch type; SHARD_CHANGED, FILE_VANISHED or
            FILE_UNREADABLE when its file is no longer what was opened.
    """
    entry = checkpoint.tensors[name]
    return _read_elements(checkpoint, entry, entry.shape, 0, entry.nbytes)


def read_rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
    """Read rows `start:stop` of a tensor's first axis: [stop - start, ...]. Errors as in `read_tensor`."""
    entry = checkpoint.tensors[name]
    assert entry.shape and 0 <= start <= stop <= entry.shape[0], (name, entry.shape, start, stop)
    shape = (stop - start, *entry.shape[1:])
    row_nbytes = entry.nbytes // entry.shape[0] if entry.shape[0] else 0
    return _read_elements(checkpoint, entry, shape, start * row_nbytes, (stop - start) * row_nbytes)


def same_bytes(left: Checkpoint, left_name: str, right: Checkpoint, right_name: str) -> bool:
    """Whether two tensors agree in dtype, shape and every byte; compared in pieces of 4 MiB."""
    ours, theirs = left.tensors[left_name], right.tensors[right_name]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    pieces = ((at, min(HASH_CHUNK_NBYTES, ours.nbytes - at)) for at in range(0, ours.nbytes, HASH_CHUNK_NBYTES))
    return all(
        torch.equal(_read_bytes(left, ours, at, nbytes), _read_bytes(right, theirs, at, nbytes))
        for at, nbytes in pieces
    )


def read_side_file(checkpoint: Checkpoint, name: str) -> bytes | None:
    """The bytes of a small file beside the config, or None when the checkpoint has no such file."""
    path = checkpoint.path / name
    return _read_file(path) if path.is_file() else None


def hash_files(checkpoint: Checkpoint, on_bytes: Callable[[int], None]) -> tuple[SourceFile, ...]:
    """SHA-256 of every file that identifies the model: config, tokenizer, templates, index and shards.

    Args:
        checkpoint: what `open_checkpoint` gave.
        on_bytes: told the number of bytes just hashed; called from two threads.
    Returns:
        One entry a file, in name order.
    Raises:
        CheckpointError: SHARD_CHANGED, FILE_VANISHED or FILE_UNREADABLE; CONFIG_CHANGED when config.json is not
            the one that was read.
    """
    shards = {shard.name: shard for shard in checkpoint.shards}
    names = [name for name in IDENTITY_NAMES if (checkpoint.path / name).is_file()]

    def hash_one(name: str) -> SourceFile:
        return _hash_file(checkpoint.path / name, shards.get(name), on_bytes)

    largest_first = sorted(shards, key=lambda name: -shards[name].nbytes)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        files = sorted(pool.map(hash_one, [*largest_first, *names]), key=lambda file: file.path)
    config_digest = hashlib.sha256(checkpoint.config_bytes).digest()
    if config_digest not in {file.sha256 for file in files if file.path == CONFIG_NAME}:
        raise CheckpointError(
            "CONFIG_CHANGED", f"{CONFIG_NAME} changed after it was read", where=str(checkpoint.path / CONFIG_NAME),
            expected=config_digest.hex(), hint="run the export again",
        )
    return tuple(files)


def identity_nbytes(checkpoint: Checkpoint) -> int:
    """Bytes that `hash_files` will read: the length of its progress bar."""
    small = (checkpoint.path / name for name in IDENTITY_NAMES)
    return sum(shard.nbytes for shard in checkpoint.shards) + sum(p.stat().st_size for p in small if p.is_file())


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise CheckpointError("CHECKPOINT_MISSING", "checkpoint folder does not exist", where=str(path),
                              hint="pass the folder of a model downloaded from Hugging Face")
    if path.is_dir():
        return
    with _opened(path) as fd:
        magic = os.pread(fd, len(GGUF_MAGIC), 0)
    if magic == GGUF_MAGIC or path.suffix == ".gguf":
        raise gguf_refused(str(path))
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(path.parent, [path.name])
    raise CheckpointError(
        "CHECKPOINT_NOT_FOLDER", "checkpoint is a file", where=str(path),
        expected=f"a folder with {CONFIG_NAME} and safetensors files",
        hint="pass the folder that holds the file",
    )


def _refuse_other_weights(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if any(name.endswith(".safetensors") for name in names):
        return
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise gguf_refused(str(path / gguf[0]))
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES) and name != "training_args.bin"]
    if pickles:
        raise _pickle_refused(path, pickles)


def _pickle_refused(path: Path, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        "PICKLE", "checkpoint holds its weights as pickle files, which can run code and are never opened",
        where=str(path), expected="safetensors files", got=_listed(names),
        hint="convert the model to safetensors, or take a revision that ships them",
    )


def _weights_missing(path: Path) -> CheckpointError:
    found = sorted(entry.name for entry in path.glob("*.safetensors"))
    return CheckpointError(
        "WEIGHTS_MISSING", "checkpoint has no weights under the published names", where=str(path),
        expected=f"{SINGLE_NAME} or {INDEX_NAME}", got=_listed(found) if found else "no safetensors file",
        hint="fetch the index too: shards without it may be incomplete" if found else
        "download the weights as well: the folder holds none",
    )


def _read_weight_map(index_path: Path) -> dict[str, str]:
    where = str(index_path)
    weight_map = parse_json_object(_read_file(index_path), where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            "INDEX_INVALID", "index has no usable weight_map", where=where,
            expected="an object from tensor name to shard name",
            hint="download the index again",
        )
    for shard in sorted(set(weight_map.values())):
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(
                "INDEX_SHARD_PATH", "index names a shard outside the checkpoint folder", where=where,
                expected="the name of a .safetensors file in the folder itself", got=repr(shard),
                hint="download the index again; this one may be hostile",
            )
    return weight_map


def _read_shards(path: Path, names: Sequence[str]) -> tuple[tuple[Shard, ...], list[TensorEntry]]:
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise CheckpointError(
            "INDEX_SHARD_MISSING", "index names shards that are not there", where=str(path / INDEX_NAME),
            got=_listed(absent), hint="fetch the missing shards",
        )
    shards: list[Shard] = []
    entries: dict[str, TensorEntry] = {}
    for name in names:
        with _opened(path / name) as fd:
            stat = os.fstat(fd)
            found = read_header(fd, stat.st_size, name)
        shards.append(Shard(name, stat.st_size, stat.st_mtime_ns))
        for entry in found:
            if entry.name in entries:
                raise CheckpointError(
                    "TENSOR_DUPLICATE", "two shards hold the same tensor", where=entry.name,
                    got=f"{entries[entry.name].shard} and {name}",
                    hint="remove the shard that is not of this checkpoint",
                )
            entries[entry.name] = entry
    return tuple(shards), list(entries.values())


def _check_index(weight_map: Mapping[str, str], entries: Sequence[TensorEntry]) -> None:
    held = {entry.name: entry.shard for entry in entries}
    problems = [f"{name} is not in {shard}" for name, shard in sorted(weight_map.items()) if held.get(name) != shard]
    problems += [f"{name} in {held[name]} is not in the index" for name in sorted(held) if name not in weight_map]
    if problems:
        raise CheckpointError(
            "INDEX_TENSORS", "index and shards do not name the same tensors", where=INDEX_NAME,
            got=_listed(problems), hint="the files are of two revisions, or some are damaged: fetch them again",
        )


def _read_elements(
    checkpoint: Checkpoint, entry: TensorEntry, shape: tuple[int, ...], start: int, nbytes: int
) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            "TENSOR_DTYPE", "tensor has a packed dtype that is not read",
            where=f"{entry.name} in {entry.shard}", expected=f"one of {' '.join(TORCH_DTYPES)}", got=entry.dtype,
            hint="use a checkpoint published in bf16, f16 or f32",
        )
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return _read_bytes(checkpoint, entry, start, nbytes).view(dtype).reshape(shape)


def _read_bytes(checkpoint: Checkpoint, entry: TensorEntry, start: int, nbytes: int) -> torch.Tensor:
    """`nbytes` of a tensor from its byte `start` on, from a file that is still the one that was opened."""
    shard = next(shard for shard in checkpoint.shards if shard.name == entry.shard)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    with _opened(checkpoint.path / shard.name) as fd:
        _check_unchanged(fd, shard)
        done = 0
        while done < nbytes:
            count = os.preadv(fd, [view[done:]], entry.offset + start + done)
            if count == 0:
                raise _changed(shard, "its data ended early")
            done += count
        _check_unchanged(fd, shard)
    return buffer


def _hash_file(path: Path, shard: Shard | None, on_bytes: Callable[[int], None]) -> SourceFile:
    digest = hashlib.sha256()
    nbytes = 0
    buffer = bytearray(HASH_CHUNK_NBYTES)
    view = memoryview(buffer)
    with _opened(path) as fd:
        while count := os.preadv(fd, [buffer], nbytes):
            digest.update(view[:count])
            nbytes += count
            on_bytes(count)
        if shard is not None:
            _check_unchanged(fd, shard)
    return SourceFile(path.name, nbytes, digest.digest())


def _check_unchanged(fd: int, shard: Shard) -> None:
    stat = os.fstat(fd)
    if stat.st_size != shard.nbytes:
        raise _changed(shard, f"{stat.st_size} bytes")
    if stat.st_mtime_ns != shard.mtime_ns:
        raise _changed(shard, "a later modification time")


def _changed(shard: Shard, got: str) -> CheckpointError:
    return CheckpointError(
        "SHARD_CHANGED", "shard changed after it was opened", where=shard.name, expected=f"{shard.nbytes} bytes",
        got=got, hint="let the download finish, then run the export again",
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as cause:
        raise CheckpointError("FILE_VANISHED", "file vanished after it was opened", where=str(path),
                              hint="leave the checkpoint alone during an export, and start it again") from cause
    except OSError as cause:
        raise _unreadable(path, cause) from cause
    try:
        yield fd
    except OSError as cause:
        raise _unreadable(path, cause) from cause
    finally:
        os.close(fd)


def _read_file(path: Path) -> bytes:
    with _opened(path) as fd, os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def _unreadable(path: Path, cause: OSError) -> CheckpointError:
    return CheckpointError("FILE_UNREADABLE", f"file cannot be read ({cause.strerror})", where=str(path),
                           hint="check the file's permissions and the disk")


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
