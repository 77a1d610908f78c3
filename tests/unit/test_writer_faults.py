"""The writer's bad days: lost WRITEs, dead peers, preemptions, aborts. D gets no completion for missing bytes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from unittest.mock import Mock

import msgspec
import pytest

from layerpush.core.wire import Registration
from layerpush.transport.connections import TRIES
from tests.support.fake_transport import Faults
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

TOKENS = 22
NEVER = 10**6


def registered(
    faults: Faults | None = None, write_timeout_s: float = math.inf, ranks: int = 1, tokens: int = TOKENS
) -> tuple[ScriptedWorld, ScriptedRequest, Registration]:
    """A prompt that its decode engine D registered first. Finished without a step, it is pushed whole by vLLM."""
    world = ScriptedWorld(faults, write_timeout_s=write_timeout_s)
    prompt = ScriptedRequest("p-1", tokens, list(range(1, 9)))
    return world, prompt, world.registers(prompt, world.decoder(ranks=ranks))


@pytest.mark.parametrize(
    ("faults", "ranks"),
    [
        (Faults(fail_posts={4}), 1),
        (Faults(fail_writes={4}), 1),
        (Faults(fail_posts={0, 1, 2}), 1),
        (Faults(hold_writes={4: 5}, fail_writes={4}), 1),
        (Faults(fail_posts={3}), 2),
    ],
    ids=["a post that fails", "a write that fails", "no post ever", "a write that fails in the middle", "of one rank"],
)
def test_a_lost_write_ends_the_push_without_a_completion(faults: Faults, ranks: int) -> None:
    world, prompt, _ = registered(faults, ranks=ranks)
    for _ in range(3):
        world.step((prompt, 9))
    world.settle()
    posted = len(world.fabric.writes)
    assert world.rank.released == [], "the scheduler has not finished the request"
    (*warnings, (reason, drained, _)) = world.reported_failures()
    assert drained
    assert warnings in ([], [(reason, False, False)])
    world.finish(prompt)
    world.settle()

    assert world.d.received() == [[]] * ranks
    assert world.rank.released == ["p-1"], "no D will ask for its blocks any more"
    assert len(world.rank.failures) == len(warnings) + 1
    assert world.rank.endings == {"p-1": [reason]}
    assert len(world.fabric.writes) == posted
    world.assert_clean()
    assert [record.outcome for record in world.trace.records] == ["failed"]
    assert world.trace.records[0].reason
    assert world.totals.outcomes == {"failed": 1}


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
def test_the_end_of_a_push_survives_whatever_raises_on_its_way(fails: bool) -> None:
    """Each call on the way raises once. D hears of the end, P's blocks come back, and no table keeps the push."""

    def run(number: int | None) -> tuple[ScriptedWorld, list[str]]:
        world, prompt, _ = registered(Faults(fail_posts={4}) if fails else None)
        services, calls = world.writer._services, list[str]()

        def noted(name: str, call: Callable[..., Any], *args: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == number:
                raise MemoryError(name)
            return call(*args)

        parts: list[tuple[object, tuple[str, ...]]] = [
            (services.meter, ("closed", "landed", "lost")),
            (services.trace, ("write_record",)),
            (services.links, ("complete",)),
            (services.links.worker.transfer_stats, ("pushed", "failed")),
            (world.rank, ("push_ended",)),
        ]
        with pytest.MonkeyPatch.context() as monkeypatch:
            for part, names in parts:
                for name in names:
                    monkeypatch.setattr(part, name, partial(noted, name, getattr(part, name)))
            for _ in range(3):
                world.step((prompt, 9))
            world.settle()
            world.finish(prompt)
            world.settle()
        return world, calls

    for number, call in enumerate(run(None)[1]):
        world, _ = run(number)
        completions = sum(map(len, world.d.received()))
        assert completions + sum(drained for _, drained, _ in world.reported_failures()) == 1, (number, call)
        assert world.rank.released == ["p-1"], (number, call)
        assert len(world.writer) == 0, (number, call)
        assert len(world.rank.endings.get("p-1", ())) == (call != "push_ended"), (number, call)


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_defect_at_the_end_of_a_write_fails_and_releases_the_push(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WRITE has left the wire, so the session must get its end now: it is not polled again."""
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    if not whole:
        world.registers(prompt)
    release, defects = world.p.release, [ValueError("a defect")]

    def broken(handle: object) -> None:
        release(handle)
        if defects:
            raise defects.pop()

    monkeypatch.setattr(world.p, "release", broken)
    for _ in range(3):
        world.step((prompt, 9))
    if whole:
        world.registers(prompt)
    world.finish(prompt)
    world.settle()
    assert not defects
    assert world.d.received() == [[]]
    assert world.rank.released == ["p-1"]
    assert world.reported_failures()[-1][1], "D gets a drained failure"
    assert world.rank.endings == {"p-1": ["ValueError: a defect"]}
    assert len(world.writer) == 0


@pytest.mark.parametrize("plan", ["off", "gather"])
def test_a_peer_death_during_writes_ends_the_push(plan: Literal["off", "gather"]) -> None:
    held = dict.fromkeys(range(9), NEVER)
    world, prompt = (
        ScriptedWorld(Faults(hold_writes=held), plan=plan),
        ScriptedRequest("p-1", TOKENS, [5, 1, 8, 3, 12, 10]),
    )
    world.registers(prompt)
    world.step((prompt, 9))
    world.settle(2)
    world.fabric.kill("D-0")
    world.settle(5)
    world.step((prompt, 9))
    world.step((prompt, 9))
    world.finish(prompt)
    world.settle(5)
    world.assert_clean()
    assert world.rank.released == ["p-1"]
    assert set(world.rank.disconnected) == {"D"}
    assert [drained for _, drained, _ in world.reported_failures()] == [False, True]


def test_a_peer_death_before_the_completion_ends_the_push() -> None:
    world, prompt, _ = registered()
    world.fabric.faults.at["notify", 0] = lambda fabric: fabric.kill("D-0")
    world.step((prompt, TOKENS))
    world.settle()
    world.finish(prompt)
    world.assert_clean()
    (record,) = world.trace.records
    assert record.outcome == "failed"
    assert "completion could not be sent" in (record.reason or "")
    assert world.rank.released == ["p-1"]
    assert world.rank.disconnected == ["D"]
    assert world.reported_failures() == [(record.reason, True, False)]


@pytest.mark.parametrize("connected", [True, False])
def test_an_unreachable_decode_engine_fails_the_push(connected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or when the handshake in the background is over."""
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    world.registers(prompt, world.decoder(connected=connected))
    error = RuntimeError("a bug of vLLM")
    monkeypatch.setattr(world.rank, "discover_link", Mock(side_effect=error))
    world.step((prompt, 9))
    world.step((prompt, 13))
    world.finish(prompt)
    world.settle()
    assert world.fabric.writes == []
    world.assert_clean()
    assert str(error) in (world.trace.records[0].reason or "")
    assert world.reported_failures() == [(world.trace.records[0].reason, True, False)]
    assert world.rank.released == ["p-1"]


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_failed_handshake_fails_the_push(whole: bool) -> None:
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    world.registers(prompt, world.decoder(connected=False))
    world.rank.handshake = Mock(side_effect=ConnectionRefusedError("connection refused"))
    if not whole:
        world.step((prompt, TOKENS))
    world.finish(prompt)
    for _ in range(TRIES):
        world.now += 60.0
        world.turn()
    ((reason, drained, _),) = world.reported_failures()
    assert "connection refused" in reason
    assert drained
    assert world.rank.released == ["p-1"]
    world.assert_clean()


def test_a_registration_for_too_many_blocks_fails_the_push(caplog: pytest.LogCaptureFixture) -> None:
    """A peer's mistake is no defect of ours: one line, and no traceback."""
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    world.registers(prompt, wanted=len(prompt.blocks) + 1)
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        world.step((prompt, TOKENS))
        world.finish(prompt)
        world.settle()
    (record,) = caplog.records
    assert record.exc_info is None
    ((reason, drained, _),) = world.reported_failures()
    assert "the registration wants [7] blocks of a prompt of [6]" in reason
    assert drained
    assert (world.fabric.writes, world.rank.released) == ([], ["p-1"])
    world.assert_clean()


def test_the_end_of_an_unpushed_request_is_reported() -> None:
    """A decode engine may have registered for it."""
    world, prompt, _ = registered()
    world.abort(prompt)
    world.settle()
    assert world.rank.endings == {"p-1": ["aborted"]}


def test_an_unwanted_request_is_released_after_prefill() -> None:
    world, prompt, wanted = registered()
    world.cancel(wanted)
    world.step((prompt, TOKENS))
    assert world.rank.released == []
    world.finish(prompt)
    assert (world.rank.released, world.rank.failures, world.fabric.writes) == (["p-1"], [], [])
    assert [record.outcome for record in world.trace.records] == ["cancelled"]
    world.assert_clean()


@pytest.mark.parametrize(
    ("request_id", "key"),
    [("p-1", ("D", "d-other")), ("p-1", ("E", "d-p-1")), ("p-other", ("D", "d-p-1"))],
    ids=["another request", "another engine", "no push"],
)
def test_an_unrelated_cancel_disturbs_no_push(request_id: str, key: tuple[str, str]) -> None:
    world, prompt, wanted = registered(Faults(hold_writes={1: 10}))
    world.step((prompt, 9))
    assert world.writer.cancel(request_id, key)
    world.step((prompt, 13))
    world.settle()
    world.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("on_the_wire", [True, False])
def test_a_cancel_stops_writes_and_is_reported_after_the_wire_drains(on_the_wire: bool) -> None:
    world, prompt, wanted = registered(Faults(hold_writes={1: 10}))
    world.step((prompt, 9))
    if not on_the_wire:
        world.settle()
    posted = len(world.fabric.writes)
    assert not world.writer.cancel("p-1", wanted.key), "a report follows"
    assert len(world.rank.failures) == (not on_the_wire)
    assert world.writer.cancel("p-1", wanted.key) is not on_the_wire
    world.step((prompt, 9))
    world.settle()
    assert world.writer.cancel("p-1", wanted.key)
    world.step((prompt, 9))
    world.finish(prompt)
    world.settle()

    assert world.d.received() == [[]]
    assert [(drained, cancelled) for _, drained, cancelled in world.reported_failures()] == [(True, True)]
    assert len(world.fabric.writes) == posted
    assert world.rank.released == ["p-1"]
    assert [record.outcome for record in world.trace.records] == ["cancelled"]
    world.assert_clean()


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_cancel_during_the_handshake_prevents_every_write(whole: bool) -> None:
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    decoder = world.decoder(connected=False)
    decoder.frozen = True
    wanted = world.registers(prompt, decoder)
    if whole:
        world.finish(prompt)
    else:
        world.step((prompt, 9))
    world.cancel(wanted)
    assert [drained for _, drained, _ in world.reported_failures()] == [True]
    decoder.frozen = False
    if not whole:
        world.step((prompt, 13))
        world.finish(prompt)
    world.settle()
    assert world.fabric.writes == []
    assert world.rank.released == ["p-1"]
    world.assert_clean()


def test_a_cancel_during_vllms_write_prevents_another() -> None:
    """A handshake that vLLM had begun for another rank ends later."""
    world, prompt, wanted = registered(Faults(hold_writes={0: 5}))
    blocks = prompt.blocks
    world.finish(prompt)
    world.cancel(wanted)
    assert (world.rank.failures, world.rank.released) == ([], [])
    world.writer.push_deferred("p-1", (blocks,), msgspec.to_builtins(wanted))
    assert len(world.fabric.writes) == 1
    world.settle()
    assert [(drained, cancelled) for _, drained, cancelled in world.reported_failures()] == [(True, True)]
    assert world.rank.released == ["p-1"]
    world.assert_clean()


@pytest.mark.parametrize(
    "end", ["it fails", "it is cancelled", "it is overdue", "it is aborted", "it is evicted", "it is aborted and fails"]
)
def test_the_loss_of_a_peer_is_reported_before_its_whole_push_drains(end: str) -> None:
    """A drained failure goes over the connection, unless this is known to be lost."""
    world, prompt, wanted = registered(Faults(hold_writes={0: 5}), write_timeout_s=0.0 if "overdue" in end else 60.0)
    world.finish(prompt)
    if "fails" in end:
        world.writer.fail("p-1", "no route to rank 1")
    if "cancelled" in end:
        assert not world.writer.cancel("p-1", wanted.key)
    if "aborted" in end:
        world.abort(prompt)
    if "evicted" in end:
        world.writer.request_ended("p-1")
    assert [drained for _, drained, _ in world.reported_failures()] in ([], [False])
    world.fabric.kill("D-0")
    world.settle()
    assert world.rank.disconnected == ["D"]
    assert world.reported_failures()[-1][1]
    world.assert_clean()


def test_a_registration_taken_at_the_end_of_its_push_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a decode engine would wait for a push that never comes."""
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)))
    wanted = world.asks(prompt, world.decoder())
    world.step((prompt, TOKENS))

    def taken_as_the_push_ends(request_id: str, _: float) -> Registration:
        world.writer.fail(request_id, "it ends here")
        return wanted

    monkeypatch.setattr(world.rank, "take_registration", taken_as_the_push_ends)
    world.finish(prompt)
    assert world.reported_failures() == [("it ends here", True, False)]
    assert world.rank.released == ["p-1"]
    world.assert_clean()


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_hanging_write_fails_the_push_and_keeps_the_blocks(whole: bool) -> None:
    world, prompt, _ = registered(Faults(hold_writes={0: 20, 1: 20}), write_timeout_s=0.0)
    if not whole:
        world.step((prompt, 9))
    world.finish(prompt)
    world.turn()
    (warning,) = world.reported_failures()
    assert warning == ("a WRITE is on the wire for more than 0 s (write_timeout_s)", False, False)
    posted = len(world.fabric.writes)
    while world.writer.writes_in_flight("p-1"):
        assert world.rank.released == []
        assert len(world.rank.failures) == 1
        world.turn()
    assert [drained for _, drained, _ in world.reported_failures()] == [False, True]
    assert world.rank.released == ["p-1"]
    assert len(world.fabric.writes) == posted
    assert world.d.received() == [[b"d-p-1:1"] if whole else []], "vLLM's WRITE carries its own completion"
    world.assert_clean()


def test_a_write_within_its_timeout_completes() -> None:
    world, prompt, _ = registered(Faults(hold_writes={1: 20}), write_timeout_s=60.0, tokens=8)
    world.step((prompt, 8))
    world.settle()
    assert world.d.received() == [[b"d-p-1:1"]]


def test_a_lost_engine_fails_only_its_own_pushes() -> None:
    world = ScriptedWorld(Faults(hold_writes={0: 20, 5: 20}))
    prompts = {
        name: ScriptedRequest(f"p-{name}", 8, list(range(first, first + 8))) for first, name in ((1, "D"), (20, "E"))
    }
    for first, (name, prompt) in enumerate(prompts.items()):
        world.registers(prompt, world.decoder(name), first=10 * first)
    completed = ScriptedRequest("p-completed", 4, list(range(40, 48)))
    world.registers(completed, world.d, first=30)
    world.step((completed, 4))
    world.settle()
    assert (world.writer.engines_in_use, world.writer.engines_in_flight) == ({"D"}, set())
    world.step(*((prompt, 8) for prompt in prompts.values()))
    world.writer.fail_engine("D", "it is gone")
    world.settle()

    assert world.reported_failures("p-D")[-1] == ("it is gone", True, False)
    assert world.reported_failures("p-E") == world.reported_failures("p-completed") == []
    assert world.side("E").received() == [[b"d-p-E:1"]]
    assert world.writer._pushes["p-D"].session.failure == "it is gone"
    assert world.writer._pushes["p-E"].session.failure is None
    for prompt in (completed, *prompts.values()):
        world.finish(prompt)
    assert sorted(world.rank.released) == ["p-D", "p-E", "p-completed"]
    assert {record.request_id: record.outcome for record in world.trace.records}["p-completed"] == "completed"
    world.assert_clean()


def test_a_lost_engine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world, prompt, _ = registered(Faults(hold_writes={0: 20}))
    world.finish(prompt)
    with caplog.at_level(logging.ERROR, "vllm.layerpush"):
        for _ in range(5):
            world.writer.fail_engine("D", "it is gone")
    assert len(caplog.records) == 1


def test_shutdown_waits_for_writes_on_the_wire() -> None:
    world, prompt, _ = registered(Faults(hold_writes={0: 6, 1: 6}))
    world.step((prompt, 9))
    assert world.writer.drain(10.0) == 0
    assert not world.p._live
    assert not world.fabric.violations


def test_shutdown_gives_up_on_a_frozen_peer() -> None:
    world, prompt, _ = registered()
    world.fabric.freeze("D-0")
    world.step((prompt, 9))
    started = time.monotonic()
    assert world.writer.drain(0.2) == world.layers
    assert time.monotonic() - started < 5
    assert not world.p._live


def test_a_failed_write_of_vllm_is_reported_to_the_host() -> None:
    world, prompt, _ = registered(Faults(fail_writes={0}))
    world.finish(prompt)
    world.settle()
    assert world.rank.whole_writes_ended == [("p-1", False)]
    assert world.rank.transfer_stats.pushes == [], "vLLM counts its own WRITE"
    assert [drained for _, drained, _ in world.reported_failures()] == [True]
    assert world.rank.released == ["p-1"]
    world.assert_clean()
    assert world.trace.records[0].outcome == "failed"
