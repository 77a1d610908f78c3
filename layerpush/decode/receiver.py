"""Completions that reach a decode worker before its engine told it of the request.

Every rank of a decode engine shares one scheduler, and any rank's registration may start the push for all. A rank that
is a step behind can therefore be told "complete" for a request that it has not heard of; upstream would call that
notification unrecognised and drop it, and the request would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from layerpush.wire import HEARTBEAT_PREFIX

HOLD_S = 10.0
HELD = 65536


class Receiver:
    """Passes notifications on in order of arrival, but holds a completion until its request is known.

    ``knows`` says whether the worker's main thread tracks a request; it is called on the writer thread. A completion
    that is still unknown after ``hold`` seconds is passed on all the same, for upstream to log and count; so is the
    oldest when too many are held.
    """

    def __init__(self, knows: Callable[[str], bool], hold: float = HOLD_S) -> None:
        self._knows = knows
        self._hold = hold
        self._held: deque[tuple[float, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def accept(self, payload: bytes, now: float) -> None:
        """A notification that is no registration has arrived at time ``now``, in seconds."""
        self._held.append((now + self._hold, payload))

    def due(self, now: float) -> Iterator[bytes]:
        """Take what can be passed on now."""
        for _ in range(len(self._held)):
            deadline, payload = self._held.popleft()
            crowded = len(self._held) >= HELD
            heartbeat = payload.startswith(HEARTBEAT_PREFIX)
            if crowded or heartbeat or now >= deadline or self._knows(_request_id(payload)):
                yield payload
            else:
                self._held.append((deadline, payload))


def _request_id(payload: bytes) -> str:
    return payload.rpartition(b":")[0].decode(errors="replace")
