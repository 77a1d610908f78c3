"""API servers from the fork server that engine hosts come from: one process of a test session imports vLLM."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from pathlib import Path

from bench.servers import forkserver
from bench.servers.engines import EngineSpec
from bench.servers.forkserver import ForkServer
from tests.e2e.enginehost import fork_server
from tests.support import starts
from tests.support.waiting import until

COLD = ("-m", "vllm.entrypoints.openai.api_server")
START_S = 120.0
CLONE_NEWTIME = 0x80


class ForkedSpec(EngineSpec):
    """A server from a fork server of the session. Not for several API servers, or a network namespace of its own."""

    ahead_s = 0
    """Seconds by which the server's monotonic clock is ahead of the tests' clock."""

    def command(self, port: int) -> list[str]:
        words = super().command(port)
        module = words.index(COLD[0])
        assert tuple(words[module : module + 2]) == COLD
        return [*words[: module - 1], *server_command(self.ahead_s), *words[module + 2 :]]


class SessionForkServer(ForkServer):
    """The session's fork server in the place of an `EngineGroup`'s own one, which would import vLLM again."""

    def __init__(self, *_: object) -> None:
        self._path = server_socket()

    def is_ready(self) -> bool:
        return True

    def stop(self) -> None:
        """It serves the rest of the session."""


def server_command(ahead_s: int = 0) -> list[str]:
    """The replacement of `python -m vllm.entrypoints.openai.api_server`. The first call starts the fork server."""
    return forkserver.command(server_socket(ahead_s))


@functools.cache
def server_socket(ahead_s: int = 0) -> Path:
    """Where a fork server of the session listens. The first call for a clock starts it."""
    folder = tempfile.TemporaryDirectory(prefix="layerpush-fork-")
    path = Path(folder.name) / "socket"
    process = fork_server().Process(target=_serve, args=(str(path), ahead_s), name="servers", daemon=True)
    process.start()
    _kept.extend((folder, process))
    starts.add_source(lambda: forkserver.count_starts(path))
    until(lambda: path.exists() or not process.is_alive(), "the fork server starts", START_S, pause_s=0.05)
    assert process.is_alive(), "the fork server has ended"
    return path


def _serve(path: str, ahead_s: int) -> None:
    """Serve on this clock, or in a child with a time namespace. It needs root."""
    if ahead_s:
        forkserver.end_with_parent()
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
            raise OSError(ctypes.get_errno(), "there is no time namespace")
        Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0")
        if (child := os.fork()) != 0:
            os.waitpid(child, 0)
            return
    forkserver.serve(path)


_kept: list[object] = []
"""Alive until the test session ends."""
