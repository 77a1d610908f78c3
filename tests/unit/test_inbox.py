"""Notifications on their way to the two sides of a worker: D's device must see the bytes that they announce."""

from __future__ import annotations

from typing import Any, cast

import pytest

from layerpush.core.wire import MAX_ID_CHARS, Completion, FirstToken, Ping, PrefixLanded, encode
from layerpush.engine.worker.inbox import MESSAGES_PER_TURN, Inbox, logger
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.base import Transport
from layerpush.transport.cuda import CudaError

COMPLETION = b"r-1:2"
OTHERS = [encode(Ping("D", 1)), encode(FirstToken("r-1", 7)), b"not a message"]


class Calls:
    """A transport with these notifications, and every receiver of an inbox. Keeps the calls, in order."""

    def __init__(self, *payloads: bytes) -> None:
        self._payloads = payloads
        self.made: list[str] = []
        parts = cast(Any, self)
        self.inbox = Inbox(
            cast(Transport, self),
            parts,
            parts,
            parts,
            parts,
            PeerErrors(logger),
            lambda: self.made.append("flush"),
        )
        self.peers = self

    def notifications(self) -> list[tuple[str, bytes]]:
        return [("P", payload) for payload in self._payloads]

    def on_message(self, agent: str, message: object, *_: object) -> None:
        assert agent == "P"
        self.made.append(type(message).__name__)

    def on_invisible(self, agent: str, message: object, payload: bytes, reason: str, now: float) -> None:
        assert "the device is lost" in reason
        self.made.append(f"invisible {type(message).__name__}")

    def __call__(self, payload: bytes) -> None:
        self.made.append("Heartbeat")

    def on_ping(self, agent: str, message: object) -> None:
        self.on_message(agent, message)


def test_landed_bytes_are_flushed_before_use() -> None:
    calls = Calls(*OTHERS, COMPLETION)
    calls.inbox.deliver()
    assert calls.made[0] == "flush"
    assert calls.made.count("flush") == 1
    assert len(calls.made) == 4


def test_several_completions_need_one_flush() -> None:
    calls = Calls(COMPLETION, COMPLETION)
    calls.inbox.deliver()
    assert calls.made == ["flush", Completion.__name__, Completion.__name__]


def test_a_prefix_is_flushed_before_use_and_dropped_if_that_fails() -> None:
    calls = Calls(encode(PrefixLanded("r-1", 1, 64)), OTHERS[0])
    calls.inbox.deliver()
    assert calls.made == ["flush", "PrefixLanded", "Ping"]

    def fail() -> None:
        raise CudaError("the device is lost")

    calls.inbox._flush = fail
    calls.made.clear()
    calls.inbox.deliver()
    assert calls.made == ["Ping"]


def test_other_notifications_need_no_flush() -> None:
    calls = Calls(*OTHERS)
    calls.inbox.deliver()
    assert calls.made == ["Ping", "FirstToken"]


def test_a_flush_that_fails_costs_the_bytes_that_it_was_for_and_no_other_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls(COMPLETION, *OTHERS, COMPLETION, b"HB:r-2")

    def fail() -> None:
        raise CudaError("the device is lost")

    calls.inbox._flush = fail
    for _ in range(2):
        calls.made.clear()
        calls.inbox.deliver()
        assert calls.made == [
            "invisible Completion", "Ping", "FirstToken", "invisible Completion", "Heartbeat",
        ]  # fmt: skip
    assert caplog.text.count("cannot be made visible to the device: the device is lost") == 1, "once a second"


def test_a_flood_is_handed_over_in_several_turns() -> None:
    """Pushes go on meanwhile. Nothing more is read before the last of what was read."""
    calls = Calls(*[OTHERS[0]] * (MESSAGES_PER_TURN + 2))
    calls.inbox.deliver()
    assert (len(calls.made), calls.inbox.is_behind) == (MESSAGES_PER_TURN, True)
    calls.inbox.deliver()
    assert (len(calls.made), calls.inbox.is_behind) == (MESSAGES_PER_TURN + 2, False)


def test_an_agent_with_an_endless_name_is_not_heard() -> None:
    """NIXL does not check names, and several tables keep them."""
    calls = Calls(OTHERS[0])
    calls.notifications = lambda: [("P" * (MAX_ID_CHARS + 1), OTHERS[0])]
    calls.inbox.deliver()
    assert calls.made == []
    assert calls.inbox._peer_errors.counts == {"bad notification": 1}
