"""Many requests at once, and requests without a transfer in the same batch."""

import random

from tests.e2e import engines
from tests.e2e.enginehost import Request
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt
from tests.e2e.models import LAYERS
from tests.e2e.pushtrace import pushes


def test_sixteen_at_once(fleet: Fleet, reference: Reference) -> None:
    """All 16 requests are in both engines before P steps."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    lengths = random.Random(30).sample(range(1, 700), 16)
    handoffs = [Handoff(new_id(), prompt(length, seed=30), p, d) for length in lengths]
    p.hold()
    p.add(*(handoff.to_p() for handoff in handoffs))
    d.add(*(handoff.to_d() for handoff in handoffs))
    for handoff in handoffs:
        handoff.await_registration()
    p.run()
    for handoff in handoffs:
        check(handoff.outcome(), reference)
        push = handoff.push()
        assert (push.outcome, push.swept_layers) == ("completed", 0)
        assert push.hooked_layers == len(push.chunks) * LAYERS
    assert sum(handoff.push().mode == "layer" for handoff in handoffs) >= 12


def test_plain_requests_in_the_same_batch_are_untouched(fleet: Fleet, reference: Reference) -> None:
    """P serves plain requests to the end beside handoffs. No plain request is pushed."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    plain = [Request(new_id(), prompt(length, seed=32), None, max_tokens=24) for length in (5, 64, 300, 777)]
    also_plain_on_d = Request(new_id(), prompt(400, seed=33), None, max_tokens=24)
    handoffs = [Handoff(new_id(), prompt(length, seed=34), p, d) for length in (900, 40, 1300)]
    p.hold()
    d.add(*(handoff.to_d() for handoff in handoffs), also_plain_on_d)
    p.add(plain[0], handoffs[0].to_p(), plain[1], plain[2], handoffs[1].to_p(), handoffs[2].to_p(), plain[3])
    for handoff in handoffs:
        handoff.await_registration()
    p.run()
    for handoff in handoffs:
        check(handoff.outcome(), reference)
    for request in plain:
        output = p.wait_output(request.request_id)
        assert output.token_ids == reference.tokens(request.token_ids, 24)
        assert output.kv_transfer_params is None
        assert pushes(p.trace_dir, request.request_id) == []
    assert d.wait_output(also_plain_on_d.request_id).token_ids == reference.tokens(also_plain_on_d.token_ids, 24)
