"""The writer with staging memory: bytes arrive by way of rings, and every span of them comes back in the end."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import pytest

from layerpush.core.wire import Registration
from layerpush.prefill.writer import WRITE_POLL_S
from layerpush.telemetry.trace_records import PushRecord
from layerpush.transport.base import Route, TransportError
from layerpush.transport.packing import strategy
from layerpush.transport.packing.calibration import SCRATCH_PIECES
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.packer import UNPACK_RETRY_S, Stage
from tests.support.fake_transport import FakeTransport, Faults
from tests.unit.packing_rig import PackingRig, UnpackingDecoder
from tests.unit.writer_rig import Prompt

TOKENS = 22
NEVER = 10**6


def story(
    packing: Literal["gather", "packed"] = "packed", faults: Faults | None = None, **details: float
) -> tuple[PackingRig, Prompt, UnpackingDecoder, Registration]:
    """A prompt in scattered blocks, which its decode engine registered first."""
    rig = PackingRig(packing, faults, **details)
    prompt = Prompt("p-1", TOKENS, [5, 1, 8, 3, 12, 10, 20, 22])
    decoder = rig.unpacking()
    wanted = rig.host.pending[prompt.name] = rig.asks(prompt, decoder)
    return rig, prompt, decoder, wanted


def arrived(rig: PackingRig, prompt: Prompt, decoder: UnpackingDecoder, wanted: Registration) -> PushRecord:
    """The record of a push that ends well: D has P's bytes, and no other bytes change."""
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    assert decoder.holds(prompt, wanted, rig.layers)
    assert decoder.untouched(rig.layers, but=wanted.local_block_ids[0])
    over(rig, prompt, decoder, wanted)
    (record,) = rig.trace.records
    return record


def over(rig: PackingRig, prompt: Prompt, decoder: UnpackingDecoder, wanted: Registration) -> None:
    """The request is over, and all memory is free."""
    if not rig.host.released:
        rig.finish(prompt)
    rig.settle()
    if wanted.request_id in decoder.awaited:
        decoder.reuse(wanted)
    rig.assert_clean()
    rig.assert_unpacked(decoder)
    assert rig.host.released == ["p-1"]


@pytest.mark.parametrize(("packing", "plan"), [("packed", "packed"), ("gather", "gathered")])
def test_packed_bytes_arrive_through_the_rings(packing: Literal["gather", "packed"], plan: str) -> None:
    rig, prompt, decoder, wanted = story(packing, Faults(hold_writes={1: 9, 4: 5}))
    for _ in range(3):
        rig.step((prompt, 9))
        rig.settle()
    record = arrived(rig, prompt, decoder, wanted)
    assert {write.plan for write in record.writes} == {plan}
    for write in record.writes:
        assert write.t_landed is not None
        assert write.t_post <= write.t_posted <= write.t_landed
    assert rig.totals.writes == len(record.writes)


