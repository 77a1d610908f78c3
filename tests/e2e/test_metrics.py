"""Real engines' ``/metrics`` of real pushes. Tests share the engines, so they compare differences."""

import pytest

from layerpush.telemetry.metrics.catalog import PUSHES
from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check_tokens, prompt, send
from tests.metrics_scrape import Scrape
from tests.support.waiting import until


def scrape(host: EngineHost) -> Scrape:
    return Scrape(host.call(probes.metrics))


def value(host: EngineHost, name: str, **labels: str) -> float:
    return scrape(host).value(name, **labels)


def wait_for(host: EngineHost, name: str, wanted: float, **labels: str) -> None:
    until(lambda: value(host, name, **labels) == wanted, f"{name} {labels} is {wanted}", pause_s=0.05)


@pytest.mark.parametrize(("order", "outcome"), [("early", "layerwise"), ("late", "late_registration")])
def test_a_push_is_counted_by_its_outcome(fleet: Fleet, reference: Reference, order: Order, outcome: str) -> None:
    """Although both engines fall idle after the push, and then stop reporting."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    pushes = {one: value(p, "pushes_total", outcome=one) for one in PUSHES.values}
    loads, exposed = value(d, "loads_total", outcome="loaded"), value(p, "exposed_seconds_count")
    size = value(p, "write_bytes_sum")
    handoff = send(p, d, prompt(1500, seed=400), order)
    check_tokens(handoff.outcome(), reference)
    for one, before in pushes.items():
        wait_for(p, "pushes_total", before + (one == outcome), outcome=one)
    wait_for(d, "loads_total", loads + 1, outcome="loaded")
    assert value(p, "exposed_seconds_count") == exposed + 1
    assert value(p, "write_bytes_sum") == size + sum(write["bytes"] for write in handoff.push().writes)
    for host, levels in ((p, ("active_pushes", "unclaimed_pushes", "pending_registrations")), (d, ("awaited_loads",))):
        for level in levels:
            assert value(host, level) == 0, level
