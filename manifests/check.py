"""Check the cores, recipes and pins of a repository, as a pull request or a commit changes them.

    python -m manifests.check --base origin/main --trust trust.json     # what changed since a revision
    python -m manifests.check manifests/recipes/llama.txtpb demo/core/manifest.pb --trust trust.json

A core is verified in full by the trust file, and held against `--policy` if one is given. A recipe must be one that the
exporter reads. A pin must have the size and digest of every file that lies in the repository. Each problem is one line,
`file:line: CODE message`; under GitHub Actions it is an annotation of that file as well.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_core.errors import CheckpointError, DflashError, PolicyError, QualityError, RecipeError, UsageError

from exporter.recipe import load_recipe
from runtime.bundle import StrictJsonError, is_sha256, parse_strict_json
from runtime.policy import check_policy, read_policy
from runtime.trust import TrustPolicy
from runtime.verify import MANIFEST, verify

RECIPE_SUFFIX = ".txtpb"
ARCHIVE_SUFFIX = ".core.zip"
PIN_FOLDER = "pins"
IN_REPOSITORY = "repository"
_PIN_FILE_FIELDS = {"role", "path", "bytes", "sha256"}


@dataclass(frozen=True, slots=True)
class Subjects:
    """What to check: files and directories relative to the working directory, each once, sorted."""

    cores: tuple[str, ...]
    recipes: tuple[str, ...]
    pins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the line that a person would change."""

    file: str
    line: int
    error: DflashError


def main(arguments: list[str] | None = None) -> int:
    """Check, report, and return the exit status: 0, or the exit code of the first problem."""
    parser = argparse.ArgumentParser(prog="python -m manifests.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", help="files to check, or files of cores")
    parser.add_argument("--base", help="check what changed since the merge base with this revision")
    parser.add_argument("--trust", type=Path, help="trust file for cores")
    parser.add_argument("--policy", type=Path, help="rules for cores, as `dflash-run policy check` reads them")
    known = parser.parse_args(arguments)
    try:
        paths = [*known.paths, *(changed_since(known.base) if known.base else [])]
    except UsageError as err:
        return report([Problem(".", 1, err)])
    subjects = select(paths)
    status = report(check(subjects, known.trust, known.policy))
    if not status:
        print(f"sound: {len(subjects.cores)} cores, {len(subjects.recipes)} recipes, {len(subjects.pins)} pins")
    return status


def changed_since(base: str) -> list[str]:
    """Files that differ from the merge base with `base`, removed ones included. Raises BASE_UNKNOWN.

    The commit before the first push of a branch is all zeros: every file has changed since.
    """
    command = ["git", "diff", "--name-only", "-z", "--no-renames", f"{base}...HEAD"]
    if set(base) == {"0"}:
        command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError("BASE_UNKNOWN", "git cannot compare with the base", where=base, got=done.stderr.strip()[:200],
                         hint="fetch the base with its history: `fetch-depth: 0` in actions/checkout")
    return [path for path in done.stdout.split("\0") if path]


def select(paths: Iterable[str]) -> Subjects:
    """The cores, recipes and pins that these files belong to; pins of changed files are checked too."""
    cores, recipes, pins = set(), set(), set()
    listed = [PurePosixPath(path) for path in paths]
    for path in listed:
        core = next((parent for parent in path.parents if Path(parent, MANIFEST).is_file()), None)
        if core is not None:
            cores.add(str(core))
        elif path.name.endswith(ARCHIVE_SUFFIX) and Path(path).is_file():
            cores.add(str(path))
        elif path.suffix == RECIPE_SUFFIX and Path(path).is_file():
            recipes.add(str(path))
        elif is_pin(path) and Path(path).is_file():
            pins.add(str(path))
    names = {str(path) for path in listed}
    pins |= {pin for pin in all_pins() if names & set(pinned_paths(pin))}
    return Subjects(tuple(sorted(cores)), tuple(sorted(recipes)), tuple(sorted(pins)))


def is_pin(path: PurePosixPath) -> bool:
    return path.suffix == ".json" and path.parent.name == PIN_FOLDER


def all_pins() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=False)
    return [name for name in done.stdout.split("\0") if name and is_pin(PurePosixPath(name)) and Path(name).is_file()]


def pinned_paths(pin: str) -> list[str]:
    """Files of the repository that a pin names; none if the pin is malformed, which is found when it is checked."""
    try:
        document = parse_strict_json(Path(pin).read_bytes())
        return [item["path"] for item in document["files"] if item["role"] == IN_REPOSITORY]
    except (StrictJsonError, KeyError, TypeError):
        return []


