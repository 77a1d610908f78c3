"""A prefill rank's counters of its pushes and WRITEs, and the times of their changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from layerpush.core.push_mode import LATE_REGISTRATION, SHORT_PROMPT, PushMode
from layerpush.core.replica import Replica
from layerpush.prefill.push import Push
from layerpush.prefill.push_session import PushSession
from layerpush.telemetry.metrics.catalog import (
    EXPOSED,
    FAILED_WRITES,
    FALLBACKS,
    LAYERS_READY,
    PUSHES,
    TRANSFER,
    WRITE_BYTES,
    WRITE_DESCRIPTORS,
    WRITE_ESTIMATE,
    WRITE_LAYERS,
    WRITE_SECONDS,
    WRITES,
)
from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import PushRecord, WriteRecord
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes
from tests.support.fake_transport import Faults
from tests.support.measured import measured
from tests.unit.both_sides.process import BLOCK_BYTES
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

TOKENS = 22  # five full blocks of four and a partly filled one
ENGINE_FALLBACK = "the model has Mamba layers"


class Metered:
    """A writer with a recorder, and one prompt."""

    def __init__(self, faults: Faults | None = None, registered: bool = True, mode: PushMode = PushMode.LAYER) -> None:
        self.recorder = Recorder()
        meter = PushMeter(self.recorder, engine_fallback=None)
        self.world = ScriptedWorld(faults, mode=mode, meter=meter)
        self.prompt = ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
        self.wanted = self.world.asks(self.prompt, self.world.decoder())
        if registered:
            self.world.send(self.wanted)

    def run(self) -> MetricDelta:
        for tokens in (9, 9, 9):
            self.world.step((self.prompt, tokens))
            self.world.settle()
        self.world.finish(self.prompt)
        self.world.settle()
        return measured(self.recorder)


def pushes(delta: MetricDelta) -> dict[str, int]:
    return delta.counters.get(PUSHES.key, {})


def test_a_layerwise_push_is_counted_with_its_writes_and_times() -> None:
    metered = Metered()
    delta, layers = metered.run(), metered.world.layers
    assert pushes(delta) == {"layerwise": 1}
    assert delta.counters[LAYERS_READY.key] == {"hooked": 3 * layers}
    assert FALLBACKS.key not in delta.counters
    writes = metered.world.trace.records[0].writes
    assert delta.observed(WRITE_BYTES).total == sum(write.bytes for write in writes) == layers * 6 * BLOCK_BYTES
    assert delta.observed(WRITE_DESCRIPTORS).total == sum(write.descriptors for write in writes)
    assert delta.observed(WRITE_LAYERS).count == len(writes)
    assert delta.counters[WRITES.key] == {"direct": len(writes)}
    assert delta.observed(WRITE_LAYERS).total == 3 * layers
    assert (delta.observed(EXPOSED).count, delta.observed(TRANSFER).count) == (1, 1)
    assert 0 < delta.observed(TRANSFER).total < 10
    ((written, transfer_s),) = filter(None, metered.world.rank.transfer_stats.pushes)
    assert (written.bytes, written.descriptors) == (
        layers * 6 * BLOCK_BYTES,
        sum(write.descriptors for write in writes),
    )
    assert written.post_s == pytest.approx(sum(write.t_posted - write.t_post for write in writes))
    assert transfer_s == delta.observed(TRANSFER).total


def test_a_rank_whose_blocks_other_ranks_send_has_exposed_time() -> None:
    """The engine's metric is that of its slowest rank, so each rank has one."""
    metered = Metered()
    metered.world.rank.replica = Replica(1, 2)  # of 6 blocks, the last two
    delta = metered.run()
    assert delta.observed(WRITE_BYTES).total == metered.world.layers * 2 * BLOCK_BYTES
    alone = Metered()
    alone.world.rank.replica = Replica(2, 3)
    delta = alone.run()
    assert (pushes(delta), delta.observed(WRITE_BYTES).count) == ({"layerwise": 1}, 0)
    assert delta.observed(EXPOSED).count == 1


def test_a_late_registration_has_its_own_fallback_label() -> None:
    metered = Metered(registered=False)
    for tokens in (9, 9, 9):
        metered.world.step((metered.prompt, tokens))
    metered.world.finish(metered.prompt)
    assert measured(metered.recorder).is_empty, "no push has ended"
    metered.world.send(metered.wanted)
    metered.world.settle()
    delta = measured(metered.recorder)
    assert pushes(delta) == {"late_registration": 1}
    assert delta.counters[FALLBACKS.key] == {"late_registration": 1}
    assert delta.observed(WRITE_BYTES).count == 1
    assert delta.counters[WRITES.key] == {"direct": 1}
    assert delta.observed(WRITE_LAYERS).count == 0, "the layers of a whole WRITE are not known"
    assert delta.observed(EXPOSED).count == 1
    assert metered.world.rank.transfer_stats.pushes == [], "vLLM counts its own WRITE"


def test_an_unclaimed_push_is_no_failed_transfer() -> None:
    metered = Metered(registered=False)
    metered.world.step((metered.prompt, 27))
    metered.world.finish(metered.prompt)
    metered.world.expire(metered.prompt)
    metered.world.settle()
    assert pushes(measured(metered.recorder)) == {"unclaimed": 1}
    assert metered.world.rank.transfer_stats.pushes == []


def test_the_wait_for_a_late_registration_is_exposed_time() -> None:
    push = push_of()
    push.record.t_last_ready, push.record.t_registered, push.record.t_last_landed = 10.0, 50.0, 50.5
    assert push.exposed_s == pytest.approx(40.5)


