"""The fuzzed readers in every test run: the committed corpus, and a bounded number of mutations of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS, seeds

CORPUS = Path(__file__).resolve().parent / "corpus"
MUTATIONS = 10_000


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutated(source: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to four changes of the kinds that parsers trip over."""
    out = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(out) + 1)
        match source.randrange(6):
            case 0:
                out[at : at + 1] = bytes([source.randrange(256)])
            case 1:
                out[at:at] = source.randbytes(source.randint(1, 8))
            case 2:
                del out[at : at + source.randint(1, 16)]
            case 3:
                out[at : at + 8] = source.choice([b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80", b"\x7f" + b"\xff" * 7])
            case 4:
                out[at:at] = out[source.randrange(len(out) + 1) :][: source.randint(1, 64)]
            case _:
                other = source.choice(others)
                out[at:] = other[min(at, len(other)) :]
    return bytes(out)


@pytest.mark.parametrize("name", READERS)
def test_no_mutation_of_the_corpus_surprises_a_reader(name: str) -> None:
    source = random.Random(name)
    inputs = corpus(name)

    for data in inputs:
        READERS[name](data)
    for _ in range(MUTATIONS):
        READERS[name](mutated(source, source.choice(inputs), inputs))


@pytest.mark.parametrize("name", READERS)
def test_corpus_begins_with_what_the_reader_accepts(name: str) -> None:
    assert [seed for seed, data in seeds()[name].items() if data not in corpus(name)] == []
