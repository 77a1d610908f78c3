"""Messages between a prefill and a decode worker, as bytes and as structs.

Three notifications are vLLM's, and a stock ``NixlPushConnector`` sends and understands them: the registration
(``PUSH_REG``, a msgpack map), the completion ``<decode request id>:<prefill world size>`` and the heartbeat
``HB:<prefill request id>,...``. The others are ours: a msgpack map behind ``LAYERPUSH:``, sent only to a peer that is
known to speak them. For any other peer ``encode_quietly`` hides them in a heartbeat, which stock peers ignore. Unknown
keys are ignored, so a newer peer may add some. ``read`` takes any bytes: it returns a message whose fields all have
their types and bounds, or raises ``WireError``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from layerpush.core.hosts import MAX_HOST_CHARS

PROTOCOL_VERSION = 2
"""The newest version of our messages that this release speaks. A registration offers it."""

REGISTRATION_PREFIX = b"PUSH_REG:"
HEARTBEAT_PREFIX = b"HB:"
QUIET_PREFIX = HEARTBEAT_PREFIX + b"layerpush."
"""Prefix of one of our messages in hex. A stock peer reads it as the heartbeat of an unknown request. No request id of
vLLM begins like this, because its API server puts the kind of the endpoint before the client's id: ``cmpl-``.
"""
PEER_PREFIX = b"LAYERPUSH:"

MAX_REGISTRATION_BYTES = 4 << 20
MAX_HEARTBEAT_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 17
"""Of every other message: a ``Queued`` may have 16 names of 4 KiB."""
MAX_BLOCKS = 1 << 20
MAX_GROUPS = 1024
MAX_HEARTBEAT_IDS = 1 << 16
MAX_ID_CHARS = 1024
MAX_REASON_CHARS = 1000
MAX_RANK_DIGITS = 6
MAX_COMPUTED = 16
MAX_PARAMETERS = 64
MAX_PARAMETER_CHARS = 64
MAX_ACKNOWLEDGED = 4096
MAX_PARTS = 1024
MAX_CHECKSUMS = 8192
MAX_RANKS = 10**MAX_RANK_DIGITS - 1
MAX_PORT = 65535
MAX_TP_SIZE = 1024
MAX_CONTACT_BYTES = 1 << 16
NULL_BLOCK = 0
"""vLLM's placeholder in block tables: it holds no request's KV and is never sent."""

# Characters that could forge a log line or hide a part of one: control characters, line ends, changes of direction.
_UNSAFE_CHARS = r"\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CLEAN = rf"\A[^{_UNSAFE_CHARS}]+\Z"
# A completion begins with its request id, so an id must not begin with the prefix of another message.
_UNAMBIGUOUS = rf"\A(?!(?:PUSH_REG|HB|LAYERPUSH)(?::|\Z))[^{_UNSAFE_CHARS}]+\Z"

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=_UNAMBIGUOUS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=_CLEAN)]
Host = Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS, pattern=_CLEAN)]
Port = Annotated[int, Meta(ge=1, le=MAX_PORT)]
TpSize = Annotated[int, Meta(ge=1, le=MAX_TP_SIZE)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Reason = Annotated[str, Meta(max_length=4 * MAX_REASON_CHARS)]
Block = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Parameter = Annotated[str, Meta(min_length=1, max_length=MAX_PARAMETER_CHARS, pattern=_CLEAN)]
Parameters = Annotated[tuple[tuple[Parameter, Parameter], ...], Meta(max_length=MAX_PARAMETERS)]
ParameterNames = Annotated[tuple[Parameter, ...], Meta(max_length=2 * MAX_PARAMETERS)]
Contact = Annotated[bytes, Meta(min_length=1, max_length=MAX_CONTACT_BYTES)]
Blocks = Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)]
Groups = Annotated[tuple[Blocks, ...], Meta(max_length=MAX_GROUPS)]


class WireError(ValueError):
    """A message is invalid. The text gives the reason, in one line that is safe to log."""


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a prefill worker to push one request's blocks into these blocks of a decode worker.

    - ``request_id``: the decode engine's id of the request.
    - ``decode_engine_id``: its name. ``decode_host``, ``decode_port``: its side channel. ``decode_tp_size``: its ranks.
    - ``local_block_ids``: its logical block ids, one list per transferable KV cache group, uncached blocks only, in
      token order.
    - ``layerpush``: the newest version of our messages that the worker speaks; 0: none.
    - ``prefill_request_id``: the prefill engine's id of the request, if the worker knows it.
    - ``transfer_id``: the name that a router gave the transfer on both engines, if any.
    - ``prompt_digest``: distinguishes prompts of requests with the same base id.
    - ``sampling``: asks for a ``FirstToken``. It is the digest of the request's sampling parameters.
    - ``parameters``: the name and a digest of each parameter that is not vLLM's default. So the prefill worker can name
      those that differ.
    - ``contact``: the address of the worker's NIXL agent. The prefill worker can report a failure there although no
      handshake with the decode engine succeeds.
    - ``attempt``: counts the registrations of one request, from 0. It is registered again after an ``Unregister``.
    - ``acknowledges``: the worker answers a ``Landed`` with ``Acknowledged``.
    - ``number``: another one for each registration of the decode engine. Each ``PrefixLanded`` has it. 0: the worker
      asks for none.
    - ``verifies``: the name of a checksum. The worker takes a ``Completed`` with such checksums in the place of a
      completion.
    - ``prefix_tokens``: the worker is a prefill worker, and asks for the first tokens of a turn that the receiver keeps
      under the name ``prefill_request_id``. ``prompt_digest`` is the digest of these tokens. 0: it is none.
    """

    request_id: RequestId
    decode_engine_id: Name
    decode_host: Host
    decode_port: Port
    decode_tp_size: TpSize
    local_block_ids: Groups
    layerpush: Count = 0
    prefill_request_id: RequestId | None = None
    transfer_id: Name | None = None
    prompt_digest: Name | None = None
    sampling: Name | None = None
    parameters: Parameters = ()
    contact: Contact | None = None
    attempt: Count = 0
    acknowledges: bool = False
    number: Count = 0
    verifies: Name | None = None
    prefix_tokens: Count = 0

    @property
    def key(self) -> tuple[str, str]:
        """The decode engine's id, and the request's id there."""
        return self.decode_engine_id, self.request_id

    @property
    def blocks(self) -> int:
        """The number of registered blocks, of all groups."""
        return sum(len(group) for group in self.local_block_ids)

    @property
    def fingerprint(self) -> bytes:
        """A digest of 16 bytes of all but ``contact``: equal for the registrations of all ranks of one
        request.
        """
        common = msgspec.structs.replace(self, contact=None)
        return hashlib.blake2b(msgspec.msgpack.encode(common), digest_size=16).digest()


