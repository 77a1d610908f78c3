"""No ring is lost, whenever it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from layerpush.prefill.layer_interval import NAP_S
from layerpush.worker.wake import Waker

LONG_S = 20.0


def test_it_rings_before_or_while_somebody_waits() -> None:
    bell = Waker()
    assert not bell.wait(0.0)
    bell.set()
    assert bell.is_set()
    assert bell.wait(LONG_S)
    assert bell.wait(), "it rings until it is cleared"
    bell.clear()
    assert not bell.is_set()
    assert not bell.wait(0.001)
    threading.Timer(0.01, bell.set).start()
    assert bell.wait(LONG_S)


def test_rings_do_not_add_up() -> None:
    bell = Waker()
    for _ in range(3):
        bell.set()
    bell.clear()
    assert not bell.wait(0.001)


class InterruptedDoor:
    """``then`` happens in another thread while this one tries the door."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.then: Callable[[], None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        then, self.then = self.then, None
        if then is not None:
            then()
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("rung", [False, True])
def test_a_ring_while_it_is_cleared_is_not_lost(rung: bool) -> None:
    door = InterruptedDoor()
    bell = Waker(door)
    if rung:
        bell.set()
    door.then = bell.set
    bell.clear()
    assert bell.wait(0.0)


def test_a_ring_just_before_it_sleeps_is_not_lost() -> None:
    door = InterruptedDoor()
    bell = Waker(door)
    door.then = bell.set
    assert bell.wait(0.0)


def test_whatever_is_queued_before_a_ring_is_seen() -> None:
    """As the writer's loop does it: clear, take everything, wait. Two threads ring."""
    bell, queues, seen = Waker(), ([0], [0]), 0
    number = 3000

    def produce(queue: list[int]) -> None:
        for _ in range(number):
            queue[0] += 1
            bell.set()
            if queue[0] % 7 == 0:
                time.sleep(0)

    threads = [threading.Thread(target=produce, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    while seen < 2 * number:
        bell.clear()
        seen = sum(queue[0] for queue in queues)
        if seen < 2 * number:
            assert bell.wait(LONG_S), f"{seen} seen, {sum(queue[0] for queue in queues)} queued, and nobody rang"
    for thread in threads:
        thread.join()


def test_a_short_sleep_is_a_nap_for_as_long_as_it_lasts() -> None:
    """Whoever finds it napping was before its end: what they left is there when the sleeper looks."""
    door = InterruptedDoor()
    bell = Waker(door)
    seen = []
    for timeout in (NAP_S, 2 * NAP_S, None):
        door.then = lambda: (seen.append(bell.naps), bell.set())  # type: ignore[func-returns-value]
        bell.wait(timeout)
        assert not bell.naps
        bell.clear()
    assert seen == [True, False, False]
