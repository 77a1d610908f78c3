"""Calm mode: loads as a plugin of vLLM, slows busy loops down, and wakes an engine whose KV has come."""

from __future__ import annotations

import logging
import queue
import threading
import types
import uuid
from collections.abc import Collection

import pytest

from bench import calm
from tests.support.waiting import until
from tests.unit.test_plugin import python


@pytest.mark.slow
def test_a_calm_progress_thread_uses_little_of_its_core() -> None:
    """Real agents. The first one, made before the cure, shows the ill."""
    done = python(
        """
import time, nixl
from bench import calm

def seconds_used(within_s):
    agent = nixl.nixl_agent(f"calm-test-{within_s}")
    before, end = time.process_time(), time.monotonic() + within_s
    while (used := time.process_time() - before) < 0.3 and time.monotonic() < end:
        time.sleep(0.05)
    return used

spinning = seconds_used(60.0)  # on a busy machine a thread that spins gets little of a second
calm._NixlHook().install()  # the first agent is gone
print("SECONDS", spinning, seconds_used(1.0))
""",
        UCX_TLS="tcp,self",
        UCX_NET_DEVICES="lo",
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    spinning, calmed = map(float, line.split()[1:])
    assert spinning > 0.2
    assert calmed < 0.1


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_sleeps_grow_with_a_wait_up_to_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(calm, "time", clock)
    rest, start = calm.Rest(), clock.now
    waited = 0.0
    while waited < 1.0:
        rest.sleep()
        assert clock.sleeps[-1] <= max(calm.YIELD_SECONDS, calm.YIELD_SHARE * waited) + 1e-12
        waited = clock.now - start
    assert clock.sleeps[0] == calm.YIELD_SECONDS
    assert clock.sleeps[-1] == calm.LONGEST_YIELD_SECONDS
    assert len(clock.sleeps) < 1100


def test_another_wait_begins_with_short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(calm, "time", clock)
    rest = calm.Rest()
    for _ in range(200):
        rest.sleep()
    clock.now += 2 * calm.NEW_WAIT_SECONDS  # work was done
    rest.sleep()
    assert clock.sleeps[-2] == calm.LONGEST_YIELD_SECONDS
    assert clock.sleeps[-1] == calm.YIELD_SECONDS


class Core:
    """An engine that takes one step, with or without work, and then has requests or none, with or without new KV."""

    def __init__(self, computes: bool = False, requests: bool = True, received: Collection[str] = ()) -> None:
        self.computes, self.requests = computes, requests
        self.finished_recving_kv_req_ids = set(received)
        self.scheduler = self
        self.input_queue: queue.Queue[str] = queue.Queue()
        engine_id = f"core-{uuid.uuid4()}"
        self.vllm_config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace(engine_id=engine_id))
        self.steps = 0

    @property
    def engine_id(self) -> str:
        return str(self.vllm_config.kv_transfer_config.engine_id)

    def has_requests(self) -> bool:
        return self.requests

    def _process_engine_step(self) -> bool:
        self.steps += 1
        return self.computes


def resting_core(core: Core) -> Core:
    """The same engine, made to rest."""
    rests = type("Rests", (Core,), {"_process_engine_step": Core._process_engine_step})
    module = types.ModuleType("core")
    module.EngineCoreProc = rests
    calm.rest_after_empty_steps(module)
    core.__class__ = rests
    return core


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("requests", [True, False])
@pytest.mark.parametrize("received", [(), ("r",)])
def test_a_calm_engine_rests_only_while_requests_wait_and_it_can_compute_nothing(
    monkeypatch: pytest.MonkeyPatch, computes: bool, requests: bool, received: Collection[str]
) -> None:
    """A request whose KV was reported in this step can be computed in the next one."""
    waits: list[float] = []
    monkeypatch.setattr(calm.InputWait, "wait", lambda _, seconds: waits.append(seconds))
    core = resting_core(Core(computes, requests, received))
    assert core._process_engine_step() is computes
    assert core.steps == 1
    assert waits == ([calm.EMPTY_STEP_SECONDS] if requests and not computes and not received else [])


def ends(wait: calm.InputWait, *others: threading.Thread) -> bool:
    """Whether a rest of 100 seconds ends early, while the other threads run."""
    resting = threading.Thread(target=wait.wait, args=(100.0,), daemon=True)
    for thread in (resting, *others):
        thread.start()
    for thread in (resting, *others):
        thread.join(timeout=10.0)
    return not any(thread.is_alive() for thread in (resting, *others))


def test_a_resting_engine_wakes_up_for_a_request() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    assert ends(calm.InputWait(inputs), threading.Thread(target=inputs.put, args=("request",), daemon=True))
    assert inputs.get_nowait() == "request"


def test_an_engine_with_a_request_at_hand_does_not_rest() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    inputs.put("request")
    assert ends(calm.InputWait(inputs))


def test_a_worker_ends_the_rest_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calm, "EMPTY_STEP_SECONDS", 100.0)
    core = resting_core(Core())
    resting = threading.Thread(target=core._process_engine_step, daemon=True)
    resting.start()
    until(lambda: calm.wake(core.engine_id) or not resting.is_alive())  # it listens from its first rest on
    calm.wake("an engine that nobody knows")


def test_a_wake_up_during_a_step_ends_the_rest_after_it() -> None:
    wait = calm.InputWait(queue.Queue())
    wait.wake()
    assert ends(wait)


def test_a_wake_up_ends_one_rest_only() -> None:
    wait = calm.InputWait(queue.Queue())
    wait.wake()
    assert ends(wait)
    resting = threading.Thread(target=wait.wait, args=(100.0,), daemon=True)
    resting.start()
    until(lambda: wait._inputs.not_empty._waiters)
    assert resting.is_alive()
    wait.wake()
    resting.join(timeout=10.0)
    assert not resting.is_alive()


def test_a_second_engine_with_the_same_id_is_logged_and_not_woken(caplog: pytest.LogCaptureFixture) -> None:
    engine_id = f"twin-{uuid.uuid4()}"
    woken, other = threading.Event(), threading.Event()
    calm.listen(f"not-{engine_id}", other.set)
    calm.listen(engine_id, woken.set)
    with caplog.at_level(logging.WARNING):
        calm.listen(engine_id, lambda: None)
    assert f"workers of engine {engine_id} cannot wake it" in caplog.text
    calm.wake(engine_id)
    assert woken.wait(10.0)
    assert not other.is_set()


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("yes", True), (" 0 ", False), ("", False), (None, False)])
def test_calm_is_asked_for_by_a_variable(value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(calm.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(calm.VARIABLE, value)
    assert calm.wanted() is wanted
