"""For any bytes of a peer, reading ends in a message with sound fields or in a ``WireError``."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layerpush.core.wire import (
    HEARTBEAT_PREFIX,
    PEER_PREFIX,
    QUIET_PREFIX,
    REGISTRATION_PREFIX,
    Accepted,
    Acknowledged,
    Cancel,
    Cancelled,
    Completed,
    Completion,
    Decline,
    Fail,
    FirstToken,
    HasLanded,
    Heartbeat,
    Landed,
    Message,
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
    encode,
    encode_completion,
    encode_heartbeat,
    encode_quietly,
    encode_registration,
    read,
)
from tests.unit.builders import registration
from tests.unit.test_wire import BETWEEN_US

PREFIXES = [REGISTRATION_PREFIX, PEER_PREFIX, QUIET_PREFIX, HEARTBEAT_PREFIX, b""]
INT64 = 2**63
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no finding."""

# --- the rules of a sound message, again without msgspec ---


def is_clean(text: object, most: int = 1024) -> bool:
    if type(text) is not str or not 1 <= len(text) <= most:
        return False
    return not any(
        unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or char in "\u200e\u200f"
        or unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        for char in text
    )


def is_count(number: object, least: int = 0, most: int = INT64 - 1) -> bool:
    return type(number) is int and least <= number <= most


def is_request(text: object) -> bool:
    return is_clean(text) and not f"{text}:1".startswith(("HB:", "PUSH_REG:", "LAYERPUSH:"))


def is_blocks(groups: object) -> bool:
    assert type(groups) is tuple
    assert all(type(group) is tuple for group in groups)
    named = [block for group in groups for block in group]
    twice = any(len(set(used)) < len(used) for used in ([block for block in group if block] for group in groups))
    return len(groups) <= 1024 and len(named) <= 2**20 and all(is_count(b, 0, 2**31 - 1) for b in named) and not twice


def is_parameter(pair: Any) -> bool:
    return type(pair) is tuple and len(pair) == 2 and all(is_clean(text, 64) for text in pair)


def is_sums(row: Any) -> bool:
    """One that was read, or its fields."""
    if type(row) is PartSums:
        row = msgspec.structs.astuple(row)
    if type(row) is not tuple or len(row) != 7:
        return False
    layer, *numbers, unit, values = row
    lengths = is_count(unit, 1, 2**31 - 1) and type(values) is bytes and len(values) <= 4 * 8192
    return is_clean(layer) and all(map(is_count, numbers)) and lengths


SOUND: dict[str, Callable[[Any], bool]] = {
    "request_id": is_request,
    "decode_engine_id": is_clean,
    "decode_host": lambda host: is_clean(host, 255),
    "decode_port": lambda port: is_count(port, 1, 65535),
    "decode_tp_size": lambda size: is_count(size, 1, 1024),
    "local_block_ids": is_blocks,
    "layerpush": is_count,
    "prefill_request_id": lambda text: text is None or is_request(text),
    "transfer_id": lambda text: text is None or is_clean(text),
    "prompt_digest": lambda text: text is None or is_clean(text),
    "sampling": lambda text: text is None or is_clean(text),
    "contact": lambda contact: contact is None or (type(contact) is bytes and 1 <= len(contact) <= 2**16),
    "parameters": lambda pairs: type(pairs) is tuple and len(pairs) <= 64 and all(map(is_parameter, pairs)),
    "other": lambda names: type(names) is tuple and len(names) <= 128 and all(is_clean(name, 64) for name in names),
    "token": lambda token: token is None or is_count(token, 0, 2**31 - 1),
    "first_token": lambda value: type(value) is bool,
    "epoch": is_count,
    "attempt": is_count,
    "prefix_tokens": is_count,
    "numbers": lambda numbers: type(numbers) is tuple and 1 <= len(numbers) <= 4096 and all(map(is_count, numbers)),
    "notification": lambda payload: type(payload) is bytes,
    "acknowledges": lambda value: type(value) is bool,
    "computed": lambda texts: type(texts) is tuple and len(texts) <= 16 and all(map(is_clean, texts)),
    "number": is_count,
    "tokens": is_count,
    "prompt_tokens": is_count,
    "void": lambda value: type(value) is bool,
    "sums": lambda rows: type(rows) is tuple and len(rows) <= 1024 and all(map(is_sums, rows)),
    "verifies": lambda text: text is None or is_clean(text),
    "drained": lambda value: type(value) is bool,
    "reason": lambda text: type(text) is str and len(text) <= 1000 and (text == "" or text.isprintable()),
    "world_size": lambda size: is_count(size, 1, 999_999),
    "request_ids": lambda ids: type(ids) is tuple and len(ids) <= 65536 and all(map(is_clean, ids)),
}


