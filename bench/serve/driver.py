"""Runs ``vllm bench serve`` in a child process and reads its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.serve.plan import Call, SweepPlan
from bench.servers.processes import start

CLIENT = "bench.serve.client"
WATCH_S = 0.5
STOP_TIMEOUT_S = 5.0
LOG_LINES = 25
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class DriverError(RuntimeError):
    """``vllm bench serve`` could not be run, or failed; the text has the end of its log."""


def arguments(plan: SweepPlan, call: Call, url: str, model: Sequence[str], prompts: int | None = None) -> list[str]:
    """Arguments of one call of ``vllm bench serve``, without the result's path. ``model``: those for the model."""
    return [
        *("--backend", "openai", "--base-url", url, *model),
        *("--dataset-name", "random", "--random-input-len", str(call.cell.prompt_tokens)),
        *("--random-output-len", str(plan.answer_tokens), "--ignore-eos", "--temperature", "0"),
        *("--extra-body", '{"skip_special_tokens": false}'),
        *("--num-prompts", str(prompts or plan.prompts(call)), "--seed", str(plan.seed_of(call))),
        *("--max-concurrency", str(call.cell.load.concurrency)),
    ]


class Driver:
    """``with Driver(logs) as driver:`` has a client process, whose output goes to a file in ``logs``.

    It ends with the block, and by itself if this process is killed. Ctrl-C on the terminal does not reach it.
    """

    def __init__(self, logs: Path, client: Sequence[str] = (sys.executable, "-m", CLIENT)) -> None:
        self._log = logs / "bench-serve.log"
        self._results = logs / "bench-serve"
        self._client = client
        self._ready = False
        self._busy = False

    def __enter__(self) -> Driver:
        here, there = socket.socketpair()
        with there:
            self._commands = Connection(here.detach())
            command = [*self._client, str(there.fileno())]
            self._process = start(command, self._log, cwd=ROOT, env=_environment(), pass_fds=[there.fileno()])
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.close()
        if self._busy:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def run(self, words: Sequence[str], name: str, watch: Callable[[], None]) -> dict[str, Any]:
        """The result file of one call. ``watch`` is called from time to time, and may raise.

        Raises ``DriverError``.
        """
        saving = ["--save-result", "--save-detailed", "--disable-tqdm"]
        self._results.mkdir(exist_ok=True)
        path = self._results / f"{name}.json"
        self._busy = True
        if not self._ready:
            self._answer(watch)
            self._ready = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer says why
            where = ["--result-dir", str(self._results), "--result-filename", path.name]
            self._commands.send([*words, *saving, *where])
        self._answer(watch)
        self._busy = False
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def _answer(self, watch: Callable[[], None]) -> None:
        try:
            while not self._commands.poll(WATCH_S):
                watch()
            problem = self._commands.recv()
        except (EOFError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            problem = f"its process ended with status {self._process.poll()}"
        if problem is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise DriverError("\n".join([f"vllm bench serve: {problem}", f"The last lines of {self._log}:", *lines]))


def _environment() -> dict[str, str]:
    """The environment, without the HTTP proxies that vLLM's client would use for engines on this machine, too."""
    inherited = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
