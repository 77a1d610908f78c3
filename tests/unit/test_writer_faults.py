"""The writer's bad days: lost WRITEs, dead peers, preemptions, aborts. D gets no completion for missing bytes."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import pytest

from layerpush.core.wire import Registration
from tests.support.fake_transport import Faults
from tests.unit.writer_rig import Prompt, Rig

TOKENS = 22
NEVER = 10**6


def registered(
    faults: Faults | None = None, write_timeout_s: float = math.inf, ranks: int = 1, tokens: int = TOKENS
) -> tuple[Rig, Prompt]:
    """A prompt that its decode engine D registered first. Finished without a step, it is pushed whole by upstream."""
    rig, prompt = Rig(faults, write_timeout_s=write_timeout_s), Prompt("p-1", tokens, list(range(1, 9)))
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder(ranks=ranks))
    return rig, prompt


def received(rig: Rig) -> list[list[bytes]]:
    return rig.decoders["D"].told()


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
    rig, prompt = registered(faults, ranks=ranks)
    for _ in range(3):
        rig.step((prompt, 9))
    rig.settle()
    posted = len(rig.fabric.writes)
    assert rig.host.released == [], "the scheduler has not finished the request"
    (*warnings, (reason, drained, _)) = rig.host.reported_failures()
    assert drained
    assert warnings in ([], [(reason, False, False)])
    rig.finish(prompt)
    rig.settle()

    assert received(rig) == [[]] * ranks
    assert rig.host.released == ["p-1"], "no D will ask for its blocks any more"
    assert len(rig.host.failures) == len(warnings) + 1
    assert rig.host.endings == {"p-1": [reason]}
    assert len(rig.fabric.writes) == posted
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["failed"]
    assert rig.trace.records[0].reason
    assert rig.totals.outcomes == {"failed": 1}


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_defect_at_the_end_of_a_write_fails_and_releases_the_push(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WRITE has left the wire, so the session must get its end now: it is not polled again."""
    rig, prompt = (Rig(), Prompt("p-1", TOKENS, list(range(1, 9)))) if whole else registered()
    decoder = rig.decoders.get("D") or rig.decoder()
    release, defects = rig.p.release, [ValueError("a defect")]

    def broken(handle: object) -> None:
        release(handle)
        if defects:
            raise defects.pop()

    monkeypatch.setattr(rig.p, "release", broken)
    for _ in range(3):
        rig.step((prompt, 9))
    if whole:
        rig.registers(prompt, decoder)
    rig.finish(prompt)
    rig.settle()
    assert not defects
    assert received(rig) == [[]]
    assert rig.host.released == ["p-1"]
    assert rig.host.reported_failures()[-1][1], "D gets a drained failure"
    assert rig.host.endings == {"p-1": ["ValueError: a defect"]}
    assert len(rig.writer) == 0


def test_a_peer_death_during_writes_ends_the_push() -> None:
    rig, prompt = registered(Faults(hold_writes={1: NEVER, 2: NEVER}))
    rig.step((prompt, 9))
    rig.fabric.kill("D-0")
    rig.settle(5)
    rig.step((prompt, 9))
    rig.step((prompt, 9))
    rig.finish(prompt)
    rig.settle(5)
    rig.assert_clean()
    assert rig.host.released == ["p-1"]
    assert set(rig.host.disconnected) == {"D"}
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [False, True]


def test_a_peer_death_before_the_completion_ends_the_push() -> None:
    rig, prompt = registered()
    rig.fabric.faults.at["notify", 0] = lambda fabric: fabric.kill("D-0")
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.finish(prompt)
    rig.assert_clean()
    (record,) = rig.trace.records
    assert record.outcome == "failed"
    assert "completion could not be sent" in (record.reason or "")
    assert rig.host.released == ["p-1"]
    assert rig.host.disconnected == ["D"]
    assert rig.host.reported_failures() == [(record.reason, True, False)]


