"""Rewrites a client's request body for P and for D. Pure.

Only the top level is parsed: a prompt of any length passes through as the client's own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from layerpush.apps.proxy.errors import ProxyError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

MAX_KEYS = 1024
"""The most keys of a JSON object: a million would stop all other requests for seconds."""

_NOT_FOR_ENGINES = ("kv_transfer_params", "ec_transfer_params", "request_id")
_NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "echo",
    "return_token_ids",
    "max_completion_tokens",
)
_ONE = msgspec.Raw(b"1")
_FALSE = (b"", b"null", b"false", b"0")
_ENCODER = msgspec.json.Encoder()


class _Key(str):
    """A key of an object."""

    __slots__ = ()


class RequestBody:
    """The body of a completion or chat completion, without the keys that only a router may set."""

    def __init__(self, path: str, raw: bytes) -> None:
        """``path``: ``COMPLETIONS`` or ``CHAT``. Raises ``ProxyError``."""
        keys = 0

        def key(kind: type[_Key], text: str) -> _Key:
            nonlocal keys
            keys += 1
            if keys > MAX_KEYS:  # msgspec would wrap a ValueError
                raise ProxyError(400, f"the body has more than {MAX_KEYS} keys")
            return kind(text)

        try:
            members = msgspec.json.decode(raw, type=dict[_Key, msgspec.Raw], dec_hook=key)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProxyError(400, f"the body must be a JSON object: {error}") from None
        self.path = path
        self._fields = {str(name): value for name, value in members.items() if name not in _NOT_FOR_ENGINES}

    @property
    def streams(self) -> bool:
        """Whether the client seems to want server-sent events."""
        return bytes(self._fields.get("stream", b"")) not in _FALSE

    @property
    def said(self) -> bytes:
        """The JSON of the prompt, or of the messages of a chat."""
        return bytes(self._fields.get("messages" if self.path == CHAT else "prompt", b""))

    @property
    def cache_salt(self) -> bytes:
        """JSON. Requests with different salts share no KV cache."""
        return bytes(self._fields.get("cache_salt", b""))

    def probe(self) -> RequestBody:
        """The body of a short prompt to the same model, for one token."""
        model = {"model": self._fields["model"]} if "model" in self._fields else {}
        return RequestBody(COMPLETIONS, _ENCODER.encode({**model, "prompt": [1, 1, 1, 1], "max_tokens": 1}))

    def to_prefill(self, params: Mapping[str, object]) -> bytes:
        """P's body: the same prompt and sampling, and an answer of one token, which the proxy drops."""
        fields: dict[str, object] = {key: raw for key, raw in self._fields.items() if key not in _NOT_FOR_PREFILL}
        fields["max_tokens"] = _ONE
        if self.path == CHAT:
            fields["max_completion_tokens"] = _ONE
        return _ENCODER.encode({**fields, "kv_transfer_params": params})

    def to_decode(self, params: Mapping[str, object]) -> bytes:
        """D's body: the client's, with these `kv_transfer_params`."""
        return _ENCODER.encode({**self._fields, "kv_transfer_params": params})

    def free(self) -> None:
        """Forget the client's bytes. Only ``path`` stays valid."""
        self._fields.clear()
