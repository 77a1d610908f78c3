"""Checks the `kv_transfer_params` of an incoming request, which a client may have set to anything. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Literal, NoReturn, cast

from layerpush.core.config import LayerPushConfig
from layerpush.core.hosts import MAX_HOST_CHARS, host_allowed, is_host
from layerpush.core.push_mode import PushMode
from layerpush.core.wire import MAX_ID_CHARS, MAX_PORT, MAX_TP_SIZE, is_request_id

KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]

MODE = "layerpush_mode"
"""The key with which a request chooses its push mode."""

MAX_PP_SIZE = 64
MAX_CACHED_TOKENS = 2**31 - 1
MAX_OUTER_ID_CHARS = MAX_ID_CHARS - 16
"""Maximum length of a request's id in vLLM's front end: the id that engines exchange has a suffix of 9 characters, and
the number of the answer in front if there are several.
"""

TRANSFER = "transfer_id"
"""The key with which a router names one transfer to both engines."""

PREFIXES = "remote_prefixes"
"""The key with digests of the turn that D keeps, beside the keys of vLLM's pull connector."""
TRUNCATED = "_p_side_truncated"
"""The key that vLLM's scheduler on P sets when it has dropped tokens that it leaves to D."""
_RETURNED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")

# Keys of D's request that vLLM reads. In some versions a bad value ends the engine or the front end.
_SIZES = {"pp_size": MAX_PP_SIZE, "dcp_size": MAX_TP_SIZE}
_FROM_P = "; the router copies it from P's response"


class ParamsError(ValueError):
    """A request's `kv_transfer_params` cannot be used; the message names the key, the value and the remedy."""

    def __init__(self, problem: str, key: str | None = None) -> None:
        super().__init__(f"kv_transfer_params: {problem}")
        self.parameter = "kv_transfer_params" if key is None else f"kv_transfer_params.{key}"


def check_params(params: object, role: KvRole, config: LayerPushConfig) -> None:
    """Check that an engine of this role can serve such a request. Unknown keys are ignored: routers add some.

    Raises:
        ParamsError: a key is missing or bad, or the request does not fit this engine's role.
    """
    if params is None:
        return
    if not isinstance(params, Mapping):
        raise ParamsError(f"must be an object, not {_shown(params)}")
    receives, sends = _flag(params, "do_remote_prefill"), _flag(params, "do_remote_decode")
    if receives and sends:
        _refuse(
            "do_remote_prefill",
            "is true, and so is 'do_remote_decode'; set 'do_remote_decode' on the prefill engine's request only",
        )
    if receives:
        _check_role("do_remote_prefill", role, "kv_producer", "does not take KV cache; send the request to a decode")
        _check_source(params, config)
    if sends:
        _check_role("do_remote_decode", role, "kv_consumer", "does not push KV cache; send the request to a prefill")
        _check_mode(params.get(MODE))
    if (receives or sends) and params.get(TRANSFER) is not None:
        _check_id(TRANSFER, params[TRANSFER], "; a router that sends it sends both engines the same")
    if TRUNCATED in params:
        _refuse(TRUNCATED, "is vLLM's own mark; leave it out")


def check_request_id(params: object, request_id: str, most: int = MAX_ID_CHARS) -> None:
    """Check the id of a request with these checked params, if it asks for a transfer: the other engine reads the id.

    Raises:
        ParamsError: the id is empty, longer than ``most`` characters or not printable, or looks like a message.
    """
    if not isinstance(params, Mapping) or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        return
    if not is_request_id(request_id, most):
        raise ParamsError(
            f"the request's id is {_shown(request_id)} with {len(request_id)} characters. For a transfer it must be "
            f"text of 1 to {most} printable characters that does not begin with 'HB:', 'PUSH_REG:' or 'LAYERPUSH:'; "
            "vLLM makes it from X-Request-Id"
        )


def chosen_mode(params: Mapping[str, object]) -> PushMode | None:
    """The push mode in these checked params; None: the engine's configuration decides."""
    mode = params.get(MODE)
    return None if mode is None else PushMode(str(mode))


def transfer_id(params: Mapping[str, object]) -> str | None:
    """The transfer's name in these checked params; None: the router has given none."""
    return cast("str | None", params.get(TRANSFER))


