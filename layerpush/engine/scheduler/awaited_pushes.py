"""The scheduler's half of a decode engine: the requests that await a push, their deadlines and their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from layerpush.compat.metadata import ABORTED
from layerpush.engine.scheduler.block_holds import BlockHolds, BlockPool


class AwaitedPushes:
    """Every registered request, until all its ranks have reported the load as over. Runs in the scheduler's thread.

    A load is cancelled when its deadline passes, ``timeout_s`` seconds after its registration, or when the engine has
    finished its request. If the deadline passes first, the end of the request cancels the load once more. Time is the
    caller's clock.
    """

    def __init__(self, timeout_s: float, pool: BlockPool) -> None:
        self._timeout_s = timeout_s
        self.block_holds = BlockHolds(pool)
        self._deadlines: dict[str, float] = {}
        """By request id; only of loads that are not cancelled. In the order of the deadlines."""
        self._ending: set[str] = set()
        self._cancelled: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._deadlines) + len(self._ending)

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must go on stepping, so that workers can report, although it may have no request left."""
        return bool(self._ending or self.block_holds.parked_requests)

    def await_push(self, request_id: str, blocks: Sequence[Any], now: float) -> None:
        """A push is awaited into these blocks."""
        self.block_holds.hold(request_id, blocks)
        self._ending.discard(request_id)
        self._deadlines.pop(request_id, None)
        self._deadlines[request_id] = now + self._timeout_s

    def request_finished(self, request_id: str) -> None:
        """The engine has finished the request, in any state."""
        if request_id in self._deadlines or request_id in self._ending:
            self._cancel(request_id, ABORTED)

    def take_cancelled(self, now: float) -> dict[str, str]:
        """The loads to cancel, by request id, each with its reason. Each cancellation is returned once."""
        overdue = []
        for request_id, deadline in self._deadlines.items():
            if deadline > now:
                break
            overdue.append(request_id)
        for request_id in overdue:
            self._cancel(request_id, f"no push within {self._timeout_s:g} s (push_registration_timeout)")
        taken, self._cancelled = self._cancelled, {}
        return taken

    def loads_ended(self, received: Iterable[str]) -> None:
        """The loads of these requests are over on all ranks. ``block_holds`` has their earlier reports."""
        for request_id in received:
            self._deadlines.pop(request_id, None)
            self._ending.discard(request_id)
            self._cancelled.pop(request_id, None)
            self.block_holds.load_ended(request_id)

    def _cancel(self, request_id: str, reason: str) -> None:
        self._deadlines.pop(request_id, None)
        self._ending.add(request_id)
        self._cancelled[request_id] = reason
