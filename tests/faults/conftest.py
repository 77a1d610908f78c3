"""What every fault test gets, and what every engine that is still alive after it must have got rid of."""

from collections.abc import Iterator

import pytest

from tests.e2e import stagingfaults, wirefaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.faults import engines
from tests.faults.checks import LogView, check_clean


@pytest.fixture(scope="module", params=engines.PACKINGS)
def packing(request: pytest.FixtureRequest) -> engines.Packing:
    """How P's WRITEs go. Tests that want it run once for each way, and in each file all of one way together."""
    chosen: engines.Packing = request.param
    return chosen


@pytest.fixture
def log() -> LogView:
    return LogView()


@pytest.fixture(autouse=True)
def _survivors_are_clean(fleet: Fleet, log: LogView) -> Iterator[None]:
    """Engines of `fleet.spawn` live for one test only; those of `fleet.get` go on to the next one."""
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
    """Engines of one rank, as all fault tests use: what others have left behind may be of more, in other processes."""
    return [host for host in fleet.live() if host.spec.ranks == 1]
