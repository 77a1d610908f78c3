"""Allocates spans of a staging buffer. Pure; one thread owns a ring."""

from __future__ import annotations

from bisect import bisect_left


class RingError(ValueError):
    """A span was given back that was not taken: its bytes may now be in use twice."""


class Ring:
    """``capacity_bytes`` bytes. The search for a free span begins at the end of the last one that was taken."""

    def __init__(self, size: int) -> None:
        self.capacity_bytes = size
        self.used_bytes = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        """The number of spans that are taken."""
        return len(self._starts)

    def allocate(self, size: int, align: int = 1) -> int | None:
        """Take ``size`` bytes. Returns their offset, a multiple of ``align``; None if there is no room now."""
        if size <= 0:
            raise ValueError(f"a span of {size} bytes")
        for low, high in self._gaps():
            start = -(-low // align) * align
            if start + size <= high:
                self._starts.insert(bisect_left(self._starts, start), start)
                self._sizes[start] = size
                self.used_bytes += size
                self._next = start + size
                return start
        return None

    def free(self, offset: int) -> None:
        """Give a span back. Raises ``RingError``."""
        if offset not in self._sizes:
            raise RingError(f"no span begins at byte {offset}")
        self.used_bytes -= self._sizes.pop(offset)
        del self._starts[bisect_left(self._starts, offset)]

    def _gaps(self) -> list[tuple[int, int]]:
        """Free ranges ``(low, high)``: first those behind the last span that was taken, then all."""
        gaps, low = [], 0
        for start in self._starts:
            gaps.append((low, start))
            low = start + self._sizes[start]
        gaps.append((low, self.capacity_bytes))
        ahead = [(max(low, self._next), high) for low, high in gaps if high > self._next]
        return ahead + gaps
