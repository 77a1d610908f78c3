"""Models whose attention calls no hook of vLLM: P pushes layers of known classes as they are computed."""

import math

from tests.e2e import engines
from tests.e2e.enginespec import PREFILL_TOKENS_PER_STEP
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, check, introduce, prompt, send
from tests.e2e.models import LAYERS


def test_known_layers_are_hooked_and_others_swept(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_SILENT, engines.D_LAYER)
    introduce(p, d)
    for length in (1, 33, 256, 700):
        handoff = send(p, d, prompt(length, seed=130), "early")
        check(handoff.outcome(), reference)
        push, steps = handoff.push(), math.ceil(length / PREFILL_TOKENS_PER_STEP)
        assert (push.outcome, push.fallback) == ("completed", None)
        assert (push.hooked_layers, push.swept_layers) == ((LAYERS - 1) * steps, steps)
