"""Requests of this prefill engine, found by the names that a decode engine may give them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.request_names import of_transfer


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that has come to this prefill engine: its router's ``transfer_id`` and the digest of its prompt, each
    None if unknown.
    """

    request_id: str
    transfer_id: str | None = None
    prompt_digest: str | None = None


class RequestIndex:
    """Keeps the newest ``limit`` requests, each for ``kept_s`` seconds. ``base_id`` strips the suffix that an engine
    adds to the id its router gave. Times are the caller's clock.
    """

    def __init__(self, base_id: Callable[[str], str], limit: int, max_bytes: int, kept_s: float = float("inf")) -> None:
        self._base = base_id
        self._requests: BoundedIndex[Arrived] = BoundedIndex(limit, max_bytes, kept_s)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Arrived, now: float = 0.0) -> None:
        """Keep a request, in place of one with the same id."""
        self.remove(request.request_id)
        names = [(request.request_id,), self._base(request.request_id)]
        transfer = request.transfer_id
        self._requests.add(request, names if transfer is None else [*names, of_transfer(transfer)], now)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.drop([(request_id,)])

    def expire(self, now: float) -> None:
        """Forget the requests that are too old."""
        self._requests.expire(now)

    @property
    def requests(self) -> list[str]:
        """All requests, in the order in which they were added."""
        return [request.request_id for request in self._requests]

    def get(self, request_id: str) -> Arrived | None:
        """A request, if it is kept."""
        return next(iter(self._requests.find([(request_id,)])), None)

    def with_any(self, keys: Iterable[str]) -> list[str]:
        """The requests with any of these keys, in the order in which they were added. See ``RequestNames.keys``."""
        return [request.request_id for request in self._requests.find(keys)]

    def has_any(self, keys: Iterable[str]) -> bool:
        """Whether a request with any of these keys is kept."""
        return any(key in self._requests for key in keys)
