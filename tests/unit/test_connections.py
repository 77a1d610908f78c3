"""Connecting to engines: once for all callers, again after a failure, never to a forbidden host."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from layerpush.core.liveness import Verdict
from layerpush.transport import connections
from layerpush.transport.connections import RETRY_S, TRIES
from layerpush.transport.peers import Address
from tests.unit.fake_peers import FakePeers

D = Address("D", "10.0.0.7", 5600, tp_size=2)
ELSEWHERE = Address("D", "10.9.9.9", 1, tp_size=2)
PING = b"HB:"


class Outcomes(list[str | None]):
    """A ``Then`` that keeps its calls."""

    def __call__(self, error: str | None, now: float) -> None:
        self.append(error)
        self.at = now


def test_a_connected_engine_is_reached_at_once() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.connect(D, "d-0", "d-1")
    fakes.connections.reach(D, outcomes, 3.0)
    assert (outcomes, outcomes.at) == ([None], 3.0)
    assert fakes.connections.address("D") == D
    assert fakes.network.handshakes == []


def test_an_unconnected_engine_is_reached_after_the_handshake() -> None:
    """A handshake proves the address of the caller that began it, and no other's."""
    fakes, first, second = FakePeers(), Outcomes(), Outcomes()
    fakes.connections.reach(D, first, 0.0)
    fakes.connections.reach(ELSEWHERE, second, 0.0)
    fakes.settle()
    assert (first, fakes.connections.address("D")) == ([], None)
    fakes.network.answer("D", "d-0", "d-1")
    assert first == [], "the handshake's thread is not ours"
    fakes.settle()
    assert (first, second) == ([None], [])
    fakes.asked(Verdict.UNKNOWN)
    assert second == [None]
    assert first.at == fakes.now
    assert fakes.network.handshakes == [D]
    assert fakes.connections.address("D") == D
    assert fakes.connections.agents("D") == {"d-0": (0, 0), "d-1": (0, 1)}
    fakes.connections.forget("D")
    assert not fakes.connections.agents("D")


def test_a_failed_handshake_is_retried_before_its_last_error_is_reported() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.connections.reach(D, outcomes, fakes.now)
    for attempt in range(1, TRIES + 1):
        assert len(fakes.network.handshakes) == attempt
        fakes.network.reject("D", OSError(f"no route, {attempt}"))
        fakes.settle()
        assert bool(outcomes) == (attempt == TRIES) != bool(fakes.connections._retries)
        fakes.now += RETRY_S / 2
        fakes.settle()
        assert len(fakes.network.handshakes) == attempt, "too early"
        fakes.now += RETRY_S / 2
        fakes.settle()
    (error,) = outcomes
    assert error is not None
    assert f"no route, {TRIES}" in error
    assert "OSError" in error
    assert "'D' at 10.0.0.7:5600" in error
    assert len(fakes.network.handshakes) == TRIES


def test_an_error_without_a_text_names_the_keys_to_check() -> None:
    """vLLM's handshake asserts that the side channel knows the rank."""
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.connections.reach(D, outcomes, fakes.now, tries=1)
    fakes.network.reject("D", AssertionError())
    fakes.settle()
    assert outcomes == [
        "no handshake with engine 'D' at 10.0.0.7:5600: AssertionError; has it so many ranks? See tp_size and pp_size"
    ]


def test_a_later_handshake_succeeds() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.connections.reach(D, outcomes, fakes.now)
    fakes.network.reject("D", OSError("not yet"))
    fakes.settle()
    fakes.network.listening["D"] = ("d-0",)
    fakes.now += RETRY_S
    fakes.settle()
    assert (outcomes, fakes.connections._retries) == ([None], [])


def test_a_handshake_that_cannot_begin_counts_as_a_failed_try() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.broken = KeyError("a stale engine")
    fakes.connections.reach(D, outcomes, fakes.now, tries=1)
    (error,) = outcomes
    assert error is not None
    assert "KeyError: 'a stale engine'" in error


