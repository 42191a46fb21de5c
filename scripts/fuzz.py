#!/usr/bin/env python
"""Coverage-guided fuzzing (atheris) of every reader of untrusted bytes, from the corpus in tests/fuzz/corpus.

    scripts/fuzz.py --seconds 60                        # each reader for a minute, one after the other
    scripts/fuzz.py --reader archive --runs 20000

Prints one line per reader. What makes a reader fail is written to build/fuzz/<reader>/ and named; what reaches new code
is kept there too, and becomes part of the committed corpus with --keep.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
NAMES = ("bundle", "statement", "manifest", "graphs", "archive", "safetensors", "image")
MAX_BYTES = {"archive": 16384}
DEFAULT_MAX_BYTES = 4096
RSS_LIMIT_MB = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", choices=NAMES, help="one reader alone")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--runs", type=int, default=-1, help="stop after so many inputs")
    parser.add_argument("--keep", action="store_true", help="add what reached new code to the committed corpus")
    parser.add_argument("--inside", choices=NAMES, help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    if known.inside:
        fuzz(known.inside, rest)
    if importlib.util.find_spec("atheris") is None:
        print("error: atheris is not installed\n hint: it exists for Linux and Python 3.11 to 3.13; `make setup` there",
              file=sys.stderr)
        return 6
    names = [known.reader] if known.reader else NAMES
    return max([run(name, known.seconds, known.runs, keep=known.keep) for name in names])


def run(name: str, seconds: int, runs: int, *, keep: bool) -> int:
    """Fuzz one reader in a process of its own; 0 when nothing was found."""
    work = ROOT / "build" / "fuzz" / name
    work.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, __file__, "--inside", name, str(work), str(CORPUS / name), f"-max_total_time={seconds}",
        f"-runs={runs}", f"-max_len={MAX_BYTES.get(name, DEFAULT_MAX_BYTES)}", f"-rss_limit_mb={RSS_LIMIT_MB}",
        "-timeout=10", "-print_final_stats=1", f"-artifact_prefix={work}/failure-",
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    took = time.monotonic() - started
    inputs = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    print(f"{name:<12} {inputs[1] if inputs else '?':>9} inputs   {took:.0f} s   "
          f"coverage {covered[-1] if covered else '?'}   {'FAILED' if done.returncode else 'sound'}", flush=True)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    elif keep:
        merge(name, work)
    return int(done.returncode != 0)


def merge(name: str, work: Path) -> None:
    """Replace the committed corpus by the smallest set that reaches the same code."""
    fresh = work.with_name(f"{name}.merged")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    subprocess.run([sys.executable, __file__, "--inside", name, "-merge=1", str(fresh), str(CORPUS / name), str(work)],
                   check=True, capture_output=True, cwd=ROOT)
    for path in fresh.iterdir():
        shutil.copy(path, CORPUS / name / path.name)


def fuzz(name: str, arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    sys.path[:0] = [str(ROOT), str(ROOT / "proto")]
    import atheris

    with atheris.instrument_imports(include=["runtime", "exporter", "dflash_core.errors", "json"]):
        from tests.fuzz.readers import READERS
    # libFuzzer starts itself again to merge, by handing its first argument to a shell.
    atheris.Setup([f"{sys.executable} {__file__} --inside {name}", *arguments], READERS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
