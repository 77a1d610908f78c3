"""Messages of peers, ours and vLLM's: their bytes, and the texts of refusals.

``test_wire_fuzz.py`` sends every odd value in every field.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from layerpush.core.wire import (
    MAX_BLOCKS,
    MAX_COMPUTED,
    MAX_HEARTBEAT_IDS,
    MAX_ID_CHARS,
    PEER_PREFIX,
    PROTOCOL_VERSION,
    QUIET_PREFIX,
    REGISTRATION_PREFIX,
    Accepted,
    Cancel,
    Cancelled,
    Completed,
    Completion,
    Fail,
    FirstToken,
    Heartbeat,
    PartSums,
    PeerMessage,
    Ping,
    Pong,
    PrefixLanded,
    Queued,
    Registration,
    Unregister,
    Unregistered,
    WireError,
    decode_registration,
    encode,
    encode_completion,
    encode_quietly,
    encode_registration,
    read,
)
from tests.unit.builders import registration

STOCK = {
    "request_id": "cmpl-1-abc",
    "decode_engine_id": "eng-D",
    "decode_host": "127.0.0.1",
    "decode_port": 5700,
    "decode_tp_size": 2,
    "local_block_ids": [[3, 4], [7]],
    "remote_engine_id": "eng-P",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_tp_size": 1,
    "remote_pp_size": 1,
}
"""A stock decode worker's registration."""
BETWEEN_US: list[tuple[PeerMessage, dict[str, Any]]] = [
    (Accepted("r:1", True, 32), {"request_id": "r:1", "first_token": True, "prefix_tokens": 32}),
    (FirstToken("r", 2**31 - 1), {"request_id": "r", "token": 2**31 - 1}),
    (FirstToken("r", None, ("top_p",)), {"request_id": "r", "token": None, "other": ["top_p"]}),
    (
        Completed("r", 2, 9, (PartSums("a.0", 1, 2, 0, 9, 8, b"12345678"),)),
        {"request_id": "r", "world_size": 2, "tokens": 9, "sums": [["a.0", 1, 2, 0, 9, 8, b"12345678"]]},
    ),
    (PrefixLanded("r", 7, 8), {"request_id": "r", "number": 7, "tokens": 8}),
    (
        PrefixLanded("r", 7, 8, 9, (PartSums("a.0", 1, 2, 0, 8, 8, b"1234"),)),
        {"request_id": "r", "number": 7, "tokens": 8, "prompt_tokens": 9, "sums": [["a.0", 1, 2, 0, 8, 8, b"1234"]]},
    ),
    (Fail("r", 2, "preempted", True), {"request_id": "r", "epoch": 2, "reason": "preempted", "drained": True}),
    (
        Fail("r", 2, "doubt", True, void=True),
        {"request_id": "r", "epoch": 2, "reason": "doubt", "drained": True, "void": True},
    ),
    (
        Cancel("r", "D", "::1", 65535, 1024),
        {
            "request_id": "r",
            "decode_engine_id": "D",
            "decode_host": "::1",
            "decode_port": 65535,
            "decode_tp_size": 1024,
        },
    ),
    (Cancelled("r"), {"request_id": "r"}),
    (Queued("r", ("a", "t")), {"request_id": "r", "computed": ["a", "t"]}),
    (
        Unregister("r", "D", "::1", 65535, 1024, 2),
        {
            "request_id": "r",
            "decode_engine_id": "D",
            "decode_host": "::1",
            "decode_port": 65535,
            "decode_tp_size": 1024,
            "attempt": 2,
        },
    ),
    (Unregistered("r", 2), {"request_id": "r", "attempt": 2}),
    (Ping("D", 0), {"decode_engine_id": "D", "number": 0}),
    (Pong(2**63 - 1), {"number": 2**63 - 1}),
]
"""Every message of ours, and its map on the wire."""
ours = pytest.mark.parametrize(
    ("message", "fields"), [pytest.param(*each, id=type(each[0]).__name__) for each in BETWEEN_US]
)


def packed(message: object) -> bytes:
    return REGISTRATION_PREFIX + msgspec.msgpack.encode(message)


def said(kind: object, fields: dict[str, Any]) -> bytes:
    return PEER_PREFIX + msgspec.msgpack.encode({"kind": kind, **fields})


def test_the_protocol_version_of_this_release() -> None:
    assert PROTOCOL_VERSION == 2


def test_a_stock_decode_worker_is_understood() -> None:
    asked = read(packed(STOCK))
    assert isinstance(asked, Registration)
    assert asked.local_block_ids == ((3, 4), (7,))
    assert (asked.decode_engine_id, asked.decode_port, asked.decode_tp_size) == ("eng-D", 5700, 2)
    assert (asked.layerpush, asked.prefill_request_id, asked.prompt_digest) == (0, None, None)
    assert asked.blocks == 3


