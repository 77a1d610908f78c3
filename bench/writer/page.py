"""The table and the paragraph of the documentation, from the JSON of ``bench.writer``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.markdown import Result, conditions, number_table
from bench.writer.prices import LOCKED, TOKENS, UNLOCKED, Sampled, calls_s, descriptors, step_of, step_s
from layerpush.transport.nixl import SPLIT_AT

HEADINGS = (
    *("mode", "requests", "WRITEs", "descriptors of each", "Python", "for a WRITE", "for a layer and request"),
    *("for a poll", "with NIXL", "one WRITE for all saves", "of the time under the lock"),
)


def table(result: Result) -> str:
    """One row for each mode and number of requests of a step; below it the prices of NIXL's calls."""
    rows = number_table(HEADINGS, [_row(step, result["calls"]) for step in result["turns"]])
    return f"{rows}\n\n{_about(result)} {conditions(result)}"


def _row(step: Sampled, writes: Sequence[Sampled]) -> tuple[str, ...]:
    requests, count = step["case"]["requests"], int(step["raw"]["writes"][0])
    python_s, poll_s = (statistics.median(step["raw"][name]) for name in ("turn_s", "poll_s"))
    python = [_us(python_s / per) for per in (count, step_of(requests).layers * requests)]
    with_nixl = ["", "", ""]
    if requests * descriptors(step) < SPLIT_AT:
        now = {calls: step_s(step, writes, calls) for calls in (LOCKED + UNLOCKED, LOCKED)}
        left = [step_s(step, writes, calls, joined=requests) / seconds for calls, seconds in now.items()]
        with_nixl = [_ms(now[LOCKED + UNLOCKED]), *(f"{100 - 100 * share:.0f} %" for share in left)]
    numbers = map(str, (requests, count, descriptors(step)))
    return (f"`{step['case']['mode']}`", *numbers, _ms(python_s), *python, _us(poll_s), *with_nixl)


def _about(result: Result) -> str:
    locked, unlocked = result["lines"]["locked"], result["lines"]["unlocked"]
    least, *_, most = result["calls"]
    one = [_us(calls_s(least, calls)) for calls in (LOCKED, UNLOCKED)]
    return (
        f"Processor time of the writer thread, medians of {result['rounds']} rounds: one step of {TOKENS:,} tokens, "
        f"shared by the requests, in {step_of(1).layers} layers. Python: the writer's turns over a transport that "
        "costs nothing, all of it under Python's lock. A poll: one turn that finds nothing new. NIXL's calls for a "
        f"WRITE of one descriptor cost {one[0]} under that lock (`release_xfer_handle`) and {one[1]} outside it "
        "(`make_prepped_xfer`, `transfer`, `check_xfer_state`). Straight lines through WRITEs of 1 to "
        f"{most['case']['descriptors']} descriptors of {step_of(1).block_bytes >> 10} KiB: {_us(locked['write_s'])} a "
        f"WRITE and {1e9 * locked['descriptor_s']:.1f} ns a descriptor under it (R² {locked['r2']:.2f}), "
        f"{_us(unlocked['write_s'])} and {_us(unlocked['descriptor_s'])} outside it (R² {unlocked['r2']:.2f}). Over "
        "TCP and shared memory these calls also copy the bytes. The last columns: the share of the time with NIXL, and "
        "of its part under the lock, that one WRITE for all requests of the step would save. Only NIXL's calls become "
        "fewer: each request's own accounting stays. And a WRITE that fails would fail all its requests. Empty where "
        f"such a WRITE has {SPLIT_AT} descriptors or more."
    )


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
