"""Breaks a request's time down into parts that follow each other and add up to the whole. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerpush.apps.tracing.requests import RequestTrace

PARTS = {
    "queue": "D gets the request, until P plans its first chunk",
    "prefill": "P computes, until the last layer's KV is ready",
    "exposed": "the last layer is ready, until the last WRITE has landed",
    "notification": "all WRITEs have landed, until D has the completion of every rank of P",
    "D wait": "D has the completions, until its scheduler has the report of all ranks",
    "schedule": "the scheduler has the report, until a step with the request begins",
    "first step": "that step begins, until D's scheduler has the first token",
}
HAND_OVER = ("exposed", "notification", "D wait", "schedule", "first step")
"""The parts of the hand-over that engines record. After them the token goes to the client."""
OTHER = "other"
"""Time between two moments of which one is not recorded."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One request. ``parts`` has every name of ``PARTS``, with None for a part that is not recorded. Times in seconds.

    The parts and ``other`` add up to ``total``, which begins when D asks and ends with D's first token. If D has no
    record, it begins when P plans the first chunk.
    """

    request: RequestTrace
    total: float
    parts: dict[str, float | None]

    @property
    def hand_over(self) -> float | None:
        """From the last layer's KV being ready on P until D's scheduler has the first token; None if not recorded.

        It begins with D's request if that came later than the last layer.
        """
        known = [part for name in HAND_OVER if (part := self.parts[name]) is not None]
        return sum(known) if len(known) == len(HAND_OVER) else None

    @property
    def other(self) -> float:
        """Seconds of ``total`` in no part."""
        return max(0.0, self.total - sum(part for part in self.parts.values() if part is not None))


def break_down(request: RequestTrace) -> Breakdown:
    """Break down one request. Of several ranks, the first to begin and the last to end count.

    Only time in which D waits counts: neither prefill before D asks, nor P's work after D has the completion.
    """
    pushes, loads, tokens = request.pushes, request.loads, request.first_tokens
    settled = _last(load.t_settled for load in loads)
    at_p = (
        _first(push.t_first_planned for push in pushes),
        _last(push.t_last_ready for push in pushes),
        _last(push.t_last_landed for push in pushes),
    )
    marks = [
        _first(load.t_awaited for load in loads),
        *(at if at is None or settled is None else min(at, settled) for at in at_p),
        settled,
        _last(token.t_all_reported for token in tokens) or _last(load.t_reported for load in loads),
        _last(token.t_scheduled or token.t_first_token for token in tokens),
        _last(token.t_first_token for token in tokens),
    ]
    begin = now = _first(marks) if marks[0] is None else marks[0]
    if begin is None or now is None:
        return Breakdown(request, 0.0, dict.fromkeys(PARTS))
    parts: dict[str, float | None] = {}
    for name, start, end in zip(PARTS, marks[:-1], marks[1:], strict=True):
        later = now if end is None else max(now, end)
        parts[name] = None if start is None or end is None else later - now
        now = later
    return Breakdown(request, now - begin, parts)


def slowest(requests: Iterable[RequestTrace], count: int) -> list[Breakdown]:
    """The ``count`` slowest requests, the slowest first."""
    return sorted(map(break_down, requests), key=lambda one: one.total, reverse=True)[:count]


def shares(breakdowns: Sequence[Breakdown]) -> dict[str, float]:
    """The share (0 to 1) of each part, and of ``OTHER``, in the total time of these requests."""
    total = sum(one.total for one in breakdowns)
    times = {name: sum(one.parts[name] or 0.0 for one in breakdowns) for name in PARTS}
    times[OTHER] = sum(one.other for one in breakdowns)
    return {name: time / total if total else 0.0 for name, time in times.items()}


def medians(breakdowns: Sequence[Breakdown]) -> dict[str, float | None]:
    """The median, in seconds, of ``total``, of the hand-over and of each part, over the requests that have it."""
    columns: dict[str, list[float]] = {
        "total": [one.total for one in breakdowns],
        "hand-over": [one.hand_over for one in breakdowns if one.hand_over is not None],
    }
    for name in PARTS:
        columns[name] = [part for one in breakdowns if (part := one.parts[name]) is not None]
    return {name: statistics.median(values) if values else None for name, values in columns.items()}


def _first(times: Iterable[float | None]) -> float | None:
    return min((at for at in times if at is not None), default=None)


def _last(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)