def test_an_older_p_promises_no_first_token() -> None:
    assert read(said("accepted", {"request_id": "r"})) == Accepted("r", first_token=False)


def test_names_of_sampling_parameters_are_bounded() -> None:
    for other in (["x" * 65], [""], ["a\n"], ["x"] * 129, [7]):
        with pytest.raises(WireError, match="other"):
            read(said("firsttoken", {"request_id": "r", "token": None, "other": other}))
    assert read(said("firsttoken", {"request_id": "r", "token": None, "other": []})) == FirstToken("r", None)


def test_a_registration_without_offers_equals_a_stock_one() -> None:
    sent = {key: value for key, value in STOCK.items() if not key.startswith("remote")}
    assert encode_registration(decode_registration(packed(STOCK))) == packed(sent)


def test_the_offers_of_a_registration_come_last() -> None:
    stock = registration([1], [2])
    offering = msgspec.structs.replace(stock, layerpush=1, prefill_request_id="p-1", prompt_digest="ab")
    offer = {"layerpush": 1, "prefill_request_id": "p-1", "prompt_digest": "ab"}

    assert encode_registration(offering) == packed({**msgspec.to_builtins(stock), **offer})
    assert read(encode_registration(offering)) == offering
    assert read(encode_registration(stock, **offer)) == offering


NEWER = {"version": 9, "more": [{"x": b"\xff"}, None], "last": 1.5}


def test_keys_of_a_newer_decode_worker_are_ignored() -> None:
    assert read(packed(NEWER | STOCK)) == read(packed(STOCK))


@ours
def test_layerpush_messages_survive_a_round_trip(message: PeerMessage, fields: dict[str, Any]) -> None:
    kind = type(message).__name__.lower()
    assert encode(message) == said(kind, fields)
    assert read(encode(message)) == read(said(kind, NEWER | fields)) == message


@ours
def test_a_quiet_message_is_a_heartbeat_to_a_stock_peer(message: PeerMessage, fields: dict[str, Any]) -> None:
    """A stock peer reads one unknown request id: it splits the heartbeat at commas and looks each id up."""
    payload = encode_quietly(message)
    assert read(payload) == message
    assert payload.startswith(b"HB:")
    assert payload.isascii()
    assert not set(payload[3:]) & set(b",:")


@pytest.mark.parametrize("kind", ["", "Ping", "pings", 3, None, b"ping", "x" * 10_000, "ping\nERROR all is lost"])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(WireError, match="kind") as refusal:
        read(said(kind, {"number": 1, "request_id": "r"}))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


def test_a_reason_is_sanitized_for_the_log_on_both_sides() -> None:
    reason = "boom\n" + "x" * 5000
    assert read(encode(Fail("r", 0, reason, False))) == Fail("r", 0, "boom?" + "x" * 995, False)
    sent = said("fail", {"request_id": "r", "epoch": 2, "reason": "a\x1b[2Jb\u2029c", "drained": True})
    assert read(sent) == Fail("r", 2, "a?[2Jb?c", True)


@pytest.mark.parametrize(
    "message",
    [
        Accepted("a\nb"),
        Accepted("\ud800"),
        Fail("r", 2**80, "", True),
        Cancel("r", "D", "host", 0, 1),
        Pong(1.5),
        Ping(object(), 1),
    ],
)
def test_an_unreadable_message_is_not_sent(message: PeerMessage) -> None:
    for encoder in (encode, encode_quietly):
        with pytest.raises(WireError):
            encoder(message)


@pytest.mark.parametrize(
    "inner",
    ["", "xy", "0", "é", (b"HB:" + b"a").hex(), PEER_PREFIX.hex(), encode(Pong(1)).hex().replace("4c", "4d")],
)
def test_an_invalid_quiet_message_is_refused(inner: str) -> None:
    with pytest.raises(WireError):
        read(QUIET_PREFIX + inner.encode())


@pytest.mark.parametrize(("flat", "groups"), [([3, 4], ((3, 4),)), ([], ())])
def test_one_group_may_come_unwrapped(flat: list[int], groups: tuple[tuple[int, ...], ...]) -> None:
    offer = {"layerpush": 1, "prefill_request_id": "p", "prompt_digest": "ab"}
    whole = read(packed({**STOCK, "local_block_ids": groups, **offer}))
    assert read(packed({**STOCK, "local_block_ids": flat, **offer})) == whole
    assert isinstance(whole, Registration)
    assert whole.local_block_ids == groups


def test_a_refusal_names_the_rule_in_words() -> None:
    with pytest.raises(WireError, match=r"`str` without control characters or a prefix of ours - at `\$.request_id`"):
        read(packed({**STOCK, "request_id": "a\nb"}))


