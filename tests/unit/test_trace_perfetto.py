"""One Chrome trace of P and D that a viewer can take: slices nest, arrows begin and end in slices, rows have names."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from layerpush.apps.tracing.perfetto import chrome_trace
from layerpush.apps.tracing.requests import read_traces
from layerpush.telemetry.trace_records import SCHEDULER_RANK, ChunkRecord, WriteRecord
from tests.unit.trace_hosts import WALL, TwoHosts, first_token, load, process, push, write

Events = list[dict[str, Any]]


def events_of(folder: Path) -> Events:
    trace = json.loads(b"".join(chrome_trace(read_traces([folder]))))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    check(trace["traceEvents"])
    return list(trace["traceEvents"])


def check(events: Events) -> None:
    """Fails for events that ui.perfetto.dev would reject, or draw wrong."""
    rows: dict[tuple[int, int], Events] = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert named == rows.keys()
    assert {one["pid"] for one in events} == {one["pid"] for one in events if one["name"] == "process_name"}
    for slices in rows.values():
        open_until: list[float] = []
        for one in sorted(
            slices, key=lambda one: nanos(one["ts"])
        ):  # of two that begin together the outer one comes first
            start, end = nanos(one["ts"]), nanos(one["ts"]) + nanos(one["dur"])
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{one} sticks out of the slice around it"
            open_until.append(end)
    check_arrows(events, rows)


def check_arrows(events: Events, rows: dict[tuple[int, int], Events]) -> None:
    ends: dict[int, Events] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            row = rows[event["pid"], event["tid"]]
            inside = [one for one in row if one["ts"] <= event["ts"] < one["ts"] + one["dur"]]
            assert inside, f"{event} belongs to no slice"
    for number, pair in ends.items():
        assert sorted(one["ph"] for one in pair) == ["f", "s"], number
        assert len({(one["name"], one["cat"]) for one in pair}) == 1
        assert all(one.get("bp") == "e" for one in pair if one["ph"] == "f")


def nanos(micros: float) -> int:
    return round(1e3 * micros)


def names(events: Events, cat: str) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == cat]


def processes(events: Events) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_records_of_real_workers_become_valid_events(tmp_path: Path) -> None:
    hosts = TwoHosts()
    for number in range(3):
        hosts.play(f"p-{number}", measured=hosts.offset)
    events = events_of(hosts.write(tmp_path))
    assert sorted(processes(events)) == ["D: D rank 0", "D: D scheduler", "P: P rank 0"]
    pushes = names(events, "push")
    assert [pushes.count(f"d-p-{number}") for number in range(3)] == [1, 1, 1]
    assert [pushes.count(name) for name in ("chunk 0", "chunk 1", "layer 0", "layer 2")] == [3, 3, 6, 6]
    assert len(names(events, "WRITEs")) == sum(len(push.writes) for push in hosts.pushes)
    loads = names(events, "load")
    assert [loads.count(name) for name in ("register", "await P", "report")] == [3, 3, 3]
    tokens = names(events, "first token")
    assert [tokens.count(name) for name in ("d-p-0", "schedule", "first step")] == [1, 3, 3]
    arrows = names(events, "arrow")
    assert (arrows.count("registration"), arrows.count("completion")) == (6, 6)


def test_arrows_do_not_lead_back_in_time(tmp_path: Path) -> None:
    hosts = TwoHosts()
    hosts.play(measured=hosts.offset)
    ends = {(one["name"], one["ph"]): one["ts"] for one in events_of(hosts.write(tmp_path)) if one["ph"] in "sf"}
    assert ends["registration", "s"] <= ends["registration", "f"]
    assert ends["completion", "s"] <= ends["completion", "f"]


@pytest.mark.parametrize(("noted", "leaves"), [(3.0, 3.0), (4.5, 4.0), (None, 2.5)])
def test_a_completion_leaves_before_it_arrives(tmp_path: Path, noted: float | None, leaves: float) -> None:
    """P notes the time after it gave the completion to NIXL; on a busy host D may have it by then."""
    one = push(t_first_planned=1.0, t_last_ready=2.0, t_last_landed=2.5, t_notified=noted)
    write(tmp_path / "p.jsonl", process("P", "x"), one)
    write(tmp_path / "d.jsonl", process("D", "x"), load(t_awaited=1.0, t_settled=4.0, t_reported=5.0))
    ends = {one["ph"]: one["ts"] for one in events_of(tmp_path) if one["name"] == "completion"}
    inside = min(leaves, noted or 2.5)
    assert ends == {"s": pytest.approx(1e6 * (inside - 1.0), abs=0.01), "f": 3e6}


def test_times_are_microseconds_since_the_first_slice(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push(t_first_planned=1000.5, t_last_ready=1000.75))
    write(tmp_path / "d.jsonl", process("D", "x", 990.0, WALL), load(t_awaited=1000.0, t_reported=1001.0))
    events = events_of(tmp_path)
    (one,) = [event for event in events if event["ph"] == "X" and event["cat"] == "push"]
    assert (one["ts"], one["dur"]) == (500_000.0, 250_000.0)
    other = json.loads(b"".join(chrome_trace(read_traces([tmp_path]))))["otherData"]
    assert other["unix_time_of_zero"] == WALL + 10.0
    assert other["notes"] == []


def test_chunks_planned_ahead_do_not_overlap(tmp_path: Path) -> None:
    """With asynchronous scheduling a step is planned before the one before it has been computed."""
    one = push(t_first_planned=1.0, t_last_ready=4.0)
    one.chunks = [ChunkRecord(0, 1, 1.0), ChunkRecord(1, 2, 1.5)]
    one.ready = [(0, 0, 2.0, True), (0, 1, 3.0, True), (1, 0, 3.5, True), (1, 1, 4.0, True)]
    write(tmp_path / "p.jsonl", process("P", "x"), one)
    chunks = [event for event in events_of(tmp_path) if event["name"].startswith("chunk")]
    assert [(chunk["ts"], chunk["dur"]) for chunk in chunks] == [(0.0, 2e6), (2e6, 1e6)]


def test_simultaneous_requests_are_in_separate_lanes(tmp_path: Path) -> None:
    spans = [(1.0, 3.0), (2.0, 4.0), (3.0, 5.0)]
    pushes = [push(str(n), t_first_planned=start, t_last_ready=end) for n, (start, end) in enumerate(spans)]
    write(tmp_path / "p.jsonl", process("P", "x"), *pushes)
    events = events_of(tmp_path)
    assert [event["tid"] for event in events if event["ph"] == "X"] == [1, 2, 1]
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == ["push", "push (2)"]


def test_a_write_that_never_landed_is_shown_as_posted(tmp_path: Path) -> None:
    one = push(outcome="failed", reason="lost", t_first_planned=1.0)
    one.writes = [
        WriteRecord(1, (0, 3), (0, 0), 8, 1024, 2.0, 2.5),
        WriteRecord(1, (0, 3), (0, 0), 8, 1024, 2.25, 2.5, 4.0),
    ]
    write(tmp_path / "p.jsonl", process("P", "x"), one)
    lost, landed = [event for event in events_of(tmp_path) if event.get("cat") == "WRITEs"]
    assert (lost["name"], lost["dur"], lost["args"]["landed"]) == ("WRITE layers 0-3", 5e5, False)
    assert (landed["dur"], landed["args"]["landed"], landed["args"]["bytes"]) == (1.75e6, True, 1024)
    assert lost["tid"] != landed["tid"]


def test_parked_blocks_outlast_their_load(tmp_path: Path) -> None:
    parked = load(outcome="failed", t_registered=1.0, t_settled=2.0, t_parked=2.0, t_reported=2.5, t_cleared=9.0)
    write(tmp_path / "d.jsonl", process("D", "x"), parked)
    (parked,) = [event for event in events_of(tmp_path) if event.get("cat") == "parked blocks"]
    assert (parked["ts"], parked["dur"], parked["args"]) == (1e6, 7e6, {"freed": True})


def test_a_load_with_only_parking_times_is_shown(tmp_path: Path) -> None:
    write(
        tmp_path / "d.jsonl",
        process("D", "x"),
        load(t_awaited=None, t_parked=2.0, t_cleared=3.0),
        load("2", t_awaited=None),
    )
    slices = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    assert [(one["cat"], one["dur"]) for one in slices] == [("load", 1e6), ("parked blocks", 1e6)]


def test_the_phases_of_the_scheduler(tmp_path: Path) -> None:
    """For a step, for P's token, which needs no step, and for a request that ended before its first token."""
    write(tmp_path / "d.jsonl", process("D", "x"), *(load(name, t_reported=2.0) for name in "123"))
    write(
        tmp_path / "s.jsonl",
        process("D", "x", rank=SCHEDULER_RANK),
        first_token("1", t_all_reported=2.0, t_scheduled=3.0, t_first_token=7.0),
        first_token("2", t_all_reported=2.0, t_scheduled=None, t_first_token=4.0),
        first_token("3", t_all_reported=2.0, t_scheduled=None, t_first_token=None),
    )
    events = events_of(tmp_path)
    slices = [event for event in events if event.get("cat") == "first token"]
    assert [(one["name"], one["ts"], one["dur"]) for one in slices] == [
        ("cmpl-1-0", 1e6, 5e6),
        ("schedule", 1e6, 1e6),
        ("first step", 2e6, 4e6),
        ("cmpl-2-0", 1e6, 2e6),
        ("schedule", 1e6, 2e6),
    ]
    assert slices[0]["tid"] != slices[3]["tid"]


