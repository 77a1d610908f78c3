"""The engines behind the proxy, and the choice of one for a request. Used by the event loop's thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from layerpush.core.prefill_identity import PrefillIdentity

Role: TypeAlias = Literal["prefill", "decode"]

REST_S = 5.0
"""So long an engine that could not be connected to gets requests only if there is no other."""


@dataclass(eq=False)
class Engine:
    """One API server. Times are those of the event loop."""

    role: Role
    url: str
    requests: int = 0
    """Requests that it works on."""
    rests_until: float = 0.0
    identity: PrefillIdentity | None = None
    """The identity of a prefill engine; None while it is unknown."""
    asked_at: float | None = None
    """The time at which the server that listens at this URL was asked for its identity."""
    warning: str = ""
    """The last logged reason why the identity is unknown."""

    def gone(self, now: float) -> None:
        """Nobody listens at its URL: the next server there is another process."""
        self.rests_until = now + REST_S
        self.identity = self.asked_at = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def __str__(self) -> str:
        return f"{self.role} {self.url}"


class Pool:
    """All engines of a role."""

    def __init__(self, role: Role, urls: list[str]) -> None:
        self.engines = [Engine(role, url) for url in urls]
        self._turn = 0

    def pick(self, suspects: Collection[Engine], now: float) -> Engine:
        """The engine with the fewest requests; equals take turns. A suspect, or one that rests, only if all are."""
        turn = self._turn % len(self.engines)
        self._turn += 1
        in_turn = self.engines[turn:] + self.engines[:turn]
        return min(in_turn, key=lambda each: (each in suspects, each.rests_until > now, each.requests))
