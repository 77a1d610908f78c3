"""The writer thread: its loop, its queues, its end.

vLLM's push worker starts the thread, ``nixl-push-writer``, at the end of ``register_kv_caches``. It is the only thread
that posts and polls WRITEs, sends and reads notifications, and changes pushes and loads. So none of their objects has a
lock. The handshake executor is the only other thread that calls NIXL; ``LockedAgent`` keeps the two apart.

Other threads leave work in queues. The writer is the only reader of each, and empties them in this order in a turn:

- tasks, from any thread: registrations that D sends, news of the scheduler, heartbeats, handshakes that are over,
  answers of the side-channel probe. First in, first out: a request's registration comes before its cancellation.
- ended requests, from the main thread: P's requests that were sent, or whose lease is over.
- deferred pushes, from the handshake executor: vLLM's whole pushes whose handshake is over.
- notifications, from NIXL: ``Inbox`` hands each to P's or D's side.
- step events, from the main thread: steps, layers, finished requests, revoked blocks. New requests are queued before
  their first step, and ``Claims`` takes them before it looks for a request.

The writer leaves for the main thread: outcomes of loads (``VllmPushWorker.loaded``, ``failed``), ended pushes
(``report_sent``), heartbeats (``Heartbeats``), completions (``pass_on``), reports to the scheduler
(``LayerwisePushWorker.report``), metrics (``Reporter``).

Wake rules. A thread queues first and then wakes; the writer clears first, then empties the queues, then waits: so no
wake-up is lost. ``Waker.wake`` announces work: a step, a sweep, a revocation, a task. ``wake_lazily`` announces a layer
before a step's last; the writer polls for those while it knows the time of a layer. vLLM's code calls ``set`` in
every step.

Nothing wakes the writer for a notification, a WRITE that has landed, a fence that has passed or a deadline: it wakes up
by itself. While somebody awaits a notification, it asks NIXL for them every 1 to 5 ms, else every 50 ms. It asks less
often the longer no notification has come and no wait has begun or ended (``poll_s``). For all else the objects tell
when they are due (``next_due``), and the writer sleeps until the least of these times. If it wakes up before, was not
woken, and finds no notification, it goes back to sleep and touches nothing. A full turn follows at least every 50 ms.

A failed call is logged and ends its push, if it has one. A failed turn ends every push. The thread runs until
``stop``. If every turn fails for a second, or any other exception leaves the loop, the engine ends
(``compat.engine_threads``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from layerpush.decode.loads import Loads
from layerpush.engine.unreported_aborts import UnreportedAborts
from layerpush.engine.worker.inbox import Inbox
from layerpush.engine.worker.wake import Waker
from layerpush.prefill.pushes import Pushes
from layerpush.telemetry.metrics.loop_lag import LoopLag

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")

NOTIFICATION_POLL_S = 1e-3
LONGEST_POLL_S = 5e-3
POLL_SHARE = 0.01
"""Between two polls, as a part of the time since the last notification, or since the number of waits changed."""
IDLE_POLL_S = 50e-3
DRAIN_S = 2.0
FAILING_S = 1.0
"""If every turn fails for so many seconds, the thread ends, and with it the engine."""
THREAD_NAME = "push-writer"
"""As the system knows it: for ``top -H``, ``perf``, and for counting its CPU time. At most 15 characters."""


class Timed(Protocol):
    """A part of the worker that has something to do at times that it knows. Writer thread."""

    def next_due(self, now: float, /) -> float | None:
        """When ``tick`` has something to do, unless an event comes first; None: never. On ``perf_counter``."""

    def tick(self, now: float, /) -> None:
        """Do what is due."""


class WriterThread:
    """The writer thread's loop, and the objects that it serves; ``timed`` in the order of their ticks. Built on the
    main thread before the loop starts.
    """

    def __init__(
        self,
        worker: VllmPushWorker,
        waker: Waker,
        lag: LoopLag,
        inbox: Inbox,
        pushes: Pushes,
        loads: Loads,
        timed: Sequence[Timed],
        unreported_aborts: UnreportedAborts,
    ) -> None:
        self._worker = worker
        self._waker = waker
        self._lag = lag
        self._inbox = inbox
        self._pushes = pushes
        self._loads = loads
        self._unreported_aborts = unreported_aborts
        self._timed = timed
        self._stop = threading.Event()
        self.due = math.inf
        """When a part has something to do, if nothing wakes the writer before; infinite: never."""
        self._due = 0.0
        """When the next full turn is due."""
        self._waits = 0
        """Loads and pushes that await a notification."""
        self._changed_at = 0.0
        """When their number changed, or a notification came."""
        self._failing_since: float | None = None
        """When the first of the last turns failed, if all since then have failed."""

    def run(self) -> None:
        """The loop, until ``stop``. Writer thread. An exception that leaves it ends the engine."""
        _name_this_thread(THREAD_NAME)
        _call("using the device", self._worker.use_device)
        while not self._stop.is_set():
            woken = self._waker.clear()
            self._lag.turn_began(time.perf_counter())
            try:
                self.turn(woken)
            except Exception as error:  # noqa: BLE001  the engine outlives it: every push fails, none completes
                self._turn_failed(error)
            now = time.perf_counter()
            timeout = max(0.0, min(self._due - now, self.poll_s(now)))
            self._lag.turn_ended(now, timeout)
            self._waker.wait(timeout, polls_layers=self._pushes.polls_layers)

    def stop(self) -> bool:
        """End the loop, fail every push, report that to each D, and wait for WRITEs on the wire. Main thread.

        At most ``DRAIN_S`` seconds each. False if the loop still runs; then its objects must be left alone.
        """
        self._stop.set()
        self._waker.set()
        if not self._worker.join_writer(DRAIN_S):
            return False
        self._pushes.fail_all("the prefill engine shuts down")
        left = self._pushes.drain(DRAIN_S)
        if left:
            logger.warning("layerpush shuts down with %d WRITEs still on the wire", left)
        return True

    def turn(self, woken: bool) -> None:
        """Do all that is due. Without a reason - ``woken``, a notification, the time - it touches nothing."""
        aborts = self._unreported_aborts.count
        if woken:
            self._take_queued()
        found = self._inbox.deliver()
        if not woken and not found and time.perf_counter() < self._due:
            return
        self._pushes.turn()
        now = time.perf_counter()
        for part in self._timed:
            part.tick(now)
        if not self._pushes.is_draining:
            self._unreported_aborts.aborts_drained(aborts)
        now = time.perf_counter()
        waits = len(self._loads) + self._pushes.awaiting
        if found or waits != self._waits:
            self._waits, self._changed_at = waits, now
        self._failing_since = None
        self.due = self._next_due(now)
        self._due = min(now + IDLE_POLL_S, self.due)

    def _turn_failed(self, error: Exception) -> None:
        """Fail every push. Raises ``error`` if turns have failed for too long: requests would wait without end."""
        now = time.perf_counter()
        if self._failing_since is None:
            self._failing_since = now
            logger.exception("layerpush: the writer's turn failed")
        elif now - self._failing_since >= FAILING_S:
            raise error
        _call("to fail every push", partial(self._pushes.fail_all, f"{type(error).__name__}: {error}"))
        self._due = time.perf_counter() + NOTIFICATION_POLL_S

    def poll_s(self, now: float) -> float:
        """Seconds between two questions to NIXL for notifications."""
        if not self._waits:
            return IDLE_POLL_S
        return min(max(NOTIFICATION_POLL_S, POLL_SHARE * (now - self._changed_at)), LONGEST_POLL_S)

    def _take_queued(self) -> None:
        for what, task in self._worker.tasks():
            _call(what, task)
        for request_id in self._worker.ended_requests():
            self._pushes.request_ended(request_id)
        for request_id, blocks, data in self._worker.deferred_pushes():
            self._pushes.push_deferred(request_id, blocks, data)

    def _next_due(self, now: float) -> float:
        if self._inbox.is_behind:
            return now
        times = (self._pushes.next_due(now), *(part.next_due(now) for part in self._timed))
        return min((at for at in times if at is not None), default=math.inf)


def _name_this_thread(name: str) -> None:
    """Linux only; elsewhere nothing happens. Python before 3.14 does not set the names of its threads in the system."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _call(what: str, call: Callable[[], None]) -> None:
    """Call a function that may raise; the thread lives on. ``what`` names the call in the log."""
    try:
        call()
    except Exception:  # a push ends by its own defect, a load at its deadline at the latest
        logger.exception("layerpush: %s failed", what)
