"""Clean-up checks that all end-to-end tests share."""

from collections.abc import Iterator

import pytest

from tests.e2e import probes, stagingfaults
from tests.e2e.enginehost import EngineHost
from tests.e2e.fixtures import LogReader
from tests.e2e.fleet import Fleet

CLEAN_UP_S = 10.0
"""Seconds that another thread may take to clean up on a busy machine."""


@pytest.fixture(autouse=True)
def _nothing_left_behind(fleet: Fleet, logs: LogReader) -> Iterator[None]:
    """After every test its engines are idle, all blocks free; no table mentions its requests; no log has an error."""
    yield
    try:
        for host in fleet.in_use():
            if host.broken:
                fleet.discard(host)
                continue
            try:
                host.wait_idle(timeout=20)
                check_nothing_left(host)
            except AssertionError:
                fleet.discard(host)
                raise
            errors = logs.errors(host)
            assert errors == [], f"{host.engine_id} complained:\n{host.log_tail()}"
    finally:
        fleet.rest()


def check_nothing_left(host: EngineHost, bounded_memories: tuple[str, ...] = probes.BOUNDED_MEMORIES) -> None:
    assert host.call(probes.request_statuses) == {}
    assert host.call(probes.free_blocks) == host.idle_blocks, f"{host.engine_id} has not freed all its blocks"
    left = host.call(probes.wait_until_forgotten, host.request_ids(), bounded_memories, CLEAN_UP_S)
    assert left == [], f"{host.engine_id} still mentions finished requests at {left}"
    held = host.call(stagingfaults.wait_until_free, CLEAN_UP_S)
    assert held == 0, f"{host.engine_id} has not given back {held} bytes of its staging memory"
