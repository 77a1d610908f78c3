"""The turns that decode engines keep for the proxy's clients. Event loop's thread only."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.prefill_identity import TO_PREFILL

SESSION = "X-Session-Id"
"""A client's header with the name of its conversation."""
KEPT = 1 << 14
KEPT_BYTES = 64 << 20
KEPT_S = 480.0
"""vLLM's default of ``decoder_kv_blocks_ttl``."""
PARAMS = "kv_transfer_params"
_SHOWN = b'"%b":null' % PARAMS.encode()


def _pattern() -> re.Pattern[bytes]:
    """Finds the begin of an object of params. A match that does not end in ``{`` is a beginning at the data's end."""
    rest = b""
    for token in reversed([*(bytes([byte]) for byte in PARAMS.encode()), b'"', rb"\s*", b":", rb"\s*", rb"\{"]):
        rest = rb"(?:\Z|%b%b)" % (token, rest)
    return re.compile(b'"' + rest)


_PARAMS_BEGIN = _pattern()
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Session:
    """A request of a conversation.

    ``who``: the client's ``Authorization``, its ``cache_salt``, and the name that it gives its conversation.
    ``said``: the JSON of the prompt or of all messages, without the bracket or quote at its end. The next one begins
    with it. Its digest stands for it, because names are guessed more easily than conversations.
    """

    who: tuple[str, bytes, str]
    length: int
    digest: bytes

    @classmethod
    def of(cls, who: tuple[str, bytes, str], said: bytes) -> Session:
        begin = said[:-1].rstrip()
        return cls(who, len(begin), _digest(begin))

    def goes_on_in(self, said: bytes) -> bool:
        return _digest(said[: self.length]) == self.digest


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Conversations:
    """For each session the params that D returned with its last answer. Times are those of the event loop."""

    def __init__(self) -> None:
        self._turns = BoundedDict[tuple[str, bytes, str], tuple[float, Session, dict[str, object]]](KEPT, KEPT_BYTES)

    def pop_params(self, session: Session | None, said: bytes, now: float) -> Mapping[str, object]:
        """P's `kv_transfer_params` for the session's next request. D returns a turn once, so they are forgotten.

        A request that does not begin with all that the session's last one said gets none, and takes none.
        """
        if session is None or session.who not in self._turns:
            return TO_PREFILL
        at, last, params = self._turns[session.who]
        if now >= at + KEPT_S or not last.goes_on_in(said):
            return TO_PREFILL
        del self._turns[session.who]
        return {**params, **TO_PREFILL}

    def without_params(self, session: Session | None, answer: bytes, now: float) -> bytes:
        """D's answer as the client gets it. The session keeps the params in it: they have engines' addresses."""
        try:
            members = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
            params = msgspec.json.decode(members.get(PARAMS, b"null"), type=dict[str, object] | None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return answer
        if not params:
            return answer
        self._keep(session, params, now)
        return msgspec.json.encode({**members, PARAMS: None})

    async def shown(self, session: Session | None, stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """D's stream, or its long answer in one piece, as the client gets it. The session keeps the params in it.

        Only a part that is, or may be, the begin of params waits for what follows. vLLM 0.33 sends them in an event.
        """
        held = b""
        async for data in stream:
            shown, held = self._shown(session, held + data)
            yield shown
        if (match := _PARAMS_BEGIN.match(held)) and not match[0].endswith(b"{"):
            yield held

    def _shown(self, session: Session | None, data: bytes) -> tuple[bytes, bytes]:
        """``data`` without params, and the part of it that waits."""
        shown = b""
        while match := _PARAMS_BEGIN.search(data):
            shown, data = shown + data[: match.start()], data[match.start() :]
            if not match[0].endswith(b"{"):
                return shown, data
            text = data[len(match[0]) - 1 :].decode(errors="surrogateescape")
            try:
                params, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError):  # it is not whole
                return shown, data
            if params:
                self._keep(session, params, asyncio.get_running_loop().time())
            shown, data = shown + _SHOWN, text[end:].encode(errors="surrogateescape")
        return shown + data, b""

    def _keep(self, session: Session | None, params: dict[str, Any], now: float) -> None:
        if session is not None:
            self._turns.put(session.who, (now, session, params))
