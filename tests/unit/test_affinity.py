"""Threads keep their cores, and the writer gets those that vLLM wants for transfers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from layerpush.compat.affinity import Affinity


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """All cores of this thread, restored afterwards."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    yield sorted(before)
    os.sched_setaffinity(0, before)


def test_a_binding_inside_the_block_ends_with_the_block(cores: list[int]) -> None:
    with Affinity():
        os.sched_setaffinity(0, {cores[-1]})
    assert os.sched_getaffinity(0) == set(cores)


def test_a_binding_ends_with_the_block_after_an_error(cores: list[int]) -> None:
    with pytest.raises(RuntimeError, match="no device"):
        _bind_and_fail(cores[-1])
    assert os.sched_getaffinity(0) == set(cores)


def _bind_and_fail(core: int) -> None:
    with Affinity():
        os.sched_setaffinity(0, {core})
        raise RuntimeError("no device")


def test_the_writer_of_a_bound_engine_may_run_on_the_core_for_transfers(cores: list[int]) -> None:
    first, last = cores[0], cores[-1]
    os.sched_setaffinity(0, {first})
    with Affinity() as bound:
        os.sched_setaffinity(0, {last})
    assert os.sched_getaffinity(0) == {first}
    bound.bind_writer()
    assert os.sched_getaffinity(0) == {first, last}


def test_the_writer_of_an_unbound_engine_stays_unbound(cores: list[int]) -> None:
    with Affinity() as bound:
        os.sched_setaffinity(0, {cores[-1]})
    bound.bind_writer()
    assert os.sched_getaffinity(0) == set(cores)


def test_the_writer_keeps_its_cores_if_the_block_bound_nothing(cores: list[int]) -> None:
    with Affinity() as bound:
        pass
    os.sched_setaffinity(0, {cores[0]})  # by other code
    bound.bind_writer()
    assert os.sched_getaffinity(0) == {cores[0]}
