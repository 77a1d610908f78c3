"""API servers from the fork server that engine hosts come from: one process of a test session imports vLLM."""

from __future__ import annotations

import functools
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


class ForkedSpec(EngineSpec):
    """A server from the session's fork server. Not for several API servers, or a namespace of its own."""

    def command(self, port: int) -> list[str]:
        words = super().command(port)
        module = words.index(COLD[0])
        assert tuple(words[module : module + 2]) == COLD
        return [*words[: module - 1], *server_command(), *words[module + 2 :]]


class ColdSpec(EngineSpec):
    """A server that imports vLLM itself, three times. In an `EngineGroup` that forks, its fork server does so once."""

    def command(self, port: int) -> list[str]:
        starts.count_start()
        return super().command(port)


class SessionForkServer(ForkServer):
    """The session's fork server in the place of an `EngineGroup`'s own one, which would import vLLM again."""

    def __init__(self, *_: object) -> None:
        self._path = server_socket()

    def is_ready(self) -> bool:
        return True

    def stop(self) -> None:
        """It serves the rest of the session."""


def server_command() -> list[str]:
    """The replacement of `python -m vllm.entrypoints.openai.api_server`. The first call starts the fork server."""
    return forkserver.command(server_socket())


@functools.cache
def server_socket() -> Path:
    """Where the session's fork server listens. The first call starts it."""
    folder = tempfile.TemporaryDirectory(prefix="layerpush-fork-")
    path = Path(folder.name) / "socket"
    process = fork_server().Process(target=forkserver.serve, args=(str(path),), name="servers", daemon=True)
    process.start()
    _kept.extend((folder, process))
    starts.add_source(lambda: forkserver.count_starts(path))
    until(lambda: path.exists() or not process.is_alive(), "the fork server starts", START_S, pause_s=0.05)
    assert process.is_alive(), "the fork server has ended"
    return path


_kept: list[object] = []
"""Alive until the test session ends."""