@pytest.mark.parametrize("error", ["connection refused", RuntimeError("a bug of the host")])
@pytest.mark.parametrize("handshake", [None, "succeeds", "fails"])
def test_an_unreachable_decode_engine_fails_the_push(error: Exception | str, handshake: str | None) -> None:
    """At once, or when the handshake in the background is over."""
    rig, prompt = registered()
    rig.host.links["D"] = [error] if handshake is None else [None, error]
    rig.step((prompt, 9))
    if handshake == "succeeds":
        rig.host.connecting["p-1"](None, 0.0)
    elif handshake == "fails":
        for _ in range(2):  # a double report
            rig.host.connecting["p-1"](str(error), 0.0)
    rig.step((prompt, 13))
    rig.finish(prompt)
    rig.settle()
    assert rig.fabric.writes == []
    rig.assert_clean()
    assert str(error) in (rig.trace.records[0].reason or "")
    assert rig.host.reported_failures() == [(rig.trace.records[0].reason, True, False)]
    assert rig.host.released == ["p-1"]


def test_a_registration_for_too_many_blocks_fails_the_push(caplog: pytest.LogCaptureFixture) -> None:
    """A peer's mistake is no defect of ours: one line, and no traceback."""
    rig, prompt = registered()
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoders["D"], wanted=len(prompt.blocks) + 1)
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        rig.step((prompt, TOKENS))
        rig.finish(prompt)
        rig.settle()
    (record,) = caplog.records
    assert record.exc_info is None
    ((reason, drained, _),) = rig.host.reported_failures()
    assert "the registration wants [7] blocks of a prompt of [6]" in reason
    assert drained
    assert (rig.fabric.writes, rig.host.released) == ([], ["p-1"])
    rig.assert_clean()


def test_an_abort_in_flight_drains_without_a_completion() -> None:
    rig, prompt = registered(Faults(hold_writes={1: 10}))
    rig.step((prompt, 9))
    rig.abort(prompt)
    rig.writer.turn()
    assert "p-1" in rig.writer, "until its WRITEs have ended"
    assert rig.writer.writes_in_flight("p-1")
    posted = len(rig.fabric.writes)
    rig.settle()

    assert received(rig) == [[]]
    assert rig.host.reported_failures() == [("aborted", True, False)]
    assert rig.host.endings == {"p-1": ["aborted"]}
    assert rig.host.released == [], "the scheduler has freed the blocks itself"
    assert len(rig.fabric.writes) == posted
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]


def test_an_aborted_and_repeated_request_is_pushed() -> None:
    rig, prompt = registered()
    wanted = rig.host.pending[prompt.name]
    rig.step((prompt, 9))
    rig.abort(prompt)
    rig.settle()
    assert rig.host.reported_failures() == [("aborted", True, False)]

    again = Prompt("p-1", TOKENS, list(range(20, 28)))
    rig.decoders["D"].hand_out(wanted)
    rig.host.pending["p-1"] = wanted
    rig.step((again, TOKENS))
    rig.settle()
    rig.assert_delivered(again, wanted)


@pytest.mark.parametrize("completed_first", [True, False])
def test_only_an_unfinished_push_is_reported_as_failed(completed_first: bool) -> None:
    rig, prompt = registered(None if completed_first else Faults(hold_writes={2: 20}))
    rig.step((prompt, TOKENS))
    if completed_first:
        rig.settle()
    rig.abort(prompt)
    rig.settle()
    assert rig.host.reported_failures() == ([] if completed_first else [("aborted", True, False)])
    assert received(rig) == [[b"d-p-1:1"] if completed_first else []]


def test_the_end_of_an_unpushed_request_is_reported() -> None:
    """A decode engine may have registered for it."""
    rig, prompt = registered()
    rig.abort(prompt)
    rig.settle()
    assert rig.host.endings == {"p-1": ["aborted"]}
    assert "p-1" in rig.host.pending


KEY = ("D", "d-p-1")


