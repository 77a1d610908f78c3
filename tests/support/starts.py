"""Counts engine starts of this process. They take most of a run's time."""

from __future__ import annotations

from collections.abc import Callable

_sources: list[Callable[[], int]] = []
_started = _reported = 0


def count_start() -> None:
    """An engine starts now."""
    global _started
    _started += 1


def add_source(started: Callable[[], int]) -> None:
    """Add the starts of another counter: `started` returns its starts so far."""
    _sources.append(started)


def new_starts() -> int:
    """Starts since the last call."""
    global _reported
    started = _started + sum(started() for started in _sources)
    before, _reported = _reported, started
    return started - before
