"""Registrations that came before their request. Pure; used by the writer thread only."""

from __future__ import annotations

from collections.abc import Callable

from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.request_names import RequestNames
from layerpush.core.wire import Registration

KEPT = 4096
KEPT_BYTES = 128 << 20
KEPT_S = 480.0

Key = tuple[str, str]


class PendingRegistrations:
    """Bounded in number, bytes and time: a registration is forgotten if its request does not come in ``kept_s`` s.

    ``names`` decides whether a registration may mean a request. Of several that may, ``take`` prefers the newest: a
    router that tries again leaves older ones behind. ``take`` drops the older ones of stock decode engines, because
    these engines never cancel them.
    """

    def __init__(
        self, names: RequestNames, kept: int = KEPT, kept_s: float = KEPT_S, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._names = names
        self._entries: BoundedIndex[Registration] = BoundedIndex(kept, kept_bytes, kept_s)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def add(self, registration: Registration, now: float) -> list[Registration]:
        """Keep a registration. Returns the registrations that are dropped because they are too old, too many or too
        large.
        """
        self._entries.drop([registration.key])
        return self._entries.add(registration, [registration.key, *self._names.keys(registration)], now)

    def expire(self, now: float) -> list[Registration]:
        """Forget and return the registrations that are too old."""
        return self._entries.expire(now)

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
                self.drop(entry.key)
        return taken

    def matching(self, request_id: str, now: float) -> list[Registration]:
        """Every registration that may mean this request, oldest first."""
        found = self._entries.find(self._names.keys_of(request_id), now)
        return [entry for entry in found if self._names.is_for(entry, request_id)]

    def naming(self, request_id: str) -> list[Registration]:
        """Every registration with a name of this request, whatever their prompts are, oldest first."""
        found = self._entries.find(self._names.keys_of(request_id))
        return [entry for entry in found if self._names.is_named(entry, request_id)]

    def older_than(self, age_s: float, now: float) -> list[tuple[float, Registration]]:
        """Every registration that is older than ``age_s`` seconds, oldest first, with the time when it became so."""
        return self._entries.older_than(age_s, now)

    def drop_if(self, condition: Callable[[Registration], bool], request_id: str | None = None) -> list[Registration]:
        """Forget and return every registration that meets this condition: of those whose names may mean this request,
        or, without one, of all.
        """
        if request_id is None:
            return self._entries.drop_if(condition)
        return self._entries.drop(self._names.keys_of(request_id), condition)

    def drop(self, key: Key) -> Registration | None:
        """Forget a registration and return it; None if there is none."""
        return next(iter(self._entries.drop([key])), None)
