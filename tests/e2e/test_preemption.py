"""P runs out of blocks and preempts a prompt whose layers are already on their way."""

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt
from tests.e2e.streamchecks import check_completed


def test_preempted_while_streaming(fleet: Fleet, reference: Reference) -> None:
    """The first prompt holds its blocks, because its D is late. The second one streams, is preempted and restarts."""
    p, d = fleet.get(engines.P_TIGHT, engines.D_LAYER)
    waiting = Handoff(new_id(), prompt(1600, seed=60), p, d)
    streaming = Handoff(new_id(), prompt(2000, seed=61), p, d)
    p.hold()
    p.add(waiting.to_p())
    while not p.has_output(waiting.request_id):
        p.step()
    d.add(streaming.to_d())
    streaming.await_registration()
    p.add(streaming.to_p())
    preempted_after = next(steps for steps in range(1, 40) if stepped_into_preemption(p, streaming))
    assert preempted_after > 2, "no chunk was computed before the preemption"
    d.add(waiting.to_d())
    waiting.await_registration()
    p.run()
    for handoff in (waiting, streaming):
        check(handoff.outcome(), reference)
    push = streaming.push()
    assert (push.outcome, push.mode, push.epoch) == ("completed", "layer", 1)
    check_completed(waiting.push(), 1600)


def stepped_into_preemption(p: EngineHost, handoff: Handoff) -> bool:
    p.step()
    return bool(p.call(probes.preemptions, handoff.request_id))
