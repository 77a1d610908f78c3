"""NIXL's calls that hold Python's lock: the main thread waits for them. Other builds may differ."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.contract.link import COUNT, NixlLink
from tests.support.waiting import until

LEAST_ROUNDS = 20
SECONDS = 100.0


@pytest.fixture
def held() -> Iterator[None]:
    """A thread keeps Python's lock until it releases the lock by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def ran_beside(call: Callable[..., Any], *arguments: Any) -> tuple[Any, bool]:
    """The call's answer, and whether another thread ran Python code meanwhile."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def beside() -> None:
        gate.acquire()
        ran.append(True)

    thread = threading.Thread(target=beside)
    thread.start()
    gate.release()
    answer = call(*arguments)
    seen = bool(ran)
    thread.join()
    return answer, seen


@pytest.mark.usefixtures("held")
def test_only_the_release_of_a_write_holds_pythons_lock() -> None:
    link = NixlLink(threads=0)
    agent, route = link.agent, link.route
    ids = np.random.default_rng(0).permutation(COUNT).astype(np.int32)
    rounds, seen = 0, set[str]()

    def watched(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        answer, ran = ran_beside(call, *arguments)
        if ran:
            seen.add(name)
        return answer

    def every_unlocked_call_is_seen() -> bool:
        nonlocal rounds
        rounds += 1
        sides = (route.local_descriptors, ids, route.remote_descriptors, ids)
        handle = watched("make", agent.make_prepped_xfer, "WRITE", *sides)
        watched("transfer", agent.transfer, handle)
        until(lambda: watched("check", agent.check_xfer_state, handle) == "DONE")
        watched("release", agent.release_xfer_handle, handle)
        return rounds >= LEAST_ROUNDS and seen >= {"make", "transfer", "check"}

    try:
        until(every_unlocked_call_is_seen, seconds=SECONDS)
    finally:
        link.close()
    assert "release" not in seen
