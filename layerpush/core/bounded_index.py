"""Values that are found by several names, and forgotten when they are too old, too many or too large. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, TypeVar

from layerpush.core.sizes import size_of

V = TypeVar("V")

EXPIRED_AT_ONCE = 64
"""Values that ``expire`` forgets in one call: its caller has other work."""
ENTRY_BYTES = 512
"""Bytes of an entry without its value and names."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    deadline: float
    value: V
    names: tuple[Hashable, ...]
    size: int


class BoundedIndex(Generic[V]):
    """Keeps the newest values: at most ``limit`` of them, in at most ``max_bytes`` bytes, each for ``kept_s`` seconds.

    To find, to add and to drop a value takes no longer if there are many others with other names.

    ``TTLCache`` of ``cachetools`` bounds entries or bytes, but not both, and finds a value by one name. Beyond its
    bound it drops the value that was used least recently, not the oldest one.
    """

    def __init__(self, limit: int, max_bytes: int, kept_s: float = float("inf")) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._numbers = count()
        self._entries: OrderedDict[int, _Entry[V]] = OrderedDict()
        """Oldest first. A plain dictionary slows down when entries leave it at the front."""
        self._named: dict[Hashable, dict[int, None]] = {}
        self.held_bytes = 0
        """Bytes of all values."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        """All values, oldest first."""
        return (entry.value for entry in list(self._entries.values()))

    def __contains__(self, name: Hashable) -> bool:
        """Whether a value has this name."""
        return name in self._named

    def add(self, value: V, names: Iterable[Hashable], now: float = 0.0) -> list[V]:
        """Keep a value. Returns the values that are dropped: those that are too old, and the oldest beyond the limits.
        A value that is too large by itself is one of them.
        """
        names = tuple(dict.fromkeys(names))
        number, size = next(self._numbers), ENTRY_BYTES + size_of(value) + size_of(names)
        self._entries[number] = _Entry(now + self._kept_s, value, names, size)
        self.held_bytes += size
        for name in names:
            self._named.setdefault(name, {})[number] = None
        return [*self.expire(now), *self._trim()]

    def grown(self, name: Hashable) -> list[V]:
        """The values with this name have grown. Returns the oldest beyond the limits, which are dropped."""
        for number in self._numbers_of([name]):
            entry = self._entries[number]
            size = ENTRY_BYTES + size_of(entry.value) + size_of(entry.names)
            self.held_bytes += size - entry.size
            self._entries[number] = replace(entry, size=size)
        return self._trim()

    def find(self, names: Iterable[Hashable], now: float = float("-inf")) -> list[V]:
        """The values that have any of these names and are not too old, oldest first."""
        return [self._entries[number].value for number in self._numbers_of(names, now)]

    def drop(self, names: Iterable[Hashable]) -> list[V]:
        """Forget and return the values that have any of these names."""
        return [self._drop(number) for number in self._numbers_of(names)]

    def expire(self, now: float) -> list[V]:
        """Forget and return values that are too old, at most ``EXPIRED_AT_ONCE``."""
        dropped: list[V] = []
        while self._entries and len(dropped) < EXPIRED_AT_ONCE:
            number, entry = next(iter(self._entries.items()))
            if entry.deadline > now:
                break
            dropped.append(self._drop(number))
        return dropped

    @property
    def expires_at(self) -> float | None:
        """When the oldest value is too old; None if there is none."""
        return next((entry.deadline for entry in self._entries.values()), None)

    def older_than(self, age_s: float, now: float) -> list[tuple[float, V]]:
        """The values that are older than ``age_s`` seconds, oldest first, each with the time when it became so."""
        aged = []
        for entry in self._entries.values():
            since = entry.deadline - self._kept_s + age_s
            if since > now:
                break
            aged.append((since, entry.value))
        return aged

    def _trim(self) -> list[V]:
        dropped = []
        while len(self._entries) > self._limit or self.held_bytes > self._max_bytes:
            dropped.append(self._drop(next(iter(self._entries))))
        return dropped

    def _numbers_of(self, names: Iterable[Hashable], now: float = float("-inf")) -> list[int]:
        numbers = {number for name in names for number in self._named.get(name, ())}
        return sorted(number for number in numbers if self._entries[number].deadline > now)

    def _drop(self, number: int) -> V:
        entry = self._entries.pop(number)
        self.held_bytes -= entry.size
        for name in entry.names:
            numbers = self._named[name]
            del numbers[number]
            if not numbers:
                del self._named[name]
        return entry.value