def read_or_refused(notification: bytes) -> Message | None:
    """Checks the one property of this file. None: the message was refused."""
    refusal, message = None, None
    try:
        message = read(notification)
    except WireError as error:
        refusal = str(error)
    if message is None:
        assert refusal is not None
        assert refusal.isprintable()
        assert len(refusal) < 400
        return None
    for field in message.__struct_fields__:
        value = getattr(message, field)
        ok = is_clean(value) if isinstance(message, Completion) and field == "request_id" else SOUND[field](value)
        assert ok, f"{type(message).__name__}.{field} = {value!r}"
    assert read(sent_again(message)) == message
    return message


def sent_again(message: Message) -> bytes:
    match message:
        case Registration():
            return encode_registration(message)
        case Completion():
            return encode_completion(message.request_id, message.world_size)
        case Heartbeat():
            return encode_heartbeat(message.request_ids)
        case _:
            return encode(message)


# --- messages as they should be ---

letters = st.characters(exclude_categories=("Cc", "Cs", "Cf", "Zl", "Zp"))
names = st.text(letters, min_size=1, max_size=20)
request_ids = names.filter(is_request) | st.sampled_from(["cmpl-1:x", "a,b", "HBx", "x" * 1024])
counts = st.integers(0, INT64 - 1) | st.just(INT64 - 1)
ports, sizes = st.integers(1, 65535), st.integers(1, 1024)
reasons = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
groups = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9, unique=True).map(tuple), max_size=4).map(tuple)
blocks = st.integers(0, 2**31 - 1)
registrations = st.builds(
    Registration,
    request_id=request_ids,
    decode_engine_id=names,
    decode_host=names,
    decode_port=ports,
    decode_tp_size=sizes,
    local_block_ids=groups,
    layerpush=counts,
    prefill_request_id=st.none() | request_ids,
    transfer_id=st.none() | names,
    prompt_digest=st.none() | names,
    sampling=st.none() | names,
    parameters=st.lists(st.tuples(names, names), max_size=3).map(tuple),
    contact=st.none() | st.binary(min_size=1, max_size=300),
    attempt=counts,
    acknowledges=st.booleans(),
    verifies=st.none() | names,
    prefix_tokens=counts,
)
sums = st.builds(PartSums, names, counts, counts, counts, counts, st.integers(1, 2**31 - 1), st.binary(max_size=40))
peer_messages = st.one_of(
    st.builds(Accepted, request_ids, st.booleans(), counts),
    st.builds(FirstToken, request_ids, st.none() | blocks, st.lists(names, max_size=3).map(tuple)),
    st.builds(Completed, request_ids, st.integers(1, 999_999), counts, st.lists(sums, max_size=3).map(tuple)),
    st.builds(PrefixLanded, request_ids, counts, counts, counts, st.lists(sums, max_size=3).map(tuple)),
    st.builds(Fail, request_ids, counts, reasons, st.booleans(), st.booleans()),
    st.builds(Cancel, request_ids, names, names, ports, sizes),
    st.builds(Cancelled, request_ids),
    st.builds(Queued, request_ids, st.lists(names, max_size=5).map(tuple)),
    st.builds(Unregister, request_ids, names, names, ports, sizes, counts),
    st.builds(Unregistered, request_ids, counts),
    st.builds(Landed, counts, st.binary(max_size=300)),
    st.builds(HasLanded, counts),
    st.builds(Acknowledged, st.lists(counts, min_size=1, max_size=5).map(tuple)),
    st.builds(Decline, request_ids, names, st.none() | request_ids, st.none() | names),
    st.builds(Ping, names, counts),
    st.builds(Pong, counts),
)
completions = st.builds(Completion, request_ids, st.integers(1, 999_999))
heartbeats = st.builds(Heartbeat, st.lists(names.filter(lambda name: "," not in name), max_size=5).map(tuple)).filter(
    lambda heartbeat: not encode_heartbeat(heartbeat.request_ids).startswith(QUIET_PREFIX)
)
quiet = peer_messages.map(encode_quietly)
notifications = st.one_of(registrations, peer_messages, completions, heartbeats).map(sent_again) | quiet


@FUZZ
@given(registrations, st.dictionaries(st.text(letters, min_size=20, max_size=30), st.booleans(), max_size=3))
def test_a_registration_survives_a_round_trip(sent: Registration, extra: dict[str, bool]) -> None:
    assert read(encode_registration(sent, **extra)) == sent
    assert read_or_refused(encode_registration(sent)) == sent