class _FlatRegistration(Registration, frozen=True, kw_only=True):
    """A registration of one cache group, without the list of groups around it. vLLM accepts this form."""

    local_block_ids: Blocks  # type: ignore[assignment]


class Completion(msgspec.Struct, frozen=True):
    """One of ``world_size`` prefill ranks has written all blocks. The request id is the decode engine's."""

    request_id: str
    world_size: int


class Heartbeat(msgspec.Struct, frozen=True):
    """The decode engine still needs these requests of the prefill engine. An empty list only shows that it lives."""

    request_ids: tuple[str, ...]


class _PeerMessage(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Sent between layerpush workers only. A request id is always the decode engine's."""


class Accepted(_PeerMessage, frozen=True):
    """P has the registration and speaks our messages. ``first_token``: a ``FirstToken`` will follow. ``prefix_tokens``
    is the registration's: an engine that does not know this field could push another prompt.
    """

    request_id: RequestId
    first_token: bool = False
    prefix_tokens: Count = 0


class FirstToken(_PeerMessage, frozen=True, omit_defaults=True):
    """P has sampled ``token`` after the prompt, with the parameters of D's request. None: P has no such token, and
    ``other`` names the sampling parameters that differ, if P knows them. Only a D that asked for the token gets this
    message.
    """

    request_id: RequestId
    token: Token | None
    other: ParameterNames = ()


class PartSums(msgspec.Struct, frozen=True, array_like=True):
    """Checksums of a layer's KV: of tokens ``[start, end)`` of the prompt and KV heads ``[first_head, end_head)``, one
    of 4 bytes for every ``unit`` tokens. Heads are counted over all ranks. ``layer`` is the layer's name.
    """

    layer: Name
    first_head: Count
    end_head: Count
    start: Count
    end: Count
    unit: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    values: Annotated[bytes, Meta(max_length=4 * MAX_CHECKSUMS)]


Sums = Annotated[tuple[PartSums, ...], Meta(max_length=MAX_PARTS)]


class PrefixLanded(_PeerMessage, frozen=True, omit_defaults=True):
    """The sender has written its part of the first ``tokens`` tokens of the prompt, in all layers, and will not write
    into their blocks again. ``number`` is the registration's. ``sums`` are checksums of parts of these tokens, and the
    prompt has ``prompt_tokens`` tokens: only for a D whose registration ``verifies``.
    """

    request_id: RequestId
    number: Count
    tokens: Count
    prompt_tokens: Count = 0
    sums: Sums = ()


class Completed(_PeerMessage, frozen=True):
    """As vLLM's completion: one of ``world_size`` prefill ranks has written all blocks. ``sums`` are checksums of parts
    of what it has written, taken from its own KV. The prompt has ``tokens`` tokens. Only a D whose registration
    ``verifies`` gets it.
    """

    request_id: RequestId
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    tokens: Count
    sums: Sums


class Fail(_PeerMessage, frozen=True, omit_defaults=True):
    """The push will not complete. ``drained``: none of the sender's WRITEs for it is on the wire. ``void``: no
    ``PrefixLanded`` of the push counts any more.
    """

    request_id: RequestId
    epoch: Count
    reason: Reason
    drained: bool
    void: bool = False


class Cancel(_PeerMessage, frozen=True):
    """D wants the request's blocks back. It identifies D as a registration does, because it may arrive without one."""

    request_id: RequestId
    decode_engine_id: Name
    decode_host: Host
    decode_port: Port
    decode_tp_size: TpSize

    @property
    def key(self) -> tuple[str, str]:
        """The decode engine's id, and the request's id there."""
        return self.decode_engine_id, self.request_id


class Cancelled(_PeerMessage, frozen=True):
    """The sender has no WRITE of the request on the wire, and will post none."""

    request_id: RequestId


class Queued(_PeerMessage, frozen=True):
    """P has no free blocks for the registered prompt. P holds those of ``computed`` prompts, which no D has registered.
    It names some of them: by base id or ``transfer_id``, a slash, and the prompt's digest. Only a D that speaks version
    2 gets it.
    """

    request_id: RequestId
    computed: Annotated[tuple[Name, ...], Meta(max_length=MAX_COMPUTED)]


class Unregister(_PeerMessage, frozen=True):
    """D gives the request's blocks to another request, and will register it again later. P answers ``Unregistered``,
    unless it has begun to serve the registration of this ``attempt``: then it goes on.
    """

    request_id: RequestId
    decode_engine_id: Name
    decode_host: Host
    decode_port: Port
    decode_tp_size: TpSize
    attempt: Count

    @property
    def key(self) -> tuple[str, str]:
        """The decode engine's id, and the request's id there."""
        return self.decode_engine_id, self.request_id


class Unregistered(_PeerMessage, frozen=True):
    """The sender has dropped the registration of this ``attempt``, and has posted no WRITE for it."""

    request_id: RequestId
    attempt: Count


class Decline(_PeerMessage, frozen=True):
    """D will not load this request, and has not registered it: P may free its blocks. The other fields are those of a
    registration. For a kept turn, ``prompt_digest`` is the digest of any of its prefixes. P does not answer.
    """

    request_id: RequestId
    decode_engine_id: Name
    prefill_request_id: RequestId | None = None
    prompt_digest: Name | None = None
    transfer_id: Name | None = None

    @property
    def key(self) -> tuple[str, str]:
        """The decode engine's id, and the request's id there."""
        return self.decode_engine_id, self.request_id


class Ping(_PeerMessage, frozen=True):
    """Asks for a ``Pong`` with the same number."""

    decode_engine_id: Name
    number: Count


class Pong(_PeerMessage, frozen=True):
    """Answers the ``Ping`` with this number."""

    number: Count


class Landed(_PeerMessage, frozen=True):
    """The WRITE that carries this message is in D's memory: NIXL holds the message back until then. ``notification`` is
    another message that goes with the WRITE, if any. Only a D that acknowledges WRITEs gets it.
    """

    number: Count
    notification: bytes = b""


class HasLanded(_PeerMessage, frozen=True):
    """Asks for ``Acknowledged`` again, if D has got the ``Landed`` with this number."""

    number: Count


class Acknowledged(_PeerMessage, frozen=True):
    """D has got the ``Landed`` with each of these numbers."""

    numbers: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_ACKNOWLEDGED)]


