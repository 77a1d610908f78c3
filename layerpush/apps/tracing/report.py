"""Text and JSON of `layerpush trace summary`, and the notes about files that every subcommand prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from layerpush.apps.tracing.breakdown import OTHER, PARTS, Breakdown, break_down, medians, shares, slowest
from layerpush.apps.tracing.clocks import Offset
from layerpush.apps.tracing.requests import TraceSet

NOTHING = "-"
ALIGNED_BY = {
    "handshake": "measured by the handshake",
    "messages": "from the order of messages",
    "wall clocks": "from the wall clocks, as good as the hosts' NTP",
    "nothing": "unknown, taken to be the same: records of both sides are missing",
}


def notes(traces: TraceSet) -> Iterator[str]:
    """Notes about the files: the offsets of the hosts' clocks, and the number of missing records."""
    for clock, offset in traces.clocks.offsets.items():
        if clock != traces.clocks.reference:
            yield _clock_note(traces, clock, offset)
    for source in traces.sources:
        for count, problem in ((source.dropped, "records were dropped"), (source.unreadable, "lines cannot be read")):
            if count:
                yield f"{source.name}: {count} {problem} ({source.path.name})"


def _clock_note(traces: TraceSet, clock: str, offset: Offset) -> str:
    here = sorted({source.engine[0] for source in traces.sources if source.clock == clock})
    there = sorted({source.engine[0] for source in traces.sources if source.clock == traces.clocks.reference})
    note = (
        f"clock of {', '.join(here)} less that of {', '.join(there)}: {offset.seconds:.6f} s, {ALIGNED_BY[offset.how]}"
    )
    if offset.contradiction:
        return f"{note}; messages contradict any one value by {1e3 * offset.contradiction:.3f} ms: the clocks drift"
    if math.isfinite(offset.low) and math.isfinite(offset.high):
        below, above = 1e3 * (offset.seconds - offset.low), 1e3 * (offset.high - offset.seconds)
        note += f"; messages allow {below:.3f} ms less to {above:.3f} ms more"
    return note


def summary_text(traces: TraceSet, count: int) -> str:
    """Lines for a terminal; times in milliseconds."""
    breakdowns = slowest(traces.requests, count)
    outcomes = Counter(request.outcome for request in traces.requests)
    counted = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    lines = [f"{len(traces.requests)} requests: {counted}", *notes(traces), ""]
    rows = [["request", "tokens", "pushed", "verified", "outcome", "total", "hand-over", *PARTS, OTHER]]
    rows += [_row(one) for one in breakdowns]
    all_of_them = medians([break_down(request) for request in traces.requests])
    rows.append(["median of all", "", "", "", "", *map(_ms, all_of_them.values()), ""])
    lines += [f"the slowest {len(breakdowns)}, in milliseconds:", *_aligned(rows), ""]
    largest = sorted(shares(breakdowns).items(), key=lambda entry: -entry[1])
    lines.append("their time: " + ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005))
    lines += [f"  {name}: {meaning}" for name, meaning in PARTS.items()]
    failed = [one.request for one in breakdowns if one.request.outcome != "completed"]
    lines += [f"{request.name} {request.outcome}: {request.reason or 'no reason given'}" for request in failed]
    return "\n".join(lines)


def summary_data(traces: TraceSet, count: int) -> dict[str, Any]:
    """The content of ``summary_text`` as JSON types; times in seconds."""
    breakdowns = slowest(traces.requests, count)
    return {
        "requests": len(traces.requests),
        "outcomes": dict(Counter(request.outcome for request in traces.requests)),
        "notes": list(notes(traces)),
        "slowest": [
            {
                "request": one.request.name,
                "tokens": one.request.tokens,
                "mode": one.request.mode,
                "verified_parts": one.request.verified_parts,
                "verify_s": sum(load.verify_s for load in one.request.loads),
                "outcome": one.request.outcome,
                "reason": one.request.reason,
                "total": one.total,
                "hand-over": one.hand_over,
                **one.parts,
                OTHER: one.other,
            }
            for one in breakdowns
        ],
        "median": medians([break_down(request) for request in traces.requests]),
        "shares": shares(breakdowns),
    }


def _row(one: Breakdown) -> list[str]:
    request = one.request
    parts = [_ms(one.parts[name]) for name in PARTS]
    other = _ms(one.other) if one.other > 5e-7 else NOTHING
    return [
        request.name,
        str(request.tokens),
        request.mode,
        str(request.verified_parts),
        request.outcome,
        _ms(one.total),
        _ms(one.hand_over),
        *parts,
        other,
    ]


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.1f}"


def _aligned(rows: list[list[str]]) -> Iterable[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()
