"""Checkpoints are opened by header and byte range; anything damaged, ambiguous or unsafe is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import struct

import pytest
import torch
from dflash_core.errors import CheckpointError, ExitCode
from safetensors.torch import save_file

from exporter.checkpoint import (
    hash_files,
    identity_nbytes,
    open_checkpoint,
    read_rows,
    read_tensor,
    same_bytes,
)
from tests.exporter.small_checkpoints import EXAMPLES, bf16, raw_shard, shard_bytes, write_sharded, write_single

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONE = {"w": bf16((2, 3))}


def refused(path, code, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    for word in words:
        assert word in str(caught.value), str(caught.value)


def entry(dtype="BF16", shape=(2, 3), begin=0, end=12):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_opens_the_example_draft_by_name_shape_and_byte_range():
    draft = open_checkpoint(EXAMPLES / "smollm2-135m-dflash2")

    fc = draft.tensors["fc.weight"]
    assert len(draft.tensors) == 51
    assert list(draft.tensors) == sorted(draft.tensors)
    assert (fc.dtype, fc.shape, fc.shard) == ("BF16", (576, 2880), "model-00002-of-00003.safetensors")
    assert (fc.offset, fc.nbytes) == (8 + 1752 + 3145728, 3317760)
    assert draft.config["architectures"] == ["DFlash2DraftModel"]
    assert [shard.nbytes for shard in draft.shards] == [15730976, 13004256, 3182848]


def test_reads_tensors_as_the_safetensors_package_wrote_them(tmp_path):
    tensors = {
        "bf16": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "f32": torch.linspace(-1, 1, 7),
        "fp8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5, dtype=torch.float16),
        "empty": torch.empty(0, 5, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    checkpoint = open_checkpoint(tmp_path)

    for name, tensor in tensors.items():
        assert read_tensor(checkpoint, name).dtype == tensor.dtype
        assert torch.equal(read_tensor(checkpoint, name).float(), tensor.float())
        assert read_tensor(checkpoint, name).shape == tensor.shape


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        pytest.param(0, 1, [[0, 1]], id="first"),
        pytest.param(1, 3, [[2, 3], [4, 5]], id="rest"),
        pytest.param(2, 2, [], id="none"),
    ],
)
def test_reads_rows_of_a_tensor(tmp_path, start, stop, expected):
    write_single(tmp_path, {}, {"pad": bf16((1,)), "w": ("F32", (3, 2), struct.pack("<6f", *range(6)))})

    rows = read_rows(open_checkpoint(tmp_path), "w", start, stop)

    assert rows.tolist() == expected
    assert rows.shape == (stop - start, 2)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param(("BF16", (2, 3), bytes(12)), True, id="equal"),
        pytest.param(("BF16", (2, 3), bytes(11) + b"\1"), False, id="last byte differs"),
        pytest.param(("BF16", (3, 2), bytes(12)), False, id="another shape"),
        pytest.param(("F16", (2, 3), bytes(12)), False, id="another dtype"),
    ],
)
def test_compares_two_tensors_byte_by_byte(tmp_path, monkeypatch, other, expected):
    monkeypatch.setattr("exporter.checkpoint.HASH_CHUNK_NBYTES", 5)
    left = open_checkpoint(write_single(tmp_path / "l", {}, {"w": ("BF16", (2, 3), bytes(12))}))
    right = open_checkpoint(write_single(tmp_path / "r", {}, {"pad": bf16((1,)), "v": other}))

    assert same_bytes(left, "w", right, "v") is expected


def test_hashes_every_file_that_identifies_the_model(tmp_path):
    write_sharded(tmp_path, {A: {"a": bf16((3,), 1)}, B: {"b": bf16((9,), 2)}})
    (tmp_path / "tokenizer.json").write_text('{"t": 1}')
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "README.md").write_text("no part of the model")
    checkpoint = open_checkpoint(tmp_path)
    counts = []

    files = hash_files(checkpoint, counts.append)

    assert [file.path for file in files] == [
        "chat_template.jinja", "config.json", A, B, "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    for file in files:
        data = (tmp_path / file.path).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).digest())
    assert sum(counts) == sum(file.size_bytes for file in files) == identity_nbytes(checkpoint)


HEADERS = [
    pytest.param(b"\x01\x02", "SHARD_TRUNCATED", ["cut short", "got 2 bytes"], id="shorter than a length"),
    pytest.param(
        shard_bytes(ONE)[:40], "SHARD_TRUNCATED", ["a header of", "got 40 bytes"], id="ends within the header",
    ),
    pytest.param(
        shard_bytes(ONE)[:-1], "SHARD_TRUNCATED", ["as its header says", "fetch the shard again"],
        id="ends within the data",
    ),
    pytest.param(shard_bytes(ONE) + b"x", "SHARD_TRAILING_BYTES", ["goes on after"], id="trailing byte"),
    pytest.param(
        struct.pack("<Q", 100_000_001) + b"{}", "HEADER_TOO_LONG", ["100000000", "got 100000001"], id="huge header",
    ),
    pytest.param(b"GGUF" + bytes(60), "GGUF", ["this is a GGUF checkpoint"], id="gguf under another name"),
    pytest.param(raw_shard(b"\xff\xfe{}"), "JSON_INVALID", ["not valid JSON", "model.safetensors"], id="not utf-8"),
    pytest.param(raw_shard(b'{"a":'), "JSON_INVALID", ["not valid JSON"], id="broken json"),
    pytest.param(raw_shard(b"[" * 100_000), "JSON_INVALID", ["not valid JSON"], id="json nested too deep"),
    pytest.param(raw_shard(b"[]"), "JSON_NOT_OBJECT", ["got list"], id="a list"),
    pytest.param(raw_shard(b'{"__metadata__": {"a": NaN}}'), "JSON_INVALID", ["NaN"], id="nan"),
    pytest.param(
        raw_shard(b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(12)),
        "JSON_INVALID", ["key 'w' appears twice"], id="one tensor twice",
    ),
    pytest.param(raw_shard({"__metadata__": {"a": 1}}), "HEADER_INVALID", ["an object of strings"], id="metadata"),
    pytest.param(raw_shard({"w": [1]}), "HEADER_INVALID", ["w in model.safetensors"], id="entry is a list"),
    pytest.param(raw_shard({"w": {**entry(), "x": 1}}, bytes(12)), "HEADER_INVALID", ["dtype, shape"], id="extra key"),
    pytest.param(raw_shard({"w": entry(shape=(-2, -3))}, bytes(12)), "HEADER_INVALID", ["non-neg"], id="negative dim"),
    pytest.param(raw_shard({"w": entry(shape=(True, 6))}, bytes(12)), "HEADER_INVALID", ["shape"], id="boolean dim"),
    pytest.param(raw_shard({"w": entry(shape=(2.0, 3))}, bytes(12)), "HEADER_INVALID", ["shape"], id="float dim"),
    pytest.param(raw_shard({"w": entry(begin=12, end=0)}, bytes(12)), "HEADER_INVALID", ["begin ≤ end"], id="reversed"),
    pytest.param(raw_shard({"w": entry(dtype="BF17")}, bytes(12)), "TENSOR_DTYPE", ['BF17'], id="unknown dtype"),
    pytest.param(
        raw_shard({"w": entry(dtype="F32")}, bytes(12)), "TENSOR_NBYTES",
        ["w in model.safetensors", "24 bytes for F32 [2, 3]", "got 12"], id="mislabelled dtype",
    ),
    pytest.param(raw_shard({"w": entry(shape=(2, 2))}, bytes(12)), "TENSOR_NBYTES", ["8 bytes"], id="wrong shape"),
    pytest.param(raw_shard({"w": entry("F4", (3,), 0, 2)}, bytes(2)), "TENSOR_NBYTES", ["1.5 bytes"], id="half byte"),
    pytest.param(
        raw_shard({"w": entry(), "v": entry(begin=11, end=23)}, bytes(23)), "TENSOR_OFFSETS",
        ["overlap", "v in model.safetensors", "expected data at byte 12, got 11"], id="overlap",
    ),
    pytest.param(
        raw_shard({"w": entry(), "v": entry(begin=13, end=25)}, bytes(25)), "TENSOR_OFFSETS", ["belong to no tensor"],
        id="hole",
    ),
    pytest.param(raw_shard({"w": entry(begin=1, end=13)}, bytes(13)), "TENSOR_OFFSETS", ["got 1"], id="hole at start"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "code", "words"), HEADERS)
def test_refuses_damaged_shard(tmp_path, data, code, words):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)

    refused(tmp_path, code, *words)


def test_takes_tensors_that_are_listed_out_of_order(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    header = {"b": entry(begin=12, end=24), "a": entry(), "none": entry(shape=(0,), begin=12, end=12)}
    (tmp_path / "model.safetensors").write_bytes(raw_shard(header, bytes(24)))

    assert sorted(open_checkpoint(tmp_path).tensors) == ["a", "b", "none"]


FOLDERS = [
    pytest.param({}, "CONFIG_MISSING", ["no config.json"], id="empty folder"),
    pytest.param({"model.safetensors": shard_bytes(ONE)}, "CONFIG_MISSING", ["no config.json"], id="no config"),
    pytest.param({"config.json": b"{}"}, "WEIGHTS_MISSING", ["no safetensors file"], id="no weights"),
    pytest.param(
        {"config.json": b"{}", A: shard_bytes(ONE)}, "WEIGHTS_MISSING", [A, "fetch the index"],
        id="shard without index",
    ),
    pytest.param(
        {"config.json": b"{}", "pytorch_model.bin": b"\x80\x02"}, "PICKLE",
        ["never opened", "pytorch_model.bin", "convert the model to safetensors"], id="pickle .bin",
    ),
    pytest.param({"config.json": b"{}", "model.pt": b"\x80"}, "PICKLE", ["model.pt"], id="pickle .pt"),
    pytest.param({"model.Q4_1.gguf": b"GGUF"}, "GGUF", ["GGUF checkpoint", "model.Q4_1.gguf"], id="gguf folder"),
    pytest.param(
        {"config.json": b"nope", "model.safetensors": shard_bytes(ONE)}, "JSON_INVALID", ["config.json"],
        id="config is not json",
    ),
    pytest.param(
        {"config.json": b'{"a": 1, "a": 2}', "model.safetensors": shard_bytes(ONE)}, "JSON_INVALID",
        ["'a' appears twice"], id="config says a key twice",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("files", "code", "words"), FOLDERS)
def test_refuses_folder_without_a_readable_model(tmp_path, files, code, words):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)

    refused(tmp_path, code, *words)


def test_refuses_path_that_is_not_there(tmp_path):
    refused(tmp_path / "absent", "CHECKPOINT_MISSING", "does not exist", "absent")


@pytest.mark.parametrize(
    ("name", "data", "code", "word"),
    [
        pytest.param("draft.gguf", b"GGUF\3", "GGUF", "GGUF checkpoint", id="gguf file"),
        pytest.param("draft", b"GGUF\3", "GGUF", "GGUF checkpoint", id="gguf by magic"),
        pytest.param("model.bin", b"\x80", "PICKLE", "never opened", id="pickle file"),
        pytest.param("model.safetensors", shard_bytes(ONE), "CHECKPOINT_NOT_FOLDER", "a folder", id="one shard"),
    ],
)
def test_refuses_file_in_place_of_a_folder(tmp_path, name, data, code, word):
    (tmp_path / name).write_bytes(data)

    refused(tmp_path / name, code, word)


TWO = {A: {"a": bf16((2,))}, B: {"b": bf16((2,))}}
INDEXES = [
    pytest.param(TWO, {}, "INDEX_INVALID", ["no usable weight_map"], id="empty map"),
    pytest.param(TWO, [1], "INDEX_INVALID", ["from tensor name to shard name"], id="map is a list"),
    pytest.param(TWO, {"a": 1}, "INDEX_INVALID", ["weight_map"], id="shard is a number"),
    pytest.param(TWO, {"a": "../" + A, "b": B}, "INDEX_SHARD_PATH", ["outside the checkpoint", "../"], id="escapes"),
    pytest.param(TWO, {"a": "/etc/passwd", "b": B}, "INDEX_SHARD_PATH", ["/etc/passwd"], id="absolute"),
    pytest.param(TWO, {"a": "config.json", "b": B}, "INDEX_SHARD_PATH", ["config.json"], id="no shard at all"),
    pytest.param(
        TWO, {"a": A, "b": "model-00009-of-00002.safetensors"}, "INDEX_SHARD_MISSING",
        ["model-00009-of-00002.safetensors", "fetch the missing"], id="absent shard",
    ),
    pytest.param(TWO, {"a": A, "b": B, "c": B}, "INDEX_TENSORS", [f"c is not in {B}"], id="absent tensor"),
    pytest.param(
        {A: {"a": bf16((2,)), "x": bf16((1,))}, B: {"b": bf16((2,))}}, {"a": A, "b": B}, "INDEX_TENSORS",
        [f"x in {A} is not in the index"], id="tensor that the index lacks",
    ),
    pytest.param(
        {A: {"a": bf16((2,))}, B: {"a": bf16((2,)), "b": bf16((2,))}}, {"a": A, "b": B}, "TENSOR_DUPLICATE",
        ["two shards hold the same tensor", f"{A} and {B}"], id="duplicate tensor",
    ),
    pytest.param(TWO, {"a": B, "b": A}, "INDEX_TENSORS", [f"a is not in {B}", f"b is not in {A}"], id="swapped"),
]  # fmt: skip


@pytest.mark.parametrize(("shards", "weight_map", "code", "words"), INDEXES)
def test_refuses_index_that_does_not_describe_its_shards(tmp_path, shards, weight_map, code, words):
    write_sharded(tmp_path, shards, weight_map)

    refused(tmp_path, code, *words)


def test_refuses_single_file_beside_an_index_of_other_shards(tmp_path):
    write_sharded(tmp_path, TWO)
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(ONE))

    refused(tmp_path, "WEIGHTS_AMBIGUOUS", "both model.safetensors and an index")


def grow(path):
    path.write_bytes(path.read_bytes() + b"x")


def touch(path):
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def unlink(path):
    path.unlink()


@pytest.mark.parametrize("read", [
    pytest.param(lambda checkpoint: read_tensor(checkpoint, "w"), id="read"),
    pytest.param(lambda checkpoint: read_rows(checkpoint, "w", 0, 1), id="rows"),
    pytest.param(lambda checkpoint: hash_files(checkpoint, lambda nbytes: None), id="hash"),
])  # fmt: skip
@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        pytest.param(grow, "SHARD_CHANGED", "changed after it was opened", id="grown"),
        pytest.param(touch, "SHARD_CHANGED", "a later modification time", id="rewritten"),
        pytest.param(unlink, "FILE_VANISHED", "vanished after it was opened", id="vanished"),
    ],
)
def test_refuses_shard_that_is_no_longer_what_was_opened(tmp_path, read, change, code, word):
    checkpoint = open_checkpoint(write_single(tmp_path, {}, ONE))
    change(tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError) as caught:
        read(checkpoint)

    assert caught.value.code == code
    assert word in str(caught.value)
    assert "model.safetensors" in caught.value.where


def test_refuses_config_that_changed_before_it_was_hashed(tmp_path):
    checkpoint = open_checkpoint(write_single(tmp_path, {"a": 1}, ONE))
    (tmp_path / "config.json").write_text('{"a": 2}')

    with pytest.raises(CheckpointError, match=r"config\.json changed after it was read"):
        hash_files(checkpoint, lambda nbytes: None)


def test_refuses_packed_dtype_when_it_is_read(tmp_path):
    checkpoint = open_checkpoint(write_single(tmp_path, {}, {"w": ("F4", (4,), bytes(2))}))

    with pytest.raises(CheckpointError, match="packed dtype that is not read") as caught:
        read_tensor(checkpoint, "w")

    assert caught.value.got == "F4"
