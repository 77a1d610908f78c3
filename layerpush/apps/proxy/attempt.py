"""Sends a request once to a P and a D: at the same time if P's identity is known, else to one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from layerpush.apps.proxy.body import CHAT, RequestBody
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.errors import shortened
from layerpush.apps.proxy.legs import Engines, LegFailedError, Stream, Whole, end
from layerpush.core.prefill_identity import TO_PREFILL, IdentityError, PrefillIdentity, remote_request_id

logger = logging.getLogger("layerpush.proxy")

IDENTITY_S = 5.0
"""So long requests to an engine wait for its identity. A busy one answers later."""


class _Prefilled(msgspec.Struct):
    """The part of P's answer that the proxy reads."""

    kv_transfer_params: dict[str, object] | None = None


@dataclass
class Answer:
    """The client's answer. ``prefill`` is P's leg if it may still run: ``end`` it."""

    content: Whole | Stream
    prefill: asyncio.Task[Whole] | None = None


@dataclass(frozen=True)
class Attempt:
    """A request, and the engines that it goes to.

    Each attempt gets its own request id, so that no engine can confuse it with an earlier one. ``questions``: the last
    question to each P for its identity. ``to_prefill``: P's `kv_transfer_params`.
    """

    engines: Engines
    questions: dict[Engine, asyncio.Task[None]]
    body: RequestBody
    headers: Mapping[str, str]
    prefill: Engine
    decode: Engine
    to_prefill: Mapping[str, object]

    async def send(self) -> Answer:
        """Send it, and wait for D's first token. Cancellation ends both legs.

        Raises ``LegFailedError``: the client has got nothing yet, and another attempt is possible.
        """
        request_id = str(uuid.uuid4())
        if self.prefill.identity is None:
            await self.introduce()
        assumed = self.prefill.identity
        if assumed is None:
            return Answer(await self._ask_d_after_p(request_id, await self._ask_p(request_id)))
        at_p = remote_request_id(request_id, is_chat=self.body.path == CHAT)
        prefill = asyncio.create_task(self._ask_p(request_id))
        decode = asyncio.create_task(self._ask_d(request_id, assumed.to_decode(at_p)))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                prefilled = prefill.result()
                if prefilled.status != 200 or (self._learn(prefilled) and self.prefill.identity != assumed):
                    await end(decode)
                    return Answer(await self._ask_d_after_p(str(uuid.uuid4()), prefilled))
                await asyncio.wait((decode,))
            return Answer(self._answer_of_d(prefill, decode), prefill)
        except BaseException:  # also if the client has left: end both legs
            await end(prefill, decode)
            raise

    async def introduce(self) -> None:
        """Ask P for its identity, unless it has been asked, and wait for the answer for a while.

        The question is a request of the proxy's own, with the model and the key of this one.
        """
        now = asyncio.get_running_loop().time()
        if self.prefill.asked_at is None:
            self.prefill.asked_at = now
            key = {name: value for name, value in self.headers.items() if name == "authorization"}
            question = dataclasses.replace(self, body=self.body.probe(), headers=key, to_prefill=TO_PREFILL)
            self.questions[self.prefill] = asyncio.create_task(question._learn_identity())
        wait_s = max(0.0, self.prefill.asked_at + IDENTITY_S - now)
        await asyncio.wait((self.questions[self.prefill],), timeout=wait_s)

    async def _learn_identity(self) -> None:
        """Without a D that takes its blocks, P would keep them until their lease ends, and count a failed push."""
        request_id = f"probe-{uuid.uuid4()}"
        try:
            prefilled = await self._ask_p(request_id)
            if prefilled.status != 200:
                raise LegFailedError(self.prefill, f"answered {prefilled.status}", detail=shortened(prefilled.body))
            params = self._learn(prefilled)
        except LegFailedError as failure:
            self.prefill.asked_at = None  # the next request asks again
            self._use_sequential(str(failure))
            return
        with contextlib.suppress(LegFailedError):
            await self._ask_d(request_id, params)

    def _learn(self, prefilled: Whole) -> dict[str, object]:
        """P's own parameters for D. Afterwards P's identity is correct, or None. Raises ``LegFailedError``."""
        engine = self.prefill
        try:
            params = msgspec.json.decode(prefilled.body, type=_Prefilled).kv_transfer_params
        except msgspec.DecodeError:
            params = None
        try:
            identity = PrefillIdentity.from_params(params)
        except IdentityError as error:
            self._use_sequential(f"{engine}: {error}")
        else:
            if engine.identity != identity:
                engine.identity, engine.warning = identity, ""
                logger.info("%s is %s: P and D are asked at the same time", engine, identity)
        if params is None:
            raise LegFailedError(engine, "answered without kv_transfer_params: it has no KV connector that pushes")
        return params

    async def _ask_d_after_p(self, request_id: str, prefilled: Whole) -> Whole | Stream:
        """P's refusal, or the answer of D, which gets P's own parameters."""
        if prefilled.status != 200:
            return prefilled
        return await self._ask_d(request_id, self._learn(prefilled))

    def _answer_of_d(self, prefill: asyncio.Task[Whole], decode: asyncio.Task[Whole | Stream]) -> Whole | Stream:
        """D's answer. Until P has pushed, P may be the cause of D's failure."""
        try:
            return decode.result()
        except LegFailedError as failure:
            if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
                failure.suspects = (self.prefill, self.decode)
            raise

    async def _ask_p(self, request_id: str) -> Whole:
        headers = {**self.headers, "X-Request-Id": request_id}
        with self.prefill.working():
            return await self.engines.ask(self.prefill, self.body.path, headers, self.body.to_prefill(self.to_prefill))

    async def _ask_d(self, request_id: str, params: Mapping[str, object]) -> Whole | Stream:
        headers = {**self.headers, "X-Request-Id": request_id}
        body = self.body
        return await self.engines.decode(self.decode, body.path, headers, body.to_decode(params), streams=body.streams)

    def _use_sequential(self, reason: str) -> None:
        """Forget P's identity. Log the reason, unless it is the same as the last one."""
        engine, now = self.prefill, asyncio.get_running_loop().time()
        engine.identity = None
        if engine.warning != reason:
            engine.warning = reason
            text = f"{reason}. Sequential dispatch for this engine: D is asked after it has answered"
            self.engines.peer_errors.count(f"{engine} sequential", text, now)
