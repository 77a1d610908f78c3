"""Calm mode: patches busy waits of NIXL and vLLM that make a small CPU machine slow. A plugin of vLLM.

vLLM loads it in every process whose PYTHONPATH has the checkout and this folder. It does something only if
LAYERPUSH_CALM is set, and not to 0. It is for the demo, benchmarks and tests on machines with few cores, and no part of
layerpush's wheel.

* NIXL's Python API starts its progress thread with a delay of 0: polling takes one core per agent.
* vLLM's processes wait for each other in `os.sched_yield()`: with more processes than cores they starve the one that
  computes.
* While requests wait for KV, vLLM's engine takes an empty step every millisecond or so: D uses a core while P computes.

The patches cost a little latency, up to 1 ms per transfer and 50 us to 1 ms per step. A machine with plenty of cores
does better without them. D's engine rests no longer than until its KV arrives: layerpush's worker wakes it, and it
takes the step after the report of the KV without a rest.

The engine's core has a Unix datagram socket in Linux's abstract namespace. Its name is a hash of the engine id, which
the core and its workers know. A message is empty: it means that a worker has something to report in the next step. If
the message is lost, the engine rests for the whole time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from layerpush.compat.import_hook import ImportHook

FOLDER = Path(__file__).parent
"""vLLM finds the plugin here: the folder must be in PYTHONPATH."""
VARIABLE = "LAYERPUSH_CALM"
THREAD_NAME = "layerpush-wake"
PROGRESS_DELAY_US = 1000
YIELD_SECONDS, LONGEST_YIELD_SECONDS = 50e-6, 1e-3
YIELD_SHARE = 0.05
"""Longest sleep as a share of the time waited so far."""
NEW_WAIT_SECONDS = 1e-3
"""A thread that has not slept for this long begins a new wait."""
EMPTY_STEP_SECONDS = 10e-3

# The package `nixl` picks one of these packages and re-exports its modules.
_NIXL_APIS = frozenset({"nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api"})

_applied = False


def wanted() -> bool:
    """Whether LAYERPUSH_CALM asks for the patches."""
    return os.environ.get(VARIABLE, "").strip() not in ("", "0")


def register() -> None:
    """Entry point of `vllm.general_plugins`: patch this process if LAYERPUSH_CALM asks."""
    if wanted():
        apply()


def apply() -> None:
    """Patch this process and those that it forks, and log a line. Later calls do nothing. Call before engines start."""
    global _applied
    if _applied:
        return
    _applied = True

    logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows INFO lines of loggers below `vllm.` only
    # Importing NIXL here would cost every process, and fix its UCX environment before vLLM has set it.
    _NixlHook().install()
    _EngineHook().install()
    _WorkerHook().install()
    for name in _calm_vllm():
        logger.warning("%s: %s does not exist in this vLLM, so its busy loop stays as it is", VARIABLE, name)
    logger.info(
        "%s is set: NIXL's progress thread polls every %d us, vLLM waits in steps of %.0f us and more instead of "
        "spinning, and rests %.0f ms after a step without work",
        VARIABLE,
        PROGRESS_DELAY_US,
        YIELD_SECONDS * 1e6,
        EMPTY_STEP_SECONDS * 1e3,
    )


def applied() -> bool:
    """Whether `apply` ran in this process or in the one that forked it."""
    return _applied


def _calm_vllm() -> list[str]:
    """Replace `sched_yield` in the module that defines it and in the one that imports its name.

    Returns the names that this vLLM lacks.
    """
    import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
    import vllm.distributed.utils as utils

    missing = []
    for module in (utils, shm_broadcast):
        if hasattr(module, "sched_yield"):
            module.sched_yield = _rest.sleep
        else:
            missing.append(f"{module.__name__}.sched_yield")
    return missing


class Rest(threading.local):
    """Sleeps instead of yielding. The longer a thread has waited, the longer it sleeps.

    A reader of vLLM's message queues could wait for the notification of each message instead. But of two notifications
    within a millisecond ZeroMQ drops one, and then the reader sleeps on for seconds (seen with vLLM 0.32).
    """

    def __init__(self) -> None:
        self._since = self._last = float("-inf")

    def sleep(self) -> None:
        now = time.monotonic()
        if now - self._last > NEW_WAIT_SECONDS:
            self._since = now
        time.sleep(self.seconds(now - self._since))
        self._last = time.monotonic()

    @staticmethod
    def seconds(waited: float) -> float:
        """The length of the next sleep, in seconds, after a wait of ``waited`` seconds."""
        return min(max(YIELD_SECONDS, YIELD_SHARE * waited), LONGEST_YIELD_SECONDS)


_rest = Rest()


def delay_progress_thread(api: ModuleType) -> None:
    """Give the progress threads of `api` (NIXL's `_api` module) a delay of ``PROGRESS_DELAY_US`` in place of 0."""
    bindings: Any = api.nixlBind
    plain: Any = bindings.nixlAgentConfig
    if getattr(plain, "calmed_by_layerpush", False):
        return

    class CalmAgentConfig(plain):
        calmed_by_layerpush = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" and value == 0 else value)

    bindings.nixlAgentConfig = CalmAgentConfig


class _NixlHook(ImportHook):
    names = _NIXL_APIS

    def patch(self, module: ModuleType) -> None:
        delay_progress_thread(module)


def rest_after_empty_steps(core: ModuleType) -> None:
    """Make engines of ``core`` (vLLM's ``v1.engine.core``) rest after an empty step.

    An engine rests until it gets input, a worker wakes it, or ``EMPTY_STEP_SECONDS`` are over.
    """
    engine: Any = core.EngineCoreProc
    plain = engine._process_engine_step
    waits: weakref.WeakKeyDictionary[Any, InputWait] = weakref.WeakKeyDictionary()

    def calm_step(self: Any) -> bool:
        computed: bool = plain(self)
        received = getattr(self.scheduler, "finished_recving_kv_req_ids", ())  # their requests can run in the next step
        if not computed and self.scheduler.has_requests() and not received:
            if self not in waits:
                waits[self] = InputWait(self.input_queue)
                transfer = self.vllm_config.kv_transfer_config
                if transfer is not None:
                    listen(transfer.engine_id, waits[self].wake)
            waits[self].wait(EMPTY_STEP_SECONDS)
        return computed

    engine._process_engine_step = calm_step


class InputWait:
    """Waits until an engine's input queue holds something, or until it is woken. Takes nothing from the queue."""

    def __init__(self, inputs: queue.Queue[Any]) -> None:
        self._inputs = inputs
        self._woken = False

    def wake(self) -> None:
        """End the current wait, or the next one. Any thread."""
        with self._inputs.not_empty:
            self._woken = True
            self._inputs.not_empty.notify()

    def wait(self, seconds: float) -> None:
        """Wait ``seconds`` at most. The engine's thread."""
        with self._inputs.not_empty:
            if not self._inputs.queue and not self._woken:
                self._inputs.not_empty.wait(seconds)
            self._woken = False


class _EngineHook(ImportHook):
    names = frozenset({"vllm.v1.engine.core"})

    def patch(self, module: ModuleType) -> None:
        rest_after_empty_steps(module)


def wake_engine_after_loads(push_worker: ModuleType) -> None:
    """Make workers of ``push_worker`` (layerpush's module) wake their engine when a load is over."""
    worker: Any = push_worker.VllmPushWorker
    for name in ("loaded", "failed"):
        setattr(worker, name, _then_wake(getattr(worker, name)))


def _then_wake(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def report(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        wake(self.engine_id)

    return report


class _WorkerHook(ImportHook):
    names = frozenset({"layerpush.compat.push_worker"})

    def patch(self, module: ModuleType) -> None:
        wake_engine_after_loads(module)


def _address(engine_id: str) -> str:
    return f"\0layerpush-{hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()}"


def wake(engine_id: str) -> None:
    """Wake this engine; if it does not rest now, it skips its next rest. Any thread of a worker.

    Never blocks. Does nothing if no engine listens.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto(b"", _address(engine_id))


def listen(engine_id: str, on_wake: Callable[[], None]) -> None:
    """Call ``on_wake`` for each message of a worker of this engine, on a thread that lives as long as the process.

    If another engine of this host has the same id, that engine keeps the address, and this one logs a warning.
    """
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        inbox.bind(_address(engine_id))
    except OSError as error:
        inbox.close()
        logger = logging.getLogger(f"vllm.{__name__}")
        logger.warning("workers of engine %s cannot wake it, so it rests a little longer: %s", engine_id, error)
        return

    def run() -> None:
        while True:
            inbox.recv(1)
            on_wake()

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
