"""Where a command starts: a command line that does not parse is also an error with a document, when JSON was asked for.

    def main() -> None:
        run_app(app)
"""

from __future__ import annotations

import os
import sys

import typer
from dflash_core.errors import ExitCode, ResourceError, UsageError
from typer.exceptions import TyperException

from .console import report_error


def run_app(app: typer.Typer) -> None:
    """Run a command line and exit.

    Without `--json` this is `app()`, whose usage errors are drawn for a person. With it, stdout holds one JSON document
    whatever happens, also when the arguments do not parse; a stdout that takes no document gives a message on stderr.

    Raises:
        SystemExit: always.
    """
    if "--json" not in sys.argv[1:]:
        app()
    try:
        code = _run(app)
        sys.stdout.flush()
    except OSError as err:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        report_error(ResourceError("STDOUT", f"the document cannot be written: {err.strerror}", where="stdout",
                                   hint="send stdout to a file with room, or to a reader that stays"), False)
        code = ExitCode.RESOURCES
    raise SystemExit(code)


def _run(app: typer.Typer) -> int:
    """The exit code of a command that was asked for JSON."""
    try:
        return app(standalone_mode=False) or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.BUG
    except TyperException as err:
        context = getattr(err, "ctx", None)
        place = "the command line" if context is None else context.command_path
        report_error(UsageError("COMMAND_LINE", err.format_message().rstrip("."), where=place,
                                hint="read what --help says about this command"), True)
        return ExitCode.USAGE
