"""The files of a P that was killed while it wrote to D, and of the D that it left waiting."""

import pathlib

from tests.e2e import wirefaults
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, check, prompt, send
from tests.faults import engines
from tests.faults.checks import FEW, LogView, check_load_failed, early
from tests.trace_command import lines, merged, slices, summary, trace, wait_for
from tests.unit.test_trace_perfetto import check as check_events

D = EngineSpec(
    "D-traced",
    "D",
    transfer(LAYERWISE, on_failed_load="recompute", peer_timeout_s=engines.PEER_TIMEOUT_S, trace_dir=TRACE),
)


def test_p_killed(fleet: Fleet, reference: Reference, log: LogView, tmp_path: pathlib.Path) -> None:
    """All whole lines of P's file are kept, and D's record has the outcome of the other request."""
    p, d = fleet.spawn(engines.P, D)
    before = send(p, d, prompt(700, seed=390), "early")
    check(before.outcome(), reference)
    folders = [p.trace_dir, d.trace_dir]
    wait_for(lambda: len(lines(folders, "push")) == len(lines(folders, "load")) == 1, "the records of the first one")
    p.call(wirefaults.gate, "landed", FEW)
    handoff = early(p, d, 1500, seed=391)
    p.add(handoff.to_p())
    p.poll_until(wirefaults.is_at_gate)
    p.kill()
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    wait_for(lambda: len(lines(folders, "load")) >= 2, "D's record of the failed load")
    whole = summary(folders)
    (path,) = p.trace_dir.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:200])

    data = summary(folders)
    assert data == whole, "half a line changes the summary"
    assert data["outcomes"] == {"completed": 1, "failed": 1}
    assert data["notes"] == []
    (failed,) = [one for one in data["slowest"] if one["outcome"] == "failed"]
    assert failed["request"] == handoff.request_id
    assert failed["reason"] in trace("summary", *folders).stdout
    events = merged(folders, tmp_path / "one.json")
    check_events(events)
    assert len(slices(events, "load", handoff.request_id)) == 1
    assert len(slices(events, "push", before.request_id)) == 1
    trace("plot", *folders, "--request", handoff.request_id, "--out", tmp_path / "one.png")
