"""Wakes one sleeping thread. Like ``threading.Event``, with less to do for the thread that wakes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Lock(Protocol):
    """A ``threading.Lock``, or a test's."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Waker:
    """Any thread wakes; one thread clears and waits.

    The forward pass may wake the writer at every layer. ``Event`` would cost it more: a condition, a lock and a list of
    waiters. Here a lock that the waiting thread holds is the latch: to wake is to release it.

    ``on_wake`` gets the time of each wake-up, in seconds of ``time.perf_counter``, unless the thread is already woken.
    """

    def __init__(self, on_wake: Callable[[float], None] = lambda _: None, lock: Lock | None = None) -> None:
        self._on_wake = on_wake
        self._is_set = self._polls = self._ended_wait = False
        self._lock = lock or threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """There is work: end the wait, or the next one."""
        if not self._is_set:
            self._on_wake(time.perf_counter())
            self.set()

    def wake_lazily(self) -> None:
        """There is work that can wait for the waiting thread's next poll. Wakes it unless it polls soon by itself."""
        if not self._polls:
            self.wake()

    def set(self) -> None:
        """End the wait without a call of ``on_wake``: there may be no work. vLLM's code calls it by this name."""
        if self._is_set:
            return
        self._is_set = True
        try:
            self._lock.release()
        except RuntimeError:  # another thread has just set it, or ``clear`` has not locked again yet: it is open
            return

    def clear(self) -> bool:
        """Forget wake-ups so far, and return whether there was one since the last call. Later ones end the next
        ``wait``. Waiting thread.

        A wake-up that comes during the call may end the next wait instead. Either way it is returned once.
        """
        self._is_set = False
        was_open, ended_wait = self._lock.acquire(blocking=False), self._ended_wait
        self._ended_wait = False
        return was_open or ended_wait

    def wait(self, poll_timeout: float, *, polls_layers: bool = False) -> bool:
        """Sleep until woken, at most ``poll_timeout`` seconds. Returns whether it was woken. Waiting thread.

        ``polls_layers``: the timeout is short enough for the layers of the running step, so ``wake_lazily`` leaves this
        wait alone.
        """
        if self._is_set:
            self._ended_wait = True
        else:
            self._polls = polls_layers
            self._ended_wait |= self._lock.acquire(timeout=max(poll_timeout, 0.0))
            self._polls = False
        return self._ended_wait
