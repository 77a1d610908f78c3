"""Faults of P's token on its way: D's answer is the same, and D does not wait long."""

from collections.abc import Iterator

import pytest

from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, introduce
from tests.e2e.test_first_token import PATIENCE_S, check_origins, origins
from tests.faults import engines
from tests.faults.checks import LogView, check_serves, early

LENGTH = 700
FIRST_TOKEN = "firsttoken"


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[tuple[EngineHost, EngineHost]]:
    """A P, and a D that starts its answers with P's token."""
    p, d = fleet.get(engines.P, engines.D)
    introduce(p, d)
    d.call(probes.await_tokens, PATIENCE_S)
    p.call(wirefaults.watch)
    yield p, d
    p.call(wirefaults.forge_first_tokens, None)


def push(p: EngineHost, d: EngineHost, seed: int) -> Handoff:
    handoff = early(p, d, LENGTH, seed)
    p.add(handoff.to_p())
    return handoff


def test_token_lost(pair: tuple[EngineHost, EngineHost], reference: Reference, log: LogView) -> None:
    p, d = pair
    p.call(wirefaults.on_messages, "drop", FIRST_TOKEN)
    before = origins(d)
    check(push(p, d, 400).outcome(), reference)
    check_origins(d, before, late=1)
    p.call(wirefaults.reset)
    check_serves(p, d, reference, seed=401)
    check_origins(d, before, late=1, prefill=1)


def test_token_comes_after_the_answer(pair: tuple[EngineHost, EngineHost], reference: Reference, log: LogView) -> None:
    """By then D has computed the token. D ignores P's."""
    p, d = pair
    p.call(wirefaults.on_messages, "hold", FIRST_TOKEN, "", 1)
    before = origins(d)
    check(push(p, d, 402).outcome(), reference)
    p.call(wirefaults.lift)
    check_serves(p, d, reference, seed=403)
    check_origins(d, before, late=1, prefill=1)


def test_token_doubled(pair: tuple[EngineHost, EngineHost], reference: Reference, log: LogView) -> None:
    p, d = pair
    p.call(wirefaults.on_messages, "duplicate", FIRST_TOKEN)
    before = origins(d)
    check(push(p, d, 404).outcome(), reference)
    check_origins(d, before, prefill=1)


@pytest.mark.parametrize(("token", "origin"), [(-1, "late"), engines.for_test_all(2**31, "late"), (1024, "invalid")])
def test_token_forged(
    pair: tuple[EngineHost, EngineHost], reference: Reference, log: LogView, token: int, origin: str
) -> None:
    """P sends no valid token: negative, too large for a message, or not in the vocabulary."""
    p, d = pair
    p.call(wirefaults.forge_first_tokens, token)
    before = origins(d)
    check(push(p, d, 405 + token % 7).outcome(), reference)
    check_origins(d, before, **{origin: 1})
