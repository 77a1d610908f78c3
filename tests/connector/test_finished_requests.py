"""News of a request that vLLM has finished: vLLM processes aborts between a step's forward and its results."""

from __future__ import annotations

import pytest

from layerpush.compat.metadata import LoadPostponed
from layerpush.compat.worker_report import PushWithdrawn, WorkerReport
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadParked,
    LoadQueued,
    LoadToken,
    LoadUnregistered,
)
from tests.connector.request_tables import leftovers
from tests.connector.test_decode_scheduler import IDLE, Build, Decode, decode  # noqa: F401

LATE = {
    "queued": [LoadQueued("r", frozenset())],  # with the names of "o"
    "unregistered": [LoadKept("r", 0), LoadUnregistered("r", 0)],
    "complete": [LoadCompleted("r", 1.0, "clock"), LoadToken("r", 7)],
    "parked": [LoadParked("r", 0), LoadKept("r", 64), LoadCleared("r", 0)],
    "withdrawn": [PushWithdrawn("r")],
}


def abort_in_the_step(d: Decode, request_id: str) -> None:
    """Of the next step, before its results."""
    plain = d.scheduler.update_from_output

    def update(*args: object) -> object:
        d.scheduler.update_from_output = plain
        d.abort(request_id)
        return plain(*args)

    d.scheduler.update_from_output = update


@pytest.mark.parametrize("news", LATE.values(), ids=LATE)
@pytest.mark.parametrize("asked", [False, True])
def test_late_news_of_a_finished_request_leaves_nothing(decode: Build, news: list[object], asked: bool) -> None:  # noqa: F811
    """``asked``: the load was to give way to "o" before the abort."""
    d = decode(caching=True)
    ours = d.scheduler.connector.connector_scheduler
    d.decode("r", 480)
    d.decode("busy", 480)
    d.step()
    d.decode("o", 481)  # 9 blocks are free
    queued = LoadQueued("r", frozenset(ours.prompt_names(d.requests["o"])))
    news = [queued if isinstance(each, LoadQueued) else each for each in news]
    if asked:
        d.step(report=WorkerReport([queued]))
    abort_in_the_step(d, "r")
    d.step(report=WorkerReport(news))
    assert [each.request_id for each in d.news(LoadPostponed)] == ["r"] * asked
    d.step(report=WorkerReport(news))
    assert d.news(LoadPostponed) == []
    d.step(failed=("r",), report=WorkerReport(news))
    d.step("busy")
    d.step()
    d.step("o")
    d.finish()
    assert set(d.reasons) == {"busy", "o"}
    assert leftovers(ours) == {}
    assert d.free_blocks == IDLE
    assert not d.scheduler.has_requests()
