"""Keeps the engine's main thread on its cores, and lets the writer use the core for transfers."""

from __future__ import annotations

import os
from types import TracebackType


class Affinity:
    """A context that restores this thread's cores at its end.

    On a CPU vLLM's NIXL worker binds the thread that creates it to the last core of each NUMA node, to keep transfers
    off the cores that compute. But that thread is the engine's main thread, which computes: P, its writer, and a D on
    the same host would share one core. ``bind_writer`` gives the core to the writer instead.
    """

    def __init__(self) -> None:
        self._main: set[int] = set()
        self._transfers: set[int] = set()

    def __enter__(self) -> Affinity:
        self._main = os.sched_getaffinity(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transfers = os.sched_getaffinity(0)
        if self._transfers != self._main:
            os.sched_setaffinity(0, self._main)

    def bind_writer(self) -> None:
        """Let this thread also run on the cores for transfers. Writer thread."""
        if self._transfers - self._main:
            os.sched_setaffinity(0, self._transfers | os.sched_getaffinity(0))
