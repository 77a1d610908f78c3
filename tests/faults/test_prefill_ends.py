"""P's part of a request ends early: its client aborts, it is preempted, killed or stopped."""

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt
from tests.faults import engines
from tests.faults.checks import (
    ENDED,
    LogView,
    all_along,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_owned,
    check_planned,
    check_serves,
    check_under_way,
    described,
    early,
    hold_midway,
    pause_midway,
    restart,
    run_merged,
    spoil_writes,
    step_merged,
    warm_up,
)

LENGTH = 1000
MOMENTS = {
    "before the first WRITE": ("post", 0),
    "between WRITEs": ("landed:merged", 0),
    "after the last WRITE": ("send:completion", 0),
}


@pytest.mark.parametrize("d_spec", [engines.for_test_all(engines.D), engines.D_FAIL], ids=["recompute", "fail"])
def test_aborted_on_p(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """D's load fails at once. D's policy decides about the request."""
    p, d = fleet.get(engines.P, d_spec)
    handoff = pause_midway(p, d, LENGTH, seed=300)
    p.abort(handoff.request_id)
    p.run()
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    log.check_one(d, handoff.request_id, "abort")
    check_idle_soon(d)
    check_merged(handoff)
    check_serves(p, d, reference, seed=301)


def test_aborted_on_p_with_writes_in_flight(
    fleet: Fleet, reference: Reference, log: LogView, packing: engines.Packing
) -> None:
    """D frees its blocks only when the WRITEs have ended."""
    p, d = fleet.get(engines.with_packing(engines.P, packing), engines.D)
    warm_up(p, d)
    p.hold()
    spoil_writes(p, "early", "hold")
    handoff = early(p, d, LENGTH, seed=302)
    p.add(handoff.to_p())
    step_merged(p, 3)
    p.poll_until(wirefaults.held_posts)
    check_under_way(p)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    p.abort(handoff.request_id)
    p.run()
    all_along(lambda: d.call(probes.owned_blocks, blocks) == len(blocks), 1.0, "D keeps the blocks")
    assert not d.has_output(handoff.request_id)
    p.call(wirefaults.lift)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    log.check_one(d, handoff.request_id, "abort")
    check_planned(handoff)
    check_merged(handoff)
    check_serves(p, d, reference, seed=303)


def test_preempted_and_resumed(fleet: Fleet, reference: Reference, log: LogView, packing: engines.Packing) -> None:
    """P's cache is small, so P computes the prompt twice. D gets the second bytes, and one completion."""
    p, d = fleet.get(engines.with_packing(engines.P_SMALL, packing), engines.D)
    warm_up(p, d)
    p.call(wirefaults.watch)
    waiting, streaming = (Handoff(new_id(), prompt(length, seed=304), p, d) for length in (1600, 2000))
    p.hold()
    p.add(waiting.to_p())
    while not p.has_output(waiting.request_id):
        p.step()
    d.add(streaming.to_d())
    streaming.await_registration()
    p.add(streaming.to_p())
    step_merged(p, 1)
    while not p.call(probes.preemptions, streaming.request_id):
        assert p.step() == 1
    assert p.call(wirefaults.seen, "post:merged")
    d.add(waiting.to_d())
    p.run()
    for handoff in (waiting, streaming):
        check(handoff.outcome(), reference)
        log.check_none(d, handoff.request_id)
    assert check_planned(streaming).epoch > 0
    assert p.call(wirefaults.sent_kinds, streaming.request_id).count("completion") == 1


@pytest.mark.parametrize(
    ("d_spec", "moment", "packing"),
    [
        (engines.D_FAIL, "before the first WRITE", "auto"),
        (engines.D, "between WRITEs", "auto"),
        (engines.D, "after the last WRITE", "auto"),
        engines.for_test_all(engines.D, "before the first WRITE", "auto"),
        engines.for_test_all(engines.D_FAIL, "between WRITEs", "auto"),
        engines.for_test_all(engines.D_FAIL, "after the last WRITE", "auto"),
        engines.for_test_all(engines.D, "between WRITEs", "gather"),
    ],
    ids=described,
)
def test_p_killed(
    fleet: Fleet, reference: Reference, log: LogView, moment: str, d_spec: EngineSpec, packing: engines.Packing
) -> None:
    """D notices P's end, frees the blocks only then, and accepts the next P."""
    (p,) = fleet.get(engines.with_packing(engines.P_VICTIM, packing))
    (d,) = fleet.get(d_spec)
    warm_up(p, d)
    p.call(wirefaults.gate, *MOMENTS[moment])
    handoff = early(p, d, LENGTH, seed=305)
    if moment == "before the first WRITE":
        p.add(handoff.to_p())
    else:
        run_merged(p, handoff)
    p.poll_until(wirefaults.is_at_gate)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    check_owned(d, blocks)
    if moment == "between WRITEs":
        check_under_way(p)
    if moment != "before the first WRITE":
        assert p.call(wirefaults.seen, "post:merged")
    p.kill()
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, ENDED)
    check_idle_soon(d)
    if (moment, packing) == ("between WRITEs", "auto"):
        check_serves(fleet.respawn(p, same_id=False), d, reference, seed=306)


