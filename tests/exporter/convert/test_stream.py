"""Weight files are written whole or not at all, with the bytes, digests and views that the layout promises."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dflash_core.errors import CheckpointError, ConvertError, DflashError
from dflash_core.formats import Format
from safetensors.torch import save_file
from torch import Tensor

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.convert import blob_file, stream
from exporter.convert import pieces as reader
from exporter.convert.mxfp8 import quantize_mxfp8
from exporter.convert.nvfp4 import quantize_nvfp4
from exporter.convert.stream import ConvertedWeights, convert_weights
from exporter.weights import WeightLayout, WeightSpec, layout_weights


def checkpoint_of(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    return open_checkpoint(folder)


def spec(
    name: str, fmt: Format, shape: tuple[int, ...], sources: tuple[str, ...], blob: str = "target",
    recipe: str = "copy/1", data: Tensor | None = None,
) -> WeightSpec:
    return WeightSpec(name, blob, "target", "target", sources, recipe, fmt, shape, data)


def random_matrix(rows: int, cols: int, seed: int, size: float = 0.02) -> Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * size).to(torch.bfloat16)


def convert(tmp_path: Path, tensors: dict[str, Tensor], layout: WeightLayout, name: str = "core") -> ConvertedWeights:
    folder = tmp_path / f"model-{name}"
    checkpoint = checkpoint_of(folder, tensors)
    return convert_weights(layout, {"target": checkpoint}, tmp_path / name, lambda nbytes: None)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def view_bytes(root: Path, converted: ConvertedWeights, name: str) -> bytes:
    view = next(view for view in converted.views if view.name == name)
    blob = next(blob for blob in converted.blobs if blob.blob_id == view.blob_id)
    return (root / blob.path).read_bytes()[view.offset_bytes : view.offset_bytes + view.size_bytes]


def test_plain_weights_are_copied_with_zero_gaps(tmp_path: Path) -> None:
    layout = layout_weights([
        spec("norm", Format.BF16, (2,), ("n",)),
        spec("pair", Format.BF16, (3, 1), ("b", "a"), recipe="concat-rows/1"),
    ])
    tensors = {
        "n": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "a": torch.tensor([[3.0]], dtype=torch.bfloat16),
        "b": torch.tensor([[4.0], [5.0]], dtype=torch.bfloat16),
    }

    converted = convert(tmp_path, tensors, layout)

    content = (tmp_path / "core" / converted.blobs[0].path).read_bytes()
    assert content == bytes.fromhex("803f00c0") + bytes(252) + bytes.fromhex("8040a0404040")
    pair = converted.views[1]
    assert (pair.name, pair.blob_id, pair.offset_bytes, pair.size_bytes) == ("pair", 1, 256, 6)
    assert (pair.dtype, list(pair.shape), list(pair.source_tensors), pair.recipe) == (
        "bf16", [3, 1], ["b", "a"], "concat-rows/1"
    )
    assert pair.owner == "target" and not pair.HasField("format") and not pair.HasField("scale_view")


def test_mxfp8_weight_equals_the_codec_and_names_its_scales(tmp_path: Path) -> None:
    weight = random_matrix(40, 64, 1)
    layout = layout_weights([spec("body", Format.MXFP8, (40, 64), ("w",))])

    converted = convert(tmp_path, {"w": weight}, layout)

    expected = quantize_mxfp8(weight)
    assert view_bytes(tmp_path / "core", converted, "body") == raw(expected.codes)
    assert view_bytes(tmp_path / "core", converted, "body.block_scale") == raw(expected.block_scale)
    codes, scales = converted.views
    assert (codes.format, codes.scale_view, codes.recipe) == (
        "mxfp8-e4m3-ue8m0-k32", "body.block_scale", "copy/1+mxfp8/1"
    )
    assert (scales.dtype, list(scales.shape), scales.recipe) == ("u8", [40, 2], "copy/1+mxfp8/1")


def test_fused_nvfp4_weight_has_one_global_scale_over_all_sources(tmp_path: Path) -> None:
    small, large = random_matrix(16, 32, 2), random_matrix(8, 32, 3, size=0.5)
    layout = layout_weights([spec("qkv", Format.NVFP4, (24, 32), ("q", "k"), recipe="concat-rows/1")])

    converted = convert(tmp_path, {"q": small, "k": large}, layout)

    expected = quantize_nvfp4(torch.cat([small, large]))
    assert expected.global_scale is not None
    assert view_bytes(tmp_path / "core", converted, "qkv") == raw(expected.codes)
    assert view_bytes(tmp_path / "core", converted, "qkv.block_scale") == raw(expected.block_scale)
    assert view_bytes(tmp_path / "core", converted, "qkv.global_scale") == raw(expected.global_scale)


def test_generated_weight_needs_no_checkpoint(tmp_path: Path) -> None:
    table = torch.tensor([[1.0, 2.0]])
    layout = layout_weights([spec("rope", Format.F32, (1, 2), (), recipe="rope-table/1", data=table)])

    converted = convert_weights(layout, {}, tmp_path, lambda nbytes: None)

    assert (tmp_path / converted.blobs[0].path).read_bytes() == bytes.fromhex("0000803f00000040")
    assert list(converted.views[0].source_tensors) == []


LAYOUT = layout_weights([
    spec("norm", Format.BF16, (33,), ("n",)),
    spec("body", Format.MXFP8, (40, 64), ("w",)),
    spec("qkv", Format.NVFP4, (80, 64), ("w", "v"), recipe="concat-rows/1"),
    spec("head", Format.NVFP4, (40, 64), ("v",), "head"),
])
TENSORS = {"n": torch.arange(33, dtype=torch.bfloat16), "w": random_matrix(40, 64, 4), "v": random_matrix(40, 64, 5)}


def test_digests_are_those_of_the_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_file, "DIGEST_CHUNK_NBYTES", 1000)

    converted = convert(tmp_path, TENSORS, LAYOUT)

    for blob in converted.blobs:
        content = (tmp_path / "core" / blob.path).read_bytes()
        assert blob.path == f"weights/{hashlib.sha256(content).hexdigest()}.bin"
        assert (blob.sha256, blob.size_bytes) == (hashlib.sha256(content).digest(), len(content))
        chunks = [content[start : start + 1000] for start in range(0, len(content), 1000)]
        assert blob.chunk_bytes == 1000
        assert blob.chunk_digests == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    for view in converted.views:
        assert view.sha256 == hashlib.sha256(view_bytes(tmp_path / "core", converted, view.name)).digest()
    assert [blob.key for blob in converted.blobs] == ["target", "head"]


def test_file_that_ends_with_a_chunk_has_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_file, "DIGEST_CHUNK_NBYTES", 16)
    layout = layout_weights([spec("n", Format.BF16, (16,), ("n",))])

    converted = convert(tmp_path, {"n": torch.ones(16, dtype=torch.bfloat16)}, layout)

    assert len(converted.blobs[0].chunk_digests) == 2 * 32


def test_chunks_of_a_core_are_4_mib() -> None:
    assert blob_file.DIGEST_CHUNK_NBYTES == 4194304


@pytest.mark.parametrize("read_nbytes", [1, 3 * 128, 1000], ids=["a-row", "three-rows", "odd"])
def test_bytes_do_not_depend_on_the_rows_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_nbytes: int
) -> None:
    whole = convert(tmp_path, TENSORS, LAYOUT, "whole")
    monkeypatch.setattr(reader, "READ_NBYTES", read_nbytes)

    pieces = convert(tmp_path, TENSORS, LAYOUT, "pieces")

    assert pieces == whole


def test_no_more_rows_are_read_than_fit_the_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows_of = reader.read_rows

    def recording(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
        read.append((stop - start) * 128 if name != "n" else 0)
        return rows_of(checkpoint, name, start, stop)

    monkeypatch.setattr(reader, "READ_NBYTES", 1024)
    monkeypatch.setattr(reader, "read_rows", recording)

    convert(tmp_path, TENSORS, LAYOUT)

    assert max(read) == 1024
    assert sum(read) == 40 * 128 * (1 + 2 + 1), "every source is read once"


def test_nvfp4_weight_too_large_to_keep_is_read_twice_and_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    rows_of = reader.read_rows

    def recording(checkpoint: Checkpoint, name: str, start: int, stop: int) -> Tensor:
        read.append(name)
        return rows_of(checkpoint, name, start, stop)

    kept = convert(tmp_path, TENSORS, LAYOUT, "kept")
    monkeypatch.setattr(reader, "read_rows", recording)
    monkeypatch.setattr(stream, "KEPT_NBYTES", 80 * 64 * 2 - 1)  # one byte less than the fused weight has

    assert convert(tmp_path, TENSORS, LAYOUT, "again") == kept
    assert sorted(read) == ["n", "v", "v", "v", "w", "w", "w"]


CODECS = {Format.MXFP8: "quantize_mxfp8", Format.NVFP4: "quantize_nvfp4"}


@pytest.mark.parametrize("fmt", list(CODECS), ids=lambda fmt: fmt.value)
def test_two_pieces_are_converted_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: Format
) -> None:
    both = threading.Barrier(2, timeout=10)
    threads: list[tuple[int, int]] = []
    quantize = getattr(stream, CODECS[fmt])

    def meeting(*given: object) -> object:
        both.wait()  # passes only while another piece is in here
        threads.append((threading.get_ident(), torch.get_num_threads()))
        return quantize(*given)

    monkeypatch.setattr(stream, CODECS[fmt], meeting)
    monkeypatch.setattr(reader, "READ_NBYTES", 20 * 128)

    convert(tmp_path, TENSORS, layout_weights([spec("body", fmt, (40, 64), ("w",))]))

    assert len({thread for thread, _ in threads}) == 2
    assert [count for _, count in threads] == [1, 1], "each keeps to one core"


def test_nvfp4_weight_is_surveyed_on_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=10)
    amax_of = stream.block_amax

    def meeting(weight: Tensor, block: int) -> Tensor:
        both.wait()
        return amax_of(weight, block)

    monkeypatch.setattr(stream, "block_amax", meeting)
    monkeypatch.setattr(reader, "READ_NBYTES", 20 * 128)

    convert(tmp_path, TENSORS, layout_weights([spec("body", Format.NVFP4, (40, 64), ("w",))]))


def test_pieces_are_converted_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile = threading.Event()
    quantize = stream.quantize_mxfp8
    started: list[int] = []

    def counting(*given: object) -> object:
        started.append(1)
        if len(started) > 2:  # the third piece: it is not needed for the first to be written
            meanwhile.set()
        return quantize(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(stream, "quantize_mxfp8", counting)
    monkeypatch.setattr(reader, "READ_NBYTES", 10 * 128)
    waited: list[bool] = []

    def on_bytes(nbytes: int) -> None:
        waited.append(meanwhile.wait(10))

    layout = layout_weights([spec("body", Format.MXFP8, (40, 64), ("w",))])
    convert_weights(layout, {"target": checkpoint_of(tmp_path / "m", TENSORS)}, tmp_path / "core", on_bytes)

    assert all(waited)


def test_progress_adds_up_to_the_layout(tmp_path: Path) -> None:
    steps: list[int] = []

    convert_weights(LAYOUT, {"target": checkpoint_of(tmp_path / "m", TENSORS)}, tmp_path / "core", steps.append)

    assert sum(steps) == LAYOUT.size_bytes


@pytest.mark.parametrize(
    ("fmt", "value"), [(Format.MXFP8, math.nan), (Format.NVFP4, -math.inf)], ids=["mxfp8-nan", "nvfp4-infinity"]
)
def test_non_finite_weight_is_named_with_tensor_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: Format, value: float
) -> None:
    monkeypatch.setattr(reader, "READ_NBYTES", 7 * 128)
    damaged = random_matrix(40, 64, 6)
    damaged[29, 3], damaged[30, 1] = value, math.nan
    layout = layout_weights([spec("qkv", fmt, (80, 64), ("ok", "bad"), recipe="concat-rows/1")])

    with pytest.raises(ConvertError) as caught:
        convert(tmp_path, {"ok": random_matrix(40, 64, 7), "bad": damaged}, layout)

    assert caught.value.code == "NON_FINITE_WEIGHT"
    assert caught.value.where == "bad in model.safetensors, row 29, column 3"
    assert caught.value.got == str(value)
    assert list((tmp_path / "core" / "weights").iterdir()) == []


def test_non_finite_weight_that_is_not_converted_is_kept(tmp_path: Path) -> None:
    layout = layout_weights([spec("n", Format.BF16, (2,), ("n",))])

    converted = convert(tmp_path, {"n": torch.tensor([math.inf, 1.0], dtype=torch.bfloat16)}, layout)

    assert view_bytes(tmp_path / "core", converted, "n") == bytes.fromhex("807f803f")


WRONG = [
    ("f16-source", Format.BF16, (2, 2), torch.zeros(2, 2, dtype=torch.float16), "WEIGHT_DTYPE",
     "expected bfloat16, got float16"),
    ("f32-source-for-bf16", Format.BF16, (2, 2), torch.zeros(2, 2), "WEIGHT_DTYPE", "expected bfloat16, got float32"),
    ("shape", Format.BF16, (2, 3), torch.zeros(2, 2, dtype=torch.bfloat16), "WEIGHT_SHAPE",
     "expected [2, 3], got [2, 2]"),
    ("transposed", Format.BF16, (4, 2), torch.zeros(2, 4, dtype=torch.bfloat16), "WEIGHT_SHAPE", "got [2, 4]"),
    ("quantized-source", Format.MXFP8, (2, 32), torch.zeros(2, 32, dtype=torch.uint8), "SOURCE_DTYPE", "got uint8"),
]


@pytest.mark.parametrize(
    ("fmt", "shape", "tensor", "code", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_source_that_is_not_what_the_layout_says_is_refused(
    tmp_path: Path, fmt: Format, shape: tuple[int, ...], tensor: Tensor, code: str, text: str
) -> None:
    layout = layout_weights([spec("weight", fmt, shape, ("w",))])

    with pytest.raises(ConvertError) as caught:
        convert(tmp_path, {"w": tensor}, layout)

    assert caught.value.code == code
    assert text in str(caught.value)


def test_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path: Path) -> None:
    partial = tmp_path / "core" / "weights" / "head.partial"
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")

    with pytest.raises(DflashError) as caught:
        convert(tmp_path, TENSORS, LAYOUT)

    assert (caught.value.code, caught.value.exit_code) == ("NO_SPACE", 6)
    assert caught.value.where == str(partial)
    assert not partial.is_symlink()
    assert [path.suffix for path in partial.parent.iterdir()] == [".bin"], "the first blob was whole by then"


REFUSALS = [
    ("no-permission", errno.EACCES, "NOT_WRITABLE"),
    ("read-only-disk", errno.EROFS, "NOT_WRITABLE"),
    ("quota", errno.EDQUOT, "NO_SPACE"),
    ("broken-disk", errno.EIO, "WRITE_FAILED"),
]


@pytest.mark.parametrize(("number", "code"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refusal_of_the_system_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(DflashError) as caught:
        convert(tmp_path, TENSORS, LAYOUT)

    assert (caught.value.code, caught.value.exit_code) == (code, 6)
    assert caught.value.where.endswith("core/weights/target.partial")
    assert list((tmp_path / "core" / "weights").iterdir()) == []


def remove(shard: Path) -> None:
    shard.unlink()


def cut_off(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def touch(shard: Path) -> None:
    os.utime(shard, ns=(1, 1))


@pytest.mark.parametrize(
    ("happens", "code"), [(remove, "FILE_VANISHED"), (cut_off, "SHARD_CHANGED"), (touch, "SHARD_CHANGED")],
    ids=["vanishes", "loses-its-end", "is-touched"],
)
def test_shard_that_changes_under_a_conversion_is_a_checkpoint_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None], code: str
) -> None:
    monkeypatch.setattr(reader, "READ_NBYTES", 128)  # a row at a time: most are not read yet
    checkpoint = checkpoint_of(tmp_path / "m", TENSORS)
    written: list[int] = []

    def on_bytes(nbytes: int) -> None:
        if not written:
            happens(tmp_path / "m" / "model.safetensors")
        written.append(nbytes)

    with pytest.raises(CheckpointError) as caught:
        convert_weights(LAYOUT, {"target": checkpoint}, tmp_path / "core", on_bytes)

    assert (caught.value.code, caught.value.exit_code) == (code, 3)
    assert [path.name for path in (tmp_path / "core").rglob("*")] == ["weights"]


def test_file_in_the_place_of_the_folder_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "core").write_text("in the way")

    with pytest.raises(DflashError) as caught:
        convert(tmp_path, TENSORS, LAYOUT)

    assert (caught.value.code, caught.value.exit_code) == ("WRITE_FAILED", 6)


def test_disk_is_asked_to_follow_while_the_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def recording(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(blob_file, "SYNC_NBYTES", 1000)
    monkeypatch.setattr(os, "fdatasync", recording)

    convert(tmp_path, TENSORS, LAYOUT)

    assert sizes and all(size >= 1000 for size in sizes), "not before there is something to write"


def test_disk_that_fails_behind_the_writer_is_a_resource_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]  # the system reports a lost page once

    def refuse(fd: int) -> None:
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr(blob_file, "SYNC_NBYTES", 1)
    monkeypatch.setattr(os, "fdatasync", refuse)

    with pytest.raises(DflashError) as caught:
        convert(tmp_path, TENSORS, LAYOUT)

    assert (caught.value.code, caught.value.exit_code) == ("NO_SPACE", 6)
    assert caught.value.where.endswith("core/weights/target.partial")
    assert list((tmp_path / "core" / "weights").iterdir()) == []


def test_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_weights(LAYOUT, {"target": checkpoint_of(tmp_path / "m", TENSORS)}, tmp_path / "core", interrupt)

    assert list((tmp_path / "core" / "weights").iterdir()) == []


def test_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ShortFile(io.FileIO):
        def write(self, payload: memoryview) -> int:
            return super().write(payload[:1000]) or 0

    layout = layout_weights([spec("body", Format.MXFP8, (40, 64), ("w",))])
    whole = convert(tmp_path, TENSORS, layout, "whole")
    checkpoint = checkpoint_of(tmp_path / "again", TENSORS)
    monkeypatch.setattr(Path, "open", lambda path, mode="r", buffering=-1: ShortFile(path, mode))

    short = convert_weights(layout, {"target": checkpoint}, tmp_path / "short", lambda nbytes: None)

    assert short == whole
    assert (tmp_path / "short" / short.blobs[0].path).stat().st_size == layout.size_bytes


def test_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    sync = os.fsync

    def recording(fd: int) -> None:
        seen.append(sorted(path.suffix for path in (tmp_path / "core" / "weights").iterdir()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    layout = layout_weights([spec("n", Format.BF16, (33,), ("n",))])

    convert(tmp_path, TENSORS, layout)

    assert seen == [[".partial"], [".bin"]]