PeerMessage = (
    Accepted
    | FirstToken
    | PrefixLanded
    | Completed
    | Fail
    | Cancel
    | Cancelled
    | Queued
    | Unregister
    | Unregistered
    | Decline
    | Ping
    | Pong
    | Landed
    | HasLanded
    | Acknowledged
)
Message = Registration | PeerMessage | Completion | Heartbeat

_clean = re.compile(_CLEAN)
_unambiguous = re.compile(_UNAMBIGUOUS)
_pattern = re.compile(r"matching regex '.*'")
_decoder = msgspec.msgpack.Decoder(Registration)
_flat_decoder = msgspec.msgpack.Decoder(_FlatRegistration)
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def read(notification: bytes) -> Message:
    """Decode a notification. Raises ``WireError`` if it is invalid, and nothing else."""
    limits = {REGISTRATION_PREFIX: MAX_REGISTRATION_BYTES, HEARTBEAT_PREFIX: MAX_HEARTBEAT_BYTES}
    limit = next((most for prefix, most in limits.items() if notification.startswith(prefix)), MAX_MESSAGE_BYTES)
    if len(notification) > limit:
        raise WireError(f"a notification has {len(notification)} bytes, more than {limit}")
    if notification.startswith(REGISTRATION_PREFIX):
        return decode_registration(notification)
    if notification.startswith(PEER_PREFIX):
        return _read_peer_message(notification)
    if notification.startswith(QUIET_PREFIX):
        return _read_quiet(notification)
    if notification.startswith(HEARTBEAT_PREFIX):
        return _read_heartbeat(notification)
    return _read_completion(notification)