def is_pushed(params: object) -> bool:
    """Whether this engine is to push the KV of a request with these ``kv_transfer_params``."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def is_returned(params: object, config: LayerPushConfig) -> bool:
    """Whether a decode engine keeps the turn before, and this engine may load what it shares with this prompt.

    Raises:
        ParamsError: the turn is named by a bad value. This engine can compute the prompt all the same.
    """
    if not config.bidirectional_kv_xfer or not is_pushed(params) or not isinstance(params, Mapping):
        return False
    if not all(params.get(key) for key in _RETURNED):
        return False
    _check_source(params, config)
    _check_integer("remote_num_tokens", params.get("remote_num_tokens") or 0, 0, MAX_CACHED_TOKENS)
    if not isinstance(params.get(PREFIXES) or "", str):
        _refuse(PREFIXES, f"is {_shown(params[PREFIXES])}, must be text")
    return True


def _check_mode(mode: object) -> None:
    choices = [choice.value for choice in PushMode]
    if mode is not None and mode not in choices:
        _refuse(MODE, f"is {_shown(mode)}, must be one of {', '.join(map(repr, choices))}")


def _check_source(params: Mapping[object, object], config: LayerPushConfig) -> None:
    """Check the keys that name D's prefill engine and the request there."""
    mode = params.get("transfer_mode", "push")
    if mode != "push":
        _refuse("transfer_mode", f"is {_shown(mode)}, must be 'push': P's connector has to be a push connector")
    _check_id("remote_engine_id", _needed(params, "remote_engine_id"))
    if params.get(TRANSFER) is None or params.get("remote_request_id") is not None:
        _check_id("remote_request_id", _needed(params, "remote_request_id"))
    _check_host(_needed(params, "remote_host"), config)
    _check_integer("remote_port", _needed(params, "remote_port"), 1, MAX_PORT)
    _check_integer("tp_size", _needed(params, "tp_size"), 1, MAX_TP_SIZE)
    for key, most in _SIZES.items():
        if key in params:
            _check_integer(key, params[key], 1, most)
    cached = params.get("remote_prefill_cached_tokens")
    if cached is not None:
        _check_integer("remote_prefill_cached_tokens", cached, 0, MAX_CACHED_TOKENS)


def _check_role(key: str, role: KvRole, excluded: KvRole, advice: str) -> None:
    if role == excluded:
        _refuse(key, f"is true, but this engine's kv_role is {role!r}: it {advice} engine")


def _flag(params: Mapping[object, object], key: str) -> bool:
    value = params.get(key)
    if value is not None and not isinstance(value, bool):
        _refuse(key, f"is {_shown(value)}, must be true or false")
    return bool(value)


def _needed(params: Mapping[object, object], key: str) -> object:
    value = params.get(key)
    if value is None:
        _refuse(
            key, ("is null" if key in params else "is missing") + f"; D needs it to reach the prefill engine{_FROM_P}"
        )
    return value


def _check_id(key: str, value: object, remedy: str = _FROM_P) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS or not value.isprintable():
        _refuse(key, f"is {_shown(value)}, must be text of 1 to {MAX_ID_CHARS} printable characters{remedy}")


def _check_host(value: object, config: LayerPushConfig) -> None:
    if not isinstance(value, str) or not is_host(value):
        _refuse(
            "remote_host",
            f"is {_shown(value)}, must be a host name or an IP address of at most {MAX_HOST_CHARS} characters{_FROM_P}",
        )
    if not host_allowed(value, config.allowed_hosts):
        _refuse(
            "remote_host",
            f"is {_shown(value)}, which is not in this engine's allowed_hosts; if it is a prefill engine of yours, add "
            "it to 'allowed_hosts' in kv_connector_extra_config",
        )


def _check_integer(key: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(key, f"is {_shown(value)}, must be an integer from {least} to {most}{_FROM_P}")


def _refuse(key: str, problem: str) -> NoReturn:
    raise ParamsError(f"{key!r} {problem}", key)


def _shown(value: object) -> str:
    """The value, shortened for a message, and its type."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to convert very long integers to text."""
        return super().repr_int(x, level) if x.bit_length() <= 128 else f"{x.bit_length()} bits"


_SHORT = _Short()
