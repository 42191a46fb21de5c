"""Local checkpoints are the pinned ones byte for byte, or refused by what differs."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import CheckpointError
from typer.testing import CliRunner

from runtime import pins
from runtime.cli import app
from runtime.pins import Pin, PinnedFile, VerifiedFile, local_nbytes, read_pins, verify_pins

REVISION = "0123456789abcdef" + "0" * 24


def safetensors(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int, end: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 2], "data_offsets": [begin, end]}


GOOD = safetensors({"__metadata__": {"format": "pt"}, "a": tensor(0, 4), "b": tensor(4, 10)}, bytes(10))


def pinned(data: bytes, path: str = "model.safetensors", **stated: Any) -> Pin:
    file = PinnedFile(path, len(data), hashlib.sha256(data).hexdigest(), **stated)
    return Pin("toy", "owner/toy-draft", REVISION, (file,))


def write(home: Path, data: bytes, path: str = "model.safetensors") -> None:
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    (home / path).write_bytes(data)


PLACES = [("by-repository", "owner/toy-draft", ""), ("by-name", "toy-draft", ""), ("itself", "toy-draft", "toy-draft")]


@pytest.mark.parametrize(("home", "given"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_file_that_is_the_pinned_one_is_verified(tmp_path: Path, home: str, given: str) -> None:
    write(tmp_path / home, GOOD)
    pin = pinned(GOOD, num_tensors=2, dtypes=("BF16",))
    hashed: list[int] = []

    found = verify_pins(tmp_path / given, [pin], hashed.append)

    assert found == (VerifiedFile("owner/toy-draft", REVISION, "model.safetensors", len(GOOD),
                                  hashlib.sha256(GOOD).hexdigest(), 2),)
    assert sum(hashed) == len(GOOD) == local_nbytes(tmp_path / given, [pin])


def test_files_and_checkpoints_that_are_not_there_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "toy-draft", b"{}", "dflash/config.json")
    weights, config = pinned(GOOD).files[0], pinned(b"{}", "dflash/config.json").files[0]
    here = Pin("toy", "owner/toy-draft", REVISION, (weights, config))
    elsewhere = Pin("other", "owner/other", REVISION, (weights,))

    assert [(file.path, file.num_tensors) for file in verify_pins(tmp_path, [elsewhere, here])] == [
        ("dflash/config.json", None)
    ]


def test_folder_without_any_pinned_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        verify_pins(tmp_path, [pinned(GOOD)])

    assert (caught.value.code, caught.value.expected) == ("PIN_NONE", "owner/toy-draft")


NO_HEADER = struct.pack("<Q", 0) + bytes(8)
DIFFERENT = [
    ("longer", GOOD + b"\0", pinned(GOOD), "PIN_SIZE", f"expected {len(GOOD)} bytes, got {len(GOOD) + 1} bytes"),
    ("one-bit", GOOD[:-1] + b"\1", pinned(GOOD), "PIN_DIGEST", "expected sha256 "),
    ("fewer-tensors", GOOD, pinned(GOOD, num_tensors=3), "PIN_TENSORS", "expected 3 tensors, got 2"),
    ("other-dtype", GOOD, pinned(GOOD, dtypes=("F32",)), "PIN_DTYPE", "expected F32, got BF16"),
    ("one-more-dtype", GOOD, pinned(GOOD, dtypes=("BF16", "F32")), "PIN_DTYPE", "expected BF16 F32, got BF16"),
    ("bytes-after-the-last", GOOD + b"\0\0", pinned(GOOD + b"\0\0"), "PIN_END",
     f"expected the last tensor to end at byte {len(GOOD) + 2}, got {len(GOOD)}"),
    ("no-header", NO_HEADER, pinned(NO_HEADER), "PIN_HEADER", "got a header of 0 bytes"),
    ("endless-header", b"\xff" * 16, pinned(b"\xff" * 16), "PIN_HEADER", "expected a safetensors header"),
    ("no-json", safetensors({}, b"")[:8] + b"[]", pinned(safetensors({}, b"")[:8] + b"[]"), "PIN_HEADER", "got "),
]


@pytest.mark.parametrize(
    ("data", "pin", "code", "message"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT]
)
def test_file_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, data: bytes, pin: Pin, code: str, message: str
) -> None:
    write(tmp_path / "toy-draft", data)

    with pytest.raises(CheckpointError) as caught:
        verify_pins(tmp_path, [pin])

    assert caught.value.code == code
    assert message in str(caught.value)
    assert "the pinned one of owner/toy-draft at 0123456789ab" in caught.value.what
    assert caught.value.where == str(tmp_path / "toy-draft" / "model.safetensors")


def test_shipped_pins_are_those_of_the_published_checkpoints() -> None:
    assert {(pin.repository, pin.revision, file.path, file.nbytes, file.sha256[:12], file.num_tensors)
            for pin in read_pins() for file in pin.files} == {
        ("z-lab/Qwen3.8-27B-DFlash2", "50307d4c4cde6860d4eee73e2547cd786fe8e8a4", "config.json", 1239,
         "873e3556509b", None),
        ("z-lab/Qwen3.8-27B-DFlash2", "50307d4c4cde6860d4eee73e2547cd786fe8e8a4", "model.safetensors", 3848817896,
         "67fc76d68dc5", 81),
        ("z-lab/Muse-Glimmer-30B-DFlash2", "b54ffdd11fa9cfe2af370012e5763d492c904128", "config.json", 1326,
         "cb684d6f688a", None),
        ("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash", "b754e6c86008bdb5cc901308dda5a38173ec7276", "dflash/config.json", 1251,
         "2ed5a998f5f5", None),
    }
    assert all(len(file.sha256) == 64 and set(file.sha256) <= set("0123456789abcdef")
               for pin in read_pins() for file in pin.files)


def test_command_reports_what_it_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "toy-draft", GOOD)
    monkeypatch.setattr(pins, "read_pins", lambda: (pinned(GOOD),))

    shown = CliRunner().invoke(app, ["verify-pins", str(tmp_path), "--json"])

    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == {"files": [{
        "repository": "owner/toy-draft", "revision": REVISION, "path": "model.safetensors", "nbytes": len(GOOD),
        "sha256": hashlib.sha256(GOOD).hexdigest(), "num_tensors": 2}]}


def test_command_refuses_a_copy_that_differs(tmp_path: Path) -> None:
    write(tmp_path / "Qwen3.8-27B-DFlash2", b"{}", "config.json")

    shown = CliRunner().invoke(app, ["verify-pins", str(tmp_path), "--json"])

    assert shown.exit_code == 3
    assert json.loads(shown.stdout)["error"]["code"] == "PIN_SIZE"