def test_every_rank_of_p_has_an_arrow_to_every_rank_of_d(tmp_path: Path) -> None:
    times = {"t_registered": 2.0, "t_first_planned": 1.0, "t_last_ready": 3.0, "t_last_landed": 4.0, "t_notified": 5.0}
    for rank in range(2):
        write(tmp_path / f"p{rank}.jsonl", process("P", "x", rank=rank), push(rank=rank, **times))
        mine = load(rank=rank, t_registered=1.5, t_settled=6.0, t_reported=7.0)
        write(tmp_path / f"d{rank}.jsonl", process("D", "x", rank=rank), mine)
    events = events_of(tmp_path)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 8
    assert len(processes(events)) == 4


def test_a_push_without_a_time_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push(outcome="failed"), push("2", t_first_planned=5.0))
    slices = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    assert [(one["name"], one["ts"]) for one in slices] == [("cmpl-2-0", 0.0)]


def test_the_trace_is_written_in_pieces(tmp_path: Path) -> None:
    """The whole trace of many requests would take gigabytes."""
    write(tmp_path / "p.jsonl", process("P", "x"), *[push(str(n), t_first_planned=float(n)) for n in range(100)])
    sizes = [len(piece) for piece in chrome_trace(read_traces([tmp_path]))]
    assert len(sizes) > 100
    assert max(sizes[2:]) < 1000


@pytest.mark.parametrize("what", ["overlap", "arrow"])
def test_the_check_finds_each_kind_of_error(what: str, tmp_path: Path) -> None:
    hosts = TwoHosts()
    hosts.play(measured=hosts.offset)
    events = events_of(hosts.write(tmp_path))
    if what == "overlap":
        first = next(event for event in events if event["ph"] == "X" and event["name"] == "chunk 0")
        first["dur"] += 1e9
    else:
        next(event for event in events if event["ph"] == "s")["ts"] += 1e9
    with pytest.raises(AssertionError, match=r"sticks out|belongs to no slice"):
        check(events)