@pytest.mark.parametrize("on_the_wire", [True, False])
def test_a_cancel_stops_writes_and_is_reported_after_the_wire_drains(on_the_wire: bool) -> None:
    rig, prompt = registered(Faults(hold_writes={1: 10}))
    rig.step((prompt, 9))
    if not on_the_wire:
        rig.settle()
    posted = len(rig.fabric.writes)
    assert not rig.writer.cancel("p-1", KEY)
    reason = "the decode engine cancelled its registration"
    assert rig.host.reported_failures() == ([] if on_the_wire else [(reason, True, True)])
    assert rig.writer.cancel("p-1", KEY) is not on_the_wire
    rig.step((prompt, 9))
    rig.settle()
    assert rig.host.reported_failures() == [(reason, True, True)]
    assert rig.writer.cancel("p-1", KEY)
    rig.step((prompt, 9))
    rig.finish(prompt)
    rig.settle()

    assert received(rig) == [[]]
    assert len(rig.host.failures) == 1
    assert len(rig.fabric.writes) == posted
    assert rig.host.released == ["p-1"]
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]
    rig.assert_clean()


def test_a_cancel_before_the_request_releases_it_after_prefill() -> None:
    rig, prompt = registered()
    rig.host.pending.clear()
    rig.host.unwanted = {"p-1"}
    rig.step((prompt, TOKENS))
    assert rig.host.released == []
    rig.finish(prompt)
    rig.settle()
    assert (rig.host.released, rig.host.failures, rig.fabric.writes) == (["p-1"], [], [])
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]
    rig.assert_clean()


def test_a_new_registration_after_an_early_cancel_is_pushed() -> None:
    rig, prompt = registered()
    rig.host.unwanted = {"p-1"}
    rig.finish(prompt)
    rig.settle()
    assert [outcome.outcome for outcome in rig.trace.records] == ["completed"]


def test_a_cancel_during_the_handshake_ends_the_push() -> None:
    rig, prompt = registered()
    rig.host.links["D"] = [None]
    rig.step((prompt, 9))
    assert not rig.writer.cancel("p-1", KEY)
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [True]
    rig.host.connecting["p-1"](None, 0.0)
    rig.step((prompt, 13))
    rig.finish(prompt)
    rig.settle()
    assert rig.fabric.writes == []
    assert rig.host.released == ["p-1"]
    rig.assert_clean()


@pytest.mark.parametrize(
    ("request_id", "key"),
    [("p-1", ("D", "d-other")), ("p-1", ("E", "d-p-1")), ("p-other", KEY)],
    ids=["another request", "another engine", "no push"],
)
def test_an_unrelated_cancel_disturbs_no_push(request_id: str, key: tuple[str, str]) -> None:
    rig, prompt = registered(Faults(hold_writes={1: 10}))
    rig.step((prompt, 9))
    assert rig.writer.cancel(request_id, key)
    rig.step((prompt, 13))
    rig.settle()
    assert received(rig) == [[b"d-p-1:1"]]
    assert rig.host.failures == []


def test_a_cancel_after_the_end_finds_no_write_on_the_wire() -> None:
    rig, prompt = registered()
    rig.step((prompt, TOKENS))
    rig.settle()
    assert rig.writer.cancel("p-1", KEY)
    rig.finish(prompt)
    assert rig.writer.cancel("p-1", KEY)
    assert (rig.host.failures, rig.host.released) == ([], ["p-1"])
    assert received(rig) == [[b"d-p-1:1"]]
    rig.assert_clean()


def test_a_cancel_during_upstreams_write_waits_for_its_end() -> None:
    rig, prompt = registered(Faults(hold_writes={0: 5}))
    rig.finish(prompt)
    assert rig.writer.writes_in_flight("p-1")
    assert not rig.writer.cancel("p-1", KEY)
    assert (rig.host.failures, rig.host.released) == ([], [])
    wanted: Any = rig.host.whole["p-1"]
    rig.writer.push_deferred("p-1", (prompt.blocks,), wanted)
    assert len(rig.fabric.writes) == 1, "a handshake that was begun before may end now"
    rig.settle()
    assert [(drained, cancelled) for _, drained, cancelled in rig.host.reported_failures()] == [(True, True)]
    assert rig.host.released == ["p-1"]
    rig.assert_clean()


