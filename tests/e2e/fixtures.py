"""Fixtures of all tests with real engines, in any folder (a pytest plugin)."""

import os
from collections.abc import Iterator

import pytest

from bench.servers.ports import PortAllocator
from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import FLEET, Fleet
from tests.e2e.handoff import Reference
from tests.e2e.models import ModelShelf
from tests.support.ports import ENGINES_PORTS

WORKERS = 8
"""The most workers: each has ports of its own."""
COMPLAINTS = ("Traceback (most recent call last)", " ERROR ")


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    scratch = tmp_path_factory.mktemp("e2e")
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = PortAllocator(ENGINES_PORTS[worker % WORKERS :: WORKERS])
    request.session.stash[FLEET] = hosts = Fleet(ModelShelf(scratch), scratch, ports)
    yield hosts
    hosts.stop()


@pytest.fixture(scope="session")
def _reference_cache() -> dict[str, Reference]:
    return {}


@pytest.fixture
def reference(fleet: Fleet, _reference_cache: dict[str, Reference]) -> Reference:
    """The plain engine. The fixture keeps its answers over a restart of its process."""
    (host,) = fleet.get(engines.R)
    known = _reference_cache.setdefault("R", Reference(host))
    known.host = host
    return known


class LogReader:
    """Reads the new text of hosts' logs since the last call."""

    def __init__(self) -> None:
        self._read: dict[EngineHost, int] = {}

    def new_text(self, host: EngineHost) -> str:
        log = host.log()
        start = self._read.get(host, 0)
        self._read[host] = len(log)
        return log[start:]

    def errors(self, host: EngineHost) -> list[str]:
        """Errors and tracebacks in the new text."""
        return [line for line in self.new_text(host).splitlines() if any(words in line for words in COMPLAINTS)]


@pytest.fixture(scope="session")
def logs() -> LogReader:
    return LogReader()
