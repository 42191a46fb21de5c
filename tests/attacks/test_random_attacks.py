"""Every single-bit flip of a small core, and ten thousand random corruptions of it: none loads, none is a surprise."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from dflash_core.errors import DflashError

from runtime.trust import TrustPolicy
from tests.attacks.tiny_core import CONFIG, GRAPH, MODULE, STATE, WEIGHTS, make_tiny_core, use_everything
from tests.toy_core import ToyCore

MANIFEST = "manifest.pb"
SIGNATURE = "signature"
PARTS = [SIGNATURE, MANIFEST, GRAPH, MODULE, WEIGHTS, STATE, CONFIG]
CORRUPTIONS, SEEDS = 10_000, range(4)
JSON_SPACE = b" \t\r\n"
"""White space between the tokens of a signature file changes nothing that it says."""

Files = dict[str, bytes]


@pytest.fixture
def tiny(tmp_path: Path) -> ToyCore:
    return make_tiny_core(tmp_path / "core")


def path_of(core: ToyCore, part: str) -> Path:
    return core.signature() if part == SIGNATURE else core.path / part


def test_the_tiny_core_itself_loads(tiny: ToyCore, trust: TrustPolicy) -> None:
    use_everything(tiny.path, trust)


@pytest.mark.parametrize("part", PARTS)
def test_no_single_flipped_bit_loads(
    tiny: ToyCore, trust: TrustPolicy, part: str, record_property: Callable[[str, object], None]
) -> None:
    path = path_of(tiny, part)
    data = path.read_bytes()
    accepted = []

    with path.open("r+b", buffering=0) as stream:
        for bit in range(8 * len(data)):
            at, mask = bit // 8, 1 << bit % 8
            os.pwrite(stream.fileno(), bytes([data[at] ^ mask]), at)
            try:
                use_everything(tiny.path, trust)
                accepted.append(bit)
            except DflashError:
                pass
            os.pwrite(stream.fileno(), data[at : at + 1], at)

    record_property("flips", 8 * len(data))
    assert accepted == []
    use_everything(tiny.path, trust)


def test_flips_cover_every_byte_of_the_core(tiny: ToyCore) -> None:
    files = {path for path in tiny.path.rglob("*") if path.is_file()}

    assert {path_of(tiny, part) for part in PARTS} == files
    assert 20_000 < 8 * sum(path.stat().st_size for path in files) < 50_000


@pytest.mark.parametrize("seed", SEEDS)
def test_no_random_corruption_loads(tiny: ToyCore, trust: TrustPolicy, seed: int) -> None:
    source = random.Random(seed)
    names = {part: str(path_of(tiny, part).relative_to(tiny.path)) for part in PARTS}
    original = {name: (tiny.path / name).read_bytes() for name in names.values()}
    accepted = []
    codes: dict[str, int] = {}

    for index in range(CORRUPTIONS // len(SEEDS)):
        what, changed = corrupted(source, original, names[SIGNATURE])
        write(tiny.path, original, changed)
        try:
            use_everything(tiny.path, trust)
            accepted.append((index, what))
        except DflashError as err:
            codes[err.code] = codes.get(err.code, 0) + 1
        write(tiny.path, changed, original)

    assert accepted == []
    assert sum(codes.values()) == 2500
    assert len(codes) >= 6  # not all stopped at one and the same door
    use_everything(tiny.path, trust)


def corrupted(source: random.Random, original: Files, signature: str) -> tuple[str, Files]:
    """One corruption that changes something: what it was, and the files after it."""
    while True:
        files = dict(original)
        name = source.choice(sorted(files))
        what = source.choice(["bytes", "swap", "truncate", "insert", "append", "duplicate", "exchange", "remove"])
        data = files[name]
        at = source.randrange(len(data))
        noise = bytes(byte for byte in source.randbytes(source.randint(1, 8)) if byte not in JSON_SPACE) or b"x"
        if what == "bytes":
            files[name] = data[:at] + noise + data[at + len(noise) :]
        elif what == "swap":
            other = source.randrange(len(data))
            low, high = sorted((at, other))
            files[name] = data[:low] + data[high : high + 1] + data[low + 1 : high] + data[low : low + 1] \
                + data[high + 1 :] if low != high else data
        elif what == "truncate":
            files[name] = data[:at]
        elif what == "insert":
            files[name] = data[:at] + noise + data[at:]
        elif what == "append":
            files[name] = data + noise
        elif what == "duplicate":  # a second copy of a signature under another name would say the same again
            files[f"{name.rpartition('/')[0] or 'config'}/copy"] = data
        elif what == "exchange":
            other_name = source.choice(sorted(files))
            files[name], files[other_name] = files[other_name], data
        else:
            del files[name]
        if files != original:
            return f"{what} {name}", files


def write(root: Path, before: Files, after: Files) -> None:
    for name in before.keys() - after.keys():
        (root / name).unlink()
    for name, data in after.items():
        if before.get(name) != data:
            (root / name).write_bytes(data)
