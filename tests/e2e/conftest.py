"""Engines, reference and clean-up checks that all end-to-end tests share."""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.e2e import probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference
from tests.e2e.models import ModelShelf

FIRST_PORT = int(os.environ.get("LAYERPUSH_E2E_PORT", "46400"))
PORTS = 300
COMPLAINTS = ("Traceback (most recent call last)", " ERROR ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    scratch = tmp_path_factory.mktemp("e2e")
    engines = Fleet(ModelShelf(scratch), scratch, FIRST_PORT, FIRST_PORT + PORTS - 1)
    yield engines
    engines.stop()


@pytest.fixture(scope="session")
def _reference_cache() -> dict[str, Reference]:
    return {}


@pytest.fixture
def reference(fleet: Fleet, _reference_cache: dict[str, Reference]) -> Reference:
    """The plain engine. Its answers are remembered over a restart of its process."""
    (host,) = fleet.get(EngineSpec("R", "R", None))
    known = _reference_cache.setdefault("R", Reference(host))
    known.host = host
    return known


@pytest.fixture(autouse=True)
def _nothing_left_behind(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: engines idle, all blocks free, no table mentions a request of the test, no error in a log."""
    marks = {host: host.log_size() for host in fleet.live()}
    for host in fleet.live():
        host.forget_requests()
    yield
    tolerated = request.node.get_closest_marker("complaints")
    for host in fleet.live():
        if host.broken:
            fleet.discard(host)
            continue
        try:
            host.wait_idle(timeout=20)
            check_nothing_left(host)
        except AssertionError:
            fleet.discard(host)
            raise
        log = host.log()[marks.get(host, 0) :]
        if tolerated is None:
            assert not any(complaint in log for complaint in COMPLAINTS), f"{host.engine_id} complained:\n{log}"


def check_nothing_left(host: EngineHost) -> None:
    assert host.call(probes.request_statuses) == {}
    assert host.call(probes.free_blocks) == host.idle_blocks, f"{host.engine_id} has not freed all its blocks"
    left = host.call(probes.wait_until_forgotten, host.request_ids(), 2.0)
    assert left == [], f"{host.engine_id} still mentions finished requests at {left}"
