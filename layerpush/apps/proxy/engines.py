"""The engines behind the proxy: their health, their work, and the choice of one for a request."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.identity import Identity
from layerpush.apps.proxy.settings import Settings

Role: TypeAlias = Literal["prefill", "decode"]

FAILED_CHECKS = 3
"""Failed checks in a row that take an engine out of service. A refused connection does so at once."""


@dataclass(eq=False)
class Engine:
    """One API server. Used by the event loop's thread only."""

    role: Role
    url: str
    healthy: bool = False
    problem: str = "not checked yet"
    """The reason why it is unhealthy. It has no meaning while the engine is healthy."""
    is_lost: bool = False
    """Whether a request could not connect to it, and no check has followed yet."""
    requests: int = 0
    """Requests that it works on."""
    identity: Identity | None = None
    """The identity of a prefill engine; None while it is unknown."""
    former: set[Identity] = field(default_factory=set)
    """All identities seen since a server began to listen at this URL."""
    is_asked: bool = False
    """Whether the server that listens at this URL has been asked for its identity."""
    is_shared: bool = False
    """Whether several engines answer at this URL, in turn."""
    _failed_checks: int = 0

    @property
    def dispatch(self) -> Literal["concurrent", "sequential"]:
        """The order in which this prefill engine and D are asked."""
        return "sequential" if self.identity is None else "concurrent"

    def passed(self) -> None:
        """A check has passed."""
        self.healthy, self.is_lost, self._failed_checks = True, False, 0

    def failed(self, problem: str, *, is_gone: bool) -> None:
        """A check has failed. ``is_gone``: nobody listens at the URL."""
        self.is_lost = False
        self._failed_checks += 1
        if is_gone or not self.healthy or self._failed_checks >= FAILED_CHECKS:
            self._set_unhealthy(problem, is_gone)

    def lost(self, problem: str) -> None:
        """A request could not connect: the engine is unhealthy until the next check."""
        self._set_unhealthy(problem, is_gone=True)
        self.is_lost = True

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def _set_unhealthy(self, problem: str, is_gone: bool) -> None:
        self.healthy = False
        self.problem = problem
        if is_gone:  # the next server at this URL is another process
            self.identity = None
            self.former.clear()
            self.is_asked = self.is_shared = False

    def __str__(self) -> str:
        return f"{self.role} {self.url}"


class Fleet:
    """All engines. Used by the event loop's thread only."""

    def __init__(self, settings: Settings) -> None:
        self._is_least_loaded = settings.policy == "least_loaded"
        urls: list[tuple[Role, list[str]]] = [("prefill", settings.prefill), ("decode", settings.decode)]
        self._engines = [Engine(role, url) for role, listed in urls for url in listed]
        self._turns: dict[Role, int] = {"prefill": 0, "decode": 0}

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def healthy(self, role: Role) -> list[Engine]:
        """The healthy engines of a role."""
        return [each for each in self._engines if each.role == role and each.healthy]

    @property
    def ready(self) -> bool:
        """Whether each role has a healthy engine."""
        return bool(self.healthy("prefill") and self.healthy("decode"))

    def pick(self, role: Role, avoid: Collection[Engine], spare: Collection[Engine]) -> Engine | None:
        """An engine that is not in ``avoid``, by the policy. One in ``spare`` only if there is no other.

        If none is left, it is one to which a request could not connect, and which no check has found bad since. None
        if there is no such engine.
        """
        healthy = [each for each in self.healthy(role) if each not in avoid]
        lost = [each for each in self._engines if each.role == role and each.is_lost and each not in avoid]
        candidates = [each for each in healthy if each not in spare] or healthy or lost
        if not candidates:
            return None
        turn = self._turns[role] % len(candidates)
        self._turns[role] += 1
        in_turn = candidates[turn:] + candidates[:turn]
        return min(in_turn, key=lambda each: each.requests) if self._is_least_loaded else in_turn[0]

    @staticmethod
    def none_left(role: Role) -> ProxyError:
        """The error for a request for which no engine is left."""
        message = f"no healthy {role} engine: /health names each engine and its problem"
        return ProxyError(503, message, try_later=True)