@FUZZ
@given(peer_messages)
def test_layerpush_messages_survive_a_round_trip(sent: PeerMessage) -> None:
    back = read_or_refused(encode(sent))
    assert read_or_refused(encode_quietly(sent)) == back
    if isinstance(sent, Fail):
        assert back == msgspec.structs.replace(sent, reason="".join(c if c.isprintable() else "?" for c in sent.reason))
    else:
        assert back == sent


@FUZZ
@given(completions | heartbeats)
def test_messages_of_vllm_survive_a_round_trip(sent: Completion | Heartbeat) -> None:
    assert read_or_refused(sent_again(sent)) == sent


# --- messages as they should not be ---


@FUZZ
@given(st.sampled_from(PREFIXES), st.binary(max_size=120))
@example(PEER_PREFIX, b"\x81\xa4kind\xa3a\nb")
@example(PEER_PREFIX, b"\x82\xa4kind\xa4ping\xa4kind\xa4pong")
@example(PEER_PREFIX, b"\x81\xa4kind\xa3\xed\xa0\x80")
@example(REGISTRATION_PREFIX, b"\x81\xaarequest_id\xa3\xed\xa0\x80")
@example(PEER_PREFIX, b"\x81\xa1x" + b"\x91" * 100_000)
@example(REGISTRATION_PREFIX, b"\x81\xa1x" + b"\x91" * 100_000)
@example(REGISTRATION_PREFIX, b"\xdf\xff\xff\xff\xff")
@example(REGISTRATION_PREFIX, b"\x81\xaarequest_id\xc7\xff\xff")
def test_garbage_is_refused_or_read(prefix: bytes, payload: bytes) -> None:
    read_or_refused(prefix + payload)


@settings(FUZZ, max_examples=250)
@given(notifications, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=8))
def test_flipped_bits_are_refused_or_read(sent: bytes, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(sent)
    for at, bit in flips:
        damaged[at % len(damaged)] ^= 1 << bit
    read_or_refused(bytes(damaged))


@settings(FUZZ, max_examples=60)
@given(registrations.map(sent_again) | peer_messages.map(sent_again) | quiet)
def test_every_truncation_is_refused(sent: bytes) -> None:
    for length in range(len(sent)):
        message = read_or_refused(sent[:length])
        # the head of an id with a colon and a digit may be a completion; nothing else survives without its tail
        cut_text = isinstance(message, Completion) and not sent[:length].startswith(PEER_PREFIX)
        cut_prefix = isinstance(message, Heartbeat) and length < len(QUIET_PREFIX)
        assert message is None or cut_text or cut_prefix


@settings(FUZZ, max_examples=250)
@given(notifications, notifications, st.integers(0, 10_000), st.integers(0, 10_000), st.binary(max_size=6))
def test_splices_are_refused_or_read(head: bytes, tail: bytes, upto: int, after: int, between: bytes) -> None:
    read_or_refused(head[: upto % len(head)] + between + tail[after % len(tail) :])


@FUZZ
@given(notifications, st.binary(min_size=1, max_size=20))
def test_a_message_with_trailing_bytes_is_refused_or_read(sent: bytes, more: bytes) -> None:
    read_or_refused(sent + more)
    read_or_refused(more + sent)


ODD: list[Any] = [
    *[-1, 0, 1, 2**31 - 1, 2**31, INT64 - 1, INT64, 2**64 - 1, -INT64, 0.0, 1.0, float("nan"), True, False, None],
    *[1023, 1024, 1025, 65535, 65536, 65537, 2**30, 2**30 + 1],
    *["", "1", "x" * 255, "x" * 256, "x" * 1024, "x" * 1025, "x" * 4000, "x" * 4001, b"", b"x"],
    *["a\nb", "a\0", "a\x85b", "a\u2028b", "\u202eabc", "\u200f", "\u2066", "a\u00a0b", "ünï"],
    *["HB", "HB:1", "HBx", "PUSH_REG:1", "LAYERPUSH", "layerpush"],
    *[[], [1], [1, 1], [4, 5, 4], [0, 0], [-1], [2**31], [1.0], ["2"], {}, {"1": 1}, {1: 1}],
    *[[[1, 1]], [[0, 0]], [[0, 4, 4]], [[-1]], [[2**31]], [[], [1]], [[True]], [[1.0]], [[[]]], [1, [2]], [[1], 2]],
    *[[[]] * 1024, [[]] * 1025, [[0, 1, 0, 0, 1]], [[0, 1, 0, 0]], [[0, 1, 0, 0, 2**31]]],
    *[[[0] * 5] * 4096, [[0] * 5] * 4097],
    *[msgspec.msgpack.Ext(5, b""), msgspec.msgpack.Ext(-1, b"\0")],
]
odd = st.sampled_from(ODD)
numbers = st.sampled_from([-1, 0, INT64, 2**64 - 1]) | st.integers(-INT64, 2**64 - 1)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=5), st.binary(max_size=5))


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | numbers, inner, max_size=4)


