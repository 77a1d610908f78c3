"""Blocks that P may still write have no other owner; requests without a push are given up once."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.compat.worker_report import AbortsPending, WorkerReport
from layerpush.core.load_news import LoadParked
from layerpush.engine.scheduler.awaited_pushes import ABORTED, AwaitedPushes
from layerpush.engine.scheduler.block_holds import BlockHolds


class Pool:
    """Counts references."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()
        self.freed: list[int] = []

    def touch(self, blocks: Sequence[int]) -> None:
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0
            self.freed.append(block)

    @property
    def held(self) -> set[int]:
        return {block for block, count in self.references.items() if count}


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def block_holds(pool: Pool) -> BlockHolds:
    return BlockHolds(pool)


@pytest.fixture
def awaited(pool: Pool) -> AwaitedPushes:
    return AwaitedPushes(480.0, pool)


def test_blocks_count_as_parked_only_after_the_engine_freed_them(pool: Pool, block_holds: BlockHolds) -> None:
    def parked() -> tuple[int, int]:
        return block_holds.parked_requests, block_holds.parked_blocks

    block_holds.hold("r", [1, 2, 3])
    block_holds.hold("s", [4])
    block_holds.park("r", 0)
    block_holds.park("r", 1)
    assert parked() == (0, 0), "the engine holds the blocks itself"
    block_holds.load_ended("r")
    block_holds.load_ended("s")
    assert parked() == (1, 3)
    block_holds.clear("r", 0)
    assert parked() == (1, 3)
    block_holds.clear("r", 1)
    assert parked() == (0, 0)


def test_blocks_at_the_end_of_a_prompt_are_freed_first(pool: Pool, block_holds: BlockHolds) -> None:
    """As in vLLM."""
    block_holds.hold("r", [1, 2, 3])
    block_holds.load_ended("r")
    assert pool.freed == [3, 2, 1]


STEPS = st.tuples(st.sampled_from(["hold", "parked", "settled", "cleared"]), st.integers(0, 2), st.integers(0, 1))
"""Step, request, rank."""


@given(st.lists(STEPS, max_size=40))
def test_no_order_of_events_frees_a_block_that_a_rank_may_still_write(steps: list[tuple[str, int, int]]) -> None:
    pool = Pool()
    block_holds = BlockHolds(pool)
    under_way: dict[int, set[int]] = {}
    """Held requests, and the ranks that may still write them."""
    settled: set[int] = set()
    for what, request, rank in steps:
        name = f"r-{request}"
        match what:
            case "hold":
                block_holds.hold(name, [request])
                under_way.setdefault(request, set())
                settled.discard(request)
            case "parked":
                block_holds.park(name, rank)
                if request in under_way:
                    under_way[request].add(rank)
            case "cleared":
                block_holds.clear(name, rank)
                under_way.get(request, set()).discard(rank)
            case "settled":
                block_holds.load_ended(name)
                settled.add(request)
        for one in [one for one in under_way if one in settled and not under_way[one]]:
            del under_way[one]
        settled &= set(under_way)
        assert pool.held == set(under_way)
        assert [f"r-{request}" in block_holds for request in range(3)] == [request in under_way for request in range(3)]
        assert block_holds.parked_requests == len(settled)
        assert len(block_holds) == len(under_way)


def test_an_overdue_push_is_cancelled_once(awaited: AwaitedPushes) -> None:
    awaited.await_push("r", [1], 100.0)
    assert awaited.take_cancelled(579.9) == {}
    assert not awaited.needs_steps
    assert awaited.take_cancelled(580.0) == {"r": "no push within 480 s (push_registration_timeout)"}
    assert awaited.take_cancelled(9e9) == {}
    assert awaited.needs_steps, "the workers have not reported the end yet"
    assert len(awaited) == 1
    awaited.loads_ended(["r"])
    assert not awaited.needs_steps
    assert len(awaited) == 0


