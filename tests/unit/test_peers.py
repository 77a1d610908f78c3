"""Connecting to engines: once for all callers, again after a failure, never to a forbidden host."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from layerpush.transport import connections
from layerpush.transport.connections import RETRY_S, TRIES, Address
from tests.unit.peers_rig import Town

D = Address("D", "10.0.0.7", 5600, tp_size=2)
PING = b"HB:"


class Outcomes(list[str | None]):
    """A ``Then`` that keeps its calls."""

    def __call__(self, error: str | None, now: float) -> None:
        self.append(error)
        self.at = now


def test_a_connected_engine_is_reached_at_once() -> None:
    town, outcomes = Town(), Outcomes()
    town.network.connected["D"], town.network.addresses["D"] = ("d-0", "d-1"), D
    town.peers.reach(D, outcomes, 3.0)
    assert (outcomes, outcomes.at) == ([None], 3.0)
    assert town.peers.address("D") == D
    assert town.network.handshakes == []


def test_an_unconnected_engine_is_reached_after_the_handshake() -> None:
    town, first, second = Town(), Outcomes(), Outcomes()
    town.peers.reach(D, first, 0.0)
    town.peers.reach(D, second, 0.0)
    town.settle()
    assert (first, town.peers.address("D")) == ([], None)
    town.network.answer("D", "d-0", "d-1")
    assert first == [], "the handshake's thread is not ours"
    town.settle()
    assert first == second == [None]
    assert first.at == town.now
    assert town.network.handshakes == [D]
    assert town.peers.address("D") == D
    assert town.peers.agents("D") == ("d-0", "d-1")
    assert town.peers.rank_of("D", "d-1") == (0, 1)
    assert town.peers.rank_of("D", "x-1") is None
    town.peers.forget("D")
    assert town.peers.rank_of("D", "d-1") is None, "not another engine's rank"


def test_a_failed_handshake_is_retried_before_its_last_error_is_reported() -> None:
    town, outcomes = Town(), Outcomes()
    town.peers.reach(D, outcomes, town.now)
    for attempt in range(1, TRIES + 1):
        assert len(town.network.handshakes) == attempt
        town.network.reject("D", OSError(f"no route, {attempt}"))
        town.settle()
        assert bool(outcomes) == (attempt == TRIES) != bool(town.peers._retries)
        town.now += RETRY_S / 2
        town.settle()
        assert len(town.network.handshakes) == attempt, "too early"
        town.now += RETRY_S / 2
        town.settle()
    (error,) = outcomes
    assert error is not None
    assert f"no route, {TRIES}" in error
    assert "OSError" in error
    assert "'D' at 10.0.0.7:5600" in error
    assert len(town.network.handshakes) == TRIES


def test_an_error_without_a_text_names_the_keys_to_check() -> None:
    """vLLM's handshake asserts that the side channel knows the rank."""
    town, outcomes = Town(), Outcomes()
    town.peers.reach(D, outcomes, town.now, tries=1)
    town.network.reject("D", AssertionError())
    town.settle()
    assert outcomes == [
        "no handshake with engine 'D' at 10.0.0.7:5600: AssertionError; has it so many ranks? See tp_size and pp_size"
    ]


def test_a_later_handshake_succeeds() -> None:
    town, outcomes = Town(), Outcomes()
    town.peers.reach(D, outcomes, town.now)
    town.network.reject("D", OSError("not yet"))
    town.settle()
    town.network.listening["D"] = ("d-0",)
    town.now += RETRY_S
    town.settle()
    assert (outcomes, town.peers._retries) == ([None], [])


def test_a_handshake_that_cannot_begin_counts_as_a_failed_try() -> None:
    town, outcomes = Town(), Outcomes()
    town.network.broken = KeyError("a stale engine")
    town.peers.reach(D, outcomes, town.now, tries=1)
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
    town, outcomes = Town(allowed), Outcomes()
    town.network.listening["D"] = ("d-0",)
    town.peers.reach(Address("D", host, 5600, 1), outcomes, town.now)
    town.settle()
    assert bool(town.network.handshakes) is may
    (error,) = outcomes
    if not may:
        assert error == f"host {host!r} of engine 'D' is not in allowed_hosts"
        assert not town.peers._retries


def test_a_connected_engine_is_not_reached_under_a_forbidden_host() -> None:
    town, outcomes = Town(("10.0.0.7",)), Outcomes()
    town.network.connected["D"] = ("d-0",)
    town.peers.reach(Address("D", "192.168.0.7", 5600, 1), outcomes, town.now)
    assert outcomes != [None]


