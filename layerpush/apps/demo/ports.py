"""Free TCP ports on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

# Below the ports that Linux gives to outgoing connections and to listeners on port 0 (from 32768): a server binds its
# ports many seconds after they were chosen, and UCX in the servers started with it opens listeners meanwhile.
DEMO_PORTS = range(18100, 18400)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens on ``host:port`` now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class PortAllocator:
    """Hands out ports that were free when asked for, each one once. Two allocators start at different places."""

    def __init__(self, ports: Iterable[int] = DEMO_PORTS) -> None:
        candidates = list(ports)
        start = os.getpid() * 31 % len(candidates)
        self._candidates = iter(candidates[start:] + candidates[:start])
        self._range = f"{min(candidates)}-{max(candidates)}"

    def take(self) -> int:
        """The next free port. Raises ``RuntimeError`` when the range is used up."""
        for port in self._candidates:
            if is_free(port):
                return port
        raise RuntimeError(f"no free TCP port left in {self._range}")
