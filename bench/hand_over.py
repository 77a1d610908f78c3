"""The hand-over: from the last layer's KV being ready on P until the client has the first token. Pure.

The engines' traces have every part except the last: the way of the token from D's scheduler to the client. Here the
client reports the time of its first token.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from layerpush.apps.tracing.breakdown import HAND_OVER, break_down
from layerpush.apps.tracing.requests import RequestTrace, TraceSet

LATE = "late request"
CLIENT = "to the client"
PARTS = (LATE, *HAND_OVER, CLIENT)


@dataclass(frozen=True, slots=True)
class HandOver:
    """Milliseconds. ``parts_ms`` has every name of ``PARTS``, which add up to ``ms``; it is empty without D's records.

    ``LATE``: the last layer is ready, until D has the request; 0 if D had it before. ``CLIENT``: D's output, its API
    server, a proxy if there is one, and the network.
    """

    ms: float
    parts_ms: dict[str, float]


def hand_over_of(traces: TraceSet, request: RequestTrace, first_token_at: float, clock: str) -> HandOver | None:
    """The hand-over of one request. ``first_token_at``: time of the first token at the client, seconds of ``clock``.

    None if no trace has that clock, or if P has not recorded the time when the last layer was ready.
    """
    ready = [push.t_last_ready for push in request.pushes if push.t_last_ready is not None]
    if clock not in traces.clocks.offsets or not ready:
        return None
    at_client = first_token_at + traces.clocks.rebased(clock)
    ms = 1e3 * (at_client - max(ready))
    found = break_down(request)
    if found.hand_over is None:
        return HandOver(ms, {})
    asked = [load.t_awaited for load in request.loads if load.t_awaited is not None]
    late = max(0.0, min(asked, default=0.0) - max(ready))
    parts = {LATE: 1e3 * late} | {name: 1e3 * (found.parts[name] or 0.0) for name in HAND_OVER}
    return HandOver(ms, {**parts, CLIENT: ms - sum(parts.values())})


def median_hand_over(hand_overs: Sequence[HandOver]) -> HandOver | None:
    """Medians of the whole and of each part; no parts if one hand-over lacks them. None if there are no hand-overs."""
    if not hand_overs:
        return None
    whole = all(one.parts_ms for one in hand_overs)
    parts = {name: statistics.median(one.parts_ms[name] for one in hand_overs) for name in PARTS if whole}
    return HandOver(statistics.median(one.ms for one in hand_overs), parts)
