"""The requests of the last call in the engines' traces, and their hand-overs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from bench.hand_over import PARTS, HandOver, hand_over_of
from layerpush.apps.tracing.folder import FolderError
from layerpush.apps.tracing.requests import RequestTrace, TraceSet, read_traces
from layerpush.telemetry.trace_records import clock_name

PATIENCE_S = 10.0
LOOK_S = 0.05
PROBE = "probe-"


class Traces:
    """Follows the ``trace_dir`` of P, and that of D if it has one, from their current end."""

    def __init__(self, prefill: Path, decode: Path | None, patience_s: float = PATIENCE_S) -> None:
        self._folders = [each for each in (prefill, decode) if each is not None]
        self._has_d = decode is not None
        self._patience_s = patience_s
        self._seen: set[str] = set()
        self._seen = {push.request_id for request in self._look()[1] for push in request.pushes}

    def new(self, requests: int) -> tuple[TraceSet | None, list[RequestTrace]]:
        """The requests with a push since the last call, in the order of their last layers.

        Engines write a trace at about the time of the first token, so this waits a little for late records. It leaves
        out a proxy's probes.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            traces, found = self._look()
            complete = len(found) >= requests and (not self._has_d or all(each.first_tokens for each in found))
            if complete or time.monotonic() > deadline:
                self._seen |= {push.request_id for request in found for push in request.pushes}
                return traces, sorted(found, key=_last_ready)
            time.sleep(LOOK_S)

    def _look(self) -> tuple[TraceSet | None, list[RequestTrace]]:
        traces = None
        with contextlib.suppress(FolderError):  # nothing is recorded yet
            traces = read_traces(self._folders)
        pushed = [request for request in (traces.requests if traces else []) if request.pushes]
        new = [each for each in pushed if not {push.request_id for push in each.pushes} & self._seen]
        return traces, [each for each in new if PROBE not in each.pushes[0].request_id]


def hand_overs(
    traces: TraceSet, requests: Sequence[RequestTrace], first_token_at: Sequence[float], *, one_at_a_time: bool
) -> list[HandOver]:
    """One for each request if they came one at a time. Else their mean: no token names its request.

    Empty if P's clock is not ours, or if a time is missing; without parts if D has no trace.
    """
    clock = clock_name()
    pairs = zip(requests, sorted(first_token_at), strict=False)
    found = [one for request, at in pairs if (one := hand_over_of(traces, request, at, clock)) is not None]
    if len(found) < max(len(requests), len(first_token_at)):
        return []
    return found if one_at_a_time else [_mean(found)]


def _last_ready(request: RequestTrace) -> float:
    return max(push.t_last_ready or 0.0 for push in request.pushes)


def _mean(hand_overs: Sequence[HandOver]) -> HandOver:
    """The mean does not depend on the pairing of tokens with requests."""
    count = len(hand_overs)
    whole = all(one.parts_ms for one in hand_overs)
    parts = {name: sum(one.parts_ms[name] for one in hand_overs) / count for name in PARTS if whole}
    return HandOver(sum(one.ms for one in hand_overs) / count, parts)
