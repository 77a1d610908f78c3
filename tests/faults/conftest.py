"""Fixtures of every fault test, and the check of its surviving engines."""

from collections.abc import Iterator

import pytest

from tests.e2e import stagingfaults, wirefaults
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
    """Engines of `fleet.spawn` live for one test only. Survivors of `fleet.get` serve the next test, too."""
    yield
    try:
        for host in fleet.in_use():
            host.resume()
        for host in fleet.in_use():
            if not host.broken:
                host.call(wirefaults.reset)
                host.call(stagingfaults.reset)
        for host in fleet.in_use():
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
        fleet.rest()
