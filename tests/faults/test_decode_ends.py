"""D's part of a request ends early: its client disconnects, it is killed, it is restarted."""

import pytest

from tests.e2e import probes, stagingfaults, wirefaults
from tests.e2e.conftest import check_nothing_left
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt, send
from tests.faults import engines
from tests.faults.checks import (
    PAUSE_S,
    LogView,
    all_along,
    check_idle_soon,
    check_merged,
    check_planned,
    check_serves,
    check_under_way,
    early,
    hold_midway,
    pause_midway,
    restart,
    warm_up,
)
from tests.support.waiting import until

LENGTH = 1000


def test_client_disconnects_before_p_has_the_prompt(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D gets its blocks back at once. P still computes the prompt later, and keeps nothing for D."""
    p, d = fleet.get(engines.P, engines.D)
    p.call(wirefaults.watch)
    handoff = early(p, d, LENGTH, seed=320)
    d.abort(handoff.request_id)
    check_idle_soon(d)
    p.add(handoff.to_p())
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    assert p.call(wirefaults.count_of, "post") == 0
    check_serves(p, d, reference, seed=321)
    check_nothing_left(d)
    log.check_no_errors(p, d)


def test_client_disconnects_while_p_computes(fleet: Fleet, reference: Reference, log: LogView) -> None:
    p, d = fleet.get(engines.P, engines.D)
    handoff = pause_midway(p, d, LENGTH, seed=322)
    d.abort(handoff.request_id)
    check_idle_soon(d)
    p.run()
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    assert p.call(wirefaults.sent_kinds, handoff.request_id).count("completion") == 0
    check_merged(handoff)
    check_serves(p, d, reference, seed=323)
    check_nothing_left(d)
    log.check_no_errors(p, d)


def test_client_disconnects_with_writes_in_flight(
    fleet: Fleet, reference: Reference, log: LogView, packing: engines.Packing
) -> None:
    """D holds its blocks until the last WRITE into them has ended."""
    p, d = fleet.get(engines.with_packing(engines.P, packing), engines.D)
    handoff = hold_midway(p, d, LENGTH, seed=324)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    d.abort(handoff.request_id)
    all_along(lambda: d.call(probes.owned_blocks, blocks) == len(blocks), 1.5, "D keeps the blocks")
    p.call(wirefaults.lift)
    check_idle_soon(d)
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    check_planned(handoff)
    check_merged(handoff)
    check_serves(p, d, reference, seed=325)


def test_client_disconnects_after_p_finished(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P holds a finished prompt. D registers for it and cancels at once."""
    p, d = fleet.get(engines.P, engines.D)
    d.call(wirefaults.watch)
    handoff = Handoff(new_id(), prompt(LENGTH, seed=326), p, d)
    p.add(handoff.to_p())
    finished = p.wait_output(handoff.request_id)
    p.call(wirefaults.on_posts, "hold")
    d.add(handoff.to_d(finished.kv_transfer_params))
    p.poll_until(wirefaults.held_posts)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    d.abort(handoff.request_id)
    all_along(lambda: d.call(probes.owned_blocks, blocks) == len(blocks), 1.0, "D keeps the blocks")
    p.call(wirefaults.lift)
    check_idle_soon(d)
    check_idle_soon(p)
    check_serves(p, d, reference, seed=327)


@pytest.mark.parametrize(
    ("merged", "packing"),
    [engines.for_test_all(False, "auto"), (True, "auto"), engines.for_test_all(True, "gather")],
    ids=["all WRITEs held", "later WRITEs held", "later WRITEs held, gather"],
)
def test_d_killed(fleet: Fleet, reference: Reference, log: LogView, merged: bool, packing: engines.Packing) -> None:
    """P lives on, frees the blocks, and serves another D."""
    (p, other) = fleet.get(engines.with_packing(engines.P, packing), engines.D)
    (d,) = fleet.get(engines.D_VICTIM)
    if merged:
        handoff = hold_midway(p, d, LENGTH, seed=328)
    else:
        warm_up(p, d)
        handoff = early(p, d, LENGTH, seed=328)
        p.call(wirefaults.on_posts, "hold")
        p.add(handoff.to_p())
        p.poll_until(wirefaults.held_posts)
        check_under_way(p)
    d.kill()
    p.call(wirefaults.lift)
    p.wait_output(handoff.request_id)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(p, handoff.request_id, "(lost|disconnect|cut off)")
    check_planned(handoff)
    if merged:
        check_merged(handoff)
    check_serves(p, other, reference, seed=329)


def test_d_killed_between_writes(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """No WRITE is on the wire when D dies. The next WRITE fails."""
    p, other = fleet.get(engines.P, engines.D)
    (d,) = fleet.get(engines.D_VICTIM)
    handoff = pause_midway(p, d, LENGTH, seed=330, chunks=2, seen="landed:merged")
    until(lambda: p.call(stagingfaults.open_writes) == 0, "no WRITE is on the wire", pause_s=PAUSE_S)
    d.kill()
    p.run()
    p.wait_output(handoff.request_id)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_merged(handoff)
    check_serves(p, other, reference, seed=331)


@pytest.mark.parametrize("same_id", [True, engines.for_test_all(False)], ids=["same id", "new id"])
def test_d_restarted(fleet: Fleet, reference: Reference, log: LogView, same_id: bool) -> None:
    """Another engine takes D's port. P cannot use its connection to the old D."""
    (p,) = fleet.get(engines.P)
    (d,) = fleet.get(engines.D_VICTIM)
    check_serves(p, d, reference, seed=332)
    successor = restart(fleet, d, same_id=same_id)
    check_serves(p, successor, reference, seed=333)
    for order in ("late", "together"):
        check(send(p, successor, prompt(600, seed=334), order).outcome(), reference)


@pytest.mark.parametrize(
    ("same_id", "packing"),
    [(True, "auto"), (False, "auto"), engines.for_test_all(True, "gather")],
    ids=["same id", "new id", "same id, gather"],
)
def test_d_restarted_mid_transfer(
    fleet: Fleet, reference: Reference, log: LogView, same_id: bool, packing: engines.Packing
) -> None:
    """WRITEs to the old D never reach the new D's memory, though its name and port may be the same."""
    (p,) = fleet.get(engines.with_packing(engines.P, packing))
    (d,) = fleet.get(engines.D_VICTIM)
    lost = hold_midway(p, d, LENGTH, seed=335)
    successor = restart(fleet, d, same_id=same_id)
    handoff = early(p, successor, LENGTH, seed=336)
    p.call(wirefaults.lift)
    p.add(handoff.to_p())
    check(handoff.outcome(), reference)
    check_planned(handoff)
    p.wait_output(lost.request_id)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_merged(lost)
    check_serves(p, successor, reference, seed=337)
