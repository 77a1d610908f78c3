"""Notifications on their way to the two sides of a worker: D's device must see the bytes that they announce, and no
flood of them fills the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from layerpush.core.liveness import Verdict
from layerpush.core.wire import (
    MAX_ID_CHARS,
    REGISTRATION_PREFIX,
    Cancel,
    Completion,
    Decline,
    Fail,
    FirstToken,
    PeerMessage,
    Ping,
    Pong,
    PrefixLanded,
    Queued,
    Unregister,
    encode,
    encode_registration,
)
from layerpush.engine.worker import inbox
from layerpush.engine.worker.inbox import MESSAGES_PER_TURN, Inbox, logger
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.base import Transport
from layerpush.transport.cuda import CudaError
from tests.unit.test_claims import World as ClaimsWorld
from tests.unit.test_claims import asks
from tests.unit.test_loads import World as LoadsWorld

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


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a turn takes fewer messages."""
    monkeypatch.setattr(inbox, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def test_landed_bytes_are_flushed_before_use() -> None:
    calls = Calls(*OTHERS, COMPLETION)
    calls.inbox.deliver()
    assert calls.made == ["Ping", "FirstToken", "flush", "Completion"]


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


def test_a_turn_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few messages it has taken: the longest legal one takes a tenth of a second."""
    calls, now = Calls(*[OTHERS[0]] * 6, COMPLETION, COMPLETION), 0.0

    def takes_a_part() -> float:
        """Of a turn, with three messages: it looks at the clock once, and twice for each of them."""
        nonlocal now
        now += inbox.TURN_S / 6
        return now

    monkeypatch.setattr(inbox, "time", SimpleNamespace(perf_counter=takes_a_part))
    taken = []
    while not taken or calls.inbox.is_behind:
        assert calls.inbox.deliver()
        taken.append(len(calls.made))
        calls.notifications = list
    assert calls.made == ["Ping"] * 6 + ["flush", "Completion", "Completion"]
    assert taken == [3, 6, 9]


def test_an_agent_with_an_endless_name_is_not_heard() -> None:
    """NIXL does not check names, and several tables keep them."""
    calls = Calls(OTHERS[0])
    calls.notifications = lambda: [("P" * (MAX_ID_CHARS + 1), OTHERS[0])]
    calls.inbox.deliver()
    assert calls.made == []
    assert calls.inbox._peer_errors.counts == {"bad notification": 1}


# Floods.


FLOOD = 3000
Flood = Callable[["Sides", int], tuple[str, bytes]]
"""Returns the sender and the bytes of one message of many. At the first one it prepares the engine."""


class Sides:
    """An engine that is P and D, and what it hears."""

    def __init__(self) -> None:
        self.p, self.d = ClaimsWorld(digests={"a/p": "ours"}), LoadsWorld(scripted=False)
        self.now, self.heard = 100.0, list[tuple[str, bytes]]()
        self.p.now = self.d.now = self.now
        parts = cast(Any, self)
        self.on_pong = lambda *_: None
        self.inbox = Inbox(parts, self.p.claims, self.d.loads, parts, parts, self.p.peer_errors, lambda: None)

    def notifications(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard

    def __call__(self, heartbeat: object) -> None:
        """The main thread takes it."""

    def hears(self, messages: Iterable[tuple[str, bytes]]) -> None:
        self.heard += messages
        while self.inbox.deliver():
            self.settle()

    def settle(self) -> None:
        for world in (self.p, self.d):
            world.settle()
            world.mail.sent.clear()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.p.now = self.d.now = self.now
        for part in (self.p.claims, self.d.loads):
            due: float | None = self.now
            while due is not None and due <= self.now:
                part.tick(self.now)
                due = part.next_due(self.now)


def registers(**keys: Any) -> Flood:
    """Registrations with other ids. ``{}`` in a key is the number."""

    def flood(_: Sides, number: int) -> tuple[str, bytes]:
        named = {key: text.format(number) if isinstance(text, str) else text for key, text in keys.items()}
        sender, tokens = named.pop("sender", "d-0"), named.pop("prefix_tokens", 0)
        return sender, encode_registration(replace(asks(**named), prefix_tokens=tokens))

    return flood


def after(prepare: Callable[[Sides], object], flood: Flood) -> Flood:
    def prepared(sides: Sides, number: int) -> tuple[str, bytes]:
        if not number:
            prepare(sides)
        return flood(sides, number)

    return prepared


def sends(sender: str, message: PeerMessage | bytes) -> Flood:
    payload = message if isinstance(message, bytes) else encode(message)
    return lambda _, __: (sender, payload)


CANCEL = Cancel("a/d", "D", "10.0.0.7", 5600, 2)
FORGED = encode(FirstToken("r", 7)).replace(b"\x07", b"\xff")


def breaks(sides: Sides) -> None:
    cast(Any, sides.p.claims).on_ping = None


FLOODS: dict[str, Flood] = {
    "registrations of unknown requests": registers(request_id="r{}/d"),
    "registrations of unknown turns": registers(
        request_id="r{}/d", prefill="t{}/p", digest="d", prefix_tokens=64
    ),
    "registrations of another prompt": after(
        lambda sides: sides.p.begin("a/p"), registers(request_id="a/d{}", prefill="a/p", digest="theirs")
    ),
    "registrations of spare answers": after(
        lambda sides: sides.p.begin("a/p"), registers(request_id="{}7_a/d")
    ),
    "registrations of a request that has failed": after(
        lambda sides: (sides.p.begin("a/p"), sides.p.ends("a/p")), registers(request_id="a/d{}")
    ),
    "registrations of a request of another rank": after(
        lambda sides: sides.p.claims.rank_is_other("a/p", 1, sides.now), registers(request_id="a/d{}")
    ),
    "registrations under an id in use": after(
        lambda sides: sides.p.served(), lambda _, number: ("d-0", encode_registration(asks(blocks=(number + 9,))))
    ),
    "registrations in another's name": after(
        lambda sides: sides.p.served(), registers(request_id="r{}/d", sender="x-{}")
    ),
    "registrations that cannot be read": sends("d-0", REGISTRATION_PREFIX),
    "cancels of another's": after(lambda sides: sides.p.served(), sends("e-0", CANCEL)),
    "cancels of nothing": lambda _, number: ("d-0", encode(Cancel(f"r{number}/d", "D", "10.0.0.7", 5600, 2))),
    "unregistrations of another's": after(
        lambda sides: sides.p.served(), sends("e-0", Unregister("a/d", "D", "10.0.0.7", 5600, 2, 0))
    ),
    "declines": lambda _, number: ("d-0", encode(Decline(f"r{number}/d", "D", f"r{number}/p"))),
    "pings": sends("x", Ping("D", 1)),
    "pings that meet a defect": after(breaks, sends("d-0", Ping("D", 1))),
    "pongs": sends("x", Pong(1)),
    "heartbeats": lambda _, number: ("x", f"HB:r{number}".encode()),
    "junk": lambda _, number: ("x", bytes([number % 256]) * 9),
    "names without an end": lambda _, __: ("x" * 2000, b""),
    "another's failures": after(lambda sides: sides.d.awaits("r"), sends("x", Fail("r", 0, "no", True))),
    "failures": after(lambda sides: sides.d.awaits("r"), sends("p-0", Fail("r", 0, "no", False))),
    "failures of nothing": lambda _, number: ("p-0", encode(Fail(f"n{number}", 0, "no", True))),
    "completions of nothing": lambda _, number: ("p-0", f"n{number}:1".encode()),
    "tokens that nobody asked for": after(lambda sides: sides.d.awaits("r"), sends("p-0", FirstToken("r", 7))),
    "tokens that cannot be read": after(
        lambda sides: sides.d.awaits("r", sampling="s"), sends("p-0", FORGED)
    ),
    "tokens of other sampling": after(
        lambda sides: sides.d.awaits("r", sampling="s"),
        lambda _, number: ("p-0", encode(FirstToken("r", None, (f"p{number}",)))),
    ),
    "news of a queue": after(lambda sides: sides.d.awaits("r"), sends("x", Queued("r", ("a/b",)))),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_one_kind_is_few_lines(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, flood = Sides(), FLOODS[kind]
    monkeypatch.setattr(inbox, "time", SimpleNamespace(perf_counter=lambda: sides.now))
    with caplog.at_level("INFO"):
        sides.hears(flood(sides, number) for number in range(FLOOD))
        for verdict in [Verdict.ALIVE] * len(sides.p.probe.asked):
            sides.p.probe.answer(verdict, sides.now)
        at_once = len(caplog.messages)
        for _ in range(8):
            sides.wait(5.0)
    assert at_once <= 2
    assert len(caplog.messages) - at_once <= 8, "what times out does so in as many moments"