@pytest.mark.parametrize(
    ("allowed", "host", "may"),
    [
        (None, "10.0.0.7", True),
        (("10.0.0.0/8",), "10.0.0.7", True),
        (("10.0.0.0/8",), "192.168.0.7", False),
        (("decode.local",), "decode.local", True),
        (("decode.local",), "evil.local", False),
        ((), "10.0.0.7", False),
    ],
)
def test_only_allowed_hosts_are_connected_to(allowed: tuple[str, ...] | None, host: str, may: bool) -> None:
    fakes, outcomes = FakePeers(allowed), Outcomes()
    fakes.network.listening["D"] = ("d-0",)
    fakes.connections.reach(Address("D", host, 5600, 1), outcomes, fakes.now)
    fakes.settle()
    assert bool(fakes.network.handshakes) is may
    (error,) = outcomes
    if not may:
        assert error == f"host {host!r} of engine 'D' is not in allowed_hosts"
        assert not fakes.connections._retries


def test_a_connected_engine_is_not_reached_under_a_forbidden_host() -> None:
    fakes, outcomes = FakePeers(("10.0.0.7",)), Outcomes()
    fakes.network.connected["D"] = ("d-0",)
    fakes.connections.reach(Address("D", "192.168.0.7", 5600, 1), outcomes, fakes.now)
    assert outcomes != [None]


def test_a_broadcast_reaches_every_rank() -> None:
    fakes = FakePeers()
    fakes.network.listening["D"] = ("d-0", "d-1")
    fakes.connections.broadcast(D, PING, fakes.now)
    assert fakes.mail.sent == []
    fakes.settle()
    assert fakes.mail.sent == [("d-0", PING), ("d-1", PING)]


