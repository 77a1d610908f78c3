"""A thread of layerpush ends while requests wait: its engine ends with the reason, and its peer goes on."""

from __future__ import annotations

from typing import Any

import pytest

from layerpush.compat.engine_threads import EngineThreadError
from layerpush.engine.scheduler.side_channel import Listener
from tests.connector.engine import Engine, holds_prompt
from tests.connector.test_lifecycle import TOKENS, Build, asks_first, ends_well, run, step_until
from tests.support.waiting import until

SHORT = {"peer_timeout_s": 1}


def end(*_: Any) -> Any:
    """A defect that nobody expects."""
    raise SystemExit("a defect")


def end_writer(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.worker.connector_worker._writer_thread._inbox.deliver = end


def end_prober(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.worker.connector_worker._prober.start("127.0.0.1", engine.port, "nobody", 0, end)


def end_listener(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, turn = engine.connector.connector_scheduler._threads, Listener._turn

    def one_ends(self: Listener) -> None:
        if self._bound.getsockname()[1] == engine.port:
            end()
        turn(self)

    monkeypatch.setattr(Listener, "_turn", one_ends)
    until(lambda: listener._failure)


ENDS = {"nixl-push-writer": end_writer, "layerpush-probe": end_prober, "nixl_handshake_listener": end_listener}


@pytest.mark.parametrize("thread", ENDS)
@pytest.mark.parametrize("side", ["P", "D"])
def test_an_engine_ends_with_its_thread(engine: Build, thread: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = engine("kv_producer", {**SHORT, "granularity": "layer"}), engine("kv_consumer", SHORT)
    free = d.free_blocks
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    p.step()
    until(lambda: holds_prompt(d, blocks, 64))  # P is connected: without that it could not tell D of its end
    victim = p if side == "P" else d
    ENDS[thread](victim, monkeypatch)
    with pytest.raises(EngineThreadError, match=f"thread {thread} has ended"):
        step_until(victim, done=lambda: False)
    victim.shutdown()
    if side == "P":
        step_until(d, done=lambda: d.failed)
        assert d.failed == ["r-1"]
        d.abort("r-1")
        step_until(d, done=lambda: d.free_blocks == free)
    else:
        run(p, 3)
        step_until(p, done=lambda: p.sent)
        assert p.free_blocks == p.config.cache_config.num_gpu_blocks - 1
        ends_well_with_another_d(p, engine)


def ends_well_with_another_d(p: Engine, engine: Build) -> None:
    p.sent, p.finished, other = [], [], engine("kv_consumer", SHORT)
    asks_first(p, other, "r-2")
    p.prefill("r-2", TOKENS)
    step_until(p, other, done=lambda: other.received and p.sent)
    assert (other.received, other.failed) == (["r-2"], [])


@pytest.mark.parametrize("side", ["P", "D"])
def test_an_engine_outlives_a_failed_turn_and_what_fails_with_it(engine: Build, side: str) -> None:
    """Memory is short for a moment: the turn fails twice, and once every push should fail and cannot."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    victim = p if side == "P" else d
    writer = victim.worker.connector_worker._writer_thread
    deliver, fail_all, failed = writer._inbox.deliver, writer._pushes.fail_all, list[str]()

    def short_of_memory() -> bool:
        if len(failed) < 3:
            failed.append("the turn")
            raise MemoryError
        return bool(deliver())

    def fails_once(reason: str) -> None:
        writer._pushes.fail_all = fail_all
        failed.append("the failure")
        raise MemoryError(reason)

    writer._pushes.fail_all, writer._inbox.deliver = fails_once, short_of_memory
    until(lambda: len(failed) >= 3)
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, 4)
    ends_well(p, d)
