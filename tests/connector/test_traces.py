"""A prefill and a decode engine's records of one request, over real NIXL, and `layerpush trace` of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from layerpush.apps.tracing.breakdown import break_down
from layerpush.apps.tracing.perfetto import chrome_trace
from layerpush.apps.tracing.requests import TraceSet, read_traces
from tests.connector.engine import LAYERS, Engine, holds_prompt
from tests.connector.test_lifecycle import STEPS, TOKENS, Build, asks_first, ends_well, run, step_until
from tests.support.waiting import until
from tests.unit.test_trace_perfetto import check


def pair(
    engine: Build, folder: Path, prefill: dict[str, object] | None = None
) -> tuple[Engine, Engine, Callable[[], TraceSet]]:
    where = {"trace_dir": str(folder)}
    p = engine("kv_producer", {**where, **(prefill or {})})
    d = engine("kv_consumer", {**where, "first_token": "decode"})

    def read() -> TraceSet:
        for one in (p, d):
            one.worker.connector_worker._trace.close()
            one.connector.connector_scheduler._trace.close()
        return read_traces([folder])

    return p, d, read


@pytest.fixture
def traced(engine: Build, tmp_path: Path) -> tuple[Engine, Engine, Callable[[], TraceSet]]:
    return pair(engine, tmp_path)


def test_both_sides_record_a_push_and_its_load(traced: tuple[Engine, Engine, Callable[[], TraceSet]]) -> None:
    p, d, read = traced
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    step_until(d, done=lambda: d.finished)

    traces = read()
    (request,) = traces.requests
    (push,), (load,), (token,) = request.pushes, request.loads, request.first_tokens
    assert (push.engine_id, push.outcome, push.tokens, len(push.ready)) == (
        p.engine_id,
        "completed",
        TOKENS,
        4 * LAYERS,
    )
    assert (load.engine_id, load.prefill_engine_id, load.outcome) == (d.engine_id, p.engine_id, "completed")
    assert (load.request_id, load.prefill_request_id, load.blocks) == ("r-1", "r-1", 7)
    assert load.clock_offset == pytest.approx(0.0, abs=0.5), "one clock, but a handshake takes time"
    for at in (push.t_registered, push.t_last_ready):  # the writer may register the push after its last layer
        marks = [load.t_awaited, load.t_registered, at, push.t_last_landed, load.t_settled, load.t_reported]
        assert None not in marks
        assert marks == sorted(marks)
    assert load.t_registered <= load.t_accepted <= load.t_reported
    assert len({source.clock for source in traces.sources}) == 1
    found = break_down(request)
    assert None not in found.parts.values()
    assert load.t_settled < token.t_all_reported < token.t_scheduled < token.t_first_token
    assert found.hand_over == pytest.approx(token.t_first_token - push.t_last_ready)
    events = json.loads(b"".join(chrome_trace(traces)))["traceEvents"]
    check(events)
    assert {event["name"] for event in events if event["ph"] == "s"} == {"registration", "completion"}


@pytest.mark.parametrize(
    "configured", [{}, {"granularity": "layer"}, {"granularity": "chunk"}, {"layerwise": False}], ids=str
)
def test_requests_choose_their_mode(engine: Build, tmp_path: Path, configured: dict[str, object]) -> None:
    """Requests of every mode on one P. A request without a mode has the configured one."""
    p, d, read = pair(engine, tmp_path, configured)
    modes = {"r-0": None, "r-1": "request", "r-2": "chunk", "r-3": "layer", "r-4": "auto"}
    for name, mode in modes.items():
        blocks = asks_first(p, d, name)
        p.prefill(name, TOKENS, mode)
        for _ in range(STEPS):
            landed = p.totals.writes
            p.step(between=lambda _: until(lambda: mode != "layer" or p.totals.writes > landed))  # noqa: B023
            if mode in ("auto", "chunk"):
                until(lambda: p.totals.writes > landed)  # noqa: B023  before the next step can join it
        step_until(p, d, done=lambda: name in d.received and name in p.sent)  # noqa: B023
        assert holds_prompt(d, blocks, TOKENS)
        until(lambda: len(p.pushes) == 0)

    pushes = [request.pushes[0] for request in read().requests]
    default = "request" if configured.get("layerwise") is False else configured.get("granularity", "auto")
    assert [(push.request_id, push.mode) for push in pushes] == [
        (name, mode or default) for name, mode in modes.items()
    ]
    assert [push.fallback for push in pushes] == [None] * len(modes)
    _, whole, by_chunk, by_layer, auto = pushes
    assert len(whole.writes) == 1
    assert {write.layers for write in by_chunk.writes} == {(0, LAYERS - 1)}
    assert len(by_layer.writes) > STEPS
    assert len(auto.writes) <= STEPS * LAYERS
    for push in (by_chunk, by_layer, auto):
        assert push.writes[0].t_post < push.t_last_ready
    assert whole.writes[0].t_post > whole.t_last_ready


@pytest.mark.parametrize("configured", [{}, {"layerwise": False}], ids=str)
def test_a_cache_without_separate_layers_is_pushed_whole(
    engine: Build, no_layers: None, tmp_path: Path, configured: dict[str, object]
) -> None:
    everything_goes_whole(*pair(engine, tmp_path, configured), "cannot be told apart")


@pytest.mark.parametrize("configured", [{}, {"layerwise": False}], ids=str)
def test_an_engines_fallback_is_recorded_for_requests_with_another_mode(
    engine: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: dict[str, object]
) -> None:
    for module in ("engine.scheduler.scheduler", "engine.worker.gathering", "compat.engine_settings"):
        monkeypatch.setattr(f"layerpush.{module}.engine_fallback", lambda _: "it is so")
    everything_goes_whole(*pair(engine, tmp_path, configured), "it is so")


def everything_goes_whole(p: Engine, d: Engine, read: Callable[[], TraceSet], reason: str) -> None:
    """Requests of every mode are pushed whole. Records and metrics give the reason if a request chose another mode."""
    modes = ("auto", "layer", "chunk", "request")
    for mode in modes:
        asks_first(p, d, mode)
        p.prefill(mode, TOKENS, mode)
        run(p, STEPS)
        step_until(p, d, done=lambda: mode in d.received and mode in p.sent)  # noqa: B023
    until(lambda: len(p.pushes) == 0)
    pushes = {request.pushes[0].request_id: request.pushes[0] for request in read().requests}
    assert {(push.mode, len(push.writes)) for push in pushes.values()} == {("request", 1)}
    assert [reason in (pushes[mode].fallback or "") for mode in modes] == [True, True, True, False]
    assert pushes["request"].fallback is None
    assert p.totals.outcomes == {"completed": 4}
    assert sum(p.totals.fallbacks.values()) == 3