def check(subjects: Subjects, trust: Path | None, policy: Path | None) -> Iterator[Problem]:
    """Every problem of every subject, in order."""
    for recipe in subjects.recipes:
        try:
            load_recipe(Path(recipe))
        except RecipeError as err:
            yield Problem(recipe, recipe_line(Path(recipe), err), err)
    for pin in subjects.pins:
        yield from check_pin(pin)
    for core in subjects.cores:
        try:
            check_core(Path(core), trust, policy)
        except DflashError as err:
            file = core if core.endswith(ARCHIVE_SUFFIX) else f"{core}/{MANIFEST}"
            yield Problem(file, 1, err)


def check_core(core: Path, trust: Path | None, policy: Path | None) -> None:
    """Verify every byte of a core, and ask the policy."""
    if trust is None:
        raise PolicyError("POLICY_MISSING", "a core changed and no trust file was given", where=str(core),
                          hint="pass --trust, or the action's input `trust`")
    with verify(core, TrustPolicy.load(trust)) as verified:
        verified.read_full()
        findings = () if policy is None else check_policy(verified, read_policy(policy))
    for finding in findings:
        if not finding.met:
            raise QualityError("POLICY_UNMET", f"the core breaks the rule {finding.rule}", where=str(core),
                               expected=finding.expected, got=finding.found)


def check_pin(pin: str) -> Iterator[Problem]:
    """What a pin states about itself, and about each file that lies in the repository."""
    text = Path(pin).read_text("utf-8", "replace")
    try:
        document = parse_strict_json(text.encode("utf-8"))
        files = document["files"]
        sound = isinstance(document["name"], str) and isinstance(files, list) and all(map(is_pin_file, files))
    except StrictJsonError as err:
        yield Problem(pin, 1, pin_error("PIN_MALFORMED", f"the pin is not strict JSON: {err}", pin))
        return
    except (KeyError, TypeError):
        sound = False
    if not sound:
        what = "the pin lacks a name, or files of role, path, bytes and sha256"
        yield Problem(pin, 1, pin_error("PIN_MALFORMED", what, pin))
        return
    for item in files:
        if item["role"] == IN_REPOSITORY:
            yield from check_pinned_file(pin, text, item)


def is_pin_file(item: Any) -> bool:
    return (isinstance(item, dict) and item.keys() >= _PIN_FILE_FIELDS and isinstance(item["path"], str)
            and isinstance(item["bytes"], int) and is_sha256(item["sha256"]))


def check_pinned_file(pin: str, text: str, item: dict[str, Any]) -> Iterator[Problem]:
    path = item["path"]
    if path.startswith("/") or ".." in PurePosixPath(path).parts or not Path(path).is_file():
        yield Problem(pin, line_of(text, path), pin_error("PIN_FILE", "the pinned file is not in the repository", path))
        return
    nbytes = Path(path).stat().st_size
    with Path(path).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != item["sha256"]:
        yield Problem(pin, line_of(text, item["sha256"], after=path),
                      pin_error("PIN_DIGEST", "the file does not have the pinned digest", path, item["sha256"], digest))
    elif nbytes != item["bytes"]:
        yield Problem(pin, line_of(text, str(item["bytes"]), after=path),
                      pin_error("PIN_SIZE", "the file does not have the pinned size", path, item["bytes"], nbytes))


def pin_error(code: str, what: str, where: str, expected: object = None, got: object = None) -> CheckpointError:
    return CheckpointError(code, what, where=where, expected=expected, got=got,
                           hint="pin what was reviewed, or restore the file")


def recipe_line(path: Path, error: RecipeError) -> int:
    """The line of a recipe that an error is about: where the parser stopped, or the row or word that it names."""
    stopped = re.search(r"\((\d+):\d+", error.what)
    if stopped:
        return int(stopped[1])
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    row = re.search(r"\brow (\S+)", error.what)
    word = error.got.partition(", ")[0] if error.got else ""
    if row:
        return line_of(text, f'"{word}"', after=f'"{row[1]}"') if word else line_of(text, f'"{row[1]}"')
    return line_of(text, word or error.what.rpartition(" ")[2])


def line_of(text: str, word: str, *, after: str = "") -> int:
    """The first line that holds `word`, at or after the first that holds `after`; that line, or 1, if there is none."""
    start = max(text.find(after), 0) if after else 0
    at = text.find(word, start) if word else -1
    return text.count("\n", 0, at if at >= 0 else start) + 1


def report(problems: Iterable[Problem]) -> int:
    """Print each problem, and return the exit code of the first."""
    status = 0
    for problem in problems:
        error = problem.error
        status = status or int(error.exit_code)
        message = str(error)
        print(f"{problem.file}:{problem.line}: {error.code} {message}")
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print(f"::error file={escaped(problem.file, property_too=True)},line={problem.line},"
                  f"title={error.code}::{escaped(message)}")
    return status


def escaped(text: str, *, property_too: bool = False) -> str:
    """`text` as a workflow command carries it."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property_too else text


if __name__ == "__main__":
    sys.exit(main())
