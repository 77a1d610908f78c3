"""Messages of peers, ours and upstream's: what they are in bytes, and which are refused with which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from layerpush.core.wire import (
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_HEARTBEAT_IDS,
    MAX_NOTIFICATION_BYTES,
    PEER_PREFIX,
    REGISTRATION_PREFIX,
    Completion,
    Heartbeat,
    Registration,
    WireError,
    decode_registration,
    encode_completion,
    encode_heartbeat,
    encode_registration,
    read,
)
from tests.unit.builders import registration

UPSTREAM = {
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
"""What a stock decode worker sends."""


def packed(message: object) -> bytes:
    return REGISTRATION_PREFIX + msgspec.msgpack.encode(message)


def test_a_stock_decode_worker_is_understood() -> None:
    asked = read(packed(UPSTREAM))
    assert isinstance(asked, Registration)
    assert asked.local_block_ids == ((3, 4), (7,))
    assert (asked.decode_engine_id, asked.decode_port, asked.decode_tp_size) == ("eng-D", 5700, 2)
    assert (asked.layerpush, asked.prefill_request_id, asked.prompt_digest) == (0, None, None)
    assert asked.blocks == 3


def test_a_registration_that_offers_nothing_is_a_stock_one() -> None:
    stock = {key: value for key, value in UPSTREAM.items() if not key.startswith("remote")}
    assert encode_registration(decode_registration(packed(UPSTREAM))) == packed(stock)


def test_what_a_registration_offers_comes_last() -> None:
    stock = registration([1], [2])
    offering = msgspec.structs.replace(stock, layerpush=1, prefill_request_id="p-1", prompt_digest="ab")
    offer = {"layerpush": 1, "prefill_request_id": "p-1", "prompt_digest": "ab"}

    assert encode_registration(offering) == packed({**msgspec.to_builtins(stock), **offer})
    assert read(encode_registration(offering)) == offering
    assert read(encode_registration(stock, **offer)) == offering


def test_keys_of_a_newer_peer_are_ignored() -> None:
    newer = {"version": 9, "more": [{"x": b"\xff"}, None], **UPSTREAM, "last": 1.5}
    assert read(packed(newer)) == read(packed(UPSTREAM))


@pytest.mark.parametrize(("flat", "groups"), [([3, 4], ((3, 4),)), ([], ())])
def test_one_group_may_come_unwrapped(flat: list[int], groups: tuple[tuple[int, ...], ...]) -> None:
    offer = {"layerpush": 1, "prefill_request_id": "p", "prompt_digest": "ab"}
    whole = read(packed({**UPSTREAM, "local_block_ids": groups, **offer}))
    assert read(packed({**UPSTREAM, "local_block_ids": flat, **offer})) == whole
    assert isinstance(whole, Registration)
    assert whole.local_block_ids == groups


@pytest.mark.parametrize("key", [key for key in UPSTREAM if not key.startswith("remote")])
def test_a_missing_key_is_named(key: str) -> None:
    message = {name: value for name, value in UPSTREAM.items() if name != key}
    with pytest.raises(WireError, match=f"PUSH_REG.*{key}"):
        read(packed(message))


BAD_VALUES: dict[str, list[Any]] = {
    "request_id": [5, None, "", b"abc", "x" * 1025, "a\nb", "a\0", "a\x85b", "a\u2028b", "\u202eabc", "HB:1", "HB"],
    "decode_engine_id": [None, "", 7, ["e"], "e" * 1025, "e\r"],
    "decode_host": [None, "", 127, "h" * 256, "host\n"],
    "decode_port": ["5700", 5700.0, True, 0, -1, 65536, 2**64 - 1],
    "decode_tp_size": [1.5, 0, -2, 1025, False, "2"],
    "local_block_ids": [
        "abc",
        None,
        {},
        [[1, "2"]],
        [1, [2]],
        [[1], 2],
        [[1, -2]],
        [-1],
        [[2.0]],
        [[True]],
        [[2**31]],
        [2**31],
        [[2**64 - 1]],
        [[4, 4]],
        [[0, 4, 4]],
        [4, 5, 4],
        [[]] * (MAX_GROUPS + 1),
    ],
    "layerpush": [-1, "1", 1.0, True, None, 2**63],
    "prefill_request_id": [3, "", "a\nb", "x" * 1025],
    "prompt_digest": [3, "", "a\nb", "x" * 1025],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values])
def test_a_bad_value_is_named(key: str, value: object) -> None:
    with pytest.raises(WireError, match=key) as refusal:
        read(packed({**UPSTREAM, key: value}))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


def test_a_refusal_speaks_in_words() -> None:
    with pytest.raises(WireError, match=r"`str` without control characters or a prefix of ours - at `\$.request_id`"):
        read(packed({**UPSTREAM, "request_id": "a\nb"}))


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80"])
@pytest.mark.parametrize("start", [PEER_PREFIX + b"\x81\xa4kind", REGISTRATION_PREFIX + b"\x81\xaarequest_id"])
def test_text_that_is_none_is_a_wire_error(start: bytes, text: bytes) -> None:
    with pytest.raises(WireError, match="codec can't decode"):
        read(start + bytes([0xA0 + len(text)]) + text)


def test_the_null_block_may_come_often() -> None:
    asked = read(packed({**UPSTREAM, "local_block_ids": [[0, 0, 0, 5], [5]]}))
    assert isinstance(asked, Registration)
    assert asked.local_block_ids == ((0, 0, 0, 5), (5,))


def test_no_more_blocks_than_a_decode_engine_can_have() -> None:
    half = list(range(MAX_BLOCKS // 2))
    with pytest.raises(WireError, match="bytes"):
        read(packed({**UPSTREAM, "local_block_ids": [list(range(MAX_BLOCKS + 1))]}))
    with pytest.raises(WireError, match=r"local_block_ids.*1048577 blocks"):
        decode_registration(packed({**UPSTREAM, "local_block_ids": [half, half, [1]]}))
    with pytest.raises(WireError, match="local_block_ids"):
        read(packed({**UPSTREAM, "local_block_ids": [[0] * (MAX_BLOCKS + 1)]}))


def test_a_promise_of_blocks_reserves_little_memory() -> None:
    """A list that says it has four billion entries, and ends there."""
    head = packed({key: value for key, value in UPSTREAM.items() if key != "local_block_ids"})
    assert head[len(REGISTRATION_PREFIX)] == 0x80 + len(UPSTREAM) - 1
    longer = head.replace(b"\x8a\xaa", b"\x8b\xaa", 1) + b"\xaflocal_block_ids"
    for lists in (b"\xdd\xff\xff\xff\xff", b"\x91\xdd\xff\xff\xff\xff"):
        with pytest.raises(WireError, match="local_block_ids"):
            read(longer + lists)
    with pytest.raises(WireError, match="truncated"):
        read(longer + b"\x91\xdd\x00\x0f\xff\xff")


@pytest.mark.parametrize("change", [{"request_id": "a\n"}, {"decode_port": 0}, {"decode_host": "\ud800"}])
def test_a_registration_that_no_peer_would_read_is_not_sent(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        encode_registration(msgspec.structs.replace(registration([1]), **change))


@pytest.mark.parametrize(
    ("notification", "request_id", "world_size"),
    [(b"a:1", "a", 1), (b"cmpl-1:x:2", "cmpl-1:x", 2), (b"a,b:999999", "a,b", 999999), ("ü::8".encode(), "ü:", 8)],
)
def test_a_completion_of_upstream(notification: bytes, request_id: str, world_size: int) -> None:
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
def test_what_is_none_is_refused(notification: bytes) -> None:
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
def test_a_heartbeat_of_upstream(notification: bytes, request_ids: tuple[str, ...]) -> None:
    assert read(notification) == Heartbeat(request_ids)


def test_heartbeats_are_bounded_text() -> None:
    full = b"HB:" + b",".join([b"a"] * MAX_HEARTBEAT_IDS)
    assert len(read(full).request_ids) == MAX_HEARTBEAT_IDS  # type: ignore[union-attr]
    for bad in (full + b",a", b"HB:\xff"):
        with pytest.raises(WireError, match="heartbeat"):
            read(bad)


def test_a_huge_notification_is_not_looked_into() -> None:
    for start in (b"HB:", PEER_PREFIX, REGISTRATION_PREFIX, b""):
        with pytest.raises(WireError, match="4194305 bytes"):
            read(start.ljust(MAX_NOTIFICATION_BYTES + 1, b"\x91"))


@pytest.mark.parametrize("prefix", [PEER_PREFIX, REGISTRATION_PREFIX])
def test_a_message_nested_without_end_is_a_wire_error(prefix: bytes) -> None:
    for nested in (b"\x81\xa1x" + b"\x91" * 100_000, b"\x81\xa1x" * 100_000, b"\x91" * 100_000):
        with pytest.raises(WireError, match="cannot be read"):
            read(prefix + nested)


def test_the_heartbeat_encoder() -> None:
    assert encode_heartbeat(["a", "b"]) == b"HB:a,b"
    assert encode_heartbeat([]) == b"HB:"
