"""Stop strings are found wherever pieces are cut."""

from __future__ import annotations

import pytest

from runtime.serve.text import StopScanner


@pytest.mark.parametrize(
    ("pieces", "stops", "said", "matched"),
    [
        (["hello"], [], "hello", None), (["ab", "cd"], ["bc"], "a", "bc"), (["a", "b", "c"], ["abd"], "abc", None),
        (["x", "en", "d", "y"], ["end"], "x", "end"), (["aab"], ["ab"], "a", "ab"), (["aa", "ab"], ["aab"], "a", "aab"),
        (["one two"], ["two", "one"], "", "one"), (["abc"], ["abcd", "b"], "a", "b"), (["e", "n"], ["end"], "en", None),
        (["stop", "more"], ["stop"], "", "stop"), (["é", "n"], ["én"], "", "én"), (["ab"], ["a", "ab"], "", "ab"),
    ],
)
def test_stop_string_is_found_across_pieces(pieces, stops, said, matched) -> None:
    scanner = StopScanner(stops)

    text = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()

    assert (text, scanner.matched) == (said, matched)


def test_nothing_that_could_begin_a_stop_string_is_said_early() -> None:
    scanner = StopScanner(["end", "nnn"])

    assert [scanner.push(piece) for piece in ("a", "e", "n", "n", "n")] == ["a", "", "", "e", ""]
    assert scanner.matched == "nnn"
