"""What a command prints and how it exits, for everything that can end it."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys

import pytest
import typer
from dflash_core.errors import (
    ConvertError,
    DflashError,
    DriverError,
    PolicyError,
    QualityError,
    UsageError,
    VerificationError,
)

from runtime.console import ByteProgress, human_bytes, printable, run_command, stage_line

ERROR = ConvertError(
    "BLOCK_DIVIDES", "row does not divide into NVFP4 blocks",
    where="model.layers.3.mlp.down_proj.weight [4096, 14335] in model-00002-of-00007.safetensors",
    expected="a multiple of 16", got=14335, hint="give this tensor `format: BF16` in the recipe",
)


def ended_by(error: BaseException, json_output: bool = False) -> int | str | None:
    with pytest.raises(SystemExit) as caught, run_command(json_output):
        raise error
    return caught.value.code


def test_shows_an_error_as_what_where_and_hint_on_stderr(capsys: pytest.CaptureFixture[str]):
    code = ended_by(ERROR)

    assert code == 3
    assert capsys.readouterr() == ("", (
        "error: row does not divide into NVFP4 blocks: expected a multiple of 16, got 14335\n"
        "   at: model.layers.3.mlp.down_proj.weight [4096, 14335] in model-00002-of-00007.safetensors\n"
        " hint: give this tensor `format: BF16` in the recipe\n"
    ))


def test_puts_one_document_on_stdout_for_json(capsys: pytest.CaptureFixture[str]):
    code = ended_by(ERROR, json_output=True)

    out, err = capsys.readouterr()
    assert code == 3
    assert err == ""
    assert json.loads(out) == {"error": {
        "code": "BLOCK_DIVIDES", "what": "row does not divide into NVFP4 blocks",
        "where": "model.layers.3.mlp.down_proj.weight [4096, 14335] in model-00002-of-00007.safetensors",
        "expected": "a multiple of 16", "got": "14335", "hint": "give this tensor `format: BF16` in the recipe",
    }}


@pytest.mark.parametrize(
    ("error", "code", "first_line"),
    [
        (UsageError("X", "not together"), 2, "error: not together"),
        (PolicyError("X", "no trust"), 4, "error: no trust"),
        (VerificationError("X", "forged"), 4, "error: forged"),
        (DriverError("X", "no device"), 6, "error: no device"),
        (QualityError("X", "collapsed"), 7, "error: collapsed"),
        (OSError(errno.ENOSPC, "No space left on device", "out/w.bin"), 6, "error: no space left on the device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "w.bin"), 6, "error: no space left on the device"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 6,
         "error: this path cannot be used: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "out"), 6,
         "error: this path cannot be used: Read-only file system"),
        (MemoryError(), 6, "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (DflashError("X", "a\x1b[2Jname\nhint: obey"), 1, "error: a\\x1b[2Jname\\nhint: obey"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exits_with_the_code_of_the_remedy(
    error: BaseException, code: int, first_line: str, capsys: pytest.CaptureFixture[str]
):
    assert ended_by(error) == code
    assert capsys.readouterr().err.splitlines()[0] == first_line


def test_names_the_path_that_is_full(capsys: pytest.CaptureFixture[str]):
    ended_by(OSError(errno.ENOSPC, "No space left on device", "a/w.part", None, "a/w.bin"))

    assert "   at: a/w.part → a/w.bin\n" in capsys.readouterr().err


def test_calls_anything_else_a_bug_and_shows_the_traceback(capsys: pytest.CaptureFixture[str]):
    code = ended_by(KeyError("layer"))

    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith(
        "error: this is a bug in dflash: KeyError: 'layer'\n hint: report it, with the lines above and the command\n"
    )


def test_reports_a_bug_as_json_too(capsys: pytest.CaptureFixture[str]):
    code = ended_by(KeyError("layer"), json_output=True)

    out, err = capsys.readouterr()
    assert code == 1
    assert json.loads(out)["error"]["code"] == "BUG"
    assert err.startswith("Traceback")


@pytest.mark.parametrize("error", [typer.Exit(3), typer.Abort(), typer.BadParameter("no")], ids=repr)
def test_leaves_the_exceptions_of_typer_to_typer(error: Exception):
    with pytest.raises(type(error)), run_command(False):
        raise error


def test_a_block_that_ends_well_prints_nothing(capsys: pytest.CaptureFixture[str]):
    with run_command(False):
        pass

    assert capsys.readouterr() == ("", "")


LINES = {"lines": "for i in range(200000): print(i)",
         "a table": "from runtime.table_console import TableConsole\n for i in range(20000): TableConsole().print(i)"}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_is_silent_when_the_reader_of_stdout_has_gone(lines: str):
    code = f"from runtime.console import run_command\nwith run_command(False):\n {lines}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()

    assert process.stderr.read() == b""
    assert process.wait() == 141


def on_terminal(code: str, **environment: str) -> str:
    """What `code` writes to a stderr that is a terminal."""
    ours, theirs = pty.openpty()
    env = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", "COLUMNS": "80", **environment}
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=theirs, env=env, check=False)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says EIO once the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    return written.decode()


FAIL = "from runtime.console import *\nwith run_command(False): raise ResourceError('X', 'gone')"
BAR = (
    "from runtime.console import *\nimport time\n"
    "with ByteProgress(JSON).stage('verify', 4_000_000) as on_bytes:\n on_bytes(1_000_000); time.sleep(0.3)"
)


def test_the_word_error_is_red_on_a_terminal_and_only_there():
    assert on_terminal(FAIL).startswith("\x1b[1;31merror:\x1b[0m gone")
    assert on_terminal(FAIL, NO_COLOR="1").startswith("error: gone")


def test_a_terminal_gets_a_bar_in_bytes():
    assert "1.0/4.0 MB" in on_terminal(BAR.replace("JSON", "False"))


def test_no_bar_is_drawn_for_json():
    assert on_terminal(BAR.replace("JSON", "True")) == ""


def test_without_a_terminal_a_stage_leaves_its_closing_line_alone(capsys: pytest.CaptureFixture[str]):
    progress = ByteProgress(False)

    with progress.stage("verify", 10) as on_bytes:
        on_bytes(10)
    progress.done("verify", "3 files   10 B")

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("verify      3 files   10 B   0.0")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "line"),
    [(0.123, "convert     399 tensors   0.12 s\n"), (9.9, "convert     399 tensors   9.90 s\n"),
     (38.4, "convert     399 tensors   38 s\n")],
    ids=str,
)
def test_a_closing_line_ends_with_seconds(seconds: float, line: str, capsys: pytest.CaptureFixture[str]):
    stage_line("convert", "399 tensors", seconds)

    assert capsys.readouterr().err == line


def test_a_notice_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    ByteProgress(False).notice("taps are \x1b[31mderived\u202e")

    assert capsys.readouterr().err == "note: taps are \\x1b[31mderived\\u202e\n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_640, "16.6 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"),
     (999_499, "999 kB"), (999_500, "1.0 MB"), (330_000_000, "330 MB"), (16_400_000_000, "16.4 GB"),
     (2**40, "1.1 TB"), (10**16, "10000 TB")],
    ids=str,
)
def test_bytes_are_read_at_a_glance(nbytes: int, text: str):
    assert human_bytes(nbytes) == text


def test_printable_keeps_words_and_spells_out_controls():
    assert printable("Größe → 3\t\x00\u200b") == "Größe → 3\\t\\x00\\u200b"
