"""docs/trust.md: every command in it is run here, in one shell, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.toy_core import make_toy_core

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trust.md"
EXIT = re.compile(r"\s+# exit (\d+)$")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the page, the lines shown below it, and the exit status that it says."""

    text: str
    shown: tuple[str, ...]
    status: int


def commands() -> list[Command]:
    found: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, *shown = part.rstrip("\n").split("\n")
            status = EXIT.search(text)
            found.append(Command(EXIT.sub("", text), tuple(shown), int(status[1]) if status else 0))
    return found


def run_all(listed: list[Command], directory: Path) -> list[tuple[int, list[str]]]:
    """Run the commands in one shell; the status and output of each."""
    mark = "--- 7f3c ---"
    script = "".join(f"{command.text}\nprintf '\\n{mark} %s\\n' $?\n" for command in listed)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(directory), "COLUMNS": "200",
           "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=directory, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    parts = re.split(rf"\n{mark} (\d+)\n", done.stdout)
    return [(int(status), output.splitlines()) for output, status in zip(parts[::2], parts[1::2], strict=False)]


def matches(shown: str, printed: list[str]) -> bool:
    pattern = re.escape(shown).replace("…", ".*")
    return any(re.fullmatch(pattern, line) for line in printed)


def test_every_command_does_what_the_page_shows(tmp_path: Path) -> None:
    toy = make_toy_core(tmp_path / "core", signed=False)
    assert toy.path == tmp_path / "core"
    listed = commands()

    results = run_all(listed, tmp_path)

    assert len(results) == len(listed) > 40
    wrong = [(command.text, status, printed) for command, (status, printed) in zip(listed, results, strict=True)
             if status != command.status or not all(matches(line, printed) for line in command.shown)]
    assert wrong == []
