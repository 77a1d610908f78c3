"""Text and JSON of `layerpush trace summary`, and the notes about files that every subcommand prints."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from layerpush.apps.tracing.breakdown import OTHER, PARTS, Breakdown, break_down, medians, shares, slowest
from layerpush.apps.tracing.clocks import Offset
from layerpush.apps.tracing.requests import TraceSet, shortened

NOTHING = "-"
WIDTH, GAP = 80, "  "
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
    """Lines for a terminal of ``WIDTH`` columns; times in milliseconds. Reasons of failures may be longer."""
    breakdowns = slowest(traces.requests, count)
    outcomes = Counter(request.outcome for request in traces.requests)
    counted = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    lines = [*_filled(f"{len(traces.requests)} requests: {counted}")]
    lines += [line for note in notes(traces) for line in _filled(note)]
    total, hand_over, *parts = map(_ms, medians([break_down(request) for request in traces.requests]).values())
    named = [["", "request", "tokens", "pushed", "verified", "outcome", "total", "hand-over"]]
    named += [[str(number), *_facts(one)] for number, one in enumerate(breakdowns, 1)]
    named.append(["", "median of all", "", "", "", "", total, hand_over])
    room = WIDTH - sum(len(GAP) + max(map(len, column)) for column in list(zip(*named, strict=True))[2:])
    room -= len(GAP) + len(str(count))
    for row in named:
        row[1] = shortened(row[1], room)
    lines += ["", f"the slowest {len(breakdowns)}, in milliseconds:", *_aligned(named, left=2), ""]
    heads = [name.rpartition(" ") for name in (*PARTS, OTHER)]
    rows = [["", *(upper for upper, _, _ in heads)], ["", *(lower for _, _, lower in heads)]]
    rows += [[str(number), *_times(one)] for number, one in enumerate(breakdowns, 1)]
    rows.append(["median", *parts, ""])
    lines += ["the parts of their totals:", *_aligned(rows, left=1), ""]
    largest = sorted(shares(breakdowns).items(), key=lambda entry: -entry[1])
    lines += _filled("their time: " + ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005))
    lines += [line for name, meaning in PARTS.items() for line in _filled(f"  {name}: {meaning}")]
    failed = [one.request for one in breakdowns if one.request.outcome != "completed"]
    lines += [f"{shortened(one.name, room)} {one.outcome}: {one.reason or 'no reason given'}" for one in failed]
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


def _facts(one: Breakdown) -> list[str]:
    request = one.request
    facts = [request.name, str(request.tokens), request.mode, str(request.verified_parts), request.outcome]
    return [*facts, _ms(one.total), _ms(one.hand_over)]


def _times(one: Breakdown) -> list[str]:
    return [*(_ms(one.parts[name]) for name in PARTS), _ms(one.other) if one.other > 5e-7 else NOTHING]


def _ms(seconds: float | None) -> str:
    """Without a decimal from ten seconds on: the columns are narrow."""
    return NOTHING if seconds is None else f"{1e3 * seconds:.{0 if seconds >= 10 else 1}f}"


def _aligned(rows: list[list[str]], left: int) -> Iterator[str]:
    """The first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield GAP.join(cells).rstrip()


def _filled(text: str) -> list[str]:
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
