"""Counts engine starts of this process; they take most seconds of a run."""

from __future__ import annotations

from collections.abc import Callable

_sources: list[Callable[[], int]] = []
_started = 0


def count_start() -> None:
    """An engine starts now."""
    global _started
    _started += 1


def add_source(started: Callable[[], int]) -> None:
    """Somebody else counts, too."""
    _sources.append(started)


def engine_starts() -> int:
    """So far."""
    return _started + sum(started() for started in _sources)