anything = st.recursive(scalars | odd, nested, max_leaves=12)


def altered(
    message: Registration | PeerMessage,
) -> st.SearchStrategy[tuple[Registration | PeerMessage, dict[str, Any]]]:
    """The message as a map, with other values for some of its keys, and with additional keys."""
    keys = st.sampled_from([*message.__struct_fields__, *SOUND]) | st.text(max_size=5)
    changes = st.dictionaries(keys, odd | anything, min_size=1, max_size=2)
    return changes.map(lambda other: (message, {**msgspec.to_builtins(message, builtin_types=(bytes,)), **other}))


@settings(FUZZ, max_examples=400)
@given((registrations | peer_messages).flatmap(altered))
def test_any_value_in_any_field_is_refused_or_read(case: tuple[Registration | PeerMessage, dict[str, Any]]) -> None:
    message, fields = case
    back = read_or_refused(prefix_of(message) + msgspec.msgpack.encode(fields))
    assert back is None or type(back) is type(message)


def prefix_of(message: Registration | PeerMessage) -> bytes:
    return REGISTRATION_PREFIX if isinstance(message, Registration) else PEER_PREFIX


def is_sound_as_sent(field: str, value: Any) -> bool:
    """For a value in a map, before reading: groups and parts are lists there, and a reason may hold any text."""
    if field == "reason":
        return type(value) is str and len(value) <= 4000
    if field not in ("local_block_ids", "parameters", "other", "computed", "numbers", "sums"):
        return SOUND[field](value)
    if type(value) is not list:
        return False
    if field in ("parameters", "other", "computed", "numbers", "sums"):
        return SOUND[field](tuple(tuple(each) if type(each) is list else each for each in value))
    lists = [each for each in value if type(each) is list]
    groups = [value] if value and not lists else value
    return all(type(group) is list for group in groups) and is_blocks(tuple(map(tuple, groups)))


WHOLE = [registration([1]), *(message for message, _ in BETWEEN_US)]


@pytest.mark.parametrize("message", WHOLE, ids=lambda message: type(message).__name__)
def test_each_field_accepts_only_valid_values_and_errors_name_the_field(
    message: Registration | PeerMessage,
) -> None:
    sound = msgspec.to_builtins(message, builtin_types=(bytes,))
    for field in message.__struct_fields__:
        for value in ODD:
            sent = prefix_of(message) + msgspec.msgpack.encode({**sound, field: value})
            back = read_or_refused(sent)
            assert (back is not None) == is_sound_as_sent(field, value), (field, value)
            if back is None:
                with pytest.raises(WireError, match=field):
                    read(sent)


@pytest.mark.parametrize("message", WHOLE, ids=lambda message: type(message).__name__)
def test_the_error_names_a_missing_field(message: Registration | PeerMessage) -> None:
    sound = msgspec.to_builtins(message, builtin_types=(bytes,))
    first = {Registration: 6, Accepted: 1, FirstToken: 2, PrefixLanded: 3, Fail: 4}
    required = type(message).__struct_fields__[: first.get(type(message))]
    for field in required:
        rest = {name: value for name, value in sound.items() if name != field}
        with pytest.raises(WireError, match=field):
            read(prefix_of(message) + msgspec.msgpack.encode(rest))


@FUZZ
@given(st.sampled_from(PREFIXES), anything)
def test_any_value_as_a_message_is_refused_or_read(prefix: bytes, value: object) -> None:
    assert not isinstance(read_or_refused(prefix + msgspec.msgpack.encode(value)), Registration | Accepted | Pong)


@FUZZ
@given(st.lists(st.binary(max_size=12), max_size=6), st.text("0123456789+-_ .:٣", max_size=8))
def test_any_text_of_vllm_is_refused_or_read(parts: list[bytes], number: str) -> None:
    read_or_refused(HEARTBEAT_PREFIX + b",".join(parts))
    read_or_refused(QUIET_PREFIX + (PEER_PREFIX + b"".join(parts)).hex().encode())
    read_or_refused(b":".join([*parts, number.encode()]))


@pytest.mark.parametrize("prefix", [REGISTRATION_PREFIX, PEER_PREFIX])
def test_invalid_bodies_with_every_first_byte_are_refused(prefix: bytes) -> None:
    for code in range(256):
        for rest in (b"", b"\xff", b"\x00" * 9, b"\xff" * 9, bytes([code]) * 5000):
            assert read_or_refused(prefix + bytes([code]) + rest) is None
