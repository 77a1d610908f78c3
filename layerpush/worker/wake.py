"""Wakes one sleeping thread. Like ``threading.Event``, with less to do for whoever rings."""

from __future__ import annotations

import threading
from typing import Protocol

from layerpush.prefill.layer_interval import NAP_S


class Door(Protocol):
    """A ``threading.Lock``, or a test's."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Waker:
    """Any thread may ``set``; one thread waits and clears. ``Event`` wakes through a condition with a lock and a list
    of waiters, and whoever rings here is the forward pass, at every layer.
    """

    def __init__(self, door: Door | None = None) -> None:
        self._rung = self._naps = False
        self._door = door or threading.Lock()
        self._door.acquire()

    def is_set(self) -> bool:
        return self._rung

    def set(self) -> None:
        """The waiting thread wakes up; one that does not wait yet will not."""
        if self._rung:
            return
        self._rung = True
        try:
            self._door.release()
        except RuntimeError:  # rung by somebody else in the same moment, or before ``clear`` took it back: it is open
            return

    @property
    def naps(self) -> bool:
        """Whether the waiting thread will wake up by itself soon enough for what is not urgent. It will find what was
        left for it before.
        """
        return self._naps

    def clear(self) -> None:
        """What is rung from now on ends the next ``wait``. By the waiting thread."""
        self._rung = False
        self._door.acquire(blocking=False)

    def wait(self, timeout: float | None = None, *, naps: bool = False) -> bool:
        """Sleep until it rings, ``timeout`` seconds at most; whether it has rung. ``naps``: or no longer than
        ``NAP_S``, so that who rings for something that is not urgent need not.
        """
        if not self._rung:
            self._naps = naps or (timeout is not None and timeout <= NAP_S)
            self._door.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            self._naps = False
        return self._rung
