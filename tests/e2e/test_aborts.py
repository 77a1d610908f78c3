"""Requests that end early on one side: no engine crashes, nothing is left behind, later requests are served."""

import pytest

from tests.e2e import engines
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt, send


def test_aborted_on_d_while_it_waits(fleet: Fleet, reference: Reference) -> None:
    """D keeps the blocks until P has written them. Then both engines are clean."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    handoff = Handoff(new_id(), prompt(900, seed=90), p, d)
    d.add(handoff.to_d())
    handoff.await_registration()
    d.abort(handoff.request_id)
    p.add(handoff.to_p())
    p.wait_output(handoff.request_id)
    check(send(p, d, prompt(300, seed=91), "early").outcome(), reference)


def test_aborted_on_d_while_p_streams(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    p.hold()
    handoff = Handoff(new_id(), prompt(1500, seed=92), p, d)
    d.add(handoff.to_d())
    handoff.await_registration()
    p.add(handoff.to_p())
    p.step(3)
    d.abort(handoff.request_id)
    p.run()
    p.wait_output(handoff.request_id)
    check(send(p, d, prompt(300, seed=93), "early").outcome(), reference)


@pytest.mark.parametrize("d_spec", [engines.D_LAYER, engines.D_STOCK])
def test_aborted_on_p_and_sent_again(fleet: Fleet, reference: Reference, d_spec: EngineSpec) -> None:
    """P drops the prompt in the middle. The same request comes again, and serves D, which still waits.

    One of the two is stock: between two layerpush engines, D's load fails at once.
    """
    p, d = fleet.get(engines.P_STOCK if d_spec is engines.D_LAYER else engines.P_LAYER, d_spec)
    p.hold()
    handoff = Handoff(new_id(), prompt(1500, seed=94), p, d)
    d.add(handoff.to_d())
    handoff.await_registration()
    p.add(handoff.to_p())
    p.step(3)
    p.abort(handoff.request_id)
    p.step(2)
    p.add(handoff.to_p())
    p.run()
    check(handoff.outcome(), reference)