@pytest.mark.parametrize(
    ("same_id", "packing"),
    [(True, "auto"), engines.for_test_all(False, "auto"), engines.for_test_all(True, "gather")],
    ids=["same id", "new id", "same id, gather"],
)
def test_p_restarted(fleet: Fleet, reference: Reference, log: LogView, same_id: bool, packing: engines.Packing) -> None:
    """Another engine takes P's port. D makes a new handshake, and pushes go on."""
    (p,) = fleet.get(engines.with_packing(engines.P_VICTIM, packing))
    (d,) = fleet.get(engines.D)
    check_serves(p, d, reference, seed=307)
    successor = restart(fleet, p, same_id=same_id)
    check_serves(successor, d, reference, seed=308)


def test_p_restarted_while_d_waits(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """The old process's registration is lost. D notices this, although the new process has the old name."""
    (p,) = fleet.get(engines.P_VICTIM)
    (d,) = fleet.get(engines.D)
    handoff = early(p, d, LENGTH, seed=310)
    successor = restart(fleet, p, same_id=True)
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, ENDED)
    check_serves(successor, d, reference, seed=311)


@pytest.mark.parametrize("packing", ["auto", engines.for_test_all("gather")])
def test_p_stopped_and_continued(fleet: Fleet, reference: Reference, log: LogView, packing: engines.Packing) -> None:
    """P freezes with WRITEs on the wire. D parks the blocks, goes on without them, and gets them back later."""
    p, d = fleet.get(engines.with_packing(engines.P, packing), engines.D)
    handoff = hold_midway(p, d, LENGTH, seed=312)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    p.pause()
    check_load_failed(handoff, reference, timeout=3 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "(silent|silence|nothing|no sign|not answer)")
    check_owned(d, blocks)
    fill_cache(d, reference, seed=313)
    assert d.call(probes.free_blocks) == d.idle_blocks - len(blocks)
    p.resume()
    all_along(lambda: d.call(probes.owned_blocks, blocks) == len(blocks), 1.0, "D waits for the WRITEs to end")
    p.call(wirefaults.lift)
    check_idle_soon(d)
    check_idle_soon(p)
    check_merged(handoff)
    check_serves(p, d, reference, seed=314)


@pytest.mark.exhaustive
def test_p_stopped_before_it_began(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P freezes with a registration, but without the prompt. P never writes for this registration."""
    p, d = fleet.get(engines.P, engines.D_FAIL)
    handoff = early(p, d, LENGTH, seed=315)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    d.poll_until(wirefaults.seen, "got:accepted")
    p.pause()
    check_load_failed(handoff, reference, timeout=3 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_owned(d, blocks)
    p.resume()
    check_idle_soon(d)
    p.call(wirefaults.watch)
    p.add(handoff.to_p())
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    assert p.call(wirefaults.count_of, "post") == 0
    check_serves(p, d, reference, seed=316)


def fill_cache(d: EngineHost, reference: Reference, seed: int) -> None:
    """Send plain prompts that need more blocks than D has: every free block gets a new owner."""
    requests = [Request(new_id(), prompt(1000 + number, seed=seed), None, 4) for number in range(5)]
    d.add(*requests)
    for request in requests:
        assert d.wait_output(request.request_id).token_ids == reference.tokens(request.token_ids, 4)
