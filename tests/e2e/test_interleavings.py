"""Random traffic on a P that is short of blocks, for orders of events that other tests lack."""

import random

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt
from tests.e2e.models import VOCABULARY

P_BUSY = EngineSpec(
    "P-busy",
    "P",
    transfer(LAYERWISE, trace_dir=TRACE),
    (
        *engines.PREFIX_CACHING,
        ("max_model_len", 1400),
        ("max_num_batched_tokens", 150),
        ("num_gpu_blocks_override", 70),
        ("scheduler_reserve_full_isl", False),
    ),
)
HANDOFFS = 30


@pytest.mark.parametrize("seed", [10, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (11, 12))])
def test_random_traffic(fleet: Fleet, reference: Reference, seed: int) -> None:
    """Prompts share prefixes. P and D engines get requests and steps in a random order."""
    rng = random.Random(seed)
    p, *decoders = fleet.get(P_BUSY, engines.D_CACHING, engines.D_STOCK)
    for host in (p, decoders[0]):
        host.call(probes.reset_prefix_cache)
    handoffs = [Handoff(new_id(), random_prompt(rng, seed), p, rng.choice(decoders)) for _ in range(HANDOFFS)]
    requests: list[tuple[int, EngineHost, Handoff]] = []
    for number, handoff in enumerate(handoffs):
        requests += [(number + rng.randrange(3), p, handoff), (number + rng.choice([0, 1, 2, 9]), handoff.d, handoff)]
    for host in (p, *decoders):
        host.hold()
    for _, host, handoff in sorted(requests, key=lambda event: event[0]):
        host.add(handoff.to_p() if host is p else handoff.to_d())
        for busy in (p, rng.choice(decoders)):
            busy.step(rng.randrange(6))
    for host in (p, *decoders):
        host.run()
    for handoff in handoffs:
        check(handoff.outcome(), reference)
        assert handoff.push().outcome == "completed"


def random_prompt(rng: random.Random, seed: int) -> list[int]:
    """One of three prefixes or none, and a tail that no other prompt has."""
    prefix = prompt(rng.choice([64, 200, 480]), seed=120 + seed) if rng.random() < 0.6 else []
    return prefix + rng.choices(VOCABULARY, k=rng.choice([1, 31, 32, 33, 90, 149, 150, 151, 400, 700]))