def test_a_broadcast_reaches_every_rank() -> None:
    town = Town()
    town.network.listening["D"] = ("d-0", "d-1")
    town.peers.broadcast(D, PING, town.now)
    assert town.mail.sent == []
    town.settle()
    assert town.mail.sent == [("d-0", PING), ("d-1", PING)]


@pytest.mark.parametrize("engines", [1, 18], ids=["one engine", "as many engines"])
def test_few_broadcasts_wait_for_handshakes(
    engines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit, town = 8, Town()
    monkeypatch.setattr(connections, "WAITING_KEPT", limit)
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        for number in range(limit + 10):
            town.peers.broadcast(replace(D, engine_id=f"E{number % engines}"), PING, town.now)
    assert len(town.network.handshakes) == min(engines, limit)
    (line,) = caplog.messages
    assert f"cannot answer engine E{limit % engines}: {limit} other messages wait" in line

    town.network.connected["D"] = ("d-0",)
    town.peers.broadcast(D, PING, town.now)
    assert town.mail.sent == [("d-0", PING)], "a connected engine does not wait"
    town.network.answer("E0", "e-0")
    town.settle()
    town.peers.broadcast(replace(D, engine_id="later"), PING, town.now)
    assert town.network.handshakes[-1].engine_id == "later"


def test_a_broadcast_skips_lost_ranks_and_reports_the_loss_once() -> None:
    town, lost = Town(), list[str]()
    town.peers.on_lost = lost.append
    town.network.connected["D"] = ("d-0", "d-1", "d-2")
    town.mail.lost = {"d-0", "d-1"}
    town.peers.broadcast(D, PING, town.now)
    assert town.mail.sent == [("d-2", PING)]
    assert lost == ["D"]


def test_a_failed_broadcast_is_logged_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    town, lost = Town(), list[str]()
    town.peers.on_lost = lost.append
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        town.peers.broadcast(D, PING, town.now)
        town.network.reject("D", OSError("no route"))
        town.settle()
    assert "no route" in caplog.text
    assert not town.peers._retries
    assert lost == []


def test_a_failed_notification_raises_no_exception() -> None:
    town = Town()
    town.network.connected = {"D": ("d-0", "dead", "odd")}
    town.mail.lost, town.mail.unknown = {"dead"}, {"odd"}
    assert not town.peers.notify("odd", PING)
    assert not town.peers.notify("dead", PING)
    assert not town.peers.notify("nobody", PING)
    assert town.peers.notify("d-0", PING)
    town.mail.notify = _broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        town.peers.notify("d-0", PING)


def _broken(agent: str, payload: bytes) -> None:
    raise ZeroDivisionError  # a defect is no dead peer


def test_a_forgotten_engine_is_connected_again() -> None:
    town, outcomes = Town(), Outcomes()
    town.network.listening["D"] = ("d-0",)
    town.peers.reach(D, outcomes, town.now)
    town.settle()
    town.peers.forget("D")
    assert (town.network.forgotten, town.peers.address("D"), town.peers.agents("D")) == (["D"], None, ())
    town.network.listening["D"] = ("d-new",)
    moved = Address("D", "10.0.0.8", 5600, 1)
    town.peers.reach(moved, outcomes, town.now)
    town.settle()
    assert outcomes == [None, None]
    assert (town.peers.address("D"), town.peers.agents("D")) == (moved, ("d-new",))


ELSEWHERE = Address("D", "10.9.9.9", 1, tp_size=2)


def test_a_request_does_not_change_the_address_of_a_connected_engine() -> None:
    """The address of the handshake counts. vLLM may have begun it for a heartbeat. A probe of another address finds a
    living process dead, or learns nothing of a dead one.
    """
    town, outcomes = Town(), Outcomes()
    town.network.connected["D"], town.network.addresses["D"] = ("d-0",), D
    town.peers.reach(ELSEWHERE, outcomes, town.now)
    assert outcomes == [None]
    assert town.peers.address("D") == D


def test_a_request_joins_a_handshake_that_vllm_began() -> None:
    town, outcomes = Town(), Outcomes()
    town.network.handshake(ELSEWHERE)
    town.peers.reach(D, outcomes, town.now)
    town.network.answer("D", "d-0", "d-1")
    town.settle()
    assert outcomes == [None]
    assert town.peers.address("D") == ELSEWHERE


def test_a_heartbeat_handshake_at_the_same_address_counts_as_a_try() -> None:
    """vLLM prepares descriptors for it, and we do not."""
    town, outcomes = Town(), Outcomes()
    load = replace(D, notify_only=True)
    town.network.handshake(D)
    town.peers.reach(load, outcomes, town.now)
    for _ in range(TRIES):
        assert outcomes == []
        town.network.reject("D", OSError("refused"))
        town.settle()
        town.now += RETRY_S
        town.network.handshake(D)
        town.settle()
    assert len(outcomes) == 1


def test_a_request_that_joins_a_handshake_does_not_change_its_address() -> None:
    """A handshake proves the address of the caller that began it, and no other."""
    town, outcomes = Town(), Outcomes()
    town.peers.reach(D, outcomes, town.now)
    town.peers.reach(ELSEWHERE, outcomes, town.now)
    town.network.answer("D", "d-0", "d-1")
    town.settle()
    assert outcomes == [None, None]
    assert town.peers.address("D") == D
    assert town.network.handshakes == [D]


def test_the_address_of_a_failed_handshake_is_forgotten() -> None:
    town, outcomes = Town(), Outcomes()
    town.peers.reach(ELSEWHERE, outcomes, town.now, tries=1)
    town.network.reject("D", OSError("refused"))
    town.settle()
    town.network.listening["D"] = ("d-0", "d-1")
    town.peers.reach(D, outcomes, town.now, tries=1)
    town.settle()
    assert outcomes[1:] == [None]
    assert town.peers.address("D") == D


@pytest.mark.parametrize("when", ["connected", "connecting"])
@pytest.mark.parametrize("other", [{"tp_size": 1}, {"tp_size": 2, "pp_size": 2, "notify_only": True}])
def test_a_request_with_other_rank_counts_is_refused(when: str, other: dict[str, int]) -> None:
    """A load needs one completion of each rank."""
    town, outcomes, mistaken = Town(), Outcomes(), Outcomes()
    town.peers.reach(D, outcomes, town.now)
    if when == "connected":
        town.network.answer("D", "d-0", "d-1")
        town.settle()
    town.peers.reach(Address("D", "10.0.0.7", 5600, **other), mistaken, town.now)
    if when == "connecting":
        town.network.answer("D", "d-0", "d-1")
        town.settle()
    assert outcomes == [None]
    [error] = mistaken
    assert error is not None
    assert "engine 'D' is connected with tp_size 2 and pp_size 1, not with" in error
    assert not town.peers._retries
    assert town.peers.address("D") == D


@pytest.mark.parametrize("when", ["connected", "connecting"])
def test_a_request_without_pp_size_reaches_an_engine_with_stages(when: str) -> None:
    """A registration does not name its sender's stages; the registering engine knows P's, and has connected first."""
    town, outcomes = Town(), Outcomes()
    staged = Address("D", "10.0.0.7", 5600, tp_size=2, pp_size=2, notify_only=True)
    town.peers.reach(staged, outcomes, town.now)
    if when == "connected":
        town.network.answer("D", "d-0", "d-1")
        town.settle()
    town.peers.reach(D, outcomes, town.now)
    if when == "connecting":
        town.network.answer("D", "d-0", "d-1")
        town.settle()
    assert outcomes == [None, None]
    assert town.peers.address("D") == staged


def test_handshakes_at_another_address_use_up_no_tries() -> None:
    """Else a request with a wrong address would make a right one fail."""
    town, outcomes, mistaken = Town(), Outcomes(), Outcomes()
    town.peers.reach(ELSEWHERE, mistaken, town.now, tries=1)
    town.peers.reach(D, outcomes, town.now)
    town.network.reject("D", OSError("refused"))
    town.settle()
    [error] = mistaken
    assert error is not None
    assert "at 10.9.9.9:1: " in error
    for _ in range(TRIES):
        assert outcomes == []
        town.settle()
        assert town.network.handshakes[-1] == D, "it is tried at once, before the wrong one again"
        town.peers.reach(ELSEWHERE, mistaken, town.now, tries=1)
        town.network.reject("D", OSError("no route"))
        town.settle()
        town.now += RETRY_S
    assert len(outcomes) == 1


def test_a_shared_handshake_counts_as_a_try_for_each_request() -> None:
    town, first, second = Town(), Outcomes(), Outcomes()
    town.peers.reach(D, first, town.now)
    town.peers.reach(D, second, town.now)
    for _ in range(TRIES):
        town.network.reject("D", OSError("no route"))
        town.settle()
        town.now += RETRY_S
        town.settle()
    assert [len(first), len(second)] == [1, 1]
    assert len(town.network.handshakes) == TRIES


def test_a_callback_may_reach_the_engine_again() -> None:
    """The callback of one ``reach`` starts another, as a load does that finds a dead connection."""
    town, outcomes = Town(), Outcomes()

    def again(error: str | None, now: float) -> None:
        town.peers.forget("D")
        town.peers.reach(D, outcomes, now)

    town.network.listening["D"] = ("d-0",)
    town.peers.reach(D, again, town.now)
    town.settle()
    assert outcomes == [None]
    assert len(town.network.handshakes) == 2
