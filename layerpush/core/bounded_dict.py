"""What a prefill rank remembers of decode engines beyond the life of a push, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from layerpush.core.wire import Registration, Window


class BoundedDict(OrderedDict[Any, Any]):
    """The last ``limit`` of something."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def note(self, key: Any, value: Any, is_live: Callable[[Any], bool] = lambda _: False) -> None:
        """Remember it, and forget the oldest beyond the limit, but none that ``is_live``."""
        self[key] = value
        self.move_to_end(key)
        for oldest in list(islice(self, max(0, len(self) - self._limit))):
            if is_live(oldest):
                self.move_to_end(oldest)
            else:
                del self[oldest]


@dataclass(frozen=True, slots=True)
class Asked:
    """What was registered under a key, and by which agents: the ranks of one decode engine send equal registrations,
    but for the windows that they offer.
    """

    fingerprint: bytes
    windows: Mapping[str, Window | None]

    @property
    def senders(self) -> frozenset[str]:
        return frozenset(self.windows)

    def also(self, sender: str, window: Window | None) -> Asked:
        """With another registration; what an agent said first counts."""
        return Asked(self.fingerprint, {sender: window, **self.windows})

    def is_for(self, registration: Registration) -> bool:
        return self.fingerprint == registration.fingerprint
