"""Requests to servers: one prompt to one engine, or to a prefill and a decode engine at the same time."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from bench.servers.engines import SERVED_NAME, EngineServer
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity, remote_request_id

TIMEOUT = aiohttp.ClientTimeout(total=600)
DONE = "[DONE]"


class RequestFailedError(RuntimeError):
    """A server refused a request or cut its answer short."""


@dataclass(frozen=True)
class GreedyAnswer:
    """Greedy tokens of one request; the times when it was sent, and when its first token came.

    Times are ``time.perf_counter()`` seconds.
    """

    request_id: str
    tokens: tuple[int, ...]
    sent_at: float
    first_token_at: float

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_token_at - self.sent_at


def make_prompt(tokens: int, seed: int, vocabulary: int) -> list[int]:
    """Random token ids; the special ones (0 to 2) do not occur."""
    return random.Random(f"{seed}/{tokens}").choices(range(3, vocabulary), k=tokens)


async def complete(
    session: aiohttp.ClientSession,
    engine: EngineServer,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    request_id: str | None = None,
    kv_transfer_params: Mapping[str, object] | None = None,
) -> GreedyAnswer:
    """Stream one greedy completion. Raises ``RequestFailedError`` for an error answer or a stream that ends early."""
    request_id = request_id or uuid.uuid4().hex
    body = {**_body(prompt, max_tokens, kv_transfer_params), "stream": True}
    sent_at = time.perf_counter()
    timed_tokens = [timed async for timed in _stream(session, engine, body, request_id)]
    if not timed_tokens or len(timed_tokens) != max_tokens:
        raise RequestFailedError(f"{engine.name} sent {len(timed_tokens)} of {max_tokens} tokens for {request_id}")
    tokens = tuple(token for token, _ in timed_tokens)
    return GreedyAnswer(request_id, tokens, sent_at, timed_tokens[0][1])


async def complete_whole(
    session: aiohttp.ClientSession,
    engine: EngineServer,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    request_id: str,
    kv_transfer_params: Mapping[str, object] | None = None,
) -> tuple[tuple[int, ...], dict[str, object] | None]:
    """One greedy completion in one piece: its tokens, and the ``kv_transfer_params`` that vLLM 0.32 does not stream.

    Raises ``RequestFailedError``.
    """
    body = _body(prompt, max_tokens, kv_transfer_params)
    async with _post(session, engine, body, request_id) as response:
        answer = await response.json()
    return tuple(answer["choices"][0]["token_ids"]), answer.get("kv_transfer_params")


def to_decode(prefill: EngineServer, request_id: str) -> dict[str, object]:
    """D's ``kv_transfer_params`` for a request that P gets under the same id."""
    identity = PrefillIdentity(prefill.name, prefill.spec.place.host, prefill.side_channel_port, tp_size=1)
    return identity.to_decode(remote_request_id(request_id))


async def complete_disaggregated(
    session: aiohttp.ClientSession,
    prefill: EngineServer,
    decode: EngineServer,
    prompt: Sequence[int],
    max_tokens: int,
    mode: str | None = None,
) -> GreedyAnswer:
    """Send one prompt to P and D at the same time; the answer is D's.

    Both get the same X-Request-Id, by which P finds D's registration. P computes the prompt and one token, and pushes
    in ``mode``; with None it pushes as it is configured. P's answer is dropped.
    """
    request_id = uuid.uuid4().hex
    to_p = TO_PREFILL if mode is None else {**TO_PREFILL, "layerpush_mode": mode}
    to_d = to_decode(prefill, request_id)
    decoding = complete(session, decode, prompt, max_tokens, request_id=request_id, kv_transfer_params=to_d)
    prefilling = complete(session, prefill, prompt, 1, request_id=request_id, kv_transfer_params=to_p)
    tasks = [asyncio.create_task(decoding), asyncio.create_task(prefilling)]
    try:
        answer, _ = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # one failed: the other would wait for it
    return answer


def _body(prompt: Sequence[int], max_tokens: int, kv_transfer_params: Mapping[str, object] | None) -> dict[str, object]:
    body: dict[str, object] = {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body if kv_transfer_params is None else {**body, "kv_transfer_params": dict(kv_transfer_params)}


@asynccontextmanager
async def _post(
    session: aiohttp.ClientSession, engine: EngineServer, body: Mapping[str, object], request_id: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The engine's answer. Raises ``RequestFailedError`` for an error, also while the answer is read."""
    url, headers = f"{engine.url}/v1/completions", {"X-Request-Id": request_id}
    try:
        async with session.post(url, json=body, headers=headers, timeout=TIMEOUT) as response:
            if response.status != 200:
                raise RequestFailedError(f"{engine.name} answered {response.status}: {(await response.text())[:500]}")
            yield response
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailedError(f"{engine.name}, request {request_id}: {type(error).__name__} {error}") from error


async def _stream(
    session: aiohttp.ClientSession, engine: EngineServer, body: Mapping[str, object], request_id: str
) -> AsyncIterator[tuple[int, float]]:
    """Each token id with the time when it arrived."""
    async with _post(session, engine, body, request_id) as response:
        async for line in response.content:
            arrived_at = time.perf_counter()
            for token in _tokens_of(engine.name, line):
                yield token, arrived_at


def _tokens_of(engine_name: str, line: bytes) -> list[int]:
    """Token ids in one line of a server-sent event stream."""
    field, _, payload = line.decode().strip().partition(":")
    if field != "data" or payload.strip() == DONE:
        return []
    event = json.loads(payload)
    if "error" in event:
        raise RequestFailedError(f"{engine_name}: {event['error']}")
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
