"""The leases that P's finished requests have on their blocks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

GRACE_S = 1.0
"""A lease that is due while a WRITE reads the blocks goes on for this many seconds."""
SLACK_S = 0.1
"""vLLM reads the clock after us: a lease that ends within this many seconds counts as due."""

LeaseDeadlines = dict[str, float]
"""vLLM's table: when the lease of each request ends, in seconds of ``time.perf_counter``. Main thread."""


class SendLeases:
    """Enforces two rules. No lease ends while a WRITE reads from the request's blocks. After a lease has ended, vLLM
    posts no WRITE of the whole request.

    One lock decides which of the two comes first. No thread holds it across a NIXL call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posting: set[str] = set()
        self._expired: set[str] = set()

    def reap(
        self, deadlines: LeaseDeadlines, now: float, is_read: Callable[[str], bool], expire: Callable[[str], None]
    ) -> None:
        """Prolong or end every lease that is due. Main thread.

        ``now`` is in seconds of ``time.perf_counter``. ``is_read`` gets a request id and returns whether a WRITE reads
        from its blocks. ``expire`` gets the request id of each lease that ends.
        """
        with self._lock:
            due = [request_id for request_id, deadline in deadlines.items() if deadline <= now + SLACK_S]
            for request_id in due:
                if request_id in self._posting or is_read(request_id):
                    deadlines[request_id] = now + GRACE_S
                else:
                    deadlines[request_id] = now
                    self._expired.add(request_id)
                    expire(request_id)

    @contextlib.contextmanager
    def posting(self, request_id: str) -> Iterator[bool]:
        """A context for posting the WRITEs of a whole request. Yields False if its lease has ended. Writer thread."""
        with self._lock:
            lives = request_id not in self._expired
            if lives:
                self._posting.add(request_id)
        try:
            yield lives
        finally:
            with self._lock:
                self._posting.discard(request_id)

    def forget(self, request_id: str) -> None:
        """The worker holds nothing of the request any more, so no push of it can start. Writer thread."""
        with self._lock:
            self._expired.discard(request_id)


def extend(deadlines: LeaseDeadlines, named: set[str], until: float, may_lapse: Callable[[str], bool]) -> None:
    """A heartbeat names requests: their leases end at ``until`` or later, unless they ``may_lapse``. Main thread.

    A router that asks both engines at once gives P's request another suffix than D's, so equal base ids suffice.
    """
    bases = {get_base_request_id(name) for name in named}
    for request_id in deadlines:
        if (request_id in named or get_base_request_id(request_id) in bases) and not may_lapse(request_id):
            deadlines[request_id] = max(deadlines[request_id], until)