def encode(message: PeerMessage) -> bytes:
    """Encode one of our own messages; a reason is cut to one line. Raises ``WireError`` if ``read`` would refuse it."""
    if isinstance(message, Fail):
        message = msgspec.structs.replace(message, reason=one_line(message.reason))
    return _checked(PEER_PREFIX + _packed(message))


def encode_quietly(message: PeerMessage) -> bytes:
    """Encode one of our own messages so that a stock peer ignores it. Raises as ``encode`` does."""
    return _checked(QUIET_PREFIX + encode(message).hex().encode())


def encode_registration(registration: Registration, **extra: object) -> bytes:
    """Encode a decode worker's registration, with ``extra`` keys for peers that know them. Raises ``WireError``."""
    fields = msgspec.to_builtins(registration, builtin_types=(bytes,))
    return _checked(REGISTRATION_PREFIX + _packed({**fields, **extra}))


def encode_completion(decode_request_id: str, prefill_world_size: int) -> bytes:
    """Encode the ``Completion`` that one prefill rank sends to a decode worker."""
    return f"{decode_request_id}:{prefill_world_size}".encode()


def encode_heartbeat(prefill_request_ids: Sequence[str]) -> bytes:
    """Encode the ``Heartbeat`` that extends the leases of these requests on a prefill engine."""
    return HEARTBEAT_PREFIX + ",".join(prefill_request_ids).encode()


