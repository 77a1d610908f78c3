"""Rewrites a client's request body for P and for D. Pure.

Only the top level is parsed: a prompt of any length passes through as the client's own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from layerpush.core.prefill_identity import remote_request_id

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

MAX_KEYS = 1024
"""The most keys of a JSON object: a million would stop all other requests for seconds."""

_EXTRA = "vllm_xargs"
_PARAMS = ("kv_transfer_params", "ec_transfer_params")
_NOT_FOR_ENGINES = (*_PARAMS, "request_id")
_NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "echo",
    "return_token_ids",
    "max_completion_tokens",
)
_ONE = msgspec.Raw(b"1")
_EMPTY = (b"null", b"false", b"0")
_ENCODER = msgspec.json.Encoder()


class BodyError(Exception):  # msgspec would wrap a ValueError
    """The body is no usable JSON object. The message says why."""


class _Key(str):
    """A key of an object."""

    __slots__ = ()


def _top_level(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The members of a JSON object. Stops at too many keys.

    Raises ``BodyError`` at that limit, else ``msgspec.DecodeError``, ``UnicodeDecodeError`` or ``RecursionError``.
    """
    keys = 0

    def key(kind: type[_Key], text: str) -> _Key:
        nonlocal keys
        keys += 1
        if keys > MAX_KEYS:
            raise BodyError(f"an object of the body has more than {MAX_KEYS} keys")
        return kind(text)

    members = msgspec.json.decode(raw, type=dict[_Key, msgspec.Raw], dec_hook=key)
    return {str(name): value for name, value in members.items()}


class RequestBody:
    """The body of a completion or chat completion, without the keys that only a router may set."""

    def __init__(self, path: str, raw: bytes) -> None:
        """``path``: ``COMPLETIONS`` or ``CHAT``. Raises ``BodyError``."""
        try:
            self._fields = _top_level(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyError(f"the body must be a JSON object: {error}") from None
        self.path = path
        for key in _NOT_FOR_ENGINES:
            self._fields.pop(key, None)
        self._clean_extra()

    @property
    def streams(self) -> bool:
        """Whether the client seems to want server-sent events."""
        return self._is_set("stream")

    @property
    def is_for_d_alone(self) -> bool:
        """Whether D has to compute this prompt itself, because of a parameter."""
        return (
            self._is_set("use_beam_search")
            or self._is_set("prompt_logprobs")
            or self._bytes("prompt_logprobs") == b"0"
            or (self._is_set("echo") and self._bytes("logprobs") not in (b"", b"null"))
            or self._bytes("truncate_prompt_tokens").strip(b'"').startswith(b"-")
        )

    def probe(self) -> RequestBody:
        """The body of a short prompt to the same model, for one token."""
        model = {"model": self._fields["model"]} if "model" in self._fields else {}
        return RequestBody(COMPLETIONS, _ENCODER.encode({**model, "prompt": [1, 1, 1, 1], "max_tokens": 1}))

    def remote_request_id(self, request_id: str) -> str:
        """vLLM's id of the request if it is sent with this X-Request-Id."""
        return remote_request_id(request_id, is_chat=self.path == CHAT)

    def to_prefill(self, params: Mapping[str, object]) -> bytes:
        """P's body: the same prompt and sampling, and an answer of one token, which the proxy drops."""
        fields: dict[str, object] = {key: raw for key, raw in self._fields.items() if key not in _NOT_FOR_PREFILL}
        fields["max_tokens"] = _ONE
        if self.path == CHAT:
            fields["max_completion_tokens"] = _ONE
        return _ENCODER.encode({**fields, "kv_transfer_params": params})

    def to_decode(self, params: Mapping[str, object] | msgspec.Raw | None) -> bytes:
        """D's body: the client's, with these `kv_transfer_params`. With None, D computes the prompt itself."""
        if params is None:
            return _ENCODER.encode(self._fields)
        return _ENCODER.encode({**self._fields, "kv_transfer_params": params})

    def free(self) -> None:
        """Forget the client's bytes. Only ``path`` stays valid."""
        self._fields.clear()

    def _clean_extra(self) -> None:
        """Remove transfer parameters from `vllm_xargs`: vLLM also reads them there, if a request has no others."""
        try:
            extra = _top_level(self._fields.get(_EXTRA, b"{}"))
        except msgspec.DecodeError:
            return  # the engines report the error
        except UnicodeDecodeError as error:  # an engine's parser may read it differently
            raise BodyError(f"{_EXTRA} is not valid UTF-8: {error}") from None
        if not extra.keys().isdisjoint(_PARAMS):
            left = {key: value for key, value in extra.items() if key not in _PARAMS}
            self._fields[_EXTRA] = msgspec.Raw(_ENCODER.encode(left))

    def _is_set(self, key: str) -> bool:
        return key in self._fields and self._bytes(key) not in _EMPTY

    def _bytes(self, key: str) -> bytes:
        return bytes(self._fields.get(key, b""))
