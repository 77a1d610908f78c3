"""The official client, against the proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.unit.proxy.stub import MODEL
from tests.unit.proxy.world import World, asynchronous, until, world


@contextlib.asynccontextmanager
async def client_and_world(**settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, World]]:
    async with (
        world(**settings) as here,
        openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client, here


@asynchronous
async def test_completions() -> None:
    async with client_and_world() as (client, here):
        whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        assert whole.choices[0].text == "a b c"
        assert whole.usage is not None
        assert whole.usage.total_tokens == 6
        stream = await client.completions.create(
            model=MODEL, prompt=[1, 2], max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].text for event in events if event.choices) == "t0 t1 t2 "
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 3
        assert all(seen.headers["Authorization"] == "Bearer key" for seen in here.p.seen + here.d.seen)


@asynchronous
async def test_chat() -> None:
    async with client_and_world() as (client, here):
        messages: Any = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3)
        assert whole.choices[0].message.content == "a b c"
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=3, stream=True
        )
        assert "".join([event.choices[0].delta.content or "" async for event in stream]) == "t0 t1 t2 "
        assert [seen.body["messages"] for seen in here.p.seen] == [messages, messages]


@asynchronous
async def test_errors_have_the_clients_own_exception_types() -> None:
    async with client_and_world(max_concurrent_requests=1) as (client, here):
        here.d.faults.append("400")
        with pytest.raises(openai.BadRequestError, match="d0 says 400"):
            await client.completions.create(model=MODEL, prompt="x")
        here.p.faults.append("500")
        with pytest.raises(openai.InternalServerError, match="the prefill engine answered 500"):
            await client.completions.create(model=MODEL, prompt="x")
        here.d.step = None
        here.d.faults.append("cut")
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
        here.d.hold = asyncio.Event()
        first = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
        await until(lambda: here.d.active, "the first is under way")
        with pytest.raises(openai.RateLimitError, match="--max-concurrent-requests"):
            await client.completions.create(model=MODEL, prompt="x")
        here.d.hold.set()
        await first
