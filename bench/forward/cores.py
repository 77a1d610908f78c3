"""Cores of a machine: one for the forward, the others for all that a push adds; and the time of waiting for one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

STATISTICS = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Cores:
    """``forward``: cores of P's forward. ``others``: cores of P's other threads, of D, and of the command.

    The kernel moves the bytes of a TCP link on the core of the thread that sends or receives them, so on ``others``.
    """

    forward: tuple[int, ...]
    others: tuple[int, ...]


def split_cores(cores: Iterable[int]) -> Cores | None:
    """The last core for the forward; None if no other core remains."""
    *others, forward = sorted(cores)
    return Cores((forward,), tuple(others)) if others else None


def of_this_machine() -> Cores | None:
    """``split_cores`` of the cores that this process may use; None if the system cannot bind threads to cores."""
    return split_cores(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None


@contextlib.contextmanager
def this_thread_on(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind the calling thread to ``cores`` until the block ends; none: leave it. Threads and processes that it starts
    meanwhile are bound to them for good.
    """
    before = os.sched_getaffinity(0) if cores else set()
    bind_this_thread(cores)
    try:
        yield
    finally:
        bind_this_thread(before)


def bind_this_thread(cores: Iterable[int]) -> None:
    """Bind the calling thread to ``cores``; none: leave it."""
    if wanted := set(cores):
        os.sched_setaffinity(0, wanted)


def queued_s(statistics: Path = STATISTICS) -> float | None:
    """Seconds that this thread has waited for a core, since its start; None if the system does not report them:
    Linux does, in ``schedstat`` (see ``Documentation/scheduler/sched-stats.rst`` of its source).
    """
    try:
        ran_ns, waited_ns, _ = map(int, statistics.read_text().split())
    except (OSError, ValueError):
        return None
    return waited_ns * 1e-9 if ran_ns else None  # 0 from a kernel that does not count