def test_writes_are_counted_by_plan() -> None:
    metered = Metered()
    post, plans = Writes.post, itertools.cycle(WRITES.values)

    def planned(writes: Writes, *args: Any) -> Iterator[Transfer]:
        for transfer, plan in zip(post(writes, *args), plans, strict=False):
            transfer.record.plan = plan
            if plan != "direct":
                transfer.record.estimate_s, transfer.record.t_planned = 5.0, time.perf_counter() - 60
            yield transfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writes, "post", planned)
        delta = metered.run()
    assert delta.counters[WRITES.key] == {"direct": 5, "gathered": 4}
    assert delta.observed(WRITE_ESTIMATE).total == 4 * 5.0
    assert (delta.observed(WRITE_SECONDS).count, delta.observed(WRITE_SECONDS).total // 60) == (4, 4)


@pytest.mark.parametrize("faults", [Faults(fail_writes={1}), Faults(fail_posts={0})], ids=["lost", "not posted"])
def test_a_failed_write_and_its_failed_push_are_counted(faults: Faults) -> None:
    metered = Metered(faults)
    delta = metered.run()
    assert pushes(delta) == {"failed": 1}
    assert metered.world.rank.transfer_stats.pushes == [None]
    assert delta.counted(FAILED_WRITES) == 1
    assert delta.observed(EXPOSED).count == delta.observed(TRANSFER).count == 0


def test_an_aborted_push_counts_as_cancelled() -> None:
    metered = Metered()
    metered.world.step((metered.prompt, 9))
    assert metered.world.writer.active == len(metered.world.writer) == 1
    metered.world.abort(metered.prompt)
    metered.world.settle()
    assert pushes(measured(metered.recorder)) == {"cancelled": 1}
    assert metered.world.rank.transfer_stats.pushes == []
    assert metered.world.writer.active == 0


@pytest.mark.parametrize("faults", [Faults(), Faults(fail_writes={1})], ids=["completed", "failed"])
def test_a_push_is_counted_once_and_before_its_release(faults: Faults) -> None:
    """The engine may stop stepping then, and so its reports."""
    metered = Metered(faults)
    seen: list[tuple[int, int]] = []
    report_sent = metered.world.rank.report_sent

    def released(request_id: str) -> None:
        seen.append((measured(metered.recorder).counted(PUSHES), metered.world.writer.active))
        report_sent(request_id)

    metered.world.rank.report_sent = released
    assert pushes(metered.run()) == {}
    assert seen == [(1, 0)]
    assert metered.world.totals.outcomes.total() == 1


def record(outcome: str, mode: str, fallback: str | None = None, *, registered: bool = False) -> PushRecord:
    decode_id = "d" if registered else None
    return PushRecord(
        request_id="p",
        decode_request_id=decode_id,
        engine_id="e",
        rank=0,
        mode=mode,
        outcome=outcome,
        fallback=fallback,
    )


@pytest.mark.parametrize(
    ("push", "outcome", "reason"),
    [
        (record("completed", "layer"), "layerwise", None),
        (record("completed", "chunk"), "layerwise", None),
        (record("completed", "request"), "whole", None),
        (record("completed", "request", LATE_REGISTRATION), "late_registration", "late_registration"),
        (record("completed", "request", SHORT_PROMPT), "fallback", "short_prompt"),
        (record("completed", "request", ENGINE_FALLBACK), "fallback", "engine"),
        (record("completed", "request", "its block size is 8 tokens, ours 4"), "fallback", "decode_engine"),
        (record("failed", "request", SHORT_PROMPT, registered=True), "failed", "short_prompt"),
        (record("failed", "layer"), "unclaimed", None),
        (record("cancelled", "layer"), "cancelled", None),
    ],
)
def test_every_end_has_its_label(push: PushRecord, outcome: str, reason: str | None) -> None:
    recorder = Recorder()
    PushMeter(recorder, engine_fallback=ENGINE_FALLBACK).closed(push)
    delta = measured(recorder)
    assert pushes(delta) == {outcome: 1}
    assert outcome in PUSHES.values
    assert delta.counters.get(FALLBACKS.key) == (None if reason is None else {reason: 1})
    assert reason is None or reason in FALLBACKS.values


def push_of(world: ScriptedWorld | None = None) -> Push:
    writer = (world or ScriptedWorld()).writer
    session = PushSession("p", (0,), (16,), PushMode.LAYER)
    return Push(session, record("pending", "layer"), writer.registry, writer._services)


def test_exposed_time_is_unknown_without_a_start_time() -> None:
    push = push_of()
    assert push.exposed_s is None
    push.record.t_last_landed = 3.0
    assert push.exposed_s is None
    push.finished_at = 2.0
    assert push.exposed_s == 1.0, "where layers are not watched, prefill ends when the scheduler says so"
    push.record.t_last_ready, push.record.t_notified = 1.5, 4.0
    assert push.exposed_s == 1.5, "the time until the completion is sent does not count"


@pytest.mark.parametrize(
    ("moves", "seconds"),
    [
        ("post1 post2 end4 end6", 5.0),
        ("post1 end2 post4 end5", 2.0),
        ("post1 post2 end3 post3 end7 end8", 7.0),
        ("end3", 0.0),
    ],
)
def test_transfer_time_counts_overlapping_writes_once(moves: str, seconds: float) -> None:
    world = ScriptedWorld()
    push = push_of(world)
    acts: dict[str, Callable[[float], None]] = {"post": push.note_busy, "end": push.note_idle}
    for move in moves.split():
        name, at = move[:-1], float(move[-1])
        if name == "post":
            push.transfers.append(Transfer(world.p, WriteRecord(0, (0, 0), (0, 0), 0, 0, 0.0, 0.0), None))
        elif push.transfers:
            push.transfers.pop()
        acts[name](at)
    assert push.transfer_s == seconds
