"""Which K/V pages are free."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers of one arena."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has checked that they are available."""
        assert count <= len(self._free), (count, len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free += reversed(pages)
