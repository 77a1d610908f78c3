"""Engines, reference and clean-up checks that all end-to-end tests share."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference
from tests.e2e.models import ModelShelf

PORTS = (20000, 29999)
# Attributes that remember finished requests on purpose, the last few thousand of them.
BOUNDED_MEMORIES = ("._served{key}",)
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
    hosts = Fleet(ModelShelf(scratch), scratch, PORTS, engines.FAVOURITES)
    yield hosts
    hosts.stop()


@pytest.fixture(scope="session")
def _reference_cache() -> dict[str, Reference]:
    return {}


@pytest.fixture
def reference(fleet: Fleet, _reference_cache: dict[str, Reference]) -> Reference:
    """The plain engine. Its answers are remembered over a restart of its process."""
    (host,) = fleet.get(engines.R)
    known = _reference_cache.setdefault("R", Reference(host))
    known.host = host
    return known


class LogReader:
    """Hands out what hosts have logged since it was last asked."""

    def __init__(self) -> None:
        self._read: dict[EngineHost, int] = {}

    def new_text(self, host: EngineHost) -> str:
        log = host.log()
        start = self._read.get(host, 0)
        self._read[host] = len(log)
        return log[start:]

    def complaints(self, host: EngineHost) -> list[str]:
        """The lines of the new text that an operator would have to look into."""
        return [line for line in self.new_text(host).splitlines() if any(words in line for words in COMPLAINTS)]


@pytest.fixture(scope="session")
def logs() -> LogReader:
    return LogReader()


@pytest.fixture(autouse=True)
def _nothing_left_behind(fleet: Fleet, logs: LogReader) -> Iterator[None]:
    """After every test: engines idle, all blocks free, no table mentions a request of the test, no error in a log."""
    for host in fleet.live():
        logs.new_text(host)
        host.forget_requests()
    yield
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
        complaints = logs.complaints(host)
        assert complaints == [], f"{host.engine_id} complained:\n{host.log_tail()}"


def check_nothing_left(host: EngineHost) -> None:
    assert host.call(probes.request_statuses) == {}
    assert host.call(probes.free_blocks) == host.idle_blocks, f"{host.engine_id} has not freed all its blocks"
    left = host.call(probes.wait_until_forgotten, host.request_ids(), BOUNDED_MEMORIES, 2.0)
    assert left == [], f"{host.engine_id} still mentions finished requests at {left}"
