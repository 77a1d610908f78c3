"""What a prefill and a decode engine record of one request, over real NIXL, and what `layerpush trace` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from layerpush.apps.tracing.breakdown import break_down
from layerpush.apps.tracing.perfetto import chrome_trace
from layerpush.apps.tracing.requests import TraceSet, read_traces
from tests.connector.engine import LAYERS, Engine
from tests.connector.test_lifecycle import STEPS, TOKENS, Build, ends_well, registered, run, step_until
from tests.unit.test_trace_perfetto import check


@pytest.fixture
def traced(engine: Build, tmp_path: Path) -> tuple[Engine, Engine, Callable[[], TraceSet]]:
    p, d = (engine(role, {"trace_dir": str(tmp_path)}) for role in ("kv_producer", "kv_consumer"))

    def read() -> TraceSet:
        for one in (p, d):
            one.worker.connector_worker._trace.close()
        return read_traces([tmp_path])

    return p, d, read


def test_both_sides_record_a_push_and_its_load(traced: tuple[Engine, Engine, Callable[[], TraceSet]]) -> None:
    p, d, read = traced
    d.decode_from(p, "r-1", TOKENS)
    d.step()
    registered(p)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)

    traces = read()
    (request,) = traces.requests
    (push,), (load,) = request.pushes, request.loads
    assert (push.engine_id, push.outcome, push.tokens, len(push.ready)) == (
        p.engine_id,
        "completed",
        TOKENS,
        4 * LAYERS,
    )
    assert (load.engine_id, load.prefill_engine_id, load.outcome) == (d.engine_id, p.engine_id, "completed")
    assert (load.request_id, load.prefill_request_id, load.blocks) == ("r-1", "r-1", 7)
    assert load.clock_offset == pytest.approx(0.0, abs=0.5), "one clock, and a handshake that may take its time"
    marks = [load.t_awaited, load.t_registered, push.t_registered, push.t_last_ready, push.t_last_landed]
    marks += [load.t_settled, load.t_reported]
    assert None not in marks
    assert marks == sorted(marks)  # type: ignore[type-var]
    assert load.t_registered <= load.t_accepted <= load.t_reported  # type: ignore[operator]
    assert len({source.clock for source in traces.sources}) == 1
    assert None not in break_down(request).parts.values()
    events = json.loads(b"".join(chrome_trace(traces)))["traceEvents"]
    check(events)
    assert {event["name"] for event in events if event["ph"] == "s"} == {"registration", "completion"}


def test_a_request_that_is_pushed_whole(traced: tuple[Engine, Engine, Callable[[], TraceSet]]) -> None:
    p, d, read = traced
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    step_until(p, done=p.writer.waiting)
    d.decode_from(p, "r-1", TOKENS)
    d.step()
    ends_well(p, d)

    (request,) = read().requests
    (push,), (load,) = request.pushes, request.loads
    assert (push.mode, load.outcome) == ("request", "completed")
    assert push.t_last_ready < push.t_registered < push.writes[0].t_post  # type: ignore[operator]
    assert push.writes[0].t_post < load.t_settled  # type: ignore[operator]
    assert break_down(request).parts["prefill"] == 0.0, "it was over before D asked"


def test_a_load_that_ds_engine_drops(traced: tuple[Engine, Engine, Callable[[], TraceSet]]) -> None:
    p, d, read = traced
    d.decode_from(p, "r-1", TOKENS)
    d.step()
    registered(p)
    d.abort("r-1")
    step_until(p, d, done=lambda: len(d.worker.connector_worker.loads) == 0 and "r-1" in d.failed)

    (request,) = read().requests
    (load,) = request.loads
    assert (load.outcome, load.t_parked, request.pushes) == ("cancelled", None, [])
