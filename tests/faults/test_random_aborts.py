"""Many requests, most of them aborted at a random moment on one side or both."""

import random
from collections import Counter

import pytest

from tests.e2e import probes
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, new_id, prompt
from tests.e2e.pushtrace import pushes
from tests.faults import engines
from tests.faults.checks import LogView, check_idle_soon, check_serves

AT_ONCE = 12
P_BUSY = EngineSpec(
    "P-busy-faults",
    "P",
    transfer(
        LAYERWISE,
        trace_dir=TRACE,
        peer_timeout_s=engines.PEER_TIMEOUT_S,
        kv_lease_duration=10,
    ),
    (
        ("enable_prefix_caching", True),
        ("max_model_len", 1400),
        ("max_num_batched_tokens", 150),
        ("num_gpu_blocks_override", 100),
        ("scheduler_reserve_full_isl", False),
    ),
)


@pytest.mark.parametrize(
    ("seed", "count", "packing"), [pytest.param(1, 200, "auto", marks=pytest.mark.exhaustive), (2, 60, "gather")]
)
def test_random_aborts(
    fleet: Fleet, reference: Reference, log: LogView, seed: int, count: int, packing: engines.Packing
) -> None:
    """A request that was not aborted on D gets the plain engine's tokens, pushed or computed again."""
    rng = random.Random(seed)
    p, d = fleet.get(engines.with_packing(P_BUSY, packing), engines.D)
    p.call(probes.reset_prefix_cache)
    handoffs = [
        Handoff(new_id(), prompt(rng.choice((33, 150, 200, 320, 500)), seed=1000 + number), p, d)
        for number in range(count)
    ]
    events: list[tuple[float, int, str]] = []
    gone_on_d = set()
    for number in range(count):
        start = number / AT_ONCE * 6
        events += [(start + rng.random() * 4, number, "to P"), (start + rng.random() * 4, number, "to D")]
        if rng.random() < 0.35:
            events.append((start + rng.random() * 14, number, "abort on P"))
        if rng.random() < 0.35:
            events.append((start + rng.random() * 14, number, "abort on D"))
            gone_on_d.add(number)
    for host in (p, d):
        host.hold()
    started: set[tuple[str, int]] = set()
    now = 0.0
    for at, number, event in sorted(events):
        while now < at:
            for host in (p, d):
                host.step(rng.randrange(3))
            now += 1.0
        act(event, number, handoffs[number], started)
    for host in (p, d):
        host.run()
    for number, handoff in enumerate(handoffs):
        if number not in gone_on_d or ("aborted", number) not in started:
            assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
    for host in (p, d):
        check_idle_soon(host, 20)
    if packing != "auto":
        records = [push for handoff in handoffs for push in pushes(p.trace_dir, handoff.request_id)]
        plans = Counter(write["plan"] for push in records for write in push.writes)
        assert plans[engines.PLANS[packing]] > count, f"the plans of WRITEs were {plans}"
    check_serves(p, d, reference, seed=401)


def act(event: str, number: int, handoff: Handoff, started: set[tuple[str, int]]) -> None:
    """Abort only a started request: an engine cannot abort an unknown id."""
    side, host = ("P", handoff.p) if event.endswith("P") else ("D", handoff.d)
    if event.startswith("to"):
        host.add(handoff.to_p() if side == "P" else handoff.to_d())
        started.add((side, number))
    elif (side, number) in started and not host.has_output(handoff.request_id):
        host.abort(handoff.request_id)
        if side == "D":
            started.add(("aborted", number))
