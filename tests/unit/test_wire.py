"""Messages of peers, ours and upstream's, whole and broken."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.wire import (
    REGISTRATION_PREFIX,
    Registration,
    WireError,
    decode_registration,
    encode_completion,
    encode_heartbeat,
    encode_registration,
    is_registration,
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


registrations = st.builds(
    Registration,
    request_id=st.text(max_size=20),
    decode_engine_id=st.text(max_size=20),
    decode_host=st.text(max_size=20),
    decode_port=st.integers(0, 65535),
    decode_tp_size=st.integers(1, 64),
    local_block_ids=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple), max_size=4).map(tuple),
)


@given(registrations)
def test_it_comes_back_as_it_was_sent(sent: Registration) -> None:
    assert decode_registration(encode_registration(sent)) == sent


@given(registrations, st.dictionaries(st.text(min_size=20, max_size=30), st.booleans(), max_size=3))
def test_extra_keys_ride_along(sent: Registration, extra: dict[str, bool]) -> None:
    assert decode_registration(encode_registration(sent, **extra)) == sent


def test_a_stock_decode_worker_is_understood() -> None:
    read = decode_registration(packed(UPSTREAM))
    assert read.local_block_ids == ((3, 4), (7,))
    assert (read.decode_engine_id, read.decode_port, read.decode_tp_size) == ("eng-D", 5700, 2)
    assert read.blocks == 3


@pytest.mark.parametrize(("flat", "groups"), [([3, 4], ((3, 4),)), ([], ())])
def test_one_group_may_come_unwrapped(flat: list[int], groups: tuple[tuple[int, ...], ...]) -> None:
    assert decode_registration(packed({**UPSTREAM, "local_block_ids": flat})).local_block_ids == groups


@pytest.mark.parametrize(
    "key", ["request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size", "local_block_ids"]
)
def test_a_missing_key_is_named(key: str) -> None:
    message = {name: value for name, value in UPSTREAM.items() if name != key}
    with pytest.raises(WireError, match=key):
        decode_registration(packed(message))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("request_id", 5),
        ("decode_engine_id", None),
        ("decode_port", "5700"),
        ("decode_tp_size", 1.5),
        ("decode_tp_size", 0),
        ("local_block_ids", "abc"),
        ("local_block_ids", [[1, "2"]]),
        ("local_block_ids", [1, [2]]),
        ("local_block_ids", None),
    ],
)
def test_a_bad_value_is_named(key: str, value: object) -> None:
    with pytest.raises(WireError, match=key):
        decode_registration(packed({**UPSTREAM, key: value}))


@pytest.mark.parametrize("blocks", [[[1, -2]], [-1]])
def test_a_negative_block_is_refused(blocks: list[object]) -> None:
    with pytest.raises(WireError, match=r"cmpl-1-abc.*negative block"):
        decode_registration(packed({**UPSTREAM, "local_block_ids": blocks}))


@given(st.binary(max_size=80))
def test_garbage_is_a_wire_error(payload: bytes) -> None:
    _reads_or_refuses(REGISTRATION_PREFIX + payload)


@given(st.binary(min_size=1, max_size=4), st.integers(0, 400), st.integers(0, 400))
def test_a_damaged_message_is_a_wire_error(noise: bytes, at: int, cut: int) -> None:
    whole = packed(UPSTREAM)[len(REGISTRATION_PREFIX) :]
    at %= len(whole)
    _reads_or_refuses(REGISTRATION_PREFIX + whole[:at] + noise + whole[at + len(noise) :][: cut or None])


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(sorted(UPSTREAM)), json_like)
def test_any_value_anywhere_is_read_or_refused(key: str, value: object) -> None:
    _reads_or_refuses(packed({**UPSTREAM, key: value}))


def test_a_message_nested_without_end_is_a_wire_error() -> None:
    _reads_or_refuses(REGISTRATION_PREFIX + b"\x81\xa1x" + b"\x91" * 100_000)


def _reads_or_refuses(notification: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode_registration(notification), Registration)


def test_the_other_notifications() -> None:
    assert encode_completion("cmpl-1:x", 2) == b"cmpl-1:x:2"
    assert encode_heartbeat(["a", "b"]) == b"HB:a,b"
    assert is_registration(encode_registration(registration([1])))
    assert not is_registration(encode_completion("a", 1))
    assert not is_registration(encode_heartbeat(["a"]))
