"""The scheduler's half of a decode engine: the requests that await a push, their deadlines and their blocks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
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
        self._deadlines: dict[str, tuple[float, float]] = {}
        """By request id; only of loads that are not cancelled. Each with its timeout."""
        self._ending: set[str] = set()
        self._cancelled: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._deadlines) + len(self._ending)

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must go on stepping, so that workers can report, although it may have no request left."""
        return bool(self._ending or self.block_holds.parked_requests)

    def await_push(self, request_id: str, blocks: Sequence[Any], now: float, most_s: float = math.inf) -> None:
        """A push is awaited into these blocks, for ``most_s`` seconds at most."""
        timeout_s = min(self._timeout_s, most_s)
        self.block_holds.hold(request_id, blocks)
        self._deadlines[request_id] = now + timeout_s, timeout_s

    def request_finished(self, request_id: str) -> None:
        """The engine has finished the request, in any state."""
        if request_id in self._deadlines or request_id in self._ending:
            self._cancel(request_id, ABORTED)

    def newest(self, blocks: int, among: Container[str]) -> list[str]:
        """The newest of these requests that hold ``blocks`` blocks together, or all. Cancelled ones give theirs back
        anyway.
        """
        chosen = []
        for request_id in reversed(self._deadlines):
            if blocks <= 0:
                break
            if request_id not in among:
                continue
            blocks -= self.block_holds.number_of(request_id)
            chosen.append(request_id)
        return chosen

    def take_cancelled(self, now: float) -> dict[str, str]:
        """The loads to cancel, by request id, each with its reason. Each cancellation is returned once."""
        overdue = {each: timeout_s for each, (deadline, timeout_s) in self._deadlines.items() if deadline <= now}
        for request_id, timeout_s in overdue.items():
            key = " (push_registration_timeout)" if timeout_s == self._timeout_s else ""
            self._cancel(request_id, f"no push within {timeout_s:g} s{key}")
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
