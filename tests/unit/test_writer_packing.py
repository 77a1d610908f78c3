"""The writer with staging memory: bytes arrive by way of the ring, and every span of it comes back in the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from layerpush.core.push_mode import PushMode
from layerpush.core.wire import Registration
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.base import DescriptorIds, Route, TransportError, WriteHandle
from layerpush.transport.gather.cost import runs
from layerpush.transport.gather.gatherer import Stage
from layerpush.transport.link_speed import FIRST_TRIAL
from tests.support.fake_transport import Faults
from tests.unit.packing_rig import PackingRig
from tests.unit.writer_rig import Prompt

TOKENS = 22
NEVER = 10**6
STAGES = [Stage.GATHERING, Stage.WRITING]


def story(faults: Faults | None = None, **details: float) -> tuple[PackingRig, Prompt, Registration]:
    """A prompt in scattered blocks, which its decode engine registered first."""
    rig = PackingRig("gather", faults, **details)
    prompt = Prompt("p-1", TOKENS, [5, 1, 8, 3, 12, 10, 20, 22])
    return rig, prompt, rig.registers(prompt)


def over(rig: PackingRig, prompt: Prompt, wanted: Registration) -> PushRecord:
    """The request is over, and all memory is free. The record of its push."""
    if not rig.host.released:
        rig.finish(prompt)
    rig.settle()
    rig.decoders["D"].reuse(wanted)
    rig.assert_clean()
    assert rig.host.released == ["p-1"]
    (record,) = rig.trace.records
    return record


def test_gathered_bytes_arrive_through_the_ring() -> None:
    rig, prompt, wanted = story(Faults(hold_writes={1: 9, 4: 5}))
    for _ in range(3):
        rig.step((prompt, 9))
        rig.settle()
    rig.assert_delivered(prompt, wanted)
    assert rig.decoders["D"].untouched(rig.layers, but=wanted.local_block_ids[0])
    record = over(rig, prompt, wanted)
    assert {write.plan for write in record.writes} == {"gathered"}
    for write in record.writes:
        assert write.t_landed is not None
        assert write.t_post <= write.t_posted <= write.t_landed
    assert rig.totals.writes == len(record.writes)


def with_slow_posts(rig: PackingRig, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still, but for posts: each takes a second for each descriptor."""
    now, post = [0.0], rig.p.post_write

    def slow_post(route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b"") -> WriteHandle:
        now[0] += runs(local, remote)
        return post(route, local, remote, notification)

    monkeypatch.setattr(rig.p, "post_write", slow_post)
    for module in ("prefill.push", "transport.writes", "transport.gather.gatherer", "transport.gather.strategy"):
        monkeypatch.setattr(f"layerpush.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_trial_teaches_the_writer_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = PackingRig("auto", layers=8)
    with_slow_posts(rig, monkeypatch)
    plans: list[str] = []
    for number in range(4):
        prompt = Prompt(f"p-{number}", TOKENS, [5, 1, 8, 3, 12, 10], PushMode.LAYER)
        wanted = rig.registers(prompt)
        rig.step((prompt, TOKENS), between=rig.settle)
        rig.finish(prompt)
        rig.assert_delivered(prompt, wanted)
        plans += [write.plan for write in rig.trace.records[-1].writes]
    assert plans == ["direct"] * FIRST_TRIAL + ["gathered"] * (32 - FIRST_TRIAL)
    assert [round(write.estimate_s or 0) for write in rig.trace.records[0].writes[1:]] == [6] * 7
    assert [round(write.estimate_s or 0) for write in rig.trace.records[-1].writes] == [1] * 8


@pytest.mark.parametrize("turns", [1, 20])
def test_the_time_of_a_gather_is_no_time_of_the_link(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, prompt, _ = story(layers=1)
    now, wanted_s = with_slow_posts(rig, monkeypatch), 1.0
    rig.staging.looks.append(turns)
    rig.step((prompt, 9))
    for _ in range(turns + 5):
        now[0] += 10.0 if rig.staged and rig.staged[0].stage is Stage.GATHERING else 0.0
        rig.writer.turn()
    assert not rig.staged
    speed = rig.decoders["D"].link.speed
    assert speed.estimate(rig.totals.bytes, 1) == pytest.approx(wanted_s)


def test_without_ring_space_writes_go_directly() -> None:
    rig, prompt, wanted = story()
    rig.step((prompt, 4))
    rig.settle()
    assert rig.staging.ring.allocate(rig.staging.ring.capacity_bytes) == 0
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    rig.staging.ring.free(0)
    assert {write.plan for write in over(rig, prompt, wanted).writes} == {"gathered", "direct"}


def test_a_push_does_not_wait_for_the_spans_of_another() -> None:
    """The first request's WRITEs hold all of P's ring, and do not end."""
    rig, first, _ = story(blocks=3, faults=Faults(hold_writes={0: NEVER, 1: NEVER, 2: NEVER}))
    rig.step((first, 4))
    assert rig.staging.ring.used_bytes == rig.staging.ring.capacity_bytes
    second = Prompt("p-2", TOKENS, list(range(30, 38)))
    wanted = rig.registers(second, rig.decoder("E"), first=20)
    rig.step((second, TOKENS))
    rig.settle()
    rig.assert_delivered(second, wanted)
    assert rig.decoders["D"].told() == [[]]


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_preemption_the_new_epoch_waits_for_the_old_writes(stage: Stage) -> None:
    rig, prompt, wanted = story(faults=Faults(hold_writes={0: 30, 1: 3, 2: 3}))
    rig.staging.looks.append(40 if stage is Stage.GATHERING else 0)
    rig.step((prompt, 9))
    rig.until(stage)
    old = rig.staged
    rig.scribble(prompt.table)
    prompt.preempted(list(range(30, 38)))
    rig.step((prompt, 12), preempted=[prompt])
    while any(staged.stage is not Stage.OVER for staged in old):
        assert len(rig.fabric.writes) <= rig.layers
        rig.writer.turn()
    rig.settle(80)
    rig.step((prompt, 12))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    assert over(rig, prompt, wanted).epoch == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["aborted", "cancelled"])
def test_a_push_drains_after_its_last_write(stage: Stage, how: str) -> None:
    rig, prompt, wanted = story(faults=Faults(hold_writes=dict.fromkeys(range(9), 5)))
    rig.staging.looks.extend([5] * 9)
    rig.step((prompt, 9))
    rig.until(stage)
    if how == "aborted":
        rig.abort(prompt)
        rig.scribble(prompt.table)
    else:
        assert not rig.writer.cancel("p-1", wanted.key)
    rig.writer.turn()
    while rig.staged:
        assert not [drained for _, drained, _ in rig.host.reported_failures() if drained]
        rig.writer.turn()
    rig.settle()
    ((_, drained, cancelled),) = rig.host.reported_failures()
    assert drained
    assert cancelled == (how == "cancelled")
    assert rig.decoders["D"].told() == [[]]
    if how == "cancelled":
        rig.finish(prompt)
    rig.settle()
    rig.assert_clean()


@pytest.mark.parametrize("which", [0, 2])
def test_a_failed_copy_ends_the_push(which: int) -> None:
    rig, prompt, wanted = story()
    rig.staging.fates.extend([*[None] * which, "broken"])
    rig.step((prompt, 9))
    rig.settle()
    rig.step((prompt, 13))
    rig.settle()
    assert rig.decoders["D"].told() == [[]]
    reason, drained, _ = rig.host.reported_failures()[-1]
    assert drained
    assert "gathered" in reason
    over(rig, prompt, wanted)


def test_a_write_goes_directly_if_its_copy_does_not_begin(caplog: pytest.LogCaptureFixture) -> None:
    rig, prompt, wanted = story()
    rig.staging.fates.extend(["refused", "refused"])
    rig.step((prompt, 9))
    rig.settle()
    rig.step((prompt, 13))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    record = over(rig, prompt, wanted)
    assert [write.plan for write in record.writes][:2] == ["direct", "direct"]
    assert {write.plan for write in record.writes[2:]} == {"gathered"}
    (line,) = [one for one in caplog.records if "WRITEs go directly" in one.getMessage()]
    assert "RuntimeError: no memory for block ids" in line.getMessage()


@pytest.mark.parametrize("stage", STAGES)
def test_the_death_of_the_decode_engine_ends_the_push(stage: Stage) -> None:
    rig, prompt, _ = story(faults=Faults(hold_writes=dict.fromkeys(range(9), NEVER)))
    rig.staging.looks.extend([5] * 9)
    rig.step((prompt, 9))
    rig.until(stage)
    rig.fabric.kill("D-0")
    rig.settle()
    rig.finish(prompt)
    rig.settle()
    rig.assert_clean()
    assert set(rig.host.disconnected) == {"D"}
    assert rig.host.released == ["p-1"]


def test_a_failed_release_of_a_handle_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL refuses three times; a released handle is not released again."""
    rig, prompt, wanted = story()
    release, refusals = rig.p.release, iter(range(3))

    def unwilling(handle: object) -> None:
        if next(refusals, None) is not None:
            raise TransportError("NIXL is busy")
        release(handle)

    monkeypatch.setattr(rig.p, "release", unwilling)
    monkeypatch.setattr("layerpush.prefill.pushes.RELEASE_RETRY_S", 0.0)
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    over(rig, prompt, wanted)
    assert not rig.writer._writes.has_leftovers


@pytest.mark.parametrize("stage", STAGES)
def test_shutdown_abandons_endless_writes(stage: Stage) -> None:
    rig, prompt, _ = story(faults=Faults(hold_writes={0: NEVER if stage is Stage.WRITING else 0}))
    rig.staging.looks.append(NEVER if stage is Stage.GATHERING else 0)
    rig.step((prompt, 9))
    rig.until(stage)
    rig.writer.fail_all("the prefill engine shuts down")
    assert rig.writer.drain(0.01) >= 1


def test_the_writer_polls_often_while_writes_are_staged() -> None:
    rig, prompt, _ = story()
    rig.staging.looks.extend([NEVER] * 3)
    rig.step((prompt, 9))
    assert rig.staged
    assert rig.sleep_s is not None
    assert rig.sleep_s <= 5e-4
    assert rig.writer.writes_in_flight("p-1")
    assert rig.writer.engines_in_flight == {"D"}


@pytest.mark.parametrize("how", ["aborted", "cancelled", "failed"])
def test_gathered_bytes_of_an_ended_push_are_not_posted(how: str) -> None:
    """Its blocks may have been given to another prompt meanwhile."""
    rig, prompt, wanted = story()
    rig.staging.looks.extend([5] * 9)
    rig.step((prompt, 9))
    assert {staged.stage for staged in rig.staged} == {Stage.GATHERING}
    if how == "aborted":
        rig.abort(prompt)
        rig.scribble(prompt.table)
    elif how == "cancelled":
        rig.writer.cancel("p-1", wanted.key)
    else:
        rig.writer.fail("p-1", "something else")
    rig.writer.turn()
    assert rig.writer.writes_in_flight("p-1"), "its blocks are still read"
    rig.settle()
    assert rig.fabric.writes == []
    assert rig.host.reported_failures()[-1][1]
    assert rig.totals.lost_writes == 0
    if how != "aborted":
        rig.finish(prompt)
    rig.settle()
    rig.assert_clean()
