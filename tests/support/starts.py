"""Counts engine starts of this process; they take most seconds of a run."""

from __future__ import annotations

from collections.abc import Callable

_sources: list[Callable[[], int]] = []
_started = _reported = 0


def count_start() -> None:
    """An engine starts now."""
    global _started
    _started += 1


def add_source(started: Callable[[], int]) -> None:
    """Somebody else counts, too: `started` returns the starts so far."""
    _sources.append(started)


def new_starts() -> int:
    """Starts since the last call."""
    global _reported
    started = _started + sum(started() for started in _sources)
    before, _reported = _reported, started
    return started - before
