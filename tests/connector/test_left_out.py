"""Engines without one of layerpush's patches of vLLM lose what the table says, and give no wrong token and no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerpush.compat import patches
from layerpush.compat.early_answer import MARK
from layerpush.compat.handshake_executor import HandshakeExecutor
from layerpush.compat.metadata import LoadPostponed
from layerpush.compat.patches import Process
from layerpush.compat.worker_report import PushWithdrawn, WorkerReport
from layerpush.core.config import ConfigError
from layerpush.core.load_news import LoadQueued
from tests.connector import test_decode_scheduler, test_first_tokens
from tests.connector.engine import holds_prompt
from tests.connector.test_first_tokens import answer
from tests.connector.test_lifecycle import STEPS, TOKENS, Build, asks_first, ends_well, run
from tests.support.plain_vllm import leave_out

first_tokens_decode, scheduler = test_first_tokens.decode, test_first_tokens.scheduler
decode = test_decode_scheduler.decode


def test_the_decode_engine_computes_every_first_token(
    first_tokens_decode: test_first_tokens.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out("first-tokens", Process.ENGINE_CORE, monkeypatch)
    d = first_tokens_decode()
    prompt = d.ask()
    d.step()
    assert "sampling" not in d.registrations["r"]
    d.load("r", answer(prompt, 1)[0])
    assert d.tokens("r") == []
    d.run()
    assert d.tokens("r") == answer(prompt, 6)


def test_a_decode_engine_that_recomputes_refuses_to_start_without_failed_loads(
    decode: test_decode_scheduler.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out("failed-loads", Process.ENGINE_CORE, monkeypatch)
    with pytest.raises(ConfigError, match=r'leaves out failed-loads.*Set kv_load_failure_policy to "fail"'):
        decode(policy="recompute")
    assert decode(policy="recompute", role="kv_producer").scheduler.connector is not None


def test_without_failed_loads_no_load_gives_way(
    decode: test_decode_scheduler.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that has failed ends its own request only. One that P cannot begin keeps its blocks."""
    leave_out("failed-loads", Process.ENGINE_CORE, monkeypatch)
    d = decode(policy="fail")
    for name in ("r0", "r1", "r2"):
        d.decode(name, 480)
    d.step()
    ours = d.scheduler.connector.connector_scheduler
    held = frozenset(name for names in ours.postponed._waiting.values() for name in names)
    assert held, "a request waits for blocks"
    d.step(report=WorkerReport([LoadQueued("r0", held)]))
    d.step()
    assert not d.news(LoadPostponed)
    d.step("r1", failed=("r0",))
    d.step()
    d.step("r2")
    d.finish()
    assert d.reasons == {"r0": "error", "r1": "length", "r2": "length"}


def test_p_pushes_whole_requests_from_a_v2_runner(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    leave_out("early-revocation", Process.WORKER, monkeypatch)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    p, d = engine("kv_producer"), engine("kv_consumer")
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    assert p.totals.writes == 0
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert p.totals.writes == 1
    assert "leaves out early-revocation" in " ".join(p.totals.fallbacks)


def test_p_pushes_by_layer_from_a_v1_runner(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out("early-revocation", Process.WORKER, monkeypatch)
    p, d = engine("kv_producer"), engine("kv_consumer")
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    assert p.totals.fallbacks == {}


def test_handshakes_run_on_vllms_thread(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out("handshakes", Process.WORKER, monkeypatch)
    p, d = engine("kv_producer"), engine("kv_consumer")
    assert not isinstance(p.worker.connector_worker._handshake_initiation_executor, HandshakeExecutor)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)


@pytest.mark.parametrize("name", [None, "withdrawals", "early-answers"])
def test_p_computes_a_request_that_its_decode_engine_does_not_want(
    decode: test_decode_scheduler.Build, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """Without early answers a client's own mark means nothing."""
    if name is not None:
        leave_out(name, Process.ENGINE_CORE, monkeypatch)
    p = decode({"answer_early": True}, role="kv_producer")
    p.add("r", list(range(3, 30)), {"do_remote_decode": True, MARK: True})
    p.step(report=WorkerReport([PushWithdrawn("r")]))
    p.step()
    assert p.reasons == ({"r": "abort"} if name is None else {"r": "length"})


def test_a_patch_of_another_process_may_be_left_out(
    world: None, model: Path, monkeypatch: pytest.MonkeyPatch, decode: Any
) -> None:
    """A scheduler needs none of the front end's."""
    leave_out("request-checks,rank-notices", Process.ENGINE_CORE, monkeypatch)
    d = decode()
    from vllm.v1.core.sched.scheduler import Scheduler

    assert getattr(Scheduler.schedule, patches.MARK) == ("failed-loads", "first-tokens")
    assert getattr(Scheduler.update_from_output, patches.MARK) == ("withdrawals", "first-tokens")
    assert d.scheduler is not None