@pytest.mark.parametrize(("limit", "parts"), [(96, 1), (48, 2), (32, 3)])
def test_an_oversized_write_is_packed_in_parts(limit: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has six blocks. A part of it is held up for longer than the parts behind it."""
    monkeypatch.setattr(strategy, "MAX_PACKED_BYTES", limit)
    rig, prompt, decoder, wanted = story(faults=Faults(hold_writes={0: 9, 1: 5}))
    rig.step((prompt, TOKENS))
    record = arrived(rig, prompt, decoder, wanted)
    first = [write for write in record.writes if write.layers == (0, 0)]
    assert [(write.plan, write.bytes) for write in first] == [("packed", 96 // parts)] * parts


def test_a_lost_part_ends_the_push_after_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "MAX_PACKED_BYTES", 32)
    rig, prompt, decoder, wanted = story(faults=Faults(fail_writes={1}, hold_writes={0: 9, 2: 9}))
    rig.step((prompt, TOKENS))
    rig.settle()
    assert decoder.told() != [[b"d-p-1:1"]]
    over(rig, prompt, decoder, wanted)
    assert rig.trace.records[0].outcome == "failed"


def test_the_completion_follows_the_scatter_of_the_last_block() -> None:
    rig, prompt, decoder, wanted = story()
    decoder.staging.looks.extend([NEVER])
    rig.step((prompt, TOKENS))
    rig.settle()
    assert decoder.told() == [[]]
    assert rig.writer.writes_in_flight("p-1")
    decoder.unpacker._running[0].copies._running[0]._looks = 0  # type: ignore[attr-defined]
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    assert decoder.holds(prompt, wanted, rig.layers)
    over(rig, prompt, decoder, wanted)


def describe_scratch(*ends: FakeTransport) -> None:
    """Give each end the memory that a calibration writes from and to."""
    size = SCRATCH_PIECES * PIECE_BYTES
    for end in ends:
        end.describe("scratch", np.zeros(size, np.uint8), range(0, size, PIECE_BYTES), PIECE_BYTES)


def test_calibration_writes_do_not_block_a_push() -> None:
    """The push waits for the timed WRITE on the wire; the next timed WRITE begins after the push."""
    rig = PackingRig("auto", Faults(hold_writes={0: NEVER}))
    prompt = Prompt("p-1", TOKENS, [5, 1, 8, 3, 12, 10, 20, 22])
    decoder = rig.unpacking()
    rig.host.pending[prompt.name] = wanted = rig.asks(prompt, decoder)
    describe_scratch(rig.p, decoder.ends[0])
    rig.strategy.calibrate("D", rig.p, Route("D-0", 0, "scratch", "scratch"))

    def timed() -> int:
        return sum(write.route.remote_descriptors == "scratch" for write in rig.fabric.writes)

    rig.writer.turn()
    assert (timed(), rig.strategy.engines_in_flight) == (1, {"D"})
    rig.step((prompt, TOKENS))
    rig.fabric.writes[0].polls_left = 1
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    assert (timed(), rig.strategy.engines_in_flight, rig.strategy.is_busy) == (1, set(), True)
    assert rig.sleep_s != WRITE_POLL_S, "no WRITE to poll"
    over(rig, prompt, decoder, wanted)
    deadline = time.monotonic() + 10
    while rig.strategy.is_busy and time.monotonic() < deadline:
        assert rig.sleep_s == WRITE_POLL_S
        rig.writer.turn()
    assert timed() > 10
    assert rig.strategy.costs_to("D") != Costs()


@pytest.mark.parametrize("lacks", ["room on P", "a window", "room in the window"])
def test_without_ring_space_writes_go_directly(lacks: str) -> None:
    rig, prompt, decoder, wanted = story()
    taken = rig.staging.ring.take(rig.staging.ring.capacity_bytes) if lacks == "room on P" else None
    if lacks == "a window":
        decoder.unpacker.close(wanted.request_id)
        wanted = rig.host.pending[prompt.name] = super(PackingRig, rig).asks(prompt, decoder)
    rig.step((prompt, 4))
    if lacks == "room in the window":
        spans = rig.writer._pushes["p-1"]._link.window.spans  # type: ignore[union-attr]
        rig.settle()
        assert spans.take(spans.capacity_bytes) == 0
    rig.step((prompt, TOKENS))
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    assert decoder.holds(prompt, wanted, rig.layers)
    if taken is not None:
        rig.staging.ring.give(taken)
    over(rig, prompt, decoder, wanted)
    assert "direct" in {write.plan for write in rig.trace.records[0].writes}


def test_a_push_does_not_wait_for_the_spans_of_another() -> None:
    """The first request's WRITEs hold all of P's ring, and do not end."""
    rig, first, decoder, _ = story(pieces=3, faults=Faults(hold_writes={0: NEVER, 1: NEVER, 2: NEVER}))
    rig.step((first, 4))
    assert rig.staging.ring.used_bytes == rig.staging.ring.capacity_bytes
    second, other = Prompt("p-2", TOKENS, list(range(30, 38))), rig.unpacking("E")
    wanted = rig.host.pending["p-2"] = rig.asks(second, other, 20)
    rig.step((second, TOKENS))
    rig.settle()
    assert other.told() == [[b"d-p-2:1"]]
    assert other.holds(second, wanted, rig.layers)
    assert decoder.told() == [[]]


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.WRITING, Stage.UNPACKING])
def test_after_a_preemption_the_new_epoch_waits_for_the_old_writes(stage: Stage) -> None:
    rig, prompt, decoder, wanted = story(faults=Faults(hold_writes={0: 30, 1: 3, 2: 3}))
    rig.staging.looks.append(40 if stage is Stage.GATHERING else 0)
    rig.step((prompt, 9))
    rig.until(stage)
    old = rig.staged
    rig.scribble(prompt.table)
    prompt.preempted(list(range(30, 38)))
    rig.step((prompt, 12), preempted=[prompt])
    while any(staged.stage is not Stage.OVER for staged in old):
        assert len(rig.fabric.writes) <= rig.layers
        rig.round()
    rig.settle(80)
    rig.step((prompt, 12))
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    assert decoder.holds(prompt, wanted, rig.layers)
    over(rig, prompt, decoder, wanted)
    assert rig.trace.records[0].epoch == 1


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.WRITING, Stage.UNPACKING])
@pytest.mark.parametrize("how", ["aborted", "cancelled"])
def test_a_push_drains_after_its_last_write_is_unpacked(stage: Stage, how: str) -> None:
    rig, prompt, decoder, wanted = story(faults=Faults(hold_writes=dict.fromkeys(range(9), 5)))
    rig.staging.looks.extend([5] * 9)
    decoder.staging.looks.extend([5] * 9)
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
        rig.round()
    rig.settle()
    ((_, drained, cancelled),) = rig.host.reported_failures()
    assert drained
    assert cancelled == (how == "cancelled")
    assert decoder.told() == [[]]
    if how == "cancelled":
        rig.finish(prompt)
    rig.settle()
    rig.assert_clean()
    rig.assert_unpacked(decoder)


@pytest.mark.parametrize(("side", "fate"), [("P", "broken"), ("D", "refused"), ("D", "broken")])
@pytest.mark.parametrize("which", [0, 2])
def test_a_failed_copy_ends_the_push(fate: str, side: str, which: int) -> None:
    rig, prompt, decoder, wanted = story()
    (rig.staging if side == "P" else decoder.staging).fates.extend([*[None] * which, fate])
    rig.step((prompt, 9))
    rig.settle()
    rig.step((prompt, 13))
    rig.settle()
    assert decoder.told() == [[]]
    reason, drained, _ = rig.host.reported_failures()[-1]
    assert drained
    assert ("gathered" if side == "P" else "did not unpack") in reason
    over(rig, prompt, decoder, wanted)


@pytest.mark.parametrize("packing", ["gather", "packed"])
def test_a_write_goes_directly_if_its_copy_does_not_begin(
    packing: Literal["gather", "packed"], caplog: pytest.LogCaptureFixture
) -> None:
    rig, prompt, decoder, wanted = story(packing)
    rig.staging.fates.extend(["refused", "refused"])
    rig.step((prompt, 9))
    rig.settle()
    rig.step((prompt, 13))
    rig.settle()
    rig.finish(prompt)
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    (record,) = rig.trace.records
    assert [write.plan for write in record.writes][:2] == ["direct", "direct"]
    assert {write.plan for write in record.writes[2:]} == {"gathered" if packing == "gather" else "packed"}
    (line,) = [one for one in caplog.records if "WRITEs go directly" in one.getMessage()]
    assert "RuntimeError: no memory for block ids" in line.getMessage()
    over(rig, prompt, decoder, wanted)


def test_a_refused_unpack_ends_the_push() -> None:
    rig, prompt, decoder, wanted = story()
    rig.step((prompt, 9))
    rig.until(Stage.UNPACKING)
    decoder.awaited.clear()
    rig.settle()
    assert rig.host.reported_failures()[-1][1]
    decoder.awaited[wanted.request_id] = wanted
    over(rig, prompt, decoder, wanted)
    assert "did not unpack" in (rig.trace.records[0].reason or "")


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.WRITING, Stage.UNPACKING])
def test_the_death_of_the_decode_engine_ends_the_push(stage: Stage) -> None:
    rig, prompt, _, _ = story(
        faults=Faults(hold_writes=dict.fromkeys(range(9), NEVER if stage is Stage.WRITING else 1))
    )
    rig.staging.looks.extend([5] * 9)
    rig.step((prompt, 9))
    rig.until(stage)
    rig.fabric.kill("D-0")
    for _ in range(3):
        rig.now += UNPACK_RETRY_S
        rig.settle(10)
    rig.finish(prompt)
    rig.settle()
    rig.assert_clean()
    assert set(rig.host.lost) == {"D"}
    assert rig.host.released == ["p-1"]


def test_a_missing_unpack_answer_makes_the_write_overdue() -> None:
    rig, prompt, decoder, wanted = story(write_timeout_s=0.0)
    decoder.answers = False
    rig.step((prompt, 9))
    rig.settle()
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [False]
    assert rig.writer.writes_in_flight("p-1")
    decoder.answers = True
    rig.now += UNPACK_RETRY_S
    rig.settle()
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [False, True]
    over(rig, prompt, decoder, wanted)


@pytest.mark.parametrize("packing", ["packed", "gather"])
def test_a_failed_release_of_a_handle_blocks_no_other(
    packing: Literal["gather", "packed"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL refuses three times; a released handle is not released again."""
    rig, prompt, decoder, wanted = story(packing)
    release, refusals = rig.p.release, iter(range(3))

    def unwilling(handle: object) -> None:
        if next(refusals, None) is not None:
            raise TransportError("NIXL is busy")
        release(handle)

    monkeypatch.setattr(rig.p, "release", unwilling)
    monkeypatch.setattr("layerpush.prefill.writer.RELEASE_RETRY_S", 0.0)
    rig.step((prompt, TOKENS))
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    over(rig, prompt, decoder, wanted)
    assert not rig.writer._writes.has_leftovers


def test_shutdown_waits_for_running_unpacks() -> None:
    rig, prompt, decoder, wanted = story()
    rig.step((prompt, 9))
    rig.until(Stage.UNPACKING)
    rig.writer.fail_all("the prefill engine shuts down")

    def listen() -> None:
        decoder.turn()
        rig.hear()

    assert rig.writer.drain(30.0, listen) == 0
    assert rig.host.reported_failures()[-1][1]
    over(rig, prompt, decoder, wanted)


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.WRITING, Stage.UNPACKING])
def test_shutdown_abandons_endless_writes(stage: Stage) -> None:
    rig, prompt, decoder, _ = story(faults=Faults(hold_writes={0: NEVER if stage is Stage.WRITING else 0}))
    rig.staging.looks.append(NEVER if stage is Stage.GATHERING else 0)
    decoder.answers = False
    rig.step((prompt, 9))
    rig.until(stage)
    rig.writer.fail_all("the prefill engine shuts down")
    assert rig.writer.drain(0.01, lambda: None) >= 1


