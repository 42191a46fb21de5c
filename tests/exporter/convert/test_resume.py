"""A conversion that was killed goes on where it stood, and gives the bytes that it would have given."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from dflash_core.formats import Format
from safetensors.torch import save_file

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.convert import pieces as reader
from exporter.convert.journal import JOURNAL_NAME, conversion_digest, is_resumable
from exporter.convert.stream import ConvertedWeights, convert_weights
from exporter.weights import WeightLayout, WeightSpec, layout_weights

NUM_WEIGHTS = 24
ROWS, COLS = 512, 256


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{i}": torch.randn(ROWS, COLS, generator=generator).to(torch.bfloat16) for i in range(NUM_WEIGHTS)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def layout() -> WeightLayout:
    formats = [Format.BF16, Format.MXFP8, Format.NVFP4]
    return layout_weights([
        WeightSpec(f"v{i}", "first" if i < NUM_WEIGHTS // 2 else "second", "target", "target", (f"w{i}",), "copy/1",
                   formats[i % 3], (ROWS, COLS)) for i in range(NUM_WEIGHTS)])


def convert(model: Path, staging: Path) -> ConvertedWeights:
    return convert_weights(layout(), {"target": open_checkpoint(model)}, staging, lambda nbytes: None)


def files(staging: Path) -> dict[str, bytes]:
    return {str(path.relative_to(staging)): path.read_bytes() for path in staging.rglob("*") if path.is_file()}


def converts_slowly(model: Path, staging: Path, says: Connection) -> None:
    """What the killed process does: a conversion that takes a moment, and says that it has begun."""
    read_rows = reader.read_rows

    def slow(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
        time.sleep(0.008)
        return read_rows(checkpoint, name, start, stop)

    reader.read_rows = slow
    says.send("begins")
    convert(model, staging)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("resume") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ConvertedWeights, dict[str, bytes]]:
    staging = tmp_path_factory.mktemp("whole")
    return convert(model, staging), files(staging)


def test_killed_at_twenty_moments_and_resumed_gives_the_same_bytes(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path
) -> None:
    moments = random.Random(7)
    context = multiprocessing.get_context("forkserver")  # imports torch once, not for each of the twenty
    context.set_forkserver_preload([__name__])
    kept: list[int] = []
    for number in range(20):
        staging = tmp_path / f"k{number}"
        staging.mkdir()
        hears, says = context.Pipe(duplex=False)
        process = context.Process(target=converts_slowly, args=(model, staging, says))
        process.start()
        assert hears.recv() == "begins"
        time.sleep(moments.uniform(0, 0.25))
        process.kill()
        process.join()
        journal = staging / JOURNAL_NAME
        kept.append(journal.read_bytes().count(b'"weight"') if journal.exists() else 0)

        assert convert(model, staging) == whole[0]
        assert files(staging) == whole[1]
    assert sum(1 for count in kept if 0 < count < NUM_WEIGHTS) >= 5, f"kills came too early or too late: {kept}"


class Killed(BaseException):
    """Stands for a kill in a test that stays in its process: nothing cleans up after it."""


def half_done(model: Path, staging: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Leave what a kill leaves when the weight of that number begins to be written."""
    with monkeypatch.context() as patch:
        from exporter.convert import stream

        write = stream._BlobJob._write
        left = iter(range(at))

        def stopping(self: object, *rest: object) -> object:
            if next(left, None) is None:
                raise Killed
            return write(self, *rest)  # type: ignore[arg-type]

        patch.setattr(stream._BlobJob, "_write", stopping)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(Killed):
            convert(model, staging)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    read_rows = reader.read_rows

    def counting(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
        read.append(name)
        return read_rows(checkpoint, name, start, stop)

    monkeypatch.setattr(reader, "read_rows", counting)
    return read


@pytest.mark.parametrize("at", [0, 1, 11, 12, 17, 23])
def test_what_was_written_is_not_converted_again(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    half_done(model, tmp_path, monkeypatch, at)
    read = count_reads(monkeypatch)

    resumed = convert(model, tmp_path)

    assert resumed == whole[0] and files(tmp_path) == whole[1]
    assert {int(name[1:]) for name in read} == set(range(at, NUM_WEIGHTS))


def test_progress_of_a_resumed_conversion_adds_up_to_the_layout(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(model, tmp_path, monkeypatch, 17)
    steps: list[int] = []

    convert_weights(layout(), {"target": open_checkpoint(model)}, tmp_path, steps.append)

    assert sum(steps) == layout().size_bytes


DAMAGES = [
    ("first-byte", 0, 0), ("code-of-the-second", 262144, 1), ("scale-of-the-second", 262144 + 131072 + 3, 1),
    ("zeros-after-the-third", 262144 + 131072 + 4096 + 65536 + 8192 + 4 + 10, 3),
]


@pytest.mark.parametrize(("offset", "first_again"), [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES])
def test_bytes_that_are_not_what_was_written_are_converted_again(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    offset: int, first_again: int,
) -> None:
    half_done(model, tmp_path, monkeypatch, 5)
    with (tmp_path / "weights" / "first.partial").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    read = count_reads(monkeypatch)

    assert convert(model, tmp_path) == whole[0] and files(tmp_path) == whole[1]
    assert min(int(name[1:]) for name in read) == first_again


def test_file_that_lost_its_end_is_continued_from_there(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(model, tmp_path, monkeypatch, 5)
    os.truncate(tmp_path / "weights" / "first.partial", ROWS * COLS * 2 + 5)

    assert convert(model, tmp_path) == whole[0] and files(tmp_path) == whole[1]


def test_last_line_of_the_journal_may_be_cut_short(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(model, tmp_path, monkeypatch, 5)
    journal = tmp_path / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes()[:-9])
    read = count_reads(monkeypatch)

    assert convert(model, tmp_path) == whole[0] and files(tmp_path) == whole[1]
    assert min(int(name[1:]) for name in read) == 4


def test_journal_that_was_cut_short_is_good_for_a_second_kill(
    model: Path, whole: tuple[ConvertedWeights, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(model, tmp_path, monkeypatch, 5)
    journal = tmp_path / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes()[:-9])
    half_done(model, tmp_path, monkeypatch, 3)  # three more than the four that the journal still has
    read = count_reads(monkeypatch)

    assert convert(model, tmp_path) == whole[0] and files(tmp_path) == whole[1]
    assert min(int(name[1:]) for name in read) == 7


def test_another_conversion_takes_nothing_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(model, tmp_path / "core", monkeypatch, 5)
    other = write_checkpoint(tmp_path / "other", seed=1)
    digests = [conversion_digest(layout(), {"target": open_checkpoint(path)}) for path in (model, other)]
    resumable = [is_resumable(tmp_path / "core", digest) for digest in digests]

    converted = convert(other, tmp_path / "core")

    assert resumable == [True, False]
    assert converted == convert(other, tmp_path / "fresh")


def test_checkpoint_that_was_touched_is_another_conversion(model: Path) -> None:
    before = conversion_digest(layout(), {"target": open_checkpoint(model)})
    os.utime(model / "model.safetensors", ns=(1, 1))

    assert conversion_digest(layout(), {"target": open_checkpoint(model)}) != before


def test_nothing_of_the_journal_stays_in_the_core(model: Path, tmp_path: Path) -> None:
    converted = convert(model, tmp_path)

    assert set(files(tmp_path)) == {blob.path for blob in converted.blobs}
