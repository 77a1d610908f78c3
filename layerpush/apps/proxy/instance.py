"""An engine behind the proxy: its role, whether it is healthy, what it has to do, and who it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from layerpush.apps.proxy.identity import Identity

Role: TypeAlias = Literal["prefill", "decode"]
Dispatch: TypeAlias = Literal["concurrent", "sequential"]


@dataclass(frozen=True)
class Thresholds:
    """How many checks in a row change an instance's health."""

    failures: int
    successes: int


class Instance:
    """One API server. Used by the event loop's thread only."""

    def __init__(self, role: Role, url: str, thresholds: Thresholds, identity: Identity | None = None) -> None:
        self.role: Role = role
        self.url = url
        self.outstanding_tokens = 0
        self.healthy = False
        self.problem = "not checked yet"
        """Why it is not healthy; of no meaning while it is."""
        self.identity = identity
        """A prefill engine's, once it is known."""
        self.identity_given = identity is not None
        """Whether the operator has said who it is; what it answers does not replace that."""
        self.former: set[Identity] = set()
        """All that it has had since somebody began to listen there."""
        self.shared = False
        """Whether several engines answer at this URL, in turn."""
        self.doubtful = False
        """Whether a request has put it out, and no check has followed."""
        self._thresholds = thresholds
        self._failures = 0
        self._successes = thresholds.successes - 1  # the first check after the start is enough

    @property
    def name(self) -> str:
        return self.url

    def dispatch(self, sequential: bool) -> Dispatch:
        """How requests go to this prefill engine, which may be the operator's wish."""
        return "sequential" if sequential or self.identity is None else "concurrent"

    def passed(self) -> None:
        """A check has passed."""
        self.doubtful = False
        self._failures = 0
        self._successes += 1
        if self._successes >= self._thresholds.successes:
            self.healthy = True

    def failed(self, problem: str, gone: bool = False) -> None:
        """A check has failed; ``gone``: nobody listens."""
        self.doubtful = False
        self._failures += 1
        if self._failures >= self._thresholds.failures or not self.healthy:
            self._put_out(problem, gone)

    def lost(self, problem: str) -> None:
        """A request found nobody who listens: unhealthy until the next check says otherwise."""
        self._put_out(problem, gone=True)
        self.doubtful = True
        self._successes = self._thresholds.successes - 1

    @contextlib.contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        """Count this much work for as long as the block lasts."""
        self.outstanding_tokens += tokens
        try:
            yield
        finally:
            self.outstanding_tokens -= tokens

    def _put_out(self, problem: str, gone: bool) -> None:
        self.healthy = False
        self.problem = problem
        self._failures = self._successes = 0
        if gone and not self.identity_given:
            self.identity = None  # whoever listens here next is another process
            self.former.clear()
            self.shared = False

    def __str__(self) -> str:
        return f"{self.role} {self.url}"
