"""How long each phase of a load took."""

from __future__ import annotations

import time


class PhaseClock:
    """Splits the time since it was made into named phases without gaps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase: everything since the last mark belongs to it."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in order, and "total", their sum."""
        return {**self._seconds, "total": sum(self._seconds.values())}
