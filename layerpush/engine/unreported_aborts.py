"""Aborted pushes whose outcome is unreported. Time is the caller's clock."""

from __future__ import annotations

ABORT_REPORT_S = 1.0
"""Seconds for which an engine without requests keeps stepping to report aborted pushes."""
NEXT_REPORT_S = 0.1
"""Seconds for which an engine keeps stepping after the newest report of such pushes, at least one step."""


class UnreportedAborts:
    """Keeps an engine stepping after an abort. An engine without requests takes no steps, and its workers report only
    in a step.

    The main thread calls ``abort_began`` and asks ``is_pending``; the writer thread reads ``count`` before a turn and
    passes it to ``aborts_drained`` when all pushes dropped by then have drained.
    """

    def __init__(self) -> None:
        self.count = 0
        self._drained = 0
        self._until = 0.0

    def abort_began(self, now: float) -> None:
        """Requests were aborted, or a lease has ended."""
        self.count += 1
        self._until = now + ABORT_REPORT_S

    def aborts_drained(self, count: int) -> None:
        """The pushes of the first ``count`` drops have drained."""
        self._drained = count

    def is_pending(self, now: float) -> bool:
        """Whether the engine has to keep stepping."""
        return self._drained < self.count and now < self._until
