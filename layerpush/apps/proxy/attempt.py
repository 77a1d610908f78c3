"""Sends a request once: to P and D at the same time, to one after the other, or to D alone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.introduction import Introductions, transfer_params
from layerpush.apps.proxy.legs import Engines, LegFailedError, Stream, Whole
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity


@dataclass
class Answer:
    """The client's answer. ``prefill`` is P's leg if it may still run: ``end`` it."""

    content: Whole | Stream
    prefill: asyncio.Task[Whole] | None = None


@dataclass(frozen=True)
class Attempt:
    """A request, and the engines that it goes to. Without ``prefill``, D computes the prompt.

    Each attempt gets its own request id, so that no engine can confuse it with an earlier one.
    """

    engines: Engines
    introductions: Introductions
    body: RequestBody
    headers: Mapping[str, str]
    prefill: Engine | None
    decode: Engine

    async def send(self) -> Answer:
        """Send it, and wait for D's first token. Cancellation ends both legs.

        Raises ``LegFailedError``: the client has got nothing yet, and another attempt is possible.
        """
        request_id = str(uuid.uuid4())
        if self.prefill is None:
            return Answer(await self._ask_d(request_id, None))
        if self.prefill.identity is None:
            await self.introductions.introduce(self.prefill, self.decode, self.body, self.headers)
        identity = self.prefill.identity
        if identity is None:
            return await self._sequentially(self.prefill, request_id)
        params = identity.to_decode(self.body.remote_request_id(request_id))
        prefill = asyncio.create_task(self._ask_p(self.prefill, request_id))
        decode = asyncio.create_task(self._ask_d(request_id, params))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                refusal = self._check_p(self.prefill, identity, prefill.result())
                if refusal is not None:
                    await end(decode)
                    return Answer(refusal)
                await asyncio.wait((decode,))
            return Answer(self._answer_of_d(self.prefill, prefill, decode), prefill)
        except BaseException:  # also if the client has left: end both legs
            await end(prefill, decode)
            raise

    def _check_p(self, engine: Engine, assumed: PrefillIdentity, answer: Whole) -> Whole | None:
        """Check P's answer while D waits. Returns a refusal for the client, or None to wait for D's answer."""
        if answer.status != 200:
            return answer
        self._learn(engine, answer)
        if engine.identity != assumed:
            raise LegFailedError(
                engine, "has restarted", detail=f"it is no longer {assumed}", is_lost=True, suspects=()
            )
        return None

    def _learn(self, engine: Engine, answer: Whole) -> msgspec.Raw:
        params = transfer_params(answer.body)
        self.introductions.learn(engine, params)
        if params is None:
            raise LegFailedError(engine, "answered without kv_transfer_params: it has no KV connector that pushes")
        return params

    def _answer_of_d(
        self, engine: Engine, prefill: asyncio.Task[Whole], decode: asyncio.Task[Whole | Stream]
    ) -> Whole | Stream:
        """D's answer. Until P has pushed, P may be the cause of D's failure."""
        try:
            return decode.result()
        except LegFailedError as failure:
            if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
                failure.suspects = (engine, self.decode)
            raise

    async def _sequentially(self, engine: Engine, request_id: str) -> Answer:
        prefilled = await self._ask_p(engine, request_id)
        if prefilled.status != 200:
            return Answer(prefilled)
        return Answer(await self._ask_d(request_id, self._learn(engine, prefilled)))

    async def _ask_p(self, engine: Engine, request_id: str) -> Whole:
        headers = {**self.headers, "X-Request-Id": request_id}
        with engine.working():
            return await self.engines.ask(engine, self.body.path, self.body.to_prefill(TO_PREFILL), headers)

    async def _ask_d(self, request_id: str, params: Mapping[str, object] | msgspec.Raw | None) -> Whole | Stream:
        headers = {**self.headers, "X-Request-Id": request_id}
        body = self.body
        return await self.engines.decode(self.decode, body.path, body.to_decode(params), headers, streams=body.streams)


async def end(*legs: asyncio.Task[Whole] | asyncio.Task[Whole | Stream]) -> None:
    """Cancel the legs, and close their streams."""
    for leg in legs:
        leg.cancel()
    for ended in await asyncio.gather(*legs, return_exceptions=True):
        if isinstance(ended, Stream):
            ended.close()
