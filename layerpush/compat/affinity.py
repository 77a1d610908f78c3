"""Which cores the engine's main thread and the writer run on."""

from __future__ import annotations

import os
from types import TracebackType


class Affinity:
    """As a context: what binds this thread to other cores inside has no effect on it afterwards.

    On a CPU vLLM's NIXL worker binds the thread that makes it to the last core of each NUMA node, to have transfers
    away from the cores that compute. That thread is the engine's main thread, which computes: P, its writer, and a D on
    the same host would all share one core. ``bind_writer`` gives the core to the thread that it was meant for.
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
        """Let this thread run on the cores for transfers, and where it may anyway."""
        if self._transfers - self._main:
            os.sched_setaffinity(0, self._transfers | os.sched_getaffinity(0))
