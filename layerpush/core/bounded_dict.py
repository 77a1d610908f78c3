"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

from layerpush.core.sizes import size_of

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 256
"""Bytes of an entry without its key and value."""
LIVE_LOOKS = 8
"""Live entries that ``put`` steps over at most. It adds one, so it catches up."""


class BoundedDict(MutableMapping[K, V]):
    """Keeps the last ``limit`` entries, in at most ``max_bytes`` bytes, and older ones that are still live.

    A cache of ``cachetools`` has one size, so it bounds entries or bytes, but not both. Nor can it keep a live entry.
    """

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.held_bytes = 0
        """Bytes of all entries."""

    def __getitem__(self, key: K) -> V:
        return self._entries[key][0]

    def __setitem__(self, key: K, value: V) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        self.held_bytes -= self._entries.pop(key)[1]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, is_live: Callable[[K], bool] = lambda _: False) -> None:
        """Set an entry, and forget the oldest ones beyond the limits. An entry whose key ``is_live`` stays."""
        self.pop(key, None)
        size = ENTRY_BYTES + size_of(key) + size_of(value)
        self._entries[key] = value, size
        self.held_bytes += size
        looks = LIVE_LOOKS
        while len(self._entries) > self._limit or self.held_bytes > self._max_bytes:
            oldest = next(iter(self._entries))
            if oldest == key or not looks:
                return
            if is_live(oldest):
                self._entries.move_to_end(oldest)
                looks -= 1
            else:
                del self[oldest]
