"""Our own messages between layerpush workers: what they are in bytes, and which are refused with which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from layerpush.core import wire
from layerpush.core.wire import (
    PEER_PREFIX,
    QUIET_PREFIX,
    Accepted,
    Cancel,
    Cancelled,
    Fail,
    PeerMessage,
    Ping,
    Pong,
    WireError,
    encode,
    encode_quietly,
    read,
)

WORDS: dict[str, dict[str, Any]] = {
    "accepted": {"request_id": "r:1"},
    "fail": {"request_id": "r", "epoch": 2, "reason": "preempted", "drained": True},
    "cancel": {
        "request_id": "r",
        "decode_engine_id": "D",
        "decode_host": "::1",
        "decode_port": 65535,
        "decode_tp_size": 1024,
    },
    "cancelled": {"request_id": "r"},
    "ping": {"decode_engine_id": "D", "number": 0},
    "pong": {"number": 2**63 - 1},
}
"""Every message of ours, by kind."""

MESSAGES: list[PeerMessage] = [
    Accepted("r:1"),
    Fail("r", 2, "preempted", True),
    Cancel("r", "D", "::1", 65535, 1024),
    Cancelled("r"),
    Ping("D", 0),
    Pong(2**63 - 1),
]


def said(kind: object, fields: dict[str, Any]) -> bytes:
    return PEER_PREFIX + msgspec.msgpack.encode({"kind": kind, **fields})


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_our_messages_come_back_as_they_were_sent(message: PeerMessage) -> None:
    kind = type(message).__name__.lower()
    assert encode(message) == said(kind, WORDS[kind])
    assert read(encode(message)) == message


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_keys_of_a_newer_peer_are_ignored(kind: str) -> None:
    newer = {"version": 9, "more": [{"x": b"\xff"}, None], **WORDS[kind], "last": 1.5}
    assert read(said(kind, newer)) == read(said(kind, WORDS[kind]))


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, fields in WORDS.items() for key in fields])
def test_each_field_of_ours_is_required_and_typed(kind: str, key: str) -> None:
    with pytest.raises(WireError, match=f"LAYERPUSH.*{key}"):
        read(said(kind, {name: value for name, value in WORDS[kind].items() if name != key}))
    for wrong in [None, 1.5, b"r", [], {}, 7 if isinstance(WORDS[kind][key], str) else "7"]:
        with pytest.raises(WireError, match=f"LAYERPUSH.*{key}"):
            read(said(kind, {**WORDS[kind], key: wrong}))


OUT_OF_BOUNDS: list[tuple[str, str, object]] = [
    *[
        (kind, "request_id", bad)
        for kind in ("accepted", "fail", "cancel", "cancelled")
        for bad in ("", "a\nb", "x" * 1025)
    ],
    *[("fail", "epoch", bad) for bad in (-1, 2**63, True)],
    *[("fail", "drained", bad) for bad in (0, 1, "true")],
    ("fail", "reason", "x" * 4001),
    *[("cancel", "decode_engine_id", bad) for bad in ("", "a\nb", "x" * 1025)],
    *[("cancel", "decode_host", bad) for bad in ("", "a\nb", "x" * 256)],
    *[("cancel", "decode_port", bad) for bad in (0, 65536, True)],
    *[("cancel", "decode_tp_size", bad) for bad in (0, 1025, True)],
    *[("ping", "decode_engine_id", bad) for bad in ("", "a\nb")],
    *[(kind, "number", bad) for kind in ("ping", "pong") for bad in (-1, 2**63, True)],
]


@pytest.mark.parametrize(("kind", "key", "value"), OUT_OF_BOUNDS)
def test_each_field_of_ours_is_bounded(kind: str, key: str, value: object) -> None:
    with pytest.raises(WireError, match=key):
        read(said(kind, {**WORDS[kind], key: value}))


@pytest.mark.parametrize("kind", ["", "Ping", "pings", 3, None, b"ping", "x" * 10_000, "ping\nERROR all is lost"])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(WireError, match="kind") as refusal:
        read(said(kind, {"number": 1, "request_id": "r"}))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


def test_a_reason_is_made_fit_for_the_log_on_both_sides() -> None:
    reason = "boom\n" + "x" * 5000
    cut = "boom?" + "x" * 995
    assert read(encode(Fail("r", 0, reason, False))) == Fail("r", 0, cut, False)
    assert read(said("fail", {**WORDS["fail"], "reason": "a\x1b[2Jb\u2029c"})) == Fail("r", 2, "a?[2Jb?c", True)


@pytest.mark.parametrize(
    "message",
    [
        Accepted(""),
        Accepted("a\nb"),
        Accepted("\ud800"),
        Fail("r", -1, "", True),
        Fail("r", 2**63, "", True),
        Fail("r", 2**80, "", True),
        Cancel("r", "D", "host", 0, 1),
        Pong(1.5),  # type: ignore[arg-type]
        Ping(object(), 1),  # type: ignore[arg-type]
    ],
)
def test_what_no_peer_would_read_is_not_sent(message: PeerMessage) -> None:
    with pytest.raises(WireError):
        encode(message)


def test_the_version_that_this_release_offers() -> None:
    assert wire.PROTOCOL_VERSION == 1


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_said_quietly_is_a_heartbeat_to_a_stock_peer(message: PeerMessage) -> None:
    """Of one request that it does not know: it splits at commas and looks each id up."""
    payload = encode_quietly(message)
    assert read(payload) == message
    text = payload.decode()
    assert text.startswith("HB:")
    assert text[3:].isascii()
    assert "," not in text
    assert ":" not in text[3:]


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "xy",
        "0",
        "é",
        "00ff",
        (b"HB:" + b"a").hex(),
        PEER_PREFIX.hex(),
        "4c" * 40,
        encode(Pong(1)).hex().replace("4c", "4d"),
    ],
)
def test_what_is_no_message_said_quietly_is_refused(inner: str) -> None:
    with pytest.raises(WireError):
        read(QUIET_PREFIX + inner.encode())


def test_what_no_peer_would_read_is_not_said_quietly_either() -> None:
    with pytest.raises(WireError):
        encode_quietly(Accepted(""))
