"""The turns that decode engines keep for the proxy's clients. Event loop's thread only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping

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
DATA = b"data: "
LINE_BYTES = 1 << 20
"""A longer line of a stream is no event with params."""

Session = tuple[str, str]
"""The client's ``Authorization``, and the name that it gives its conversation."""


class Conversations:
    """For each session the params that D returned with its last answer. Times are those of the event loop."""

    def __init__(self) -> None:
        self._turns = BoundedDict[Session, tuple[float, dict[str, object]]](KEPT, KEPT_BYTES)

    def pop_params(self, session: Session | None, now: float) -> Mapping[str, object]:
        """P's `kv_transfer_params` for the session's next request. D returns a turn once, so they are forgotten."""
        at, params = (now, {}) if session is None else self._turns.pop(session, (now, {}))
        return {**params, **TO_PREFILL} if now < at + KEPT_S else TO_PREFILL

    def without_params(self, session: Session | None, answer: bytes, now: float) -> bytes:
        """D's answer as the client gets it. The session keeps the params in it: they have engines' addresses."""
        try:
            members = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
            params = msgspec.json.decode(members.get(PARAMS, b"null"), type=dict[str, object] | None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return answer
        if not params:
            return answer
        if session is not None:
            self._turns.put(session, (now, params))
        return msgspec.json.encode({**members, PARAMS: None})

    async def shown(self, session: Session | None, stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """D's stream as the client gets it. The session keeps the params in an event: vLLM 0.33 sends them so."""
        line = b""
        async for data in stream:
            lines, end, line = (line + data).rpartition(b"\n")
            if PARAMS.encode() in lines:
                lines = b"\n".join(self._shown_line(session, each) for each in lines.split(b"\n"))
            if len(line) > LINE_BYTES:
                lines, end, line = lines + end, line, b""
            yield lines + end
        yield line

    def _shown_line(self, session: Session | None, line: bytes) -> bytes:
        data = line.removeprefix(DATA)
        return line if data == line else DATA + self.without_params(session, data, asyncio.get_running_loop().time())
