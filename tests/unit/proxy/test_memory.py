"""The memory of a request's body: freed with the request, without the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from layerpush.apps.proxy.body import RequestBody
from tests.unit.proxy.world import World, asynchronous, until, world


class Encoded(bytearray):
    """A body for an engine that can be referred to weakly."""


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """References to the bodies of all requests. Only reference counts free them."""
    made: list[weakref.ref[Any]] = []
    init = RequestBody.__init__

    def remember(self: RequestBody, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(weakref.ref(self))

    def encoded(encode: Any) -> Any:
        def call(self: RequestBody, params: Any) -> Encoded:
            body = Encoded(encode(self, params))
            made.append(weakref.ref(body))
            return body

        return call

    monkeypatch.setattr(RequestBody, "__init__", remember)
    for name in ("to_prefill", "to_decode"):
        monkeypatch.setattr(RequestBody, name, encoded(getattr(RequestBody, name)))
    gc.disable()
    yield made
    gc.enable()


FAILURES: dict[str, dict[str, Any]] = {
    "D refuses with 500": {"d": "500"},
    "P refuses with 500": {"p": "500"},
    "D drops the connection": {"d": "drop"},
    "P drops the connection": {"p": "drop"},
    "D sends an error event": {"d": "error_event", "stream": True},
    "D ends before the first token": {"d": "empty", "stream": True},
    "D breaks its answer off": {"d": "cut", "stream": True},
    "D breaks its whole answer off": {"d": "cut"},
    "P breaks its answer off": {"p": "cut"},
    "D refuses with 400": {"d": "400"},
    "P refuses with 400": {"p": "400"},
    "D does not answer": {"d": "hang", "stream": True, "settings": {"engine_timeout_secs": 0.2}},
    "P does not answer": {"p": "hang", "settings": {"engine_timeout_secs": 0.2}},
    "the request takes too long": {"d": "hang", "settings": {"request_timeout_secs": 0.2}},
    "P pushes nothing": {"no_connector": True},
    "dispatch is sequential": {"d": "500", "pulls": True},
    "nothing fails": {},
    "nothing fails in a stream": {"stream": True},
}


async def served(
    here: World, p: Any = None, d: Any = None, stream: bool = False, no_connector: bool = False, pulls: bool = False
) -> None:
    for stub, fault in ((here.p, p), (here.d, d)):
        stub.faults.extend([fault] if fault else [])
    here.p.has_connector = not no_connector
    if pulls:
        here.p.params_override = {"transfer_mode": "pull"}
        here.engines[0].identity = None
    with contextlib.suppress(aiohttp.ClientPayloadError):
        await here.post(stream=stream)


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@asynchronous
async def test_a_body_is_freed_with_its_request(failure: dict[str, Any], bodies: list[weakref.ref[Any]]) -> None:
    failure = dict(failure)
    async with world(**{"retries": 1} | failure.pop("settings", {})) as here:
        await here.introduce()
        bodies.clear()
        await served(here, **failure)
        assert len(bodies) >= 2
        await until(lambda: not any(each() for each in bodies), "no body is kept", 5.0)


@asynchronous
async def test_the_body_of_a_client_that_left_is_freed(bodies: list[weakref.ref[Any]]) -> None:
    async with world() as here:
        here.p.hold = asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.active and here.d.active, "both engines work")
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        await until(lambda: not any(each() for each in bodies), "no body is kept", 5.0)


@asynchronous
async def test_a_stream_that_has_begun_holds_no_body(bodies: list[weakref.ref[Any]]) -> None:
    async with world() as here:
        here.d.step = asyncio.Semaphore(1)
        await here.introduce()
        bodies.clear()
        async with here.stream() as response:
            await response.content.readuntil(b"\n\n")
            await until(lambda: not here.p.active, "P has answered")
            (body,) = [each() for each in bodies if isinstance(each(), RequestBody)]
            await until(lambda: not any(isinstance(each(), Encoded) for each in bodies), "engines have their bodies")
            assert here.proxy.body_bytes == 0
            assert body is not None
            assert body.to_decode({}) == b'{"kv_transfer_params":{}}'
            for _ in range(3):
                here.d.step.release()
