"""A thread that ends by an error ends its engine: by the next step, or by the end of an idle engine's process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from layerpush.compat import engine_threads
from layerpush.compat.engine_threads import EngineThreadError, EngineThreads


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_threads, "NOTICE_S", 0.01)


@pytest.fixture
def signals(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """The SIGTERMs that come. The parameter is the module that handles them."""
    caught: list[int] = []

    def handler(number: int, _: Any) -> None:
        caught.append(number)

    handler.__module__ = request.param
    before = signal.signal(signal.SIGTERM, handler)
    yield caught
    signal.signal(signal.SIGTERM, before)


def ends(threads: EngineThreads, error: BaseException | None) -> threading.Thread:
    """A thread that ends by the error; None: it returns."""

    def run() -> None:
        with threads.watched():
            if error is not None:
                raise error

    thread = threading.Thread(target=run, name="some-thread")
    thread.start()
    return thread


@pytest.mark.parametrize("error", [MemoryError("no memory"), SystemExit(1), KeyboardInterrupt()])
def test_a_step_after_a_threads_end_raises_the_reason(error: BaseException) -> None:
    threads = EngineThreads()
    threads.check()
    ends(threads, error).join()
    for _ in range(2):
        with pytest.raises(EngineThreadError, match=f"some-thread has ended: {type(error).__name__}"):
            threads.check()


def test_a_thread_that_returns_ends_nothing() -> None:
    threads = EngineThreads()
    ends(threads, None).join()
    threads.check()


@pytest.mark.parametrize("signals", ["vllm.v1.engine.core"], indirect=True)
def test_the_process_of_an_idle_engine_gets_sigterm(signals: list[int]) -> None:
    ends(EngineThreads(), ValueError("a defect")).join()
    assert signals == [signal.SIGTERM]


@pytest.mark.parametrize("signals", ["an.application"], indirect=True)
def test_a_program_that_steps_the_engine_itself_gets_no_signal(signals: list[int]) -> None:
    ends(EngineThreads(), ValueError("a defect")).join()
    assert signals == []


@pytest.mark.parametrize("how", ["a step", "the shutdown"])
@pytest.mark.parametrize("signals", ["vllm.v1.engine.core"], indirect=True)
def test_an_engine_that_ends_gets_no_signal(how: str, signals: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_threads, "NOTICE_S", 60.0)
    threads = EngineThreads()
    thread = ends(threads, ValueError("a defect"))
    if how == "the shutdown":
        threads.close()
    else:
        while threads._failure is None:
            threading.Event().wait(1e-3)
        with pytest.raises(EngineThreadError):
            threads.check()
    thread.join(20)
    assert not thread.is_alive()
    assert signals == []
