"""Two processes have one engine id: the second one replaces the first, or both live."""

import time

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, new_id, prompt, send
from tests.faults import engines
from tests.faults.checks import (
    LogView,
    check_idle_soon,
    check_load_failed,
    check_owned,
    check_serves,
    early,
    hold_midway,
    pause_midway,
)

LENGTH = 700
AT_ONCE_S = 2.0


def check_answers(p: EngineHost, d: EngineHost, reference: Reference, seed: int) -> None:
    """Check that D loads prompts from P. Other loads of D may not be over."""
    for order in ("early", "late"):
        handoff = send(p, d, prompt(350, seed=seed), order)
        assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
        assert handoff.push().outcome == "completed"


def test_a_p_that_vanishes_is_replaced(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """Its address neither answers nor refuses, and no send to it fails. Only the blocks of its own load wait for it."""
    (d,) = fleet.get(engines.D_FAIL)
    (vanished,) = fleet.spawn(engines.P)
    successor = fleet.namesake(vanished)
    lost = pause_midway(vanished, d, LENGTH, seed=900)
    blocks = d.call(wirefaults.registered_blocks, lost.request_id)
    vanished.pause()
    check_answers(successor, d, reference, seed=901)
    counts = f"engine {vanished.engine_id} at 127.0.0.1:{vanished.port} does not answer, and another process has its id"
    assert len([line for line in log.lines(d) if counts in line]) == 1
    check_load_failed(lost, reference, timeout=2 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_owned(d, blocks)
    check_answers(successor, d, reference, seed=902)
    check_owned(d, blocks)
    vanished.resume()
    vanished.run()
    check_idle_soon(d)
    check_serves(successor, d, reference, seed=903)


def test_a_p_that_is_silent_gets_no_load_until_it_answers(fleet: Fleet, reference: Reference, log: LogView) -> None:
    p, d = fleet.get(engines.P, engines.D_FAIL)
    lost = early(p, d, LENGTH, seed=910)
    p.pause()
    check_load_failed(lost, reference, timeout=2 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    parked = d.call(probes.free_blocks)
    for seed in (911, 912):
        started, refused = time.monotonic(), Handoff(new_id(), prompt(350, seed=seed), p, d)
        d.add(refused.to_d())
        check_load_failed(refused, reference, timeout=engines.GRACE_S)
        assert time.monotonic() - started < engines.PEER_TIMEOUT_S
        log.check_one(d, refused.request_id, "is silent, and earlier loads wait for it: no other load begins")
        assert d.call(probes.free_blocks) == parked
    p.resume()
    check_idle_soon(d)
    check_serves(p, d, reference, seed=913)


def test_a_second_living_d_is_refused(fleet: Fleet, reference: Reference, log: LogView) -> None:
    (p,) = fleet.get(engines.P)
    (first,) = fleet.spawn(engines.D_FAIL)
    second = fleet.namesake(first)
    check_serves(p, first, reference, seed=920)
    handoff = send(p, second, prompt(350, seed=921), "together")
    check_load_failed(handoff, reference, timeout=AT_ONCE_S + engines.GRACE_S)
    check_idle_soon(second)
    both = (
        f"two engines have the id '{first.engine_id}': one lives at 127.0.0.1:{first.port},"
        f" and another at 127.0.0.1:{second.port}"
    )
    log.check_one(second, handoff.request_id, both)
    log.check_one(p, handoff.request_id, both)
    check_serves(p, first, reference, seed=922)


def test_a_second_living_p_is_refused(fleet: Fleet, reference: Reference, log: LogView) -> None:
    (d,) = fleet.get(engines.D_FAIL)
    (first,) = fleet.spawn(engines.P)
    second = fleet.namesake(first)
    check_serves(first, d, reference, seed=930)
    handoff = send(second, d, prompt(350, seed=931), "late")
    check_load_failed(handoff, reference, timeout=AT_ONCE_S + engines.GRACE_S)
    check_idle_soon(d)
    check_idle_soon(second, engines.GRACE_S)
    log.check_one(d, handoff.request_id, f"one lives at 127.0.0.1:{first.port}, and another at 127.0.0.1:{second.port}")
    check_serves(first, d, reference, seed=932)


def test_a_d_that_vanishes_is_replaced(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """WRITEs are on their way to it. They keep the blocks that they read, and nothing else."""
    (p,) = fleet.get(engines.P)
    (vanished,) = fleet.spawn(engines.D)
    successor = fleet.namesake(vanished)
    lost = hold_midway(p, vanished, LENGTH, seed=940)
    vanished.pause()
    handoff = early(p, successor, LENGTH, seed=941)
    assert p.call(wirefaults.held_posts)
    p.call(wirefaults.lift)
    p.add(handoff.to_p())
    assert successor.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
    assert handoff.push().outcome == "completed"
    assert p.call(wirefaults.open_handles)
    vanished.resume()
    p.wait_output(lost.request_id)
    check_load_failed(lost, reference, timeout=3 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_idle_soon(vanished)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_serves(p, successor, reference, seed=942)
