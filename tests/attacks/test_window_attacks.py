"""No window between verify and use: another process loads in a loop while its files are overwritten, moved and cut.

The loader counts three kinds of outcome: it read exactly the signed bytes, or it was refused by a code that says why,
or something else. The last one must not happen.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toy_core import BIG_BYTES, ToyCore, trust_document, write_trust

SECONDS = 1.5

LOADER = """
import collections, hashlib, json, sys, time
from pathlib import Path
from dflash_core.errors import DflashError
from runtime.trust import TrustPolicy
from runtime.verify import verify

core, trust, big, signed, seconds = sys.argv[1:]
policy = TrustPolicy.load(Path(trust))
memory = bytearray(int(sys.argv[3].partition(":")[2]))
name = big.partition(":")[0]
counts = collections.Counter()
end = time.monotonic() + float(seconds)
print("ready", flush=True)
while time.monotonic() < end or not counts:
    try:
        with verify(Path(core), policy) as opened:
            opened.read_into(name, memoryview(memory), threads=2)
        counts["loaded" if hashlib.sha256(memory).hexdigest() == signed else "wrong bytes"] += 1
    except DflashError as err:
        counts[err.code] += 1
    except BaseException as err:
        counts["surprise: " + repr(err)] += 1
print(json.dumps(counts))
"""


def overwrite_in_place(path: Path, signed: bytes, spare: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(len(signed) // 2)
        stream.write(b"\0" * 4096)
        stream.flush()
        time.sleep(0.002)
        stream.seek(len(signed) // 2)
        stream.write(signed[len(signed) // 2 : len(signed) // 2 + 4096])


def rename_and_replace(path: Path, signed: bytes, spare: Path) -> None:
    path.rename(spare)
    path.write_bytes(bytes(len(signed)))
    time.sleep(0.002)
    spare.replace(path)


def truncate(path: Path, signed: bytes, spare: Path) -> None:
    os.truncate(path, len(signed) // 2)
    time.sleep(0.002)
    with path.open("r+b") as stream:
        stream.write(signed)


def replace_with_link(path: Path, signed: bytes, spare: Path) -> None:
    path.rename(spare)
    path.symlink_to(spare)
    time.sleep(0.002)
    path.unlink()
    spare.rename(path)


@pytest.mark.parametrize(("attack", "codes"), [
    (overwrite_in_place, {"CHUNK_MISMATCH"}),
    (rename_and_replace, {"CHUNK_MISMATCH", "FILE_MISSING", "FILE_SIZE"}),
    (truncate, {"CHUNK_MISMATCH", "FILE_SIZE"}),
    (replace_with_link, {"FILE_MISSING", "FILE_TYPE"}),
], ids=["overwrite in place", "rename and replace", "truncate", "link"])
def test_loader_gets_the_signed_bytes_or_an_error(
    toy: ToyCore, tmp_path: Path, attack: Callable[[Path, bytes, Path], None], codes: set[str]
) -> None:
    trust = write_trust(tmp_path / "trust.json", trust_document())
    path = toy.path / toy.big
    signed = path.read_bytes()
    arguments = [toy.path, trust, f"{toy.big}:{BIG_BYTES}", hashlib.sha256(signed).hexdigest(), SECONDS]
    loader = subprocess.Popen([sys.executable, "-c", LOADER, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                              cwd=Path(__file__).resolve().parents[2])
    assert loader.stdout is not None and loader.stdout.readline() == "ready\n"

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        attack(path, signed, tmp_path / "spare")
        time.sleep(0.02)
    out, _ = loader.communicate(timeout=60)

    counts = json.loads(out)
    assert set(counts) <= codes | {"loaded"}
    assert counts.keys() & codes, "the attack was never seen: it proves nothing"
    assert path.read_bytes() == signed
