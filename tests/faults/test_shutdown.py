"""An engine is shut down in an orderly way while pushes are in flight."""

from tests.e2e import wirefaults
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference
from tests.faults import engines
from tests.faults.checks import (
    ENDED,
    LogView,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_serves,
    hold_midway,
    pause_midway,
)

LENGTH = 1000
EXIT_S = 15.0


def test_p_shuts_down(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P ends in spite of WRITEs that do not end. D goes on without them."""
    (p,) = fleet.get(engines.P_VICTIM)
    (d,) = fleet.get(engines.D)
    handoff = hold_midway(p, d, LENGTH, seed=390)
    p.begin_stop()
    assert p.wait_ended(EXIT_S) == 0
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, ENDED)
    check_idle_soon(d)
    check_serves(fleet.respawn(p, same_id=True), d, reference, seed=391)


def test_p_shuts_down_while_it_computes(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """No WRITE delays P's end."""
    (p,) = fleet.get(engines.P_VICTIM)
    (d,) = fleet.get(engines.D_FAIL)
    handoff = pause_midway(p, d, LENGTH, seed=392)
    p.begin_stop()
    assert p.wait_ended(EXIT_S) == 0
    check_load_failed(handoff, reference, timeout=EXIT_S)
    log.check_one(d, handoff.request_id, ENDED)
    check_idle_soon(d)


def test_d_shuts_down(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """P frees D's blocks and serves another D."""
    p, other = fleet.get(engines.P, engines.D)
    (d,) = fleet.get(engines.D_VICTIM)
    handoff = hold_midway(p, d, LENGTH, seed=393)
    d.begin_stop()
    assert d.wait_ended(EXIT_S) == 0
    p.call(wirefaults.lift)
    p.wait_output(handoff.request_id)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(p, handoff.request_id, "(lost|disconnect|cut off)")
    check_merged(handoff)
    check_serves(p, other, reference, seed=394)
