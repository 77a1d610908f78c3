"""An engine behind the proxy: its role, its health, its outstanding work and its identity."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, TypeAlias

from layerpush.apps.proxy.identity import Identity
from layerpush.apps.proxy.settings import Settings

Role: TypeAlias = Literal["prefill", "decode"]
Dispatch: TypeAlias = Literal["concurrent", "sequential"]


class Instance:
    """One API server. Used by the event loop's thread only."""

    def __init__(self, role: Role, url: str, settings: Settings) -> None:
        self.role: Role = role
        self.url = url
        self.outstanding_tokens = 0
        self.healthy = False
        self.problem = "not checked yet"
        """The reason why it is unhealthy. It has no meaning while the instance is healthy."""
        self.identity = settings.identities.get(url)
        """The identity of a prefill engine; None while it is unknown."""
        self.identity_given = self.identity is not None
        """Whether the operator gave the identity. Then answers only replace its engine id."""
        self.former: set[Identity] = set()
        """All identities seen since a server began to listen at this URL."""
        self.shared = False
        """Whether several engines answer at this URL, in turn."""
        self.doubtful = False
        """Whether a failed request made it unhealthy, and no check has followed yet."""
        self._settings = settings
        self._failures = 0
        self._successes = settings.health_success_threshold - 1  # the first check after the start is enough

    @property
    def dispatch(self) -> Dispatch:
        """The order in which this prefill engine and D are asked."""
        return "sequential" if self._settings.sequential or self.identity is None else "concurrent"

    def passed(self) -> None:
        """A check has passed."""
        self.doubtful = False
        self._failures = 0
        self._successes += 1
        if self._successes >= self._settings.health_success_threshold:
            self.healthy = True

    def failed(self, problem: str, gone: bool = False) -> None:
        """A check has failed. ``gone``: nobody listens at the URL."""
        self.doubtful = False
        self._failures += 1
        if self._failures >= self._settings.health_failure_threshold or not self.healthy:
            self._set_unhealthy(problem, gone)

    def lost(self, problem: str) -> None:
        """A request could not connect: the instance is unhealthy until the next check."""
        self._set_unhealthy(problem, gone=True)
        self.doubtful = True
        self._successes = self._settings.health_success_threshold - 1

    @contextlib.contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        """Count this work while the block runs."""
        self.outstanding_tokens += tokens
        try:
            yield
        finally:
            self.outstanding_tokens -= tokens

    def _set_unhealthy(self, problem: str, gone: bool) -> None:
        self.healthy = False
        self.problem = problem
        self._failures = self._successes = 0
        if gone and not self.identity_given:
            self.identity = None  # the next server at this URL is another process
            self.former.clear()
            self.shared = False

    def __str__(self) -> str:
        return f"{self.role} {self.url}"
