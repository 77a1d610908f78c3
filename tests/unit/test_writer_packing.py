"""The writer with staging memory: bytes arrive by way of the ring, and every span of it comes back in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest

from layerpush.core.push_mode import PushMode
from layerpush.core.wire import Registration
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.base import DescriptorIds, Route, TransportError, WriteHandle
from layerpush.transport.gather.cost import runs
from layerpush.transport.gather.gatherer import Stage, StagedWrite
from layerpush.transport.link_speed import FIRST_TRIAL
from tests.support.fake_transport import Faults
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

TOKENS = 22
NEVER = 10**6
STAGES = [Stage.GATHERING, Stage.WRITING]


def gathering(
    faults: Faults | None = None, plan: Literal["auto", "gather"] = "gather", **details: int
) -> tuple[ScriptedWorld, ScriptedRequest, Registration]:
    """A prompt in scattered blocks, which its decode engine registered first."""
    world = ScriptedWorld(faults, plan=plan, **details)
    prompt = ScriptedRequest("p-1", TOKENS, [5, 1, 8, 3, 12, 10, 20, 22])
    return world, prompt, world.registers(prompt)


def staged(world: ScriptedWorld) -> list[StagedWrite]:
    """WRITEs of all pushes that go by way of P's ring."""
    transfers = [transfer for push in world.writer._pushes.values() for transfer in push.transfers]
    return [transfer for transfer in transfers if isinstance(transfer, StagedWrite)]


def until(world: ScriptedWorld, stage: Stage, turns: int = 60) -> None:
    """Turns of the writer, until a WRITE is at ``stage``."""
    for _ in range(turns):
        if stage in [each.stage for each in staged(world)]:
            return
        world.turn()
    raise AssertionError(f"no WRITE came to {stage}")


def over(world: ScriptedWorld, prompt: ScriptedRequest, wanted: Registration) -> PushRecord:
    """The request is over, and all memory is free. The record of its push."""
    if not world.rank.released:
        world.finish(prompt)
    world.settle()
    world.d.reuse(wanted)
    world.assert_clean()
    assert world.rank.released == ["p-1"]
    (record,) = world.trace.records
    return record


def test_gathered_bytes_arrive_through_the_ring() -> None:
    world, prompt, wanted = gathering(Faults(hold_writes={1: 9, 4: 5}))
    for _ in range(3):
        world.step((prompt, 9))
        world.settle()
    world.assert_delivered(prompt, wanted)
    assert world.d.untouched(but=wanted.local_block_ids[0])
    record = over(world, prompt, wanted)
    assert {write.plan for write in record.writes} == {"gathered"}
    for write in record.writes:
        assert write.t_landed is not None
        assert write.t_post <= write.t_posted <= write.t_landed
    assert world.totals.writes == len(record.writes)


