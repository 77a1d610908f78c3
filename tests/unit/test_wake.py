"""No wake-up is lost, whenever it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from layerpush.engine.worker.wake import Waker

LONG_S = 20.0


def test_a_wake_up_before_or_during_a_wait_ends_the_wait() -> None:
    waker = Waker()
    assert not waker.wait(0.0)
    waker.wake()
    assert waker.wait(LONG_S)
    assert waker.wait(LONG_S), "it is set until it is cleared"
    waker.clear()
    assert not waker.wait(0.001)
    threading.Timer(0.01, waker.wake).start()
    assert waker.wait(LONG_S)


def test_one_clear_removes_several_wake_ups() -> None:
    waker = Waker()
    for _ in range(3):
        waker.wake()
    waker.clear()
    assert not waker.wait(0.001)


class InterruptedLock:
    """``then`` happens in another thread while this one tries to acquire."""

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


@pytest.mark.parametrize("woken", [False, True])
def test_a_wake_up_during_a_clear_is_not_lost(woken: bool) -> None:
    lock = InterruptedLock()
    waker = Waker(lock=lock)
    if woken:
        waker.wake()
    lock.then = waker.wake
    waker.clear()
    assert waker.wait(0.0)


def test_a_wake_up_just_before_the_sleep_is_not_lost() -> None:
    lock = InterruptedLock()
    waker = Waker(lock=lock)
    lock.then = waker.wake
    assert waker.wait(0.0)


def test_items_queued_before_a_wake_up_are_seen() -> None:
    """As the writer's loop does it: clear, take everything, wait. Two threads wake it."""
    waker, queues, seen = Waker(), ([0], [0]), 0
    number = 3000

    def produce(queue: list[int]) -> None:
        for _ in range(number):
            queue[0] += 1
            waker.wake()
            if queue[0] % 7 == 0:
                time.sleep(0)

    threads = [threading.Thread(target=produce, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    while seen < 2 * number:
        waker.clear()
        seen = sum(queue[0] for queue in queues)
        if seen < 2 * number:
            assert waker.wait(LONG_S), f"{seen} seen, {sum(queue[0] for queue in queues)} queued, and no wake-up"
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("polls_layers", [False, True])
def test_a_lazy_wake_up_leaves_a_polling_sleeper_alone(polls_layers: bool) -> None:
    """The sleeper polls soon, and then finds the queued work."""
    lock = InterruptedLock()
    waker = Waker(lock=lock)
    seen: list[bool] = []

    def come() -> None:
        waker.wake_lazily()
        seen.append(not lock.lock.locked())
        waker.wake()

    lock.then = come
    assert waker.wait(LONG_S, polls_layers=polls_layers)
    assert seen == [not polls_layers]
    waker.clear()
    waker.wake_lazily()
    assert waker.wait(0.0), "no sleeper: the next wait must not be a long one"


def test_the_first_wake_up_is_timed() -> None:
    times: list[float] = []
    waker = Waker(times.append)
    waker.wake()
    waker.wake()
    assert len(times) == 1
    waker.clear()
    waker.set()
    waker.wake()
    assert len(times) == 1, "there may have been no work"


@pytest.mark.parametrize("when", ["before the wait", "during the wait", "during the clear"])
def test_each_wake_up_is_returned_by_a_clear(when: str) -> None:
    """A turn that was not woken does not look into the queues."""
    lock = InterruptedLock()
    waker = Waker(lock=lock)
    if when == "before the wait":
        waker.wake()
    else:
        lock.then = waker.wake
    cleared = waker.clear() if when == "during the clear" else False
    assert waker.wait(0.0)
    assert waker.clear() or cleared
    assert not waker.wait(0.0)
    assert not waker.clear()


def test_work_that_is_queued_during_a_clear_is_found_after_it() -> None:
    """The second of two wake-ups does not release the lock: the first one has done so."""
    lock = InterruptedLock()
    waker = Waker(lock=lock)
    lock.then = waker.wake
    waker.clear()
    waker.wake()
    assert waker.wait(0.0)
    assert waker.clear()


def test_a_wake_up_during_a_turn_is_returned_by_the_next_clear() -> None:
    waker = Waker()
    waker.wake()
    assert waker.clear()
    assert not waker.clear()