def test_a_cancel_before_upstreams_handshake_prevents_the_write() -> None:
    rig, prompt = registered()
    rig.host.posts_whole = False
    rig.finish(prompt)
    assert rig.writer._pushes["p-1"].is_whole
    assert not rig.writer.cancel("p-1", KEY)
    rig.host.connecting["p-1"](None, 0.0)
    rig.settle()
    assert rig.fabric.writes == []
    assert rig.host.released == ["p-1"]
    rig.assert_clean()


def test_a_failed_whole_push_ends_with_its_write() -> None:
    """One of upstream's ranks could be written to, the next could not."""
    rig, prompt = registered(Faults(hold_writes={0: 5}))
    rig.finish(prompt)
    rig.writer.fail("p-1", "no route to rank 1")
    assert rig.host.reported_failures() == [("no route to rank 1", False, False)]
    assert rig.host.released == []
    rig.settle()
    assert rig.host.reported_failures()[1:] == [("no route to rank 1", True, False)]
    assert rig.host.released == ["p-1"]
    assert rig.trace.records[0].outcome == "failed"
    rig.assert_clean()


@pytest.mark.parametrize(
    "end", ["it fails", "it is cancelled", "it is overdue", "it is aborted", "it is evicted", "it is aborted and fails"]
)
def test_the_loss_of_a_peer_is_reported_before_its_whole_push_drains(end: str) -> None:
    """A drained failure goes over the connection, unless this is known to be lost."""
    rig, prompt = registered(Faults(hold_writes={0: 5}), write_timeout_s=0.0 if "overdue" in end else 60.0)
    rig.finish(prompt)
    wanted = rig.host.whole["p-1"]
    if "fails" in end:
        rig.writer.fail("p-1", "no route to rank 1")
    if "cancelled" in end:
        assert not rig.writer.cancel("p-1", wanted.key)
    if "aborted" in end:
        rig.abort(prompt)
    if "evicted" in end:
        rig.writer.request_ended("p-1")
    assert [drained for _, drained, _ in rig.host.reported_failures()] in ([], [False])
    rig.fabric.kill("D-0")
    rig.settle()
    assert rig.host.disconnected == ["D"]
    assert rig.host.reported_failures()[-1][1]
    rig.assert_clean()


def test_a_registration_taken_at_the_end_of_its_push_is_answered() -> None:
    """Else a decode engine would wait for a push that never comes."""
    rig, prompt = registered()
    wanted = rig.host.pending.pop(prompt.name)
    rig.step((prompt, TOKENS))

    def taken_as_the_push_ends(request_id: str, _: float) -> Registration:
        rig.writer.fail(request_id, "it ends here")
        return wanted

    rig.host.take_registration = taken_as_the_push_ends  # type: ignore[method-assign]
    rig.finish(prompt)
    assert rig.host.reported_failures() == [("it ends here", True, False)]
    assert rig.host.released == ["p-1"]
    rig.assert_clean()


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_a_hanging_write_fails_the_push_and_keeps_the_blocks(whole: bool) -> None:
    rig, prompt = registered(Faults(hold_writes={0: 20, 1: 20}), write_timeout_s=0.0)
    if not whole:
        rig.step((prompt, 9))
    rig.finish(prompt)
    rig.writer.turn()
    (warning,) = rig.host.reported_failures()
    assert warning == ("a WRITE is on the wire for more than 0 s (write_timeout_s)", False, False)
    posted = len(rig.fabric.writes)
    while rig.writer.writes_in_flight("p-1"):
        assert rig.host.released == []
        assert len(rig.host.failures) == 1
        rig.writer.turn()
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [False, True]
    assert rig.host.released == ["p-1"]
    assert len(rig.fabric.writes) == posted
    assert received(rig) == [[]]
    rig.assert_clean()


@pytest.mark.parametrize("seconds", [60.0, math.inf])
def test_a_write_within_its_timeout_completes(seconds: float) -> None:
    rig, prompt = registered(Faults(hold_writes={1: 20}), seconds, tokens=8)
    rig.step((prompt, 8))
    rig.settle()
    assert received(rig) == [[b"d-p-1:1"]]


