"""The test's side of one hosted engine: starts it, commands it, waits with deadlines, shows its log if it dies."""

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.context
import os
import pathlib
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

from tests.e2e.enginespec import EngineSpec
from tests.e2e.hostentry import run_host
from tests.e2e.results import Finished, KvDigest
from tests.support import starts

START_DEADLINE = 180.0
DEADLINE = 60.0
LOG_TAIL_LINES = 40
MAX_TOKENS = 4
"""Of an answer. Bytes are compared by digests, so tokens only show that D goes on from them."""


class HostDied(AssertionError):
    """The host process or its engine ended unexpectedly. Has the traceback and the log's tail."""


class HostTimeout(AssertionError):
    """A deadline passed. Has the host's stacks and the log's tail."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for `EngineHost.add`."""

    request_id: str
    token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = MAX_TOKENS
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More parameters of vLLM's ``SamplingParams``, or others than ``hostmain`` chooses."""


class Logged:
    """A process that writes a log."""

    log_path: pathlib.Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])


class EngineHost(Logged):
    """A vLLM engine in its own process. Not thread-safe: one command at a time."""

    def __init__(
        self, spec: EngineSpec, model: pathlib.Path, scratch: pathlib.Path, port: int, engine_id: str | None = None
    ) -> None:
        """`engine_id`: the id of an earlier engine, whose name this one takes. None: a new id."""
        self.spec = spec
        self.engine_id = engine_id or f"{spec.name}-{uuid.uuid4().hex[:8]}"
        self.port = port
        folder = scratch / (self.engine_id if engine_id is None else f"{engine_id}-{uuid.uuid4().hex[:4]}")
        self.trace_dir = folder / "trace"
        self.log_path = folder / "log"
        self.trace_dir.mkdir(parents=True)
        self.broken = False
        self.ended = False
        self.idle_blocks = 0
        self.log_start = 0
        """The log's size in characters when the test began to use this host."""
        self.met: set[EngineHost] = set()
        """The engines to which `introduce` has pushed."""
        self._request_ids: list[str] = []
        self._seq = 0
        self._replies: dict[int, tuple[str, Any]] = {}
        self._outputs: dict[str, list[Finished]] = {}
        self._ready = False
        self._paused = False
        starts.count_start()
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        arguments = (spec, self.engine_id, port, str(model), str(self.log_path), str(self.trace_dir), theirs)
        self._process = context.Process(target=run_host, args=arguments, name=self.engine_id, daemon=True)
        self._process.start()
        theirs.close()

    # Lifetime

    def wait_ready(self) -> None:
        self._receive_until(lambda: self._ready, START_DEADLINE, "the engine to start")

    def begin_stop(self) -> None:
        """Ask the host to end, without waiting for it."""
        self.resume()
        with contextlib.suppress(OSError):  # the host is gone already
            self._pipe.send((0, "stop", ()))

    def stop(self) -> None:
        """Ask, then terminate, then kill the process. It always ends."""
        self.begin_stop()
        for end, seconds in ((self._process.terminate, 0 if self.broken else 15), (self._process.kill, 10)):
            self._process.join(seconds)
            if self._process.is_alive():
                end()
        self._process.join()
        self._pipe.close()
        self._process.close()

    def kill(self) -> None:
        """Send SIGKILL. Returns when the process is gone."""
        self._signal(signal.SIGKILL)
        self._process.join()
        self.ended, self._paused = True, False

    def pause(self) -> None:
        """Send SIGSTOP: no thread of the process runs until `resume`. Not if the host is broken or has ended."""
        if not self.broken and not self.ended:
            self._signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        """Let a paused process go on."""
        if self._paused:
            self._paused = False
            self._signal(signal.SIGCONT)

    def begin_use(self) -> None:
        """A test begins to use the host."""
        self.log_start = len(self.log())
        self.resume()

    def end_use(self) -> None:
        """The test has ended: forget its requests, and pause until the next one."""
        self._request_ids.clear()
        self.pause()

    def wait_ended(self, timeout: float) -> int | None:
        """Wait for the process after `begin_stop`. Returns its exit code."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise self._timed_out("the process to end")
        self.ended = True
        return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has crashed
            os.kill(self.pid, number)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    # Commands

    def add(self, *requests: Request) -> list[str]:
        """Queue requests; returns the engine's own request ids."""
        self._request_ids += [request.request_id for request in requests]
        ids: list[str] = self._command("add", [dataclasses.astuple(request) for request in requests])
        return ids

    def hold(self) -> None:
        """From now on only `step` moves the engine."""
        self._command("run_freely", False)

    def run(self) -> None:
        """From now on the engine steps whenever it has work."""
        self._command("run_freely", True)

    def step(self, count: int = 1) -> int:
        done: int = self._command("step", count)
        return done

    def abort(self, request_id: str) -> None:
        self._command("abort", request_id)

    def digest(self, request_id: str) -> KvDigest:
        digest = self._command("digest", request_id)
        assert digest is not None, f"{self.engine_id} took no KV digest of {request_id}"
        assert isinstance(digest, KvDigest)
        return digest

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = DEADLINE) -> Any:
        """Run a module-level function in the host process. Its first argument is the HostedEngine."""
        return self._command("call", function, args, timeout=timeout)

    def poll_until(self, function: Callable[..., bool], *args: Any, timeout: float = DEADLINE) -> None:
        """Call a probe in the host until it returns true."""
        deadline = time.monotonic() + timeout
        while not self.call(function, *args):
            if time.monotonic() > deadline:
                raise self._timed_out(f"{function.__name__}{args} to be true")
            wait([self._pipe], 0.002)

    def wait_idle(self, timeout: float = DEADLINE) -> None:
        """Let the engine run until its scheduler has no work of any kind, pending pushes included."""
        self.run()
        self._command("wait_idle", timeout=timeout)

    def wait_output(self, request_id: str, timeout: float = DEADLINE) -> Finished:
        """The request's output. If several requests have one id: the output of the first finished one."""
        self._receive_until(lambda: request_id in self._outputs, timeout, f"request {request_id} to finish")
        output = self._outputs[request_id].pop(0)
        if not self._outputs[request_id]:
            del self._outputs[request_id]
        return output

    def peek_output(self, request_id: str, timeout: float = DEADLINE) -> Finished:
        """Like wait_output, but leaves the output for a later wait."""
        self._receive_until(lambda: request_id in self._outputs, timeout, f"request {request_id} to finish")
        return self._outputs[request_id][0]

    def has_output(self, request_id: str) -> bool:
        while self._pipe.poll(0):
            self._receive()
        return request_id in self._outputs

    def request_ids(self) -> list[str]:
        """Every request that this test has added."""
        return list(self._request_ids)

    # Plumbing

    def _command(self, method: str, *args: Any, timeout: float = DEADLINE) -> Any:
        self._seq += 1
        seq = self._seq
        try:
            self._pipe.send((seq, method, args))
        except OSError as e:
            raise self._died() from e
        self._receive_until(lambda: seq in self._replies, timeout, f"the reply to {method}")
        kind, value = self._replies.pop(seq)
        if kind == "error":
            raise AssertionError(f"{method} failed in {self.engine_id}:\n{value}")
        return value

    def _receive_until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            ready = wait([self._pipe, self._process.sentinel], max(0.0, deadline - time.monotonic()))
            if self._pipe in ready:
                self._receive()
            elif ready:
                raise self._died()
            else:
                raise self._timed_out(what)

    def _receive(self) -> None:
        try:
            kind, key, value = self._pipe.recv()
        except (EOFError, OSError) as e:
            raise self._died() from e
        match kind:
            case "reply" | "error":
                self._replies[key] = (kind, value)
            case "output":
                self._outputs.setdefault(key, []).append(value)
            case "ready":
                self._ready, self.idle_blocks = True, key
            case "crash":
                self.broken = True
                raise HostDied(f"{self.engine_id} (pid {self.pid}) crashed:\n{key}\nlog:\n{self.log_tail()}")

    def _died(self) -> HostDied:
        self.broken = True
        self._process.join(5)
        return HostDied(f"{self.engine_id} is gone, exit code {self._process.exitcode}; log:\n{self.log_tail()}")

    def _timed_out(self, what: str) -> HostTimeout:
        self.broken = True
        before = len(self.log())
        if self._process.is_alive() and self.pid is not None:
            os.kill(self.pid, signal.SIGUSR1)  # faulthandler writes every thread's stack to the log
            self._process.join(1)
        return HostTimeout(
            f"waited too long for {what} on {self.engine_id}; log:\n"
            + "\n".join(self.log()[:before].splitlines()[-LOG_TAIL_LINES:])
            + f"\nstacks:\n{self.log()[before:]}"
        )


@functools.cache
def fork_server() -> multiprocessing.context.ForkServerContext:
    """A fork server with vLLM imported: a host then starts in about 3 s instead of 15 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preload", f"{__package__}.hostmain"])
    before = os.environ.get("PYTHONPATH")
    # Python 3.11's fork server imports its preload modules before it gets sys.path, and hides a failed import.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
