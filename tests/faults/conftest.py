"""Fixtures of every fault test, and the check of its surviving engines."""

from collections.abc import Iterator

import pytest

from tests.e2e import stagingfaults, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.faults import engines
from tests.faults.checks import LogView, check_clean


@pytest.fixture(scope="module", params=engines.PACKINGS)
def packing(request: pytest.FixtureRequest) -> engines.Packing:
    """The packing of P's WRITEs. A test with it runs once for each packing. A file's tests of one run together."""
    chosen: engines.Packing = request.param
    return chosen


@pytest.fixture
def log() -> LogView:
    return LogView()


@pytest.fixture(autouse=True)
def _survivors_are_clean(fleet: Fleet, log: LogView) -> Iterator[None]:
    """Engines of `fleet.spawn` live for one test only. Those of `fleet.get` serve the next test, too."""
    for host in _live(fleet):
        log.begin(host)
        host.forget_requests()
    yield
    try:
        for host in _live(fleet):
            host.resume()
        for host in _live(fleet):
            if not host.broken:
                host.call(wirefaults.reset)
                host.call(stagingfaults.reset)
        for host in _live(fleet):
            if host.broken:
                fleet.discard(host)
                continue
            try:
                check_clean(host, log)
            except AssertionError:
                fleet.discard(host)
                raise
    finally:
        fleet.discard_guests()


def _live(fleet: Fleet) -> list[EngineHost]:
    """Engines with one rank, as in all fault tests. Engines of other tests may have several, in other processes."""
    return [host for host in fleet.live() if host.spec.ranks == 1]