def test_a_lost_engine_fails_only_its_own_pushes() -> None:
    rig = Rig(Faults(hold_writes={0: 20, 5: 20}))
    prompts = {name: Prompt(f"p-{name}", 8, list(range(first, first + 8))) for first, name in ((1, "D"), (20, "E"))}
    for first, (name, prompt) in enumerate(prompts.items()):
        rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder(name), 10 * first)
    completed = Prompt("p-completed", 4, list(range(40, 48)))
    rig.host.pending["p-completed"] = rig.asks(completed, rig.decoders["D"], 30)
    rig.step((completed, 4))
    rig.settle()
    assert (rig.writer.engines_in_use, rig.writer.engines_in_flight) == ({"D"}, set())
    rig.step(*((prompt, 8) for prompt in prompts.values()))
    rig.writer.fail_engine("D", "it is gone")
    rig.settle()

    assert rig.host.reported_failures("p-D")[-1] == ("it is gone", True, False)
    assert rig.host.reported_failures("p-E") == rig.host.reported_failures("p-completed") == []
    assert rig.decoders["E"].told() == [[b"d-p-E:1"]]
    assert rig.writer._pushes["p-D"].session.failure == "it is gone"
    assert rig.writer._pushes["p-E"].session.failure is None
    for prompt in (completed, *prompts.values()):
        rig.finish(prompt)
    assert sorted(rig.host.released) == ["p-D", "p-E", "p-completed"]
    assert {record.request_id: record.outcome for record in rig.trace.records}["p-completed"] == "completed"
    rig.assert_clean()


def test_a_lost_engine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig, prompt = registered(Faults(hold_writes={0: 20}))
    rig.finish(prompt)
    with caplog.at_level(logging.ERROR, "vllm.layerpush"):
        for _ in range(5):
            rig.writer.fail_engine("D", "it is gone")
    assert len(caplog.records) == 1


def test_an_expired_lease_in_flight_drains_without_a_completion() -> None:
    rig, prompt = registered(Faults(hold_writes={2: 10}))
    rig.step((prompt, TOKENS))
    rig.finish(prompt)
    rig.expire(prompt)
    rig.settle()
    assert received(rig) == [[]]
    assert rig.host.released == []
    assert rig.host.reported_failures() == [("its lease ran out", True, False)]
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["failed"]


def test_shutdown_waits_for_writes_on_the_wire() -> None:
    rig, prompt = registered(Faults(hold_writes={0: 6, 1: 6}))
    rig.step((prompt, 9))
    assert rig.writer.drain(10.0) == 0
    assert not rig.p._live
    assert not rig.fabric.violations


def test_shutdown_gives_up_on_a_frozen_peer() -> None:
    rig, prompt = registered()
    rig.fabric.freeze("D-0")
    rig.step((prompt, 9))
    started = time.monotonic()
    assert rig.writer.drain(0.2) == rig.layers
    assert time.monotonic() - started < 5
    assert not rig.p._live


def test_a_failed_upstream_write_is_reported_to_the_host() -> None:
    rig, prompt = registered(Faults(fail_writes={0}))
    rig.finish(prompt)
    rig.settle()
    assert rig.host.whole_writes_ended == [("p-1", False)]
    assert rig.host.transfers == [], "vLLM counts its own WRITE"
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [True]
    assert rig.host.released == ["p-1"]
    rig.assert_clean()
    assert rig.trace.records[0].outcome == "failed"


def test_an_expired_lease_waits_for_upstreams_write() -> None:
    """The push stays in the table, so that its blocks count as being read and its handle is given back."""
    rig, prompt = registered(Faults(hold_writes={0: 5}))
    rig.finish(prompt)  # never planned, as where layerwise is off: pushed whole
    rig.expire(prompt)
    rig.writer.turn()
    assert rig.writer.writes_in_flight("p-1")
    assert not rig.writer.cancel("p-1", KEY)
    assert rig.host.failures == [], "the decode engine's blocks are still written to"
    rig.settle()
    assert [drained for _, drained, _ in rig.host.reported_failures()] == [True]
    rig.assert_clean()