def with_slow_posts(world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still, but for posts: each takes a second for each descriptor."""
    now, post = [0.0], world.p.post_write

    def slow_post(route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b"") -> WriteHandle:
        now[0] += runs(local, remote)
        return post(route, local, remote, notification)

    monkeypatch.setattr(world.p, "post_write", slow_post)
    for module in ("prefill.push", "transport.writes", "transport.gather.gatherer", "transport.gather.strategy"):
        monkeypatch.setattr(f"layerpush.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_trial_teaches_the_writer_to_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScriptedWorld(plan="auto", layers=8)
    with_slow_posts(world, monkeypatch)
    plans: list[str] = []
    for number in range(4):
        prompt = ScriptedRequest(f"p-{number}", TOKENS, [5, 1, 8, 3, 12, 10], PushMode.LAYER)
        wanted = world.registers(prompt)
        world.step((prompt, TOKENS), between=world.settle)
        world.finish(prompt)
        world.assert_delivered(prompt, wanted)
        plans += [write.plan for write in world.trace.records[-1].writes]
    assert plans == ["direct"] * FIRST_TRIAL + ["gathered"] * (32 - FIRST_TRIAL)
    assert [round(write.estimate_s or 0) for write in world.trace.records[0].writes[1:]] == [6] * 7
    assert [round(write.estimate_s or 0) for write in world.trace.records[-1].writes] == [1] * 8


@pytest.mark.parametrize("turns", [1, 20])
def test_the_time_of_a_gather_is_no_time_of_the_link(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt, _ = gathering(layers=1)
    now, wanted_s = with_slow_posts(world, monkeypatch), 1.0
    world.rank.staging.looks.append(turns)
    world.step((prompt, 9))
    for _ in range(turns + 5):
        now[0] += 10.0 if staged(world) and staged(world)[0].stage is Stage.GATHERING else 0.0
        world.turn()
    assert not staged(world)
    speed = world.rank.peers["D"].speed
    assert speed.estimate(world.totals.bytes, 1) == pytest.approx(wanted_s)


def test_without_ring_space_writes_go_directly() -> None:
    world, prompt, wanted = gathering()
    world.step((prompt, 4))
    world.settle()
    assert world.rank.staging.ring.allocate(world.rank.staging.ring.capacity_bytes) == 0
    world.step((prompt, TOKENS))
    world.settle()
    world.assert_delivered(prompt, wanted)
    world.rank.staging.ring.free(0)
    assert {write.plan for write in over(world, prompt, wanted).writes} == {"gathered", "direct"}


def test_a_push_does_not_wait_for_the_spans_of_another() -> None:
    """The first request's WRITEs hold all of P's ring, and do not end."""
    world, first, _ = gathering(ring_blocks=3, faults=Faults(hold_writes={0: NEVER, 1: NEVER, 2: NEVER}))
    world.step((first, 4))
    assert world.rank.staging.ring.used_bytes == world.rank.staging.ring.capacity_bytes
    second = ScriptedRequest("p-2", TOKENS, list(range(30, 38)))
    wanted = world.registers(second, world.decoder("E"), first=20)
    world.step((second, TOKENS))
    world.settle()
    world.assert_delivered(second, wanted)
    assert world.d.received() == [[]]


def test_a_write_goes_directly_if_its_copy_does_not_begin(caplog: pytest.LogCaptureFixture) -> None:
    world, prompt, wanted = gathering()
    world.rank.staging.fates.extend(["refused", "refused"])
    world.step((prompt, 9))
    world.settle()
    world.step((prompt, 13))
    world.settle()
    world.assert_delivered(prompt, wanted)
    record = over(world, prompt, wanted)
    assert [write.plan for write in record.writes][:2] == ["direct", "direct"]
    assert {write.plan for write in record.writes[2:]} == {"gathered"}
    (line,) = [one for one in caplog.records if "WRITEs go directly" in one.getMessage()]
    assert "RuntimeError: no memory for block ids" in line.getMessage()


def test_a_failed_release_of_a_handle_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL refuses three times; a released handle is not released again."""
    world, prompt, wanted = gathering()
    release, refusals = world.p.release, iter(range(3))

    def unwilling(handle: object) -> None:
        if next(refusals, None) is not None:
            raise TransportError("NIXL is busy")
        release(handle)

    monkeypatch.setattr(world.p, "release", unwilling)
    monkeypatch.setattr("layerpush.prefill.pushes.RELEASE_RETRY_S", 0.0)
    world.step((prompt, TOKENS))
    world.settle()
    world.assert_delivered(prompt, wanted)
    over(world, prompt, wanted)
    assert not world.writer._writes.has_leftovers


@pytest.mark.parametrize("stage", STAGES)
def test_shutdown_abandons_endless_writes(stage: Stage) -> None:
    world, prompt, _ = gathering(faults=Faults(hold_writes={0: NEVER if stage is Stage.WRITING else 0}))
    world.rank.staging.looks.append(NEVER if stage is Stage.GATHERING else 0)
    world.step((prompt, 9))
    until(world, stage)
    world.writer.fail_all("the prefill engine shuts down")
    assert world.writer.drain(0.01) >= 1


def test_the_writer_polls_often_while_writes_are_staged() -> None:
    world, prompt, _ = gathering()
    world.rank.staging.looks.extend([NEVER] * 3)
    world.step((prompt, 9))
    assert staged(world)
    assert world.sleep_s is not None
    assert world.sleep_s <= 5e-4
    assert world.writer.writes_in_flight("p-1")
    assert world.writer.engines_in_flight == {"D"}