def one_line(text: str, limit: int = MAX_REASON_CHARS) -> str:
    """Make text of unknown origin safe to log: one line of at most ``limit`` characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def is_request_id(text: str, most: int = MAX_ID_CHARS) -> bool:
    """Whether the messages of both sides can carry this id of a request. ``most``: its maximum length."""
    return 0 < len(text) <= most and text.isprintable() and _unambiguous.match(text) is not None


def decode_registration(notification: bytes) -> Registration:
    """Read a ``PUSH_REG`` notification. Raises ``WireError``."""
    payload = memoryview(notification)[len(REGISTRATION_PREFIX) :]
    try:
        registration = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable("a PUSH_REG notification", error) from error
    if registration.blocks > MAX_BLOCKS:
        raise WireError(f"PUSH_REG for {registration.request_id!r}: local_block_ids holds {registration.blocks} blocks")
    for group in registration.local_block_ids:
        if len(set(group)) < len(group) - max(group.count(NULL_BLOCK) - 1, 0):
            raise WireError(f"PUSH_REG for {registration.request_id!r}: local_block_ids names a block twice")
    return registration


def _decode(payload: memoryview) -> Registration:
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError as grouped_error:
        try:
            flat = _flat_decoder.decode(payload)
        except msgspec.ValidationError:
            raise grouped_error from None
        return Registration(**{**msgspec.structs.asdict(flat), "local_block_ids": (flat.local_block_ids,)})


def _read_peer_message(notification: bytes) -> PeerMessage:
    try:
        message = _peer_decoder.decode(memoryview(notification)[len(PEER_PREFIX) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable("a LAYERPUSH notification", error) from error
    if isinstance(message, Fail):
        return msgspec.structs.replace(message, reason=one_line(message.reason))
    return message


def _read_quiet(notification: bytes) -> PeerMessage:
    try:
        inner = bytes.fromhex(_text(notification[len(QUIET_PREFIX) :], "a quiet notification"))
    except ValueError as error:
        raise _unreadable("a quiet notification", error) from error
    if not inner.startswith(PEER_PREFIX):
        raise WireError(f"a quiet notification holds none of our messages: {inner[:64]!r}")
    return _read_peer_message(inner)


def _read_completion(notification: bytes) -> Completion:
    request_id, _, number = notification.rpartition(b":")
    text = _text(request_id, "a notification")
    if not number.isdigit() or len(number) > MAX_RANK_DIGITS or int(number) == 0:
        raise WireError(f"a notification is neither ours nor vLLM's: {notification[:64]!r}")
    if not _is_id(text):
        raise WireError(f"the request id of a completion is empty, too long or not clean: {notification[:64]!r}")
    return Completion(text, int(number))


def _read_heartbeat(notification: bytes) -> Heartbeat:
    """Leaves out invalid ids: one client's bad request must not end the leases of all others."""
    parts = _text(notification[len(HEARTBEAT_PREFIX) :], "a heartbeat").split(",")
    if len(parts) > MAX_HEARTBEAT_IDS:
        raise WireError(f"a heartbeat names {len(parts)} requests, more than {MAX_HEARTBEAT_IDS}")
    return Heartbeat(tuple(part for part in parts if _is_id(part)))


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(where, error) from error


def _is_id(text: str) -> bool:
    return len(text) <= MAX_ID_CHARS and _clean.match(text) is not None


def _unreadable(what: str, error: Exception) -> WireError:
    text = _pattern.sub("without control characters or a prefix of ours", str(error))
    # the error is at the beginning of the text, the field's name at its end
    short = text if len(text) <= 300 else f"{text[:150]}...{text[-100:]}"
    return WireError(f"{what} cannot be read: {one_line(short)}")


def _packed(message: object) -> bytes:
    try:
        return msgspec.msgpack.encode(message)
    except (ValueError, OverflowError, TypeError) as error:
        raise WireError(f"a message cannot be sent: {one_line(str(error), 300)}") from error


def _checked(notification: bytes) -> bytes:
    read(notification)
    return notification
