"""Run two or more independent NumPy calls at once; NumPy and hashlib release the interpreter lock while they work.

Splitting never changes a result: each part computes its own rows from its own inputs, whatever thread it runs on.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

MAX_THREADS = 8


def cpu_count() -> int:
    """Processors that this process may use."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


class Crew:
    """Worker threads that wait for parts of one call. The caller runs the first part itself, then helps with the rest,
    so that a call ends however few threads there are."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._parts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._entry = threading.Lock()
        for _ in range(threads - 1):
            threading.Thread(target=self._work, daemon=True, name="dflash-ops").start()

    def _work(self) -> None:
        while True:
            self._run(self._parts.get())

    def _run(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as e:  # handed to the caller, who raises it
            self._done.put(e)
        else:
            self._done.put(None)

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run all parts and return when the last has ended; the first failure is raised."""
        with self._entry:
            for part in parts[1:]:
                self._parts.put(part)
            self._run(parts[0])
            with suppress(queue.Empty):
                while True:
                    self._run(self._parts.get_nowait())
            failures = [self._done.get() for _ in parts]
        failure = next((f for f in failures if f is not None), None)
        if failure is not None:
            raise failure


_crew: Crew | None = None
_crew_lock = threading.Lock()


def crew() -> Crew:
    """The process's crew, started on first use."""
    global _crew
    with _crew_lock:
        if _crew is None:
            _crew = Crew(cpu_count())
        return _crew


def ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` items cut into at most `parts` non-empty consecutive ranges, as equal as they can be."""
    parts = max(1, min(parts, count))
    edges = [count * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))
