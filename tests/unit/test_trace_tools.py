"""Trace files in, requests on one clock out: reading, comparing clocks, matching records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerpush.apps.tracing.clocks import find_clocks
from layerpush.apps.tracing.folder import FolderError, read_folders
from layerpush.apps.tracing.intervals import lanes
from layerpush.apps.tracing.report import notes
from layerpush.apps.tracing.requests import RequestError, read_traces, without_suffix
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import (
    SCHEDULER_RANK,
    DropRecord,
    PushRecord,
    WriteRecord,
)
from tests.unit.trace_hosts import Host, TwoHosts, first_token, load, process, push, write

ROUNDING = 1e-9
"""The precision of sums of times of a few thousand seconds."""


# Reading.


def test_a_written_trace_file_can_be_read(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "P", 3)
    file.write_record(push(rank=3))
    file.write_record(load())
    file.close()
    (source,) = read_folders([tmp_path])
    assert source.engine == ("P", 3)
    assert source.pushes == [push(rank=3)]
    assert source.loads == [load()]
    assert source.clock != ""


def test_a_scheduler_has_a_file_of_its_own(tmp_path: Path) -> None:
    for rank, record in ((0, load()), (SCHEDULER_RANK, first_token())):
        file = TraceFile(str(tmp_path), "D", rank)
        file.write_record(record)
        file.close()
    worker, scheduler = read_folders([tmp_path])
    assert (worker.name, worker.loads) == ("D rank 0", [load()])
    assert (scheduler.name, scheduler.first_tokens) == ("D scheduler", [first_token()])
    (request,) = read_traces([tmp_path]).requests
    assert request.first_tokens == [first_token()]


def test_a_scheduler_may_have_another_clock_than_its_workers(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", process("D", "x", t=1000.0, unix=5000.0), load(t_awaited=1000.0))
    there = process("D", "y", t=990.0, unix=5000.0, rank=SCHEDULER_RANK)
    write(tmp_path / "s.jsonl", there, first_token(t_all_reported=991.0, t_first_token=992.0))
    (request,) = read_traces([tmp_path]).requests
    assert request.first_tokens == [first_token(t_all_reported=1001.0, t_first_token=1002.0)]


def test_a_first_token_without_its_load_makes_no_request(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push("other"))
    write(tmp_path / "s.jsonl", process("D", "x", rank=SCHEDULER_RANK), first_token())
    (request,) = read_traces([tmp_path]).requests
    assert (request.name, request.first_tokens) == ("cmpl-other-0", [])


def test_several_folders_are_read_and_each_file_once(tmp_path: Path) -> None:
    write(tmp_path / "p/a.jsonl", process("P", "x"), push())
    write(tmp_path / "d/b.jsonl", process("D", "x"), load())
    sources = read_folders([tmp_path / "p", tmp_path / "d", tmp_path / "p" / ".." / "p"])
    assert [len(source.pushes) for source in sources] == [0, 1]
    assert len(read_folders([tmp_path])) == 2


def test_an_unfinished_line_is_skipped_and_a_torn_one_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", process("P", "x"), push())
    whole = (tmp_path / "a.jsonl").read_bytes()
    torn = b'{"kind":"push","request\n{"kind":"push"}\n\xff\n\n{"kind":"of a later version"}\n'
    (tmp_path / "a.jsonl").write_bytes(whole + torn + msgspec.json.encode(push("2")) + b"\n" + b'{"kind":"pu')
    (source,) = read_folders([tmp_path])
    assert len(source.pushes) == 2
    assert source.unreadable == 3


def test_the_number_of_dropped_records_is_the_last_count(tmp_path: Path) -> None:
    drops = [DropRecord(records=count, t=1.0) for count in (2, 7)]
    write(tmp_path / "a.jsonl", process("P", "x"), drops[0], push(), drops[1])
    (source,) = read_folders([tmp_path])
    assert source.dropped == 7
    assert list(notes(read_traces([tmp_path]))) == ["P rank 0: 7 records were dropped (a.jsonl)"]


def test_the_second_record_of_a_load_replaces_the_first(tmp_path: Path) -> None:
    parked = load(outcome="failed", t_parked=3.0)
    other = load("other", outcome="failed", t_parked=4.0)
    write(tmp_path / "a.jsonl", process("D", "x"), parked, other, load(outcome="failed", t_parked=3.0, t_cleared=9.0))
    (source,) = read_folders([tmp_path])
    assert [(one.t_parked, one.t_cleared) for one in source.loads] == [(3.0, 9.0), (4.0, None)]


def test_outlines_leave_out_large_lists(tmp_path: Path) -> None:
    """Except the WRITEs of whole pushes: they show when the completion was sent."""
    pushes = []
    for mode in ("layer", "chunk", "request"):
        pushes.append(push(mode, mode=mode, t_last_landed=3.0))
        pushes[-1].ready_at(0, 0, 2.0, True)
        pushes[-1].writes = [WriteRecord(0, (0, 0), (0, 0), 1, 1, 2.0, 2.5, 3.0)]
    write(tmp_path / "a.jsonl", process("P", "x"), *pushes)
    (source,) = read_folders([tmp_path], outlines=True)
    assert [(len(one.ready), len(one.writes), one.t_last_landed) for one in source.pushes] == [
        (0, 0, 3.0),
        (0, 0, 3.0),
        (0, 1, 3.0),
    ]


def test_an_empty_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", process("D", "x"))
    with pytest.raises(FolderError, match="set trace_dir in kv_connector_extra_config of P and D"):
        read_folders([tmp_path])


# Clocks.


def test_times_of_processes_with_one_clock_are_not_moved(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", process("P", "x", unix=5.0), push(t_first_planned=10.0))
    write(tmp_path / "b.jsonl", process("D", "x", unix=9.0), load(t_awaited=9.0, clock_offset=3.0))
    traces = read_traces([tmp_path])
    assert traces.requests[0].pushes[0].t_first_planned == 10.0
    assert list(notes(traces)) == []


@pytest.mark.parametrize("error", [-1e-3, 0.0, 1e-3])
def test_the_handshake_measures_the_offset_of_two_clocks(tmp_path: Path, error: float) -> None:
    """With any error of the handshake, messages do not arrive before they are sent."""
    hosts = TwoHosts(d=Host("d-host", ahead=-5000.0, wrong=40.0))
    for number in range(3):
        hosts.play(f"p-{number}", measured=hosts.offset + error)
    traces = read_traces([hosts.write(tmp_path)])
    offset = traces.clocks.offsets["boot-of-p-host"]
    assert traces.clocks.reference == "boot-of-d-host"
    assert offset.how == "handshake"
    assert offset.low <= hosts.offset <= offset.high
    assert abs(offset.seconds - hosts.offset) <= min(abs(error), offset.high - offset.low) + ROUNDING
    for request in traces.requests:
        (one,), (other,) = request.pushes, request.loads
        assert other.t_registered <= one.t_registered + ROUNDING
        assert one.t_last_landed <= other.t_settled + ROUNDING
    (note,) = notes(traces)
    assert note.startswith(f"clock of P less that of D: {offset.seconds:.6f} s")
    assert "measured by the handshake; messages allow" in note


def test_without_a_handshake_messages_give_the_offset(tmp_path: Path) -> None:
    hosts = TwoHosts(d=Host("d-host", ahead=-5000.0, wrong=40.0))
    for number in range(3):
        hosts.play(f"p-{number}")
    offset = read_traces([hosts.write(tmp_path)]).clocks.offsets["boot-of-p-host"]
    assert offset.how == "messages"
    assert offset.seconds == pytest.approx((offset.low + offset.high) / 2)
    assert offset.low <= hosts.offset <= offset.high


def test_messages_correct_the_offset_of_wall_clocks(tmp_path: Path) -> None:
    hosts = TwoHosts(d=Host("d-host", ahead=-5000.0, wrong=30.0))
    hosts.play(fails="no")  # no completion: only the registration shows something
    traces = read_traces([hosts.write(tmp_path)])
    offset = traces.clocks.offsets["boot-of-p-host"]
    assert offset.how == "wall clocks"
    assert offset.seconds == offset.high
    assert offset.seconds == pytest.approx(hosts.offset, abs=5.0)


def test_the_completion_of_a_whole_request_is_sent_with_its_last_write() -> None:
    """The completion rides on the WRITE: D may get it before P sees that the WRITE has landed."""
    writes = [{"remote_rank": 0, "layers": [0, 1], "chunks": [0, 0], "descriptors": 1, "bytes": 1}]
    times = {"t_post": 10.0, "t_posted": 10.1, "t_landed": 12.0}
    one = msgspec.convert(msgspec.to_builtins(push(mode="request")) | {"writes": [writes[0] | times]}, PushRecord)
    one.t_last_landed = 12.0
    sources = [source_of(process("P", "p"), one), source_of(process("D", "d"), load(t_settled=11.0, clock_offset=0.0))]
    offset = find_clocks(sources).offsets["p"]
    assert (offset.seconds, offset.low) == (0.0, -1.0)


def test_clock_drift_is_reported(tmp_path: Path) -> None:
    early = {"t_registered": 1.0, "t_settled": 2.0, "clock_offset": 0.5}
    late = {"t_registered": 11.0, "t_settled": 12.0}
    write(tmp_path / "d.jsonl", process("D", "d"), load("1", **early), load("2", **late))
    first, second = push("1", t_registered=1.25, t_last_landed=1.5), push("2", t_registered=12.5, t_last_landed=13.0)
    write(tmp_path / "p.jsonl", process("P", "p"), first, second)
    traces = read_traces([tmp_path])
    assert traces.clocks.offsets["p"].seconds == 0.5
    assert traces.clocks.offsets["p"].contradiction == 0.75
    assert next(iter(notes(traces))).endswith("messages contradict any one value by 750.000 ms: the clocks drift")


def test_offsets_of_two_hosts_may_use_a_third_host() -> None:
    """D1 and D2 have only P in common."""
    sources = [
        source_of(process("D1", "d1"), load(engine_id="D1", clock_offset=100.0)),
        source_of(process("P", "p"), push()),
        source_of(process("D2", "d2"), load(engine_id="D2", clock_offset=30.0)),
    ]
    clocks = find_clocks(sources)
    assert {clock: offset.seconds for clock, offset in clocks.offsets.items()} == {"d1": 0.0, "p": 100.0, "d2": 70.0}
    assert clocks.rebased("p") == -100.0


def test_the_side_channel_answers_with_the_clock_of_the_first_rank() -> None:
    sources = [
        source_of(process("P", "p1", rank=1), push(rank=1)),
        source_of(process("P", "p0", rank=0), push(rank=0)),
        source_of(process("D", "d"), load(clock_offset=7.0)),
    ]
    offsets = find_clocks(sources).offsets
    assert (offsets["p0"].seconds, offsets["p0"].how) == (7.0, "handshake")
    assert offsets["p1"].how == "wall clocks"


def test_a_file_without_a_process_line_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", push(t_first_planned=3.0))
    write(tmp_path / "d.jsonl", process("D", "d"), load())
    traces = read_traces([tmp_path])
    assert traces.requests[0].pushes[0].t_first_planned == 3.0
    assert list(notes(traces)) == [
        "clock of P less that of D: 0.000000 s, unknown, taken to be the same: records of both sides are missing"
    ]


def source_of(*records: Any) -> Any:
    from layerpush.apps.tracing.folder import read_lines

    (source,) = read_lines(Path("x.jsonl"), [msgspec.json.encode(record) + b"\n" for record in records])
    return source


# Requests.


def test_ranks_are_one_request_in_order_of_rank(tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / f"p{rank}.jsonl", process("P", "x", rank=rank), push(rank=rank))
        write(tmp_path / f"d{rank}.jsonl", process("D", "x", rank=rank), load(rank=rank))
    (request,) = read_traces([tmp_path]).requests
    assert [one.rank for one in request.pushes] == [one.rank for one in request.loads] == [0, 1]


def test_the_outcome_is_the_worst_that_d_reports(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push("1"), push("2", outcome="failed", reason="lost"))
    bad = load("1", rank=1, outcome="failed", reason="too late", t_awaited=2.0)
    write(tmp_path / "d.jsonl", process("D", "x"), load("1"), bad)
    requests = {request.name: request for request in read_traces([tmp_path]).requests}
    assert (requests["cmpl-1-0"].outcome, requests["cmpl-1-0"].reason) == ("failed", "too late")
    assert (requests["cmpl-2-0"].outcome, requests["cmpl-2-0"].reason) == ("failed", "lost")


def test_an_unclaimed_push_is_a_request(tmp_path: Path) -> None:
    lonely = [push(str(number), decode_request_id=None, decode_engine_id=None) for number in range(2)]
    write(tmp_path / "p.jsonl", process("P", "x"), *lonely)
    assert [request.name for request in read_traces([tmp_path]).requests] == ["cmpl-0-0", "cmpl-1-0"]


@pytest.mark.parametrize("wanted", ["cmpl-ab-0", "cmpl-ab-0-aaaaaaaa", "cmpl-ab-0-bbbbbbbb", "ab-"])
def test_a_request_is_found_by_any_of_its_ids(tmp_path: Path, wanted: str) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push("ab"), push("cd"))
    assert read_traces([tmp_path]).find(wanted).name == "cmpl-ab-0"


def test_an_exact_id_takes_precedence_over_a_partial_match(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), push("a", request_id="a"), push("b", request_id="ab"))
    assert read_traces([tmp_path]).find("a").pushes[0].request_id == "a"


def test_an_unknown_or_ambiguous_id_is_refused_with_candidates(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", process("P", "x"), *[push(f"x{number}") for number in range(7)])
    traces = read_traces([tmp_path])
    with pytest.raises(
        RequestError, match=r"'zz' is not the id of one request: no request has it; there are: cmpl-x0-0"
    ):
        traces.find("zz")
    with pytest.raises(RequestError, match=r"7 requests have it: cmpl-x0-0, .*cmpl-x4-0, \.\.\.$"):
        traces.find("cmpl")


@pytest.mark.parametrize(
    ("request_id", "base"), [("a-01234567", "a"), ("a-0123456g", "a-0123456g"), ("a", "a"), ("a-0-89abcdef", "a-0")]
)
def test_the_engines_suffix_is_removed_from_the_name(request_id: str, base: str) -> None:
    assert without_suffix(request_id) == base


def test_overlapping_intervals_get_separate_lanes() -> None:
    assert lanes([(0, 4), (1, 2), (2, 3), (3, 5), (4, 6), (1, 9)]) == [0, 1, 1, 1, 0, 2]
    assert lanes([(5, 6), (0, 1)]) == [0, 0]
