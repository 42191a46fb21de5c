"""Where tables are printed. Imported with them alone: it takes rich, which a command without a table does not load."""

from __future__ import annotations

import sys

from rich.console import Console


class TableConsole(Console):
    """Standard output, as plain text: what a core says about itself is no markup."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Leave a reader that has gone to `runtime.console.run_command`; rich alone would end the process with 1."""
        raise BrokenPipeError
