"""The hand-overs of the last call: the engines' traces, and the times of the first tokens at the client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from bench.hand_over import PARTS, HandOver, hand_over_of
from bench.serve.pushes import LOOK_S, PATIENCE_S
from layerpush.apps.tracing.requests import RequestTrace, TraceSet, read_traces
from layerpush.telemetry.trace_records import PushRecord, clock_name


def hand_overs(
    trace: Path,
    decode_trace: Path | None,
    pushes: Sequence[Sequence[PushRecord]],
    first_token_at: Sequence[float],
    *,
    one_at_a_time: bool,
    patience_s: float = PATIENCE_S,
) -> list[HandOver]:
    """One for each request of ``pushes`` if they came one at a time. Else their mean: no token names its request.

    ``trace`` and ``decode_trace`` are the ``trace_dir`` of P and of D. Empty if P's clock is not ours, or if a time is
    missing; without parts if D has no trace.
    """
    traces, requests = _requests(trace, decode_trace, pushes, patience_s)
    requests.sort(key=lambda request: max(push.t_last_ready or 0.0 for push in request.pushes))
    clock = clock_name()
    pairs = zip(requests, sorted(first_token_at), strict=False)
    found = [one for request, at in pairs if (one := hand_over_of(traces, request, at, clock)) is not None]
    if len(found) < max(len(pushes), len(first_token_at)):
        return []
    return found if one_at_a_time else [_mean(found)]


def _requests(
    trace: Path, decode_trace: Path | None, pushes: Sequence[Sequence[PushRecord]], patience_s: float
) -> tuple[TraceSet, list[RequestTrace]]:
    """The requests of these pushes. Waits a little for the records of D."""
    folders = [each for each in (trace, decode_trace) if each is not None]
    wanted = {(push.engine_id, push.rank, push.request_id) for parts in pushes for push in parts}
    deadline = time.monotonic() + patience_s
    while True:
        traces = read_traces(folders, outlines=True)
        requests = [
            request
            for request in traces.requests
            if any((push.engine_id, push.rank, push.request_id) in wanted for push in request.pushes)
        ]
        complete = decode_trace is None or all(request.first_tokens for request in requests)
        if complete or time.monotonic() > deadline:
            return traces, requests
        time.sleep(LOOK_S)


def _mean(hand_overs: Sequence[HandOver]) -> HandOver:
    """The mean does not depend on the pairing of tokens with requests."""
    count = len(hand_overs)
    whole = all(one.parts_ms for one in hand_overs)
    parts = {name: sum(one.parts_ms[name] for one in hand_overs) / count for name in PARTS if whole}
    return HandOver(sum(one.ms for one in hand_overs) / count, parts)