def test_too_many_blocks_are_a_wire_error() -> None:
    half = list(range(MAX_BLOCKS // 2))
    with pytest.raises(WireError, match="bytes"):
        read(packed({**STOCK, "local_block_ids": [list(range(MAX_BLOCKS + 1))]}))
    with pytest.raises(WireError, match=r"local_block_ids.*1048577 blocks"):
        decode_registration(packed({**STOCK, "local_block_ids": [half, half, [1]]}))
    with pytest.raises(WireError, match="local_block_ids"):
        read(packed({**STOCK, "local_block_ids": [[0] * (MAX_BLOCKS + 1)]}))


def test_a_false_length_of_the_block_list_reserves_little_memory() -> None:
    """A list that claims four billion entries, and ends there."""
    head = packed({key: value for key, value in STOCK.items() if key != "local_block_ids"})
    assert head[len(REGISTRATION_PREFIX)] == 0x80 + len(STOCK) - 1
    longer = head.replace(b"\x8a\xaa", b"\x8b\xaa", 1) + b"\xaflocal_block_ids"
    for lists in (b"\xdd\xff\xff\xff\xff", b"\x91\xdd\xff\xff\xff\xff"):
        with pytest.raises(WireError, match="local_block_ids"):
            read(longer + lists)
    with pytest.raises(WireError, match="truncated"):
        read(longer + b"\x91\xdd\x00\x0f\xff\xff")


@pytest.mark.parametrize("change", [{"request_id": "a\n"}, {"decode_port": 0}, {"decode_host": "\ud800"}])
def test_an_unreadable_registration_is_not_sent(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        encode_registration(msgspec.structs.replace(registration([1]), **change))


@pytest.mark.parametrize(
    ("notification", "request_id", "world_size"),
    [(b"a:1", "a", 1), (b"cmpl-1:x:2", "cmpl-1:x", 2), (b"a,b:999999", "a,b", 999999), ("ü::8".encode(), "ü:", 8)],
)
def test_a_vllm_completion_is_understood(notification: bytes, request_id: str, world_size: int) -> None:
    assert read(notification) == Completion(request_id, world_size)
    assert encode_completion(request_id, world_size) == notification


@pytest.mark.parametrize(
    "notification",
    [
        b"",
        b":",
        b"a",
        b"a:",
        b":1",
        b"a:0",
        b"a:-1",
        b"a:+1",
        b"a: 1",
        b"a:1 ",
        b"a:1.0",
        b"a:1e3",
        b"a:1000000",
        "a:٣".encode(),
        b"a\n:1",
        b"\xff:1",
        b"a:\xb2",
        b"x" * 1025 + b":1",
        b"PUSH_REX:x",
        b"layerpush:\x80",
    ],
)
def test_an_invalid_notification_is_refused(notification: bytes) -> None:
    with pytest.raises(WireError) as refusal:
        read(notification)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("notification", "request_ids"),
    [
        (b"HB:", ()),
        (b"HB:,", ()),
        (b"HB:a", ("a",)),
        (b"HB:a,b:1,c", ("a", "b:1", "c")),
        (b"HB:a,,b", ("a", "b")),
        (b"HB:a\nb,c," + b"x" * 1025, ("c",)),
    ],
)
def test_a_vllm_heartbeat_is_understood(notification: bytes, request_ids: tuple[str, ...]) -> None:
    assert read(notification) == Heartbeat(request_ids)


def test_heartbeats_with_too_many_ids_or_invalid_text_are_refused() -> None:
    full = b"HB:" + b",".join([b"a"] * MAX_HEARTBEAT_IDS)
    assert len(read(full).request_ids) == MAX_HEARTBEAT_IDS
    for bad in (full + b",a", b"HB:\xff"):
        with pytest.raises(WireError, match="heartbeat"):
            read(bad)


def test_a_huge_notification_is_not_parsed() -> None:
    limits = {b"HB:": 1 << 20, PEER_PREFIX: 1 << 17, REGISTRATION_PREFIX: 4 << 20, b"": 1 << 17}
    for start, limit in limits.items():
        with pytest.raises(WireError, match=f"has {limit + 1} bytes, more than {limit}"):
            read(start.ljust(limit + 1, b"\x91"))


def test_the_largest_messages_are_within_their_limits() -> None:
    name = "\u4e00" * MAX_ID_CHARS
    for message in (Queued(name, (name,) * MAX_COMPUTED), Cancel(name, name, "h" * 253, 65535, 1024)):
        assert read(encode(message)) == message
    assert read(encode_quietly(Cancel(name, name, "h" * 253, 65535, 1024))).request_id == name
