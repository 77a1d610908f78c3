"""One engine process of the soak. Commands leave at once, and answers come back as events: no call here waits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.e2e.enginehost import Logged, Request, fork_server
from tests.e2e.enginespec import EngineSpec
from tests.e2e.hostentry import run_host
from tests.e2e.results import Finished

EXIT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a command: its value, the host's traceback, or nothing if the process has ended."""

    value: Any = None
    error: str | None = None
    gone: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    free_blocks: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """The process is gone, or its engine crashed. ``crash`` is the traceback, if the process could send one."""

    crash: str | None


Event = Finished | Ready | Ended


@dataclasses.dataclass
class Memory:
    """Resident memory of a process in MiB: its peak, and its size at each idle moment."""

    peak_mib: float = 0.0
    idle_mib: list[float] = dataclasses.field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """The growth from the first idle moment to the last."""
        return self.idle_mib[-1] - self.idle_mib[0] if self.idle_mib else 0.0


class Engine(Logged):
    """A hosted vLLM engine. Not thread-safe."""

    def __init__(self, spec: EngineSpec, engine_id: str, port: int, model: pathlib.Path, folder: pathlib.Path) -> None:
        self.spec, self.engine_id, self.port = spec, engine_id, port
        self.folder = folder
        self.log_path = folder / "log"
        (folder / "trace").mkdir(parents=True)
        self.started_at = time.monotonic()
        self.memory = Memory()
        self.idle_blocks = 0
        self.ready = self.ended = self.paused = False
        self._seq = 0
        self._then: dict[int, tuple[float, Callable[[Answer], None] | None]] = {}
        context = fork_server()
        self.pipe, theirs = context.Pipe()
        arguments = (spec, engine_id, port, str(model), str(self.log_path), str(folder / "trace"), theirs)
        self._process = context.Process(target=run_host, args=arguments, name=engine_id, daemon=True)
        self._process.start()
        theirs.close()

    # Commands

    def add(self, request: Request, then: Callable[[Answer], None]) -> None:
        self.post("add", [dataclasses.astuple(request)], then=then)

    def abort(self, request_id: str, then: Callable[[Answer], None]) -> None:
        self.post("abort", request_id, then=then)

    def call(self, function: Callable[..., Any], *args: Any, then: Callable[[Answer], None] | None = None) -> None:
        """Run a module-level function in the host. Its first argument is the HostedEngine."""
        self.post("call", function, args, then=then)

    def post(self, method: str, *args: Any, then: Callable[[Answer], None] | None = None) -> None:
        """Send a command. ``then`` gets the answer, exactly once."""
        if self.ended:
            if then is not None:
                then(Answer(gone=True))
            return
        self._seq += 1
        self._then[self._seq] = (time.monotonic(), then)
        with contextlib.suppress(OSError):  # the process has ended: the next `events` reports this
            self.pipe.send((self._seq, method, args))

    def waits_since(self) -> float | None:
        """The time of the oldest command without an answer."""
        return min((at for at, _ in self._then.values()), default=None)

    # Signals

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self.paused = False
        now = time.monotonic()
        self._then = {seq: (now, then) for seq, (_, then) in self._then.items()}  # the process could not answer before

    def dump_stacks(self) -> None:
        """Write every thread's stack to the log."""
        self._signal(signal.SIGUSR1)

    def shut_down(self) -> None:
        """End the process in good order, with the connector and NIXL."""
        with contextlib.suppress(OSError):
            self.pipe.send((0, "stop", ()))

    def put_away(self) -> None:
        """Make sure that the process has ended."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(10)
        self.pipe.close()

    # Answers

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def events(self) -> list[Event]:
        """All new events. Answers to commands go to their ``then``."""
        events: list[Event] = []
        try:
            while not self.ended and self.pipe.poll(0):
                events += self._receive(*self.pipe.recv())
        except (EOFError, OSError):
            self._end(events, None)
        if not self.ended and not self._process.is_alive():
            self._end(events, None)
        return events

    def measure_memory(self, *, idle: bool = False) -> None:
        try:
            status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in status.splitlines() if "kB" in line}
        self.memory.peak_mib = max(self.memory.peak_mib, sizes.get("VmHWM", 0.0))
        if idle and "VmRSS" in sizes:
            self.memory.idle_mib.append(sizes["VmRSS"])

    def _receive(self, kind: str, key: Any, value: Any) -> list[Event]:
        events: list[Event] = []
        match kind:
            case "reply" | "error":
                _, then = self._then.pop(key, (0.0, None))
                if then is not None:
                    then(Answer(value=value) if kind == "reply" else Answer(error=value))
            case "output":
                events.append(value)
            case "ready":
                self.ready, self.idle_blocks = True, key
                events.append(Ready(key))
            case "crash":
                self._end(events, key)
        return events

    def _end(self, events: list[Event], crash: str | None) -> None:
        self.ended, self.ready, self.paused = True, False, False
        self._process.join(EXIT_S)
        events.append(Ended(crash))
        unanswered, self._then = list(self._then.values()), {}
        for _, then in unanswered:
            if then is not None:
                then(Answer(gone=True))

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
