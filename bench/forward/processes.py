"""The command's view of P's and D's processes: starts, watches and always ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.forward.links import ALLOCATOR_VARIABLES, NamedLink
from bench.forward.orders import WrongBytesError
from bench.forward.settings import ForwardSettings
from bench.servers.processes import start

WATCH_S = 0.2
STOP_TIMEOUT_S = 5.0
LOG_LINES = 15
NOT_INHERITED = ("UCX_", *ALLOCATOR_VARIABLES)


class PairError(RuntimeError):
    """A process ended or failed; the text has the end of its log."""


class ProcessPair:
    """``with ProcessPair(...) as pair:`` has two processes on ``wire``, whose output goes to files in ``logs``.

    They end with the block, and by themselves if this
    process is killed. Ctrl-C on the terminal does not reach them.
    """

    def __init__(self, wire: NamedLink, settings: ForwardSettings, logs: Path) -> None:
        self._wire = wire
        self._settings = settings
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.about: dict[str, object] = {}

    def __enter__(self) -> ProcessPair:
        try:
            self._start()
        except BaseException:  # Ctrl-C, too: no process may stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """P ends when this closes P's connection, D when P has ended."""
        if hasattr(self, "_command"):
            self._command.close()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def ask(self, order: object) -> Any:
        """P's answer. Raises ``WrongBytesError`` or ``PairError``."""
        self._command.send(order)
        answer = self._answer()
        if isinstance(answer, WrongBytesError):
            raise answer
        return answer

    def _start(self) -> None:
        (here, there), (prefill, decode) = socket.socketpair(), socket.socketpair()
        with there, prefill, decode:
            self._command = Connection(here.detach())
            self._spawn("decode", decode)
            self._spawn("prefill", there, prefill)
        self._command.send((self._wire.name, self._settings))
        self.about = self._answer()

    def _spawn(self, side: str, *sockets: socket.socket) -> None:
        descriptors = [each.fileno() for each in sockets]
        place = self._wire.places[side]
        command = [*place.command_prefix, sys.executable, "-m", f"bench.forward.{side}", *map(str, descriptors)]
        environment = _environment(self._wire, place.device)
        self._processes[side] = start(command, self._log(side), cwd=ROOT, env=environment, pass_fds=descriptors)

    def _log(self, side: str) -> Path:
        return self._logs / f"{self._wire.name}-{side}.log"

    def _answer(self) -> Any:
        """P's next message."""
        try:
            while not self._command.poll(WATCH_S):
                if self._processes["decode"].poll() is not None:
                    raise PairError(self._describe_end())
            return self._command.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise PairError(self._describe_end()) from error

    def _describe_end(self) -> str:
        """The exit statuses, and the end of each process's log."""
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        ended = {side: status for side, process in self._processes.items() if (status := process.poll()) is not None}
        statuses = ", ".join(f"{side} ended with {status}" for side, status in ended.items())
        parts = [f"over {self._wire.name}: {statuses or 'P hung up'}"]
        for side in self._processes:
            lines = self._log(side).read_text(errors="replace").splitlines()
            parts.append(f"--- {side}\n" + "\n".join(lines[-LOG_LINES:]))
        return "\n".join(parts)


def _environment(wire: NamedLink, device: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"UCX_TLS": wire.transports, "UCX_NET_DEVICES": device, "OMP_NUM_THREADS": "1"}
    ours |= {"NIXL_UCX_SGL_ENABLE": "1"} if wire.sgl else {}
    return inherited | ours | {"PYTHONPATH": os.pathsep.join(paths)}
