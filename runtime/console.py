"""How a command talks: data on stdout, everything else on stderr, one exit code per remedy.

    with run_command(json_output):
        progress = ByteProgress(json_output)
        with progress.stage("verify", core.nbytes) as on_bytes:
            core.read_full(on_bytes)
        progress.done("verify", f"{files} files   {human_bytes(core.nbytes)}")

Only commands import this module. What a core or a checkpoint says about itself can hold anything, so control characters
are spelled out before they reach a terminal.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash_core.errors import DflashError, ExitCode, ResourceError
from typer import Abort, Exit
from typer.exceptions import TyperException

_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
)
_NAME_WIDTH = 10


@contextmanager
def run_command(json_output: bool) -> Iterator[None]:
    """Turn whatever ends the block into a message and an exit code; also usable as a decorator.

    A DflashError gives its message on stderr, or one JSON document {"error": …} on stdout, and its exit code. A full
    disk, a path that cannot be used and lack of memory become a ResourceError. Ctrl-C gives one line and 130, a reader
    that closed stdout gives 141 and silence, and anything else is our bug: a traceback and 1.

    Args:
        json_output: the command was asked for JSON.
    Raises:
        SystemExit: the block did not end normally. Typer's own exceptions pass through; Typer exits with 2.
    """
    try:
        yield
        sys.stdout.flush()
    except (Abort, Exit, TyperException):
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        raise SystemExit(_EXIT_BROKEN_PIPE) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(_EXIT_INTERRUPTED) from None
    except Exception as err:
        known = _as_dflash_error(err)
        if known is None:
            _report_bug(err, json_output)
            raise SystemExit(int(ExitCode.BUG)) from None
        report_error(known, json_output)
        raise SystemExit(int(known.exit_code)) from None


def report_error(error: DflashError, json_output: bool) -> None:
    """Print an error where the person or the script that can act on it will look."""
    if json_output:
        print_json({"error": error.as_dict()})
        return
    fields = {name: None if text is None else printable(text) for name, text in error.as_dict().items()}
    shown = type(error)(fields.pop("code") or "", fields.pop("what") or "", **fields)  # type: ignore[arg-type]
    print(f"{_error_word()} {shown}", file=sys.stderr)


def print_json(document: dict[str, Any]) -> None:
    """The one document of a command that was asked for JSON."""
    print(json.dumps(document, indent=1))


def printable(text: str) -> str:
    """`text` on one line: what a terminal could obey or hide is spelled out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def human_bytes(nbytes: int) -> str:
    """Bytes in decimal units with three digits or so: 512 B, 16.6 kB, 330 MB, 16.4 GB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    if unit == "B":
        return f"{nbytes} B"
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"


def stage_line(name: str, details: str, seconds: float) -> None:
    """The closing line of a stage, on stderr: `convert   399 tensors   16.4 GB → 6.4 GB   38 s`."""
    took = f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2f} s"
    print(f"{name:<{_NAME_WIDTH}}  {details}   {took}", file=sys.stderr)


class ByteProgress:
    """One progress bar, in bytes, on stderr; nothing is drawn when stderr is no terminal or JSON was asked for."""

    def __init__(self, json_output: bool) -> None:
        self._shown = sys.stderr.isatty() and not json_output
        self._started: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Around one stage; the function it gives is told the size of each piece of work, from any thread."""
        self._started[name] = time.perf_counter()
        if not self._shown:
            yield _ignore
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"{name:<{_NAME_WIDTH}}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=total_bytes)
            yield lambda nbytes: bar.advance(task, nbytes)

    def done(self, name: str, details: str) -> None:
        """Once a stage has ended: its closing line, with the time since the stage began."""
        stage_line(name, details, time.perf_counter() - self._started.get(name, time.perf_counter()))

    def notice(self, text: str) -> None:
        """Something a person should know, that is no error."""
        print(f"note: {printable(text)}", file=sys.stderr)


def _ignore(nbytes: int) -> None:
    """What a stage without a bar is told."""


def _as_dflash_error(err: Exception) -> DflashError | None:
    if isinstance(err, DflashError):
        return err
    if isinstance(err, MemoryError):
        return ResourceError("MEMORY", "out of memory", hint="free memory, or use a smaller core")
    if isinstance(err, OSError) and err.errno in _NO_SPACE:
        return ResourceError("NO_SPACE", "no space left on the device", where=_path_of(err),
                             hint="free space, or write to another disk")
    if isinstance(err, OSError) and err.errno in _NO_ACCESS:
        return ResourceError("NO_ACCESS", f"this path cannot be used: {err.strerror}", where=_path_of(err),
                             hint="check the owner and mode of the path, or choose another")
    return None


def _path_of(err: OSError) -> str:
    names = [os.fsdecode(name) for name in (err.filename, err.filename2) if isinstance(name, str | bytes)]
    return " → ".join(names)


def _report_bug(err: Exception, json_output: bool) -> None:
    traceback.print_exception(err, file=sys.stderr)
    what = f"this is a bug in dflash: {type(err).__name__}: {printable(str(err))}"
    hint = "report it, with the lines above and the command"
    if json_output:
        print_json({"error": {"code": "BUG", "what": what, "where": "", "expected": None, "got": None, "hint": hint}})
    else:
        print(f"{_error_word()} {what}\n hint: {hint}", file=sys.stderr)


def _error_word() -> str:
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        return f"{_RED}error:{_PLAIN}"
    return "error:"
