"""Faults of packed WRITEs between their landing in D's ring and D's answer."""

from typing import Literal

import pytest

from tests.e2e import probes, stagingfaults, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, check
from tests.faults import engines
from tests.faults.checks import (
    FEW,
    PAUSE_S,
    LogView,
    all_along,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_planned,
    check_serves,
    check_under_way,
    early,
    run_merged,
    step_merged,
    warm_up,
)
from tests.support.waiting import until

LENGTH = 1500
P_PACKED = engines.with_packing(engines.P, "packed")


@pytest.mark.parametrize("fault", ["drop", "duplicate"])
@pytest.mark.parametrize("kind", ["unpack", "unpacked"])
def test_message_is_lost_or_comes_twice(
    fleet: Fleet, reference: Reference, log: LogView, kind: str, fault: Literal["drop", "duplicate"]
) -> None:
    """P asks again until it has D's answer. D scatters once."""
    p, d = fleet.get(P_PACKED, engines.D)
    warm_up(p, d)
    d.call(wirefaults.on_messages, fault, kind, "", 3, "in" if kind == "unpack" else "out")
    handoff = early(p, d, LENGTH, seed=400)
    run_merged(p, handoff)
    check(handoff.outcome(), reference)
    writes = len(check_planned(handoff).writes)
    check_merged(handoff)
    assert d.call(wirefaults.count_of, "got:unpack") >= writes + (3 if fault == "drop" else 0)
    for host in (p, d):
        log.check_none(host, handoff.request_id)
    check_serves(p, d, reference, seed=401)


@pytest.mark.parametrize("side", ["P", "D"])
def test_request_aborted_before_d_unpacks(fleet: Fleet, reference: Reference, log: LogView, side: str) -> None:
    """A client aborts while its blocks are in D's ring. D frees the registered blocks once P has D's answer."""
    p, d = fleet.get(P_PACKED, engines.D)
    warm_up(p, d)
    p.hold()
    d.call(wirefaults.on_messages, "hold", "unpack", "", wirefaults.ALL, "in")
    handoff = early(p, d, LENGTH, seed=402)
    p.add(handoff.to_p())
    step_merged(p, 3)
    d.poll_until(wirefaults.seen, "got:unpack")
    check_under_way(p)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    (p if side == "P" else d).abort(handoff.request_id)
    p.run()
    all_along(lambda: d.call(probes.owned_blocks, blocks) == len(blocks), 1.0, "D keeps the blocks")
    d.call(wirefaults.lift)
    if side == "P":
        check_load_failed(handoff, reference, timeout=engines.GRACE_S)
        log.check_one(d, handoff.request_id, "abort")
    else:
        p.wait_output(handoff.request_id)
    for host in (p, d):
        check_idle_soon(host)
    check_planned(handoff)
    check_merged(handoff)
    check_serves(p, d, reference, seed=403)


def test_d_killed_before_it_unpacks(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """No WRITE is on the wire. P notices D's end at its next question."""
    p, other = fleet.get(P_PACKED, engines.D)
    (d,) = fleet.spawn(engines.D)
    warm_up(p, d)
    d.call(wirefaults.on_messages, "drop", "unpack", "", wirefaults.ALL, "in")
    p.call(wirefaults.watch)
    handoff = early(p, d, LENGTH, seed=404)
    run_merged(p, handoff)
    p.wait_output(handoff.request_id)
    posted = p.call(wirefaults.count_of, "post")
    until(lambda: p.call(wirefaults.count_of, "landed") == posted > 0, "all WRITEs have landed", pause_s=PAUSE_S)
    check_under_way(p)
    d.kill()
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(p, handoff.request_id, "cannot notify .*DISCONNECT")
    check_planned(handoff)
    check_merged(handoff)
    check_serves(p, other, reference, seed=405)


def test_d_stopped_and_continued(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D finds each question several times, and goes on where it stopped."""
    p, d = fleet.get(P_PACKED, engines.D)
    warm_up(p, d)
    p.call(wirefaults.watch)
    d.call(wirefaults.gate, "send:unpacked", FEW)
    handoff = early(p, d, LENGTH, seed=406)
    run_merged(p, handoff)
    p.peek_output(handoff.request_id)
    d.poll_until(wirefaults.is_at_gate)
    d.pause()
    asked = p.call(wirefaults.count_of, "send:unpack")
    until(lambda: p.call(wirefaults.count_of, "send:unpack") > asked + 10, "P has asked again", pause_s=PAUSE_S)
    check_under_way(p)
    d.resume()
    d.call(wirefaults.open_gates)
    check(handoff.outcome(), reference)
    check_planned(handoff)
    check_merged(handoff)
    for host in (p, d):
        log.check_none(host, handoff.request_id)
    check_serves(p, d, reference, seed=407)


@pytest.mark.parametrize(
    ("packing", "copying"), [("gather", "gather"), ("packed", "gather"), ("packed", "scatter")], ids=str
)
def test_blocks_cannot_be_copied(
    fleet: Fleet,
    reference: Reference,
    log: LogView,
    packing: engines.Packing,
    copying: stagingfaults.Copying,
) -> None:
    """A copy fails on either side: no completion, and D gets the cause."""
    p, d = fleet.get(engines.with_packing(engines.P, packing), engines.D)
    warm_up(p, d)
    p.call(wirefaults.watch)
    handoff = early(p, d, LENGTH, seed=408)
    copies(p, d, copying).call(stagingfaults.fail_copies, copying, FEW)
    run_merged(p, handoff)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    p.wait_output(handoff.request_id)
    cause = "could not be gathered: .*scripted" if copying == "gather" else "did not unpack"
    log.check_one(p, handoff.request_id, cause)
    assert p.call(wirefaults.sent_kinds, handoff.request_id).count("completion") == 0
    for host in (p, d):
        check_idle_soon(host)
    check_planned(handoff)
    check_serves(p, d, reference, seed=409)


def copies(p: EngineHost, d: EngineHost, copying: stagingfaults.Copying) -> EngineHost:
    """The engine that gathers, or the one that scatters."""
    return p if copying == "gather" else d
