"""D starts its answers with P's token: the same answers as one engine's, and P's token in each."""

import pytest

from layerpush.telemetry.metrics.catalog import FIRST_TOKENS
from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check, introduce, prompt, send
from tests.e2e.test_metrics import scrape

LENGTHS = (1, 31, 32, 33, 256, 257, 1100)


def origins(d: EngineHost) -> dict[str, int]:
    """How many requests of this engine have started with which token."""
    found = scrape(d)
    return {
        origin: count for origin in FIRST_TOKENS.values if (count := found.value("first_tokens_total", origin=origin))
    }


@pytest.mark.parametrize("order", ["early", "mid", "after_last_step", "late", "together"])
def test_answers_that_start_on_p(fleet: Fleet, reference: Reference, order: Order) -> None:
    p, d = fleet.get(engines.P_AUTO, engines.D_FIRST)
    introduce(p, d)
    lengths = LENGTHS if order != "mid" else (900, 1100)
    for length in lengths:
        before = origins(d)
        check(send(p, d, prompt(length, seed=110), order).outcome(), reference)
        print(order, length, {k: v - before.get(k, 0) for k, v in origins(d).items()})
