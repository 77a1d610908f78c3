"""Suspends the servers of all modes but one."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from bench.servers.engines import Engine


class Turns:
    """The servers of each mode; some may belong to several. All run at first.

    An idle engine still polls, and so do its proxy and its threads. A dozen of them on a few cores would slow down the
    engine that computes.
    """

    def __init__(self, servers: Mapping[str, Sequence[Engine]]) -> None:
        self._servers = servers
        self._suspended: list[Engine] = []

    def only(self, mode: str) -> None:
        """Suspend all servers but those of ``mode``."""
        wanted = self._servers[mode]
        for server in [each for each in self._suspended if each in wanted]:
            server.signal(signal.SIGCONT)
            self._suspended.remove(server)
        for server in (each for servers in self._servers.values() for each in servers):
            if server not in wanted and server not in self._suspended:
                server.signal(signal.SIGSTOP)
                self._suspended.append(server)
