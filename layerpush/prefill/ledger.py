"""Registrations that came before their request. Pure; the writer thread owns it."""

from __future__ import annotations

from collections.abc import Callable

from layerpush.wire import Registration

KEPT = 4096
KEPT_S = 480.0


class Ledger:
    """Bounded in number and in time: what nobody asks for within ``kept_s`` seconds is forgotten.

    ``base_id`` strips the suffix that an engine adds to the id its router gave. Of several registrations with one
    base id the newest is meant: a router that tries again leaves the older ones behind.
    """

    def __init__(self, base_id: Callable[[str], str], kept: int = KEPT, kept_s: float = KEPT_S) -> None:
        self._base_id = base_id
        self._kept = kept
        self._kept_s = kept_s
        self._entries: dict[str, tuple[float, Registration]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, registration: Registration, now: float) -> list[Registration]:
        """Keep a registration; returns those that had to go for it, too old or too many."""
        self._entries.pop(registration.request_id, None)
        self._entries[registration.request_id] = (now + self._kept_s, registration)
        dropped = [entry for deadline, entry in self._entries.values() if deadline <= now]
        excess = len(self._entries) - len(dropped) - self._kept
        if excess > 0:
            dropped += [entry for deadline, entry in self._entries.values() if deadline > now][:excess]
        for entry in dropped:
            del self._entries[entry.request_id]
        return dropped

    def take(self, request_id: str, now: float) -> Registration | None:
        """The registration of this request: its exact id, else the newest with its base id, ending older ones."""
        exact = self._entries.pop(request_id, None)
        if exact is not None and exact[0] > now:
            return exact[1]
        base = self._base_id(request_id)
        same = [key for key in self._entries if self._base_id(key) == base]
        found = [self._entries.pop(key) for key in same]
        return found[-1][1] if found and found[-1][0] > now else None

    def drop(self, request_id: str) -> None:
        self._entries.pop(request_id, None)
