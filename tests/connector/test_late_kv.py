"""KV that becomes visible late behind the host, as on a GPU: D gets the prompts' bytes, and never older ones.

Real schedulers with two batches in flight, vLLM's driver of the V2 model runner, real NIXL, the real ``FencePool`` over
events that pass late; prefix caches on both sides, preemptions, aborts, and few enough blocks to use each many times.
``MUTANTS`` shows that this can fail: each removes one guard, and each is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connector.late_mutants import MUTANTS, Mutant
from tests.connector.late_traffic import PLACES, LateTraffic, StaleBytesError
from tests.support.simulated_stream import SimulatedEvent
from tests.support.totals import Totals

REQUESTS, MUTANT_REQUESTS = 8, 12
MUTANT_SEEDS = 10
"""A busy machine gives the writer no core in time for a mutant to do harm. One seed in which it does is enough."""


@pytest.mark.parametrize("place", PLACES)
def test_d_reads_the_prompts_bytes_only(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    traffic = LateTraffic(engine, monkeypatch, PLACES[place], seed=1)
    late, totals = SimulatedEvent.open_queries, Totals(traffic.p.pushes._services.meter)
    traffic.serve(REQUESTS)
    assert bool(totals.hooked_layers) == bool(PLACES[place].hooks)
    assert traffic.d.reads > REQUESTS
    assert traffic.preempted
    assert SimulatedEvent.open_queries > late


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_late_kv_reveals_a_removed_guard(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    mutant.remove(monkeypatch)
    for seed in range(mutant.seed, mutant.seed + MUTANT_SEEDS):
        traffic = LateTraffic(engine, monkeypatch, PLACES[mutant.place], seed)
        try:
            traffic.serve(MUTANT_REQUESTS)
        except StaleBytesError:
            return
    pytest.fail("nobody noticed")
