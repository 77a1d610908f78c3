"""Runs steps one after the other within the time limit of their part. Each has a process group, which always ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.gpu.parts import Step
from bench.servers.processes import start

POLL_S = 0.2
GRACE_S = 45.0
"""A step has this time to end its processes after SIGTERM; it counts as time of the part."""
Say = Callable[[str], None]


class Ending(StrEnum):
    WELL = "well"
    FAILED = "failed"
    LATE = "out of time"


@dataclass(frozen=True)
class Ran:
    """A step that is over. ``status`` is its exit status, below 0 for a signal."""

    name: str
    command: Sequence[str]
    ending: Ending
    status: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        detail = f" with status {self.status}" if self.ending is Ending.FAILED else ""
        return f"{self.name}: {self.ending}{detail} after {self.seconds:.0f} s"


@dataclass(frozen=True)
class Runner:
    """``limit_s`` is a part's limit. The output of steps goes to files in ``logs``, and line by line to ``say``."""

    interpreter: str
    root: Path
    logs: Path
    limit_s: float
    say: Say
    environment: Mapping[str, str]
    grace_s: float = GRACE_S

    def part(self, name: str, steps: Sequence[Step]) -> list[Ran]:
        """Run the steps of a part. Returns those that were begun: the first that fails ends the part."""
        began, ran = time.monotonic(), []
        for step in steps:
            left = self.limit_s - (time.monotonic() - began)
            ran.append(self._run(f"{name}-{step.name}", step, min(left, step.share * self.limit_s)))
            self.say(str(ran[-1]))
            if ran[-1].ending is not Ending.WELL:
                break
        return ran

    def _run(self, name: str, step: Step, seconds: float) -> Ran:
        command = [self.interpreter, *step.arguments]
        self.logs.mkdir(parents=True, exist_ok=True)
        path, began = self.logs / f"{name}.log", time.monotonic()
        process = start(command, path, cwd=self.root, env=dict(self.environment))
        with path.open("rb") as output:
            try:
                late = not self._wait(process, began + max(0.0, seconds - self.grace_s), output.readline)
            finally:
                self._end(process)
            self._pass_on(output.readline)
        ending = Ending.LATE if late else Ending.FAILED if process.returncode else Ending.WELL
        return Ran(name, command, ending, process.returncode, time.monotonic() - began)

    def _wait(self, process: subprocess.Popen[bytes], deadline: float, read: Callable[[], bytes]) -> bool:
        """Wait for the process until ``deadline``. Returns whether it has ended by itself."""
        while process.poll() is None:
            if time.monotonic() > deadline:
                return False
            self._pass_on(read)
            time.sleep(POLL_S)
        return True

    def _pass_on(self, read: Callable[[], bytes]) -> None:
        while line := read():
            self.say(line.decode(errors="replace").rstrip("\n"))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the whole process group. A second signal of the terminal changes nothing."""
        if process.poll() is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.grace_s)
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(group, signum)
