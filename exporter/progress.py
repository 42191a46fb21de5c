"""How a long export tells what it is doing; the library knows only this interface, the command draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives the stages of an export."""

    def stage(self, name: str, total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        """Around one stage; the function it gives is told the size of each piece of work, in bytes."""

    def done(self, name: str, details: str) -> None:
        """Once a stage has ended: its closing line."""

    def notice(self, text: str) -> None:
        """Something a person should know, that is not an error."""


class Silent:
    """Progress that nobody watches."""

    @contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        yield lambda nbytes: None

    def done(self, name: str, details: str) -> None:
        pass

    def notice(self, text: str) -> None:
        pass
