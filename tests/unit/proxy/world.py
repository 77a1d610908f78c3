"""A proxy on a real port between a real HTTP client and stub engines, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import aiohttp
from multidict import CIMultiDictProxy

from layerpush.apps import http_server
from layerpush.apps.proxy import proxy as proxy_module
from layerpush.apps.proxy import server
from layerpush.apps.proxy.attempt import Attempt
from layerpush.apps.proxy.body import COMPLETIONS, RequestBody
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.proxy import RETRIES, UPLOAD_S, Proxy
from layerpush.apps.proxy.settings import Settings
from layerpush.core.prefill_identity import TO_PREFILL
from tests.unit.proxy.stub import MODEL, Network, Stub, running

DEADLINE_S = 30.0


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, and end it after a minute."""

    @functools.wraps(test)
    def call(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return call


async def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {deadline_s} s: {what}") from None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Reply:
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class World:
    def __init__(self, network: Network, prefill: list[Stub], decode: list[Stub], url: str, proxy: Proxy) -> None:
        self.network = network
        self.prefill = prefill
        self.decode = decode
        self.url = url
        self.proxy = proxy
        self.session: aiohttp.ClientSession

    @property
    def p(self) -> Stub:
        return self.prefill[0]

    @property
    def d(self) -> Stub:
        return self.decode[0]

    async def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Reply:
        body = {"model": MODEL, "prompt": "hello there", "max_tokens": 4, **body}
        if "chat" in path:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Reply(response.status, response.headers, await response.read())

    def stream(self) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A streamed answer of three tokens, while it comes."""
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 3}
        return self.session.post(f"{self.url}/v1/completions", json=body)

    async def get(self, path: str) -> Reply:
        async with self.session.get(self.url + path) as response:
            return Reply(response.status, response.headers, await response.read())

    @property
    def engines(self) -> list[Engine]:
        """The proxy's view of all engines."""
        return [*self.proxy.prefill.engines, *self.proxy.decode.engines]

    async def introduce(self) -> None:
        """Let the proxy learn the identity of each P, as before its first request."""
        for engine in self.proxy.prefill.engines:
            body = RequestBody(COMPLETIONS, json.dumps({"model": MODEL}).encode())
            decode = self.proxy.decode.engines[0]
            await Attempt(self.proxy.engines, self.proxy.questions, body, {}, engine, decode, TO_PREFILL).introduce()


@contextlib.asynccontextmanager
async def world(
    prefills: int = 1,
    decodes: int = 1,
    *,
    p0: Mapping[str, Any] = MappingProxyType({}),
    d0: Mapping[str, Any] = MappingProxyType({}),
    retries: int = RETRIES,
    upload_s: float = UPLOAD_S,
    runner: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[World]:
    """Engines p0, p1, ... and d0, d1, ..., and a proxy before them.

    ``p0`` and ``d0``: attributes of these stubs. ``retries``, ``upload_s``, ``runner``: in the place of the proxy's.
    """
    network = Network()
    prefill = [Stub(network, "prefill", f"p{index}") for index in range(prefills)]
    decode = [Stub(network, "decode", f"d{index}") for index in range(decodes)]
    for stub, attributes in ((prefill[0], p0), (decode[0], d0)):
        for name, value in attributes.items():
            setattr(stub, name, value)
    async with running(*prefill, *decode):
        port = free_port()
        urls = {"prefill": [stub.url for stub in prefill], "decode": [stub.url for stub in decode]}
        proxy = Proxy(Settings(**urls, port=port, **settings))
        serving = http_server.serving(server.make_app(proxy), proxy.connections, "127.0.0.1", port, 2.0, **runner)
        here = World(network, prefill, decode, f"http://127.0.0.1:{port}", proxy)
        with (
            mock.patch.object(proxy_module, "RETRIES", retries),
            mock.patch.object(proxy_module, "UPLOAD_S", upload_s),
        ):
            async with serving, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                here.session = session
                yield here
