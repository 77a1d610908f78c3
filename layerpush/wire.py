"""Messages between a prefill and a decode worker, as bytes and as structs.

The registration is upstream vLLM's ``PUSH_REG`` notification (a msgpack map that a stock ``NixlPushConnector``
sends and understands), the completion is its ``<decode request id>:<prefill world size>``. Keys that are not
named here are ignored, so a newer peer may add some.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

REGISTRATION_PREFIX = b"PUSH_REG:"
HEARTBEAT_PREFIX = b"HB:"
MAX_RANK_DIGITS = 6


class WireError(ValueError):
    """A peer sent bytes that are no message of ours. The text says what is wrong with them."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Where a decode worker wants one request's blocks.

    ``local_block_ids`` holds the decode engine's logical block ids, one list per transferable KV cache group,
    uncached blocks only, in token order.
    """

    request_id: str
    decode_engine_id: str
    decode_host: str
    decode_port: int
    decode_tp_size: int
    local_block_ids: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[str, str]:
        """Which request of which decode engine this is."""
        return self.decode_engine_id, self.request_id

    @property
    def blocks(self) -> int:
        return sum(len(group) for group in self.local_block_ids)


class _FlatRegistration(Registration, frozen=True, kw_only=True):
    """One cache group whose list was not wrapped in a list of groups: upstream accepts it, so do we."""

    local_block_ids: tuple[int, ...]  # type: ignore[assignment]


_decoder = msgspec.msgpack.Decoder(Registration)
_flat_decoder = msgspec.msgpack.Decoder(_FlatRegistration)


def is_understood(notification: bytes) -> bool:
    """Whether upstream can parse a notification that is no registration; on anything else its main thread raises."""
    request_id, _, number = notification.rpartition(b":")
    try:
        notification.decode()
    except UnicodeDecodeError:
        return False
    if notification.startswith(HEARTBEAT_PREFIX):
        return True
    return bool(request_id) and number.isdigit() and len(number) <= MAX_RANK_DIGITS and int(number) > 0


def is_registration(notification: bytes) -> bool:
    return notification.startswith(REGISTRATION_PREFIX)


def decode_registration(notification: bytes) -> Registration:
    """Read a ``PUSH_REG`` notification. Raises ``WireError``."""
    payload = memoryview(notification)[len(REGISTRATION_PREFIX) :]
    try:
        registration = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a PUSH_REG notification cannot be read: {error}") from error
    if any(block < 0 for group in registration.local_block_ids for block in group):
        raise WireError(f"PUSH_REG for {registration.request_id!r} names a negative block id")
    if registration.decode_tp_size < 1:
        raise WireError(f"PUSH_REG for {registration.request_id!r} has decode_tp_size={registration.decode_tp_size}")
    return registration


def _decode(payload: memoryview) -> Registration:
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError as grouped_error:
        try:
            flat = _flat_decoder.decode(payload)
        except msgspec.ValidationError:
            raise grouped_error from None
        return Registration(
            request_id=flat.request_id,
            decode_engine_id=flat.decode_engine_id,
            decode_host=flat.decode_host,
            decode_port=flat.decode_port,
            decode_tp_size=flat.decode_tp_size,
            local_block_ids=(flat.local_block_ids,),
        )


def encode_registration(registration: Registration, **extra: object) -> bytes:
    """The notification that a decode worker sends; ``extra`` keys ride along for peers that know them."""
    return REGISTRATION_PREFIX + msgspec.msgpack.encode({**msgspec.to_builtins(registration), **extra})


def encode_completion(decode_request_id: str, prefill_world_size: int) -> bytes:
    """What tells a decode worker that one prefill rank has written everything."""
    return f"{decode_request_id}:{prefill_world_size}".encode()


def encode_heartbeat(prefill_request_ids: Sequence[str]) -> bytes:
    """What extends the leases of these requests on a prefill engine."""
    return HEARTBEAT_PREFIX + ",".join(prefill_request_ids).encode()