@pytest.mark.parametrize("engines", [1, 18], ids=["one engine", "as many engines"])
def test_few_broadcasts_wait_for_handshakes(
    engines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit, fakes = 8, FakePeers()
    monkeypatch.setattr(connections, "WAITING_KEPT", limit)
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        for number in range(limit + 10):
            fakes.connections.broadcast(replace(D, engine_id=f"E{number % engines}"), PING, fakes.now)
    assert len(fakes.network.handshakes) == min(engines, limit)
    (line,) = caplog.messages
    assert f"cannot answer engine E{limit % engines}: {limit} other messages wait" in line

    fakes.network.connected["D"] = ("d-0",)
    fakes.connections.broadcast(D, PING, fakes.now)
    assert fakes.mail.sent == [("d-0", PING)], "a connected engine does not wait"
    fakes.network.answer("E0", "e-0")
    fakes.settle()
    fakes.connections.broadcast(replace(D, engine_id="later"), PING, fakes.now)
    assert fakes.network.handshakes[-1].engine_id == "later"


def test_a_broadcast_skips_lost_ranks_and_reports_the_loss_once() -> None:
    fakes, lost = FakePeers(), list[list[str]]()
    fakes.connections.on_lost = lambda agents, _: lost.append(list(agents))
    fakes.network.connected["D"] = ("d-0", "d-1", "d-2")
    fakes.mail.lost = {"d-0", "d-1"}
    fakes.connections.broadcast(D, PING, fakes.now)
    assert fakes.mail.sent == [("d-2", PING)]
    assert lost == [["d-0", "d-1", "d-2"]]
    assert fakes.connections.closing("D") == connections.LOST


def test_a_failed_broadcast_is_logged_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    fakes = FakePeers()
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        fakes.connections.broadcast(D, PING, fakes.now)
        fakes.network.reject("D", OSError("no route"))
        fakes.settle()
    assert "no route" in caplog.text
    assert not fakes.connections._retries
    assert fakes.connections.closing("D") is None


def test_a_failed_notification_raises_no_exception() -> None:
    fakes = FakePeers()
    fakes.network.connected = {"D": ("d-0", "dead", "odd")}
    fakes.mail.lost, fakes.mail.unknown = {"dead"}, {"odd"}
    assert not fakes.connections.notify("odd", PING)
    assert not fakes.connections.notify("dead", PING)
    assert not fakes.connections.notify("nobody", PING)
    assert fakes.connections.notify("d-0", PING)
    fakes.mail.notify = _broken
    with pytest.raises(ZeroDivisionError):
        fakes.connections.notify("d-0", PING)


def _broken(agent: str, payload: bytes) -> None:
    raise ZeroDivisionError  # a defect is no dead peer


def test_a_forgotten_engine_is_connected_again() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.listening["D"] = ("d-0",)
    fakes.connections.reach(D, outcomes, fakes.now)
    fakes.settle()
    fakes.connections.forget("D")
    assert (fakes.network.forgotten, fakes.connections.address("D"), fakes.connections.agents("D")) == (["D"], None, {})
    fakes.network.listening["D"] = ("d-new",)
    moved = Address("D", "10.0.0.8", 5600, 1)
    fakes.connections.reach(moved, outcomes, fakes.now)
    fakes.settle()
    assert outcomes == [None, None]
    assert (fakes.connections.address("D"), fakes.connections.agents("D")) == (moved, {"d-new": (0, 0)})


@pytest.mark.parametrize("verdicts", [[Verdict.UNKNOWN], [Verdict.ENDED]], ids=["no answer", "no engine of that name"])
@pytest.mark.parametrize("when", ["connected", "connecting"])
def test_a_wrong_address_does_not_change_that_of_a_connected_engine(when: str, verdicts: list[Verdict]) -> None:
    """The address of the handshake counts. vLLM may have begun it for a heartbeat. A probe of another address finds a
    living process dead, or learns nothing of a dead one.
    """
    fakes, outcomes = FakePeers(), Outcomes()
    if when == "connected":
        fakes.network.connect(D, "d-0")
        fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
    else:
        fakes.network.handshake(D)
        fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
        fakes.network.answer("D", "d-0")
        fakes.settle()
    assert fakes.asked(*verdicts) == [("d-0", (0, 0), ELSEWHERE)]
    assert outcomes == [None]
    assert fakes.connections.address("D") == D


def doubted(*callers: Outcomes) -> FakePeers:
    """D is connected, and ``callers`` ask for it at another address. Another process of that name answers there."""
    fakes = FakePeers()
    fakes.network.connect(D, "d-0", "d-1")
    fakes.network.listening["D"] = ("new-0",)
    for caller in callers:
        fakes.connections.reach(ELSEWHERE, caller, fakes.now)
    assert fakes.asked(Verdict.REPLACED) == [("d-0", (0, 0), ELSEWHERE)]
    assert [*callers] == [[] for _ in callers]
    return fakes


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.ENDED, Verdict.REPLACED])
def test_an_engine_that_does_not_answer_gives_its_name_to_one_that_does(
    verdict: Verdict, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host has vanished: no send to it fails for a quarter of an hour. What it may still write stays its own."""
    first, second = Outcomes(), Outcomes()
    fakes = doubted(first, second)
    fakes.network.written_to = {"D"}
    fakes.connections.needs = lambda agent: agent == "d-1"
    for _ in range(connections.UNANSWERED if verdict is Verdict.UNKNOWN else 1):
        assert first == second == []
        assert fakes.asked(verdict) == [("d-0", (0, 0), D)]
    assert first == second == [None]
    assert fakes.connections.address("D") == ELSEWHERE
    assert [*fakes.connections.agents("D")] == ["new-0"]
    assert "engine D at 10.0.0.7:5600 does not answer, and another process has its id at 10.9.9.9:1" in caplog.text
    for freed in (fakes.network.written_to.clear, lambda: setattr(fakes.connections, "needs", lambda _: False)):
        fakes.settle()
        assert fakes.connections.notify("d-1", PING)
        assert fakes.connections.is_retired("d-1")
        freed()
    fakes.settle()
    assert not fakes.connections.notify("d-1", PING)
    assert not fakes.connections.is_retired("d-1")


def test_the_second_of_two_living_engines_is_refused_with_both_addresses() -> None:
    first, second = Outcomes(), Outcomes()
    fakes = doubted(first, second)
    assert fakes.asked(Verdict.SPEAKS_LAYERPUSH) == [("d-0", (0, 0), D)]
    reason = "two engines have the id 'D': one lives at 10.0.0.7:5600, and another at 10.9.9.9:1"
    assert first == second == [reason]
    assert fakes.connections.address("D") == D
    fakes.connections.reach(D, first, fakes.now)
    assert first[1:] == [None]


def test_an_address_at_which_the_connected_process_was_found_counts_too() -> None:
    """A host may have several names."""
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.connect(D, "d-0")
    fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
    fakes.asked(Verdict.ALIVE)
    fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
    assert (outcomes, fakes.probe.asked) == ([None, None], [])
    assert fakes.connections.address("D") == D
    fakes.connections.forget("D")
    fakes.network.connect(D, "d-1")
    assert fakes.connections.is_elsewhere(ELSEWHERE), "another process may have only one of the names"


def test_a_replacement_may_have_fewer_ranks() -> None:
    """It has no rank of the agent's number, so rank 0 is asked as well."""
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.connect(D, "d-0", "d-1")
    fakes.network.agents_of = lambda engine_id: {"d-1": (0, 1)} if engine_id in fakes.network.connected else {}
    fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
    assert fakes.asked(Verdict.ENDED) == [("d-1", (0, 1), ELSEWHERE)]
    assert fakes.asked(Verdict.REPLACED) == [("d-1", (0, 0), ELSEWHERE)]
    assert fakes.asked(Verdict.ENDED) == [("d-1", (0, 1), D)]
    assert fakes.network.handshakes == [ELSEWHERE]


@pytest.mark.parametrize("verdict", [Verdict.REPLACED, Verdict.ALIVE, Verdict.UNKNOWN])
@pytest.mark.parametrize("at", ["the other", "the connected"])
def test_a_verdict_about_a_connection_that_has_gone_decides_nothing(at: str, verdict: Verdict) -> None:
    outcomes = Outcomes()
    fakes = doubted(outcomes)
    if at == "the other":
        fakes, outcomes = FakePeers(), Outcomes()
        fakes.network.connect(D, "d-0")
        fakes.connections.reach(ELSEWHERE, outcomes, fakes.now)
    fakes.connections.forget("D")
    fakes.network.listening["D"] = ("new-0",)
    fakes.asked(verdict)
    assert outcomes == [None]
    assert fakes.connections.address("D") == ELSEWHERE


def test_few_addresses_are_asked_at_a_time() -> None:
    """A client names them, and one thread asks. The others are refused: who lives there is not known."""
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.network.connect(D, "d-0")
    for port in range(1, connections.MAX_DOUBTS + 3):
        fakes.connections.reach(replace(ELSEWHERE, port=port), outcomes, fakes.now)
    assert len(fakes.probe.asked) == connections.MAX_DOUBTS
    reason = "engine 'D' is connected at another address, and 8 other addresses of connected engines are asked"
    assert [str(each).startswith(reason) for each in outcomes] == [True, True]


def test_a_defect_in_the_end_of_a_connection_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Outcomes(), Outcomes()
    fakes = doubted(first, second)
    monkeypatch.setattr(fakes.network, "retire", lambda _: 1 / 0)
    while fakes.probe.asked:
        fakes.asked(Verdict.UNKNOWN)
    assert first == second == ["engine 'D' could not be dropped: ZeroDivisionError: division by zero"]


def test_a_heartbeat_handshake_at_the_same_address_counts_as_a_try() -> None:
    """vLLM prepares descriptors for it, and we do not."""
    fakes, outcomes = FakePeers(), Outcomes()
    load = replace(D, notify_only=True)
    fakes.network.handshake(D)
    fakes.connections.reach(load, outcomes, fakes.now)
    for _ in range(TRIES):
        assert outcomes == []
        fakes.network.reject("D", OSError("refused"))
        fakes.settle()
        fakes.now += RETRY_S
        fakes.network.handshake(D)
        fakes.settle()
    assert len(outcomes) == 1


def test_the_address_of_a_failed_handshake_is_forgotten() -> None:
    fakes, outcomes = FakePeers(), Outcomes()
    fakes.connections.reach(ELSEWHERE, outcomes, fakes.now, tries=1)
    fakes.network.reject("D", OSError("refused"))
    fakes.settle()
    fakes.network.listening["D"] = ("d-0", "d-1")
    fakes.connections.reach(D, outcomes, fakes.now, tries=1)
    fakes.settle()
    assert outcomes[1:] == [None]
    assert fakes.connections.address("D") == D


@pytest.mark.parametrize("when", ["connected", "connecting"])
@pytest.mark.parametrize("other", [{"tp_size": 1}, {"tp_size": 2, "pp_size": 2, "has_stages": True}])
def test_a_request_with_other_rank_counts_is_refused(when: str, other: dict[str, int]) -> None:
    """A load needs one completion of each rank."""
    fakes, outcomes, mistaken = FakePeers(), Outcomes(), Outcomes()
    fakes.connections.reach(D, outcomes, fakes.now)
    if when == "connected":
        fakes.network.answer("D", "d-0", "d-1")
        fakes.settle()
    fakes.connections.reach(Address("D", "10.0.0.7", 5600, **other), mistaken, fakes.now)
    if when == "connecting":
        fakes.network.answer("D", "d-0", "d-1")
        fakes.settle()
    assert outcomes == [None]
    [error] = mistaken
    assert error is not None
    assert "engine 'D' is connected with tp_size 2 and pp_size 1, not with" in error
    assert not fakes.connections._retries
    assert fakes.connections.address("D") == D


@pytest.mark.parametrize("when", ["connected", "connecting"])
def test_a_request_without_pp_size_reaches_an_engine_with_stages(when: str) -> None:
    """A registration does not name its sender's stages; the registering engine knows P's, and has connected first."""
    fakes, outcomes = FakePeers(), Outcomes()
    staged = Address("D", "10.0.0.7", 5600, tp_size=2, pp_size=2, notify_only=True)
    fakes.connections.reach(staged, outcomes, fakes.now)
    if when == "connected":
        fakes.network.answer("D", "d-0", "d-1")
        fakes.settle()
    fakes.connections.reach(D, outcomes, fakes.now)
    if when == "connecting":
        fakes.network.answer("D", "d-0", "d-1")
        fakes.settle()
    assert outcomes == [None, None]
    assert fakes.connections.address("D") == staged


def test_handshakes_at_another_address_use_up_no_tries() -> None:
    """Else a request with a wrong address would make a right one fail."""
    fakes, outcomes, mistaken = FakePeers(), Outcomes(), Outcomes()
    fakes.connections.reach(ELSEWHERE, mistaken, fakes.now, tries=1)
    fakes.connections.reach(D, outcomes, fakes.now)
    fakes.network.reject("D", OSError("refused"))
    fakes.settle()
    [error] = mistaken
    assert error is not None
    assert "at 10.9.9.9:1: " in error
    for _ in range(TRIES):
        assert outcomes == []
        fakes.settle()
        assert fakes.network.handshakes[-1] == D, "it is tried at once, before the wrong one again"
        fakes.connections.reach(ELSEWHERE, mistaken, fakes.now, tries=1)
        fakes.network.reject("D", OSError("no route"))
        fakes.settle()
        fakes.now += RETRY_S
    assert len(outcomes) == 1


def test_a_shared_handshake_counts_as_a_try_for_each_request() -> None:
    fakes, first, second = FakePeers(), Outcomes(), Outcomes()
    fakes.connections.reach(D, first, fakes.now)
    fakes.connections.reach(D, second, fakes.now)
    for _ in range(TRIES):
        fakes.network.reject("D", OSError("no route"))
        fakes.settle()
        fakes.now += RETRY_S
        fakes.settle()
    assert [len(first), len(second)] == [1, 1]
    assert len(fakes.network.handshakes) == TRIES


def test_a_callback_may_reach_the_engine_again() -> None:
    """The callback of one ``reach`` starts another, as a load does that finds a dead connection."""
    fakes, outcomes = FakePeers(), Outcomes()

    def again(error: str | None, now: float) -> None:
        fakes.connections.forget("D")
        fakes.connections.reach(D, outcomes, now)

    fakes.network.listening["D"] = ("d-0",)
    fakes.connections.reach(D, again, fakes.now)
    fakes.settle()
    assert outcomes == [None]
    assert len(fakes.network.handshakes) == 2