def test_unexpected_unpack_answers_change_nothing() -> None:
    rig, prompt, decoder, wanted = story()
    rig.step((prompt, 9))
    staged = rig.until(Stage.UNPACKING)
    for agent, number in [("E-0", staged.number), ("D-0", staged.number + 100), ("D-0", 2**63 - 1), ("D-0", 0)]:
        rig.packer.unpacked(agent, number, True)
    assert staged.stage is Stage.UNPACKING
    rig.settle()
    for _ in range(2):
        rig.packer.unpacked("D-0", staged.number, False)
    rig.step((prompt, 13))
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1"]]
    over(rig, prompt, decoder, wanted)


def test_the_writer_polls_often_while_writes_are_staged() -> None:
    rig, prompt, _, _ = story()
    rig.staging.looks.extend([NEVER] * 3)
    rig.step((prompt, 9))
    assert rig.staged
    assert rig.sleep_s is not None
    assert rig.sleep_s <= 5e-4
    assert rig.writer.writes_in_flight("p-1")
    assert rig.writer.engines_in_flight == {"D"}


def test_an_engine_is_not_dropped_during_its_calibration() -> None:
    """It may be dropped before the first WRITE of the calibration, which waits until there is no push."""
    rig = PackingRig("auto", Faults(hold_writes={0: NEVER}))
    describe_scratch(rig.p, rig.unpacking().ends[0])
    rig.strategy.calibrate("D", rig.p, Route("D-0", 0, "scratch", "scratch"))
    assert (rig.writer.engines_in_flight, rig.strategy.engines_to_measure) == (set(), {"D"})
    rig.writer.turn()
    assert rig.writer.engines_in_flight == {"D"}


@pytest.mark.parametrize("how", ["aborted", "cancelled", "failed"])
@pytest.mark.parametrize("packing", ["packed", "gather"])
def test_gathered_bytes_of_an_ended_push_are_not_posted(packing: Literal["gather", "packed"], how: str) -> None:
    """Its blocks may have been given to another prompt meanwhile."""
    rig, prompt, decoder, wanted = story(packing)
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
    rig.assert_unpacked(decoder)