def test_only_overdue_pushes_are_cancelled(awaited: AwaitedPushes) -> None:
    for number in range(3):
        awaited.await_push(f"r-{number}", [number], float(number))
    assert set(awaited.take_cancelled(481.0)) == {"r-0", "r-1"}
    assert set(awaited.take_cancelled(482.0)) == {"r-2"}


def test_a_second_registration_restarts_the_timeout(awaited: AwaitedPushes) -> None:
    awaited.await_push("again", [1], 0.0)
    awaited.await_push("other", [2], 10.0)
    awaited.await_push("again", [3], 20.0)
    assert set(awaited.take_cancelled(495.0)) == {"other"}
    assert set(awaited.take_cancelled(500.0)) == {"again"}


def test_an_aborted_request_is_cancelled_once(awaited: AwaitedPushes) -> None:
    awaited.await_push("r", [1], 0.0)
    awaited.request_finished("r")
    assert awaited.needs_steps
    assert awaited.take_cancelled(1.0) == {"r": ABORTED}
    assert awaited.take_cancelled(9e9) == {}
    awaited.loads_ended(["r"])
    assert not awaited.needs_steps


def test_an_abort_cancels_an_overdue_request_again(awaited: AwaitedPushes) -> None:
    awaited.await_push("r", [1], 0.0)
    assert "no push" in awaited.take_cancelled(480.0)["r"]
    awaited.request_finished("r")
    assert awaited.take_cancelled(481.0) == {"r": ABORTED}
    assert awaited.take_cancelled(482.0) == {}


def test_a_received_request_finishes_without_a_cancel(awaited: AwaitedPushes) -> None:
    awaited.await_push("r", [1], 0.0)
    awaited.loads_ended(["r"])
    awaited.request_finished("r")
    awaited.request_finished("never registered")
    assert awaited.take_cancelled(9e9) == {}
    assert not awaited.needs_steps


def test_a_load_may_be_cleared_before_it_is_reported_as_over(pool: Pool, awaited: AwaitedPushes) -> None:
    awaited.await_push("r", [1], 0.0)
    for rank in (0, 1):
        awaited.block_holds.park("r", rank)
    awaited.block_holds.clear("r", 0)
    awaited.loads_ended(["r"])
    assert pool.held == {1}
    assert awaited.needs_steps
    awaited.block_holds.clear("r", 1)
    assert pool.held == set()
    assert not awaited.needs_steps


def test_reports_of_ranks_are_joined() -> None:
    one, two = WorkerReport([LoadParked("a", 0), AbortsPending()]), WorkerReport([LoadParked("a", 1)])
    both = one.aggregate(two)
    assert both == WorkerReport([LoadParked("a", 0), AbortsPending(), LoadParked("a", 1)])
    assert pickle.loads(pickle.dumps(both)) == both
    assert both, "vLLM drops a falsy report"


def test_a_push_may_be_awaited_for_less(awaited: AwaitedPushes) -> None:
    awaited.await_push("long", [1], 0.0)
    awaited.await_push("short", [2], 1.0, 30.0)
    assert awaited.take_cancelled(30.9) == {}
    assert awaited.take_cancelled(31.0) == {"short": "no push within 30 s"}
    assert awaited.take_cancelled(480.0) == {"long": "no push within 480 s (push_registration_timeout)"}


def test_the_newest_requests_give_their_blocks_first() -> None:
    """Of those that may: a prefill engine awaits the turns that it loads as well."""
    awaited = AwaitedPushes(10.0, Pool())
    for number, name in enumerate(["a", "turn", "b"]):
        awaited.await_push(name, [4 * number + block for block in range(4)], now=0.0)
    assert awaited.newest(0, {"a", "b"}) == []
    assert awaited.newest(4, {"a", "b"}) == ["b"]
    assert awaited.newest(5, {"a", "b"}) == ["b", "a"]
