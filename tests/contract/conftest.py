from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.contract.link import FakeLink, Link, NixlLink
from tests.contract.processes import LOOPBACK, set_ucx
from tests.support.scripts import made_by

QUICK_BENCHES = (
    "test_a_wrong_byte_ends_the_benchmark_without_a_result",
    "test_blocks_arrive_byte_for_byte_by_gathered_writes",
)
KINDS: dict[str, Callable[[], Link]] = {
    "fake": FakeLink,
    "nixl": NixlLink,
    "nixl-4-threads": lambda: NixlLink(threads=4),  # vLLM's default; large WRITEs are spread over the threads
    "libfabric": lambda: NixlLink("LIBFABRIC"),
}

# Each own link to NIXL starts a process, so tests with such links use only the kind that vLLM uses.
OWN_KINDS = ["fake", "nixl-4-threads", "libfabric"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-all` runs benchmarks in processes of their own. `make test` keeps one quick run of each."""
    here = pathlib.Path(__file__).parent
    for item in items:
        is_bench = item.path.parent == here and item.path.name.startswith("test_bench_")
        if is_bench and item.name.split("[")[0] not in QUICK_BENCHES:
            item.add_marker(pytest.mark.exhaustive)


def params(kinds: Iterable[str]) -> list[Any]:
    """`make test-all` runs the tests over LIBFABRIC."""
    return [pytest.param(kind, marks=pytest.mark.exhaustive if kind == "libfabric" else ()) for kind in kinds]


def new_link(kind: str) -> Link:
    if kind == "libfabric":
        made_by("libfabric")
    return KINDS[kind]()


@pytest.fixture(scope="package", autouse=True)
def _loopback() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    set_ucx(LOOPBACK)
    yield
    set_ucx(before)


@pytest.fixture(scope="package", params=params(KINDS))
def _shared_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = new_link(request.param)
    yield link
    link.close()


@pytest.fixture
def link(_shared_link: Link) -> Link:
    """Both ends are alive, and D's memory is poisoned. Tests share the link: leave nothing in flight."""
    _shared_link.reset()
    return _shared_link


@pytest.fixture(params=params(OWN_KINDS))
def own_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """A link for one test, which may freeze or kill D or leave WRITEs in flight."""
    link = new_link(request.param)
    yield link
    link.close()
