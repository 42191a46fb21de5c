"""Read the header of one safetensors file, and believe nothing that its bytes do not bear out.

A shard is 8 bytes of little-endian header length, a JSON header, then the data. A header is accepted only if its
tensors tile the data exactly: no hole, no overlap, nothing after the last one, and every length equal to
dtype × shape. Only the header is read.

    with path.open("rb") as file:
        entries = read_header(file.fileno(), os.fstat(file.fileno()).st_size, path.name)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dflash_core.errors import CheckpointError

from exporter.json_object import parse_json_object

MAX_HEADER_NBYTES = 100_000_000
GGUF_MAGIC = b"GGUF"

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: as in the file.
        dtype: as the safetensors header spells it, such as `BF16`.
        shape: outermost axis first; empty for a scalar.
        shard: name of the file that holds it.
        offset: first byte, counted from the start of the file.
        nbytes: length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


def read_header(fd: int, file_nbytes: int, shard: str) -> tuple[TensorEntry, ...]:
    """Read and check a shard's header.

    Args:
        fd: open file descriptor; its position is neither used nor moved.
        file_nbytes: size of the file.
        shard: file name, for entries and messages.
    Returns:
        The tensors in the order of their bytes.
    Raises:
        CheckpointError: SHARD_TRUNCATED, SHARD_TRAILING_BYTES, HEADER_TOO_LONG, HEADER_INVALID, TENSOR_DTYPE,
            TENSOR_NBYTES, TENSOR_OFFSETS, GGUF, JSON_INVALID or JSON_NOT_OBJECT, each naming the shard.
    Source: the format section of the safetensors README.
    """
    prefix = os.pread(fd, 8, 0)
    if prefix[:4] == GGUF_MAGIC:
        raise gguf_refused(shard)
    if len(prefix) < 8:
        raise _truncated(shard, "at least 8 bytes", file_nbytes)
    header_nbytes = int.from_bytes(prefix, "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise CheckpointError(
            "HEADER_TOO_LONG", "safetensors header is implausibly long", where=shard,
            expected=f"at most {MAX_HEADER_NBYTES} bytes", got=header_nbytes,
            hint="this is not a safetensors file, or it is damaged: fetch it again",
        )
    data_start = 8 + header_nbytes
    if data_start > file_nbytes:
        raise _truncated(shard, f"a header of {header_nbytes} bytes", file_nbytes)
    header = parse_json_object(os.pread(fd, header_nbytes, 8), f"header of {shard}")
    _check_metadata(header.pop("__metadata__", {}), shard)
    entries = sorted(
        (_entry(name, value, shard, data_start) for name, value in header.items()),
        key=lambda entry: (entry.offset, entry.nbytes),
    )
    _check_tiling(entries, data_start, file_nbytes, shard)
    return tuple(entries)


def gguf_refused(where: str) -> CheckpointError:
    """The error for a GGUF file, target or draft."""
    return CheckpointError(
        "GGUF", "this is a GGUF checkpoint: only safetensors checkpoints are exported", where=where,
        hint="pass the folder with the model's safetensors files, as it was first published",
    )


def _entry(name: str, value: Any, shard: str, data_start: int) -> TensorEntry:
    where = f"{name} in {shard}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(where, "dtype, shape and data_offsets", value)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _is_sizes(shape):
        raise _invalid(where, "a shape of non-negative integers", shape)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(where, "data_offsets [begin, end] with begin ≤ end", offsets)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            "TENSOR_DTYPE", "unknown dtype in the safetensors header", where=where,
            expected=f"one of {' '.join(DTYPE_BITS)}", got=_short(dtype),
            hint="download the shard again, or use a checkpoint in bf16, f16 or f32",
        )
    begin, end = offsets
    bits = DTYPE_BITS[dtype] * prod(shape)
    if bits != 8 * (end - begin):
        raise CheckpointError(
            "TENSOR_NBYTES", "tensor's bytes do not fit its dtype and shape", where=where,
            expected=f"{bits / 8:g} bytes for {dtype} {shape}", got=end - begin,
            hint="the header is mislabelled or damaged: fetch the shard again",
        )
    return TensorEntry(name, dtype, tuple(shape), shard, data_start + begin, end - begin)


def _check_metadata(metadata: Any, shard: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(f"__metadata__ in {shard}", "an object of strings", metadata)


def _check_tiling(entries: list[TensorEntry], data_start: int, file_nbytes: int, shard: str) -> None:
    end = data_start
    for entry in entries:
        if entry.offset != end:
            what = "tensors overlap" if entry.offset < end else "bytes that belong to no tensor precede this one"
            raise CheckpointError(
                "TENSOR_OFFSETS", what, where=f"{entry.name} in {shard}",
                expected=f"data at byte {end - data_start}", got=entry.offset - data_start,
                hint="download the shard again",
            )
        end += entry.nbytes
    if end > file_nbytes:
        raise _truncated(shard, f"{end} bytes as its header says", file_nbytes)
    if end < file_nbytes:
        raise CheckpointError(
            "SHARD_TRAILING_BYTES", "shard goes on after its last tensor", where=shard,
            expected=f"{end} bytes", got=file_nbytes,
            hint="download the shard again",
        )


def _truncated(shard: str, expected: str, file_nbytes: int) -> CheckpointError:
    return CheckpointError(
        "SHARD_TRUNCATED", "shard is cut short", where=shard, expected=expected, got=f"{file_nbytes} bytes",
        hint="the download did not finish: fetch the shard again",
    )


def _invalid(where: str, expected: str, got: Any) -> CheckpointError:
    return CheckpointError(
        "HEADER_INVALID", "safetensors header breaks the format", where=where, expected=expected, got=_short(got),
        hint="download the shard again",
    )


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
