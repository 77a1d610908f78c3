"""Cores of a machine: some for the forward's threads, the others for all that a push adds on the same machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Cores:
    """``forward``: cores of P's forward. ``others``: cores of P's other threads, of D, and of the command.

    The kernel moves the bytes of a TCP link on the core of the thread that sends or receives them, so on ``others``.
    """

    forward: tuple[int, ...]
    others: tuple[int, ...]


def split_cores(cores: Iterable[int], forward_threads: int) -> Cores | None:
    """The last ``forward_threads`` cores for the forward; None if no other core remains."""
    every = sorted(cores)
    if forward_threads >= len(every):
        return None
    return Cores(tuple(every[-forward_threads:]), tuple(every[:-forward_threads]))


def of_this_machine(forward_threads: int) -> Cores | None:
    """``split_cores`` of the cores that this process may use; None if the system cannot bind threads to cores."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return split_cores(os.sched_getaffinity(0), forward_threads)


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
