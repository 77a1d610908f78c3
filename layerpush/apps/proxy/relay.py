"""Serves a client's request, from the end of its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.client import Client
from layerpush.apps.proxy.dispatch import Answer, Attempt, AttemptFailedError
from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.gate import Payload
from layerpush.apps.proxy.instance import Instance, Role
from layerpush.apps.proxy.legs import LegFailedError, Stream, Whole

if TYPE_CHECKING:
    from layerpush.apps.proxy.core import Proxy

logger = logging.getLogger("layerpush.proxy")


class Relay:
    """The course of one request."""

    def __init__(
        self, proxy: Proxy, body: RequestBody, payload: Payload, headers: Mapping[str, str], began: float
    ) -> None:
        """``headers``: those for the engines. ``began``: the request's arrival, in seconds of the loop's clock."""
        self._proxy = proxy
        self._body = body
        self._payload = payload
        self._engine_headers = headers
        self._began = began
        self._avoid: set[Instance] = set()
        self._spare: set[Instance] = set()
        self._refused_by: set[tuple[Instance | None, Instance]] = set()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Send the answer. It ends early if the client leaves."""
        client = Client(send)
        work = asyncio.create_task(self._serve(client))
        gone = asyncio.create_task(_disconnected(receive))
        outcome = "cancelled"
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                outcome = "error"
                outcome = work.result()
        except asyncio.CancelledError:
            work.cancel()  # the server's time for draining is over
            await asyncio.gather(work, return_exceptions=True)
            with contextlib.suppress(OSError):
                await client.fail(503, "the proxy is shutting down")
            raise
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._proxy.metrics.requests.labels(self._body.endpoint, outcome).inc()

    async def _serve(self, client: Client) -> str:
        """Serve the request. Returns its outcome, a label value of the metric."""
        limit_s = self._proxy.settings.request_timeout_s
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(self._began + limit_s), self._proxy.gate.entered():
                return await self._answer(client)
        except TimeoutError:
            await client.fail(504, f"the request took more than {limit_s:g} s (--request-timeout-secs)")
            return "timeout"
        except ProxyError as error:
            await client.fail(error.status, error.message, error.retry_after_s)
            return "refused" if error.status == 429 else "error"
        finally:
            self._proxy.metrics.duration.labels(self._body.endpoint).observe(now() - self._began)

    async def _answer(self, client: Client) -> str:
        failure: LegFailedError | None = None
        for _ in range(1 + self._proxy.settings.retry_max_retries):
            decode = await self._pick("decode", failure)
            prefill = None if self._body.alone else await self._pick("prefill", failure)
            if decode is None or (prefill is None and not self._body.alone):
                break
            if failure is not None:
                if (prefill, decode) in self._refused_by:
                    break
                logger.warning(
                    "another attempt, with %s", " and ".join(str(each) for each in (prefill, decode) if each)
                )
                self._proxy.metrics.retries.inc()
            attempt = Attempt(self._body, self._engine_headers, prefill, decode, client.comment)
            self._proxy.metrics.dispatches.labels(attempt.mode).inc()
            with decode.working(self._body.prompt_tokens + self._body.answer_tokens):
                try:
                    answer = await self._proxy.dispatcher.send(attempt)
                except AttemptFailedError as error:
                    failure = error.cause
                    self._exclude(error)
                    if error.cause.refused:
                        self._refused_by.add((prefill, decode))
                    continue
                self._free_body()
                waited_s = asyncio.get_running_loop().time() - self._began
                self._proxy.metrics.first_token.labels(self._body.endpoint).observe(waited_s)
                if answer.after_prefill_s is not None and (
                    isinstance(answer.content, Stream) and answer.content.has_events
                ):
                    self._proxy.metrics.after_prefill.labels(self._body.endpoint).observe(answer.after_prefill_s)
                return await self._pass_on(client, answer)
        return await self._give_up(client, failure)

    async def _pick(self, role: Role, failure: LegFailedError | None) -> Instance | None:
        """An instance for the next attempt, else None. Raises ``ProxyError`` if there is none for the first attempt."""
        fleet = self._proxy.fleet
        chosen = fleet.pick(role, self._body, self._avoid | self._spare)
        if chosen is None:
            await self._proxy.monitor.check(each for each in fleet.doubtful(role) if each not in self._avoid)
            chosen = fleet.pick(role, self._body, self._avoid)
        if chosen is None and failure is None:
            raise fleet.none_left(role)
        return chosen

    def _free_body(self) -> None:
        """D has begun to answer, so no other attempt follows. A long answer must not hold a long prompt."""
        self._body.free()
        self._payload.free()

    def _exclude(self, error: AttemptFailedError) -> None:
        """Exclude an engine that failed. If its connection was lost, it may still be asked when there is no other."""
        cause = error.cause
        self._proxy.metrics.leg_failed(cause)
        self._proxy.monitor.heed(cause)
        forgiven = {cause.instance} if cause.gone or cause.broken else set()
        self._avoid |= error.avoid - forgiven
        self._spare |= error.spare | forgiven
        logger.warning("%s", cause)

    async def _give_up(self, client: Client, failure: LegFailedError | None) -> str:
        """Send the client the cause of the last failure."""
        if failure is None:
            raise AssertionError("no attempt was made, and none failed")
        has_room_soon = failure.gone or failure.exhausted or failure.status == 429
        await client.fail(failure.status, failure.public, 1 if has_room_soon else None)
        return "error"

    async def _pass_on(self, client: Client, answer: Answer) -> str:
        finished = False
        try:
            if isinstance(answer.content, Whole):
                await client.whole(answer.content)
                finished = not answer.content.refuses
                return "client_error" if answer.content.refuses else "ok"
            await self._stream(client, answer.content)
            finished = True
        except LegFailedError as failure:
            self._proxy.metrics.leg_failed(failure)
            self._proxy.monitor.heed(failure)
            logger.warning("%s, in the middle of its answer", str(failure))  # a handler may keep the arguments
            await client.fail(failure.status, failure.public)
            return "error"
        finally:
            self._release(answer, finished)
        return "ok"

    @staticmethod
    async def _stream(client: Client, stream: Stream) -> None:
        try:
            await client.start(200, stream.headers, has_events=stream.has_events)
            async for events in stream:
                await client.send(events)
            await client.end()
        finally:
            stream.close()

    def _release(self, answer: Answer, finished: bool) -> None:
        """Cancel P's leg unless D has finished: then D has all blocks, and P's leg may end by itself."""
        if answer.prefill is None:
            return
        if not finished:
            answer.prefill.cancel()
        self._proxy.outlive(answer.prefill)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
