"""Registrations that came before their request. Pure; used by the writer thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from layerpush.core.wire import Registration

KEPT = 4096
KEPT_S = 480.0

Key = tuple[str, str]


class PendingRegistrations:
    """Bounded in number and in time: a registration is forgotten if its request does not come in ``kept_s`` seconds.

    ``is_for`` returns whether a registration may mean a request. Of several that may, ``take`` prefers the newest: a
    router that tries again leaves older ones behind. ``take`` drops the older ones of stock decode engines, because
    these engines never cancel them.
    """

    def __init__(self, is_for: Callable[[Registration, str], bool], kept: int = KEPT, kept_s: float = KEPT_S) -> None:
        self._is_for = is_for
        self._kept = kept
        self._kept_s = kept_s
        self._entries: dict[Key, tuple[float, Registration]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def add(self, registration: Registration, now: float) -> list[Registration]:
        """Keep a registration. Returns the registrations that are dropped because they are too old or too many."""
        self._entries.pop(registration.key, None)
        self._entries[registration.key] = (now + self._kept_s, registration)
        dropped = self.expire(now)
        while len(self._entries) > self._kept:
            dropped.append(self._entries.pop(next(iter(self._entries)))[1])
        return dropped

    def __iter__(self) -> Iterator[Registration]:
        return iter([entry for _, entry in self._entries.values()])

    def expire(self, now: float) -> list[Registration]:
        """Forget and return the registrations that are too old."""
        dropped = []
        while self._entries:
            key, (deadline, registration) = next(iter(self._entries.items()))
            if deadline > now:
                break
            dropped.append(registration)
            del self._entries[key]
        return dropped

    def take(self, request_id: str, now: float) -> Registration | None:
        """Remove and return the registration of this request: the one that names it exactly, else the newest that may
        mean it.
        """
        meant = self.matching(request_id, now)
        if not meant:
            return None
        exact = [entry for entry in meant if request_id in (entry.request_id, entry.prefill_request_id)]
        taken = (exact or meant)[-1]
        for entry in meant:
            if entry is taken or not entry.layerpush:
                del self._entries[entry.key]
        return taken

    def matching(self, request_id: str, now: float) -> list[Registration]:
        """Every registration that may mean this request, oldest first."""
        current = [entry for deadline, entry in self._entries.values() if deadline > now]
        return [entry for entry in current if self._is_for(entry, request_id)]

    def older_than(self, age_s: float, now: float) -> list[tuple[float, Registration]]:
        """Every registration that is older than ``age_s`` seconds, oldest first, with the time when it became so."""
        ages = [(deadline - self._kept_s + age_s, entry) for deadline, entry in self._entries.values()]
        return [(since, entry) for since, entry in ages if since <= now]

    def drop_if(self, condition: Callable[[Registration], bool]) -> list[Registration]:
        """Forget and return every registration that meets this condition."""
        dropped = [entry for _, entry in self._entries.values() if condition(entry)]
        for entry in dropped:
            del self._entries[entry.key]
        return dropped

    def drop(self, key: Key) -> Registration | None:
        """Forget a registration and return it; None if there is none."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]
