"""Text as a client sees it: pieces that end at a stop string, and log-probabilities with their tokens spelled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine import TokenLogprob
from runtime.text import CoreText


class StopScanner:
    """Passes text on up to the first stop string; what could become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that is certain to come before any stop string."""
        if self.matched is not None:
            return ""
        self._held += piece
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            passed, self._held = self._held[:at], ""
            return passed
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def flush(self) -> str:
        """What was held back, once nothing follows."""
        passed, self._held = self._held, ""
        return passed


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one token added to the visible text."""

    token: int
    text: str


class TextAssembler:
    """Turns tokens into visible text, token by token, until a stop string."""

    def __init__(self, text: CoreText, stops: Sequence[str]) -> None:
        self._stream, self._scanner = text.stream(), StopScanner(stops)

    @property
    def stopped(self) -> bool:
        return self._scanner.matched is not None

    def push(self, tokens: Sequence[int]) -> list[TextPiece]:
        """One piece per token that was taken; tokens after the one that completes a stop string are not."""
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            pieces.append(TextPiece(token, self._scanner.push(self._stream.push(token))))
        return pieces

    def flush(self) -> str:
        return self._scanner.flush()


def chat_logprobs(text: CoreText, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As chat completions spell them."""
    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = _spell(text, token)
        return {"token": spelled, "logprob": logprob, "bytes": list(spelled.encode())}

    return {"content": [{**one(e.token, e.logprob), "top_logprobs": [one(*pair) for pair in e.top]} for e in entries],
            "refusal": None}


def completion_logprobs(text: CoreText, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """As completions spell them; `offset` is that of the first token in the text so far."""
    tokens = [_spell(text, entry.token) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": [entry.logprob for entry in entries], "text_offset": offsets,
            "top_logprobs": [{_spell(text, token): value for token, value in entry.top} for entry in entries]}


def _spell(text: CoreText, token: int) -> str:
    return str(text.tokenizer.decode([token], skip_special_tokens=False))
