"""Free TCP ports on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterable

DEMO_PORTS = range(18100, 18400)
"""Below the ports that Linux gives to outgoing connections and to listeners on port 0 (from 32768)."""


class PortAllocator:
    """Reserves free ports on loopback, each one once, as long as the allocator lives.

    A reserved port is bound, but does not listen. So no other allocator gets it, and only a server that sets
    SO_REUSEADDR can listen on it.
    """

    def __init__(self, ports: Iterable[int] = DEMO_PORTS) -> None:
        candidates = list(ports)
        start = os.getpid() * 31 % len(candidates)  # ports of a run before this one may be in TIME_WAIT
        self._candidates = iter(candidates[start:] + candidates[:start])
        self._range = f"{min(candidates)}-{max(candidates)}"
        self._reserved = contextlib.ExitStack()
        weakref.finalize(self, self._reserved.close)

    def next_free(self) -> int:
        """Reserve the next free port. Raises ``RuntimeError`` when the range is used up."""
        for port in self._candidates:
            reservation = socket.socket()
            try:
                reservation.bind(("127.0.0.1", port))
            except OSError:
                reservation.close()
                continue
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.enter_context(reservation)
            return port
        raise RuntimeError(f"no free TCP port left in {self._range}; a port is free again a minute after its last use")
