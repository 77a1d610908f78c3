"""LMCache beside layerpush, on P and on D: LMCache's server keeps KV, its connector loads it while a request waits."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e import engines, loadwatch
from tests.e2e.enginehost import EngineHost, Request
from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, Role, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, introduce, new_id, prompt, send
from tests.support import lmcache
from tests.support.ports import LMCACHE_PORTS
from tests.support.scripts import made_by

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
PORT = LMCACHE_PORTS[0]
STORED = 5 * lmcache.CHUNK


def beside_lmcache(role: Role, *, first: bool) -> EngineSpec:
    """``first``: LMCache is asked before layerpush."""
    ours = transfer(LAYERWISE, granularity="layer", trace_dir=TRACE) if role == "P" else transfer(LAYERWISE)
    child = json.loads(ours) | {"kv_role": "kv_producer" if role == "P" else "kv_consumer"}
    other = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": PORT},
    }
    children = [other, child] if first else [child, other]
    outer = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    return EngineSpec(f"{role}-{'behind' if first else 'before'}-lmcache", role, json.dumps(outer))


BEFORE_P, BEHIND_P = (beside_lmcache("P", first=first) for first in (False, True))
BEFORE_D, BEHIND_D = (beside_lmcache("D", first=first) for first in (False, True))


@pytest.fixture(scope="module", autouse=True)
def _server(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    made_by("lmcache")
    with lmcache.server(PORT, tmp_path_factory.mktemp("lmcache") / "log"):
        yield
        # An engine that ends asks the server to forget it, and waits for minutes.
        fleet.end(BEFORE_P, BEHIND_P, BEFORE_D, BEHIND_D)


def stored(p: EngineHost, seed: int) -> list[int]:
    """A prompt that P has computed, and LMCache has. vLLM's own prefix cache is off."""
    token_ids = prompt(STORED, seed)
    request = Request(new_id(), token_ids, None, max_tokens=1)
    p.add(request)
    p.wait_output(request.request_id)
    p.wait_idle()
    p.call(loadwatch.watch)
    return token_ids


@pytest.mark.parametrize("first", [True, False], ids=["LMCache first", "layerpush first"])
def test_p_pushes_what_lmcache_has_loaded(fleet: Fleet, reference: Reference, first: bool) -> None:
    p, d = fleet.get(BEHIND_P if first else BEFORE_P, engines.D_LAYER)
    introduce(p, d)
    known = stored(p, seed=100 + first)
    orders: tuple[Order, ...] = ("early", "together", "late")
    for seed, order in enumerate(orders):
        handoff = send(p, d, known + prompt(600, seed), order)
        check(handoff.outcome(), reference)
        assert p.call(loadwatch.new_loads) == [STORED]
        assert handoff.push().outcome == "completed"


@pytest.mark.parametrize("first", [True, False], ids=["LMCache first", "layerpush first"])
def test_d_asks_the_first_connector(fleet: Fleet, reference: Reference, first: bool) -> None:
    """LMCache's server has the prompt's beginning from P. D loads it from there, and computes the rest; or from P."""
    p, d = fleet.get(BEHIND_P, BEHIND_D if first else BEFORE_D)
    introduce(p, d)
    known = stored(p, seed=102 + first)
    d.call(loadwatch.watch)
    handoff = Handoff(new_id(), known + prompt(600), p, d)
    d.add(handoff.to_d())
    p.add(handoff.to_p())
    assert p.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)[:1]
    assert d.wait_output(handoff.request_id).token_ids == reference.tokens(handoff.token_ids)
    assert p.call(loadwatch.new_loads) == [STORED]
    assert bool(d.call(loadwatch.new_loads)) == first
