"""Engines without a model: the part of vLLM's API that a proxy uses, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from multidict import CIMultiDict

MODEL = "stub"
Fault = Literal["drop", "hang", "500", "429", "400", "error_event", "error_event_400", "cut", "empty", "redirect"]


@dataclass
class Network:
    """State that P and D share: living engine ids, and the prompts that P has computed."""

    engines: set[str] = field(default_factory=set)
    _pushed: dict[str, asyncio.Event] = field(default_factory=dict)

    def pushed(self, request_id: str) -> asyncio.Event:
        return self._pushed.setdefault(request_id, asyncio.Event())


@dataclass
class Seen:
    """A request as an engine got it."""

    path: str
    body: dict[str, Any]
    headers: CIMultiDict[str]

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]

    @property
    def prefill_request_id(self) -> str:
        """P's X-Request-Id, in a request to D."""
        return re.sub(r"^(chat)?cmpl-|(-0)?(-suffix)?$", "", self.params["remote_request_id"])

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}


class Stub:
    """One engine. ``faults`` are taken by one request each, in order; ``hold`` keeps requests from being answered."""

    def __init__(
        self, network: Network, role: Literal["prefill", "decode"], engine_id: str, host: str = "127.0.0.1"
    ) -> None:
        self.host = host
        self.network = network
        self.role = role
        self.engine_id = engine_id
        self.side_channel = 5600
        self.has_connector = True
        self.params_override: dict[str, Any] = {}
        self.faults: deque[Fault] = deque()
        self.fails: Fault | None = None
        """The fault of all other requests."""
        self.hold: asyncio.Event | None = None
        self.hold_probes: asyncio.Event | None = None
        self.probe_status = 200
        self.keeps_turns = False
        """Whether D returns `kv_transfer_params` with its answers."""
        self.padding = ""
        """A text in D's answers."""
        self.greeting = ""
        """A header's value in D's answers."""
        self.step: asyncio.Semaphore | None = None
        """If set, one permit for each event of a stream."""
        self.pieces: list[bytes] | None = None
        """If set, the exact pieces of D's answer."""
        self.raw: bytes | None = None
        """If set, the exact bytes of each answer to a client's request, with its head. Then the connection ends."""
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.cancelled = 0
        self.active = 0
        self.most_active = 0
        self.sent: dict[str, bytes | bytearray] = {}
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.network.engines.add(self.engine_id)

    async def stop(self) -> None:
        self.network.engines.discard(self.engine_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, engine_id: str) -> None:
        """Another process at the same address."""
        await self.stop()
        self.engine_id = engine_id
        await self.start()

    async def _health(self, _: web.Request) -> web.Response:
        """vLLM's router asks for it."""
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if self.hold is not None:
            await self.hold.wait()
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "by": self.engine_id}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, await request.json(), CIMultiDict(request.headers))
        if seen.request_id.startswith("probe-"):
            self.probes.append(seen)
            if self.hold_probes is not None:
                await self.hold_probes.wait()
            return self._prefilled(seen) if self.probe_status == 200 else web.Response(status=self.probe_status)
        self.seen.append(seen)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(request, seen)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else self.fails
        if self.hold is not None:
            await self.hold.wait()
        if self.raw is not None:
            assert request.transport is not None
            request.transport.write(self.raw)
            request.transport.close()
            return web.Response()
        match fault:
            case "drop":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "hang":
                await asyncio.Event().wait()
            case "500" | "429" | "400":
                return web.json_response(
                    {"error": {"message": f"{self.engine_id} says {fault}", "code": int(fault)}}, status=int(fault)
                )
            case "cut" if self.role == "prefill" or not seen.body.get("stream"):
                return await self._cut(request)
            case "redirect":
                return web.Response(status=307, headers={"Location": "/v1/models"})
            case _:
                pass
        if self.role == "prefill":
            self.network.pushed(seen.request_id).set()
            return self._prefilled(seen)
        if seen.params:
            if seen.params["remote_engine_id"] not in self.network.engines:
                await asyncio.Event().wait()
            await self.network.pushed(seen.prefill_request_id).wait()
        return await self._stream(request, seen, fault) if seen.body.get("stream") else self._complete(seen)

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        """The beginning of an answer in one piece."""
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    def _prefilled(self, seen: Seen) -> web.Response:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"cmpl-{seen.request_id}-0-suffix",
            "remote_host": "127.0.0.1",
            "remote_port": self.side_channel,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 4,
            "transfer_mode": "push",
            **self.params_override,
        }
        body = {"id": f"cmpl-{seen.request_id}", "choices": [{"text": "x"}]}
        return web.json_response(body | {"kv_transfer_params": params if self.has_connector else None})

    def _complete(self, seen: Seen) -> web.Response:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": "a b c" + self.padding}
        if "chat" in seen.path:
            choice["message"] = {"role": "assistant", "content": "a b c"}
        body = {
            "id": f"cmpl-{seen.request_id}",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
            **self._returned(seen),
        }
        raw = json.dumps(body, indent=1).encode()
        self.sent[seen.request_id] = raw
        return web.Response(
            body=raw, content_type="application/json", headers={"X-Request-Id": self.engine_id + self.greeting}
        )

    async def _stream(self, request: web.Request, seen: Seen, fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        written = self.sent[seen.request_id] = bytearray()
        for index, piece in enumerate(self._pieces(seen, fault)):
            if self.step is not None:
                await self.step.acquire()
            if fault == "cut" and index == 2:
                await response.write(piece[:7])
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(piece)
            written += piece
        await response.write_eof()
        return response

    def _pieces(self, seen: Seen, fault: Fault | None) -> list[bytes]:
        if fault in ("error_event", "error_event_400"):
            code = 400 if fault.endswith("400") else 500
            error = {"error": {"message": f"{self.engine_id} failed", "type": "E", "param": None, "code": code}}
            return [f"data: {json.dumps(error)}\n\n".encode(), b"data: [DONE]\n\n"]
        if fault == "empty":
            return []
        if self.pieces is not None:
            return self.pieces
        count = seen.body.get("max_completion_tokens") or seen.body.get("max_tokens") or 4
        events = [self._event(seen, index) for index in range(count)]
        events[-1] |= {"padding": self.padding} if self.padding else {}
        events[-1] |= self._returned(seen)
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            events.append({**self._event(seen, 0), "choices": [], "usage": usage})
        return [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]

    def _returned(self, seen: Seen) -> dict[str, Any]:
        """The params of a turn that D keeps: in an answer, or with vLLM 0.33 in the last event of a stream."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"cmpl-{seen.request_id}-0-suffix",
            "remote_host": "127.0.0.1",
            "remote_prefixes": "0123abcd",
        }
        return {"kv_transfer_params": params} if self.keeps_turns else {}

    def _event(self, seen: Seen, index: int) -> dict[str, Any]:
        chat = "chat" in seen.path
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"role": "assistant", "content": f"t{index} "}} if chat else {"text": f"t{index} "}
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": f"cmpl-{seen.request_id}", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}


@contextlib.asynccontextmanager
async def running(*stubs: Stub) -> AsyncIterator[None]:
    for stub in stubs:
        await stub.start()
    try:
        yield
    finally:
        for stub in stubs:
            await stub.stop()
