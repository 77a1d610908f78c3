"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Keeps the last ``limit`` entries, and older ones that are still live."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def note(self, key: K, value: V, is_live: Callable[[K], bool] = lambda _: False) -> None:
        """Set an entry, and forget the oldest ones beyond the limit. An entry whose key ``is_live`` stays."""
        self[key] = value
        self.move_to_end(key)
        for oldest in list(islice(self, max(0, len(self) - self._limit))):
            if is_live(oldest):
                self.move_to_end(oldest)
            else:
                del self[oldest]
