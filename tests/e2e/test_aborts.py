"""A request that P aborts and gets again. tests/faults has all other aborts."""

import pytest

from tests.e2e import engines
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt


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
