"""The proxy's HTTP API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web

from layerpush.apps.proxy.body import Endpoint
from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.errors import ProxyError, error_body
from layerpush.apps.proxy.legs import LegFailedError
from layerpush.apps.proxy.relay import Relay

PASSED_ON = ("authorization", "traceparent", "tracestate", "baggage", "user-agent")
"""Headers of a client that are passed on to engines. Only the proxy sets X-Request-Id and X-data-parallel-rank."""
LISTS = ("tracestate", "baggage")
"""Headers that may come in several lines; these are joined into one."""
ENDPOINTS = "/v1/completions, /v1/chat/completions, /v1/models, /health"


def make_app(proxy: Proxy) -> web.Application:
    """The application. It runs the proxy's tasks while it lives."""

    async def running(_: web.Application) -> AsyncIterator[None]:
        async with proxy.running():
            yield

    app = web.Application(middlewares=[_errors])
    app.cleanup_ctx.append(running)
    app.router.add_post("/v1/completions", partial(_complete, proxy))
    app.router.add_post("/v1/chat/completions", partial(_complete, proxy))
    app.router.add_get("/v1/models", partial(_models, proxy))
    app.router.add_get("/health", partial(_health, proxy))
    return app


async def _complete(proxy: Proxy, request: web.Request) -> web.StreamResponse:
    """Answer a request for a completion."""
    if proxy.draining:
        raise ProxyError(503, "the proxy is shutting down", try_later=True)
    if proxy.requests >= proxy.settings.max_concurrent_requests:
        message = f"{proxy.requests} requests are under way (--max-concurrent-requests); try again later"
        raise ProxyError(429, message)
    endpoint: Endpoint = "chat/completions" if "chat" in request.path else "completions"
    proxy.requests += 1
    try:
        return await Relay(proxy, request, endpoint, _passed_on(request)).serve()
    finally:
        proxy.requests -= 1


async def _models(proxy: Proxy, request: web.Request) -> web.Response:
    """The list of the first healthy D that answers."""
    for decode in proxy.fleet.healthy("decode"):
        try:
            answer = await proxy.engines.get(
                decode, "/v1/models", proxy.settings.connect_timeout_s, _passed_on(request)
            )
        except LegFailedError:
            continue
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body)
    raise proxy.fleet.none_left("decode")


async def _health(proxy: Proxy, _: web.Request) -> web.Response:
    """The state of the proxy and of each engine."""
    is_ready = proxy.fleet.ready and not proxy.draining
    engines = [
        {
            "role": each.role,
            "url": each.url,
            "healthy": each.healthy,
            "requests": each.requests,
            **({} if each.healthy else {"problem": each.problem}),
            **({"dispatch": each.dispatch} if each.role == "prefill" else {}),
        }
        for each in proxy.fleet
    ]
    state = "draining" if proxy.draining else "ok" if is_ready else "unavailable"
    body = {"status": state, "requests": proxy.requests, "retries": proxy.retries, "engines": engines}
    return _json(200 if is_ready else 503, json.dumps(body).encode())


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give errors the format of the OpenAI API."""
    codings = [each.strip().lower() for each in request.headers.getall("Transfer-Encoding", [])]
    try:
        if codings not in ([], ["chunked"]):  # aiohttp takes others before it, too
            raise ProxyError(400, "Transfer-Encoding must be chunked, and nothing else")
        return await handler(request)
    except ProxyError as error:
        response = _json(error.status, error_body(error.status, error.message), error.headers)
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path}; the proxy serves {ENDPOINTS}"
        response = _json(error.status, error_body(error.status, message))
    if not request.content.is_eof():  # the rest of the body is of no use
        response.force_close()
    return response


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")


def _passed_on(request: web.Request) -> dict[str, str]:
    """Raises ``ProxyError`` if a value cannot be sent."""
    headers = {key: request.headers[key] for key in PASSED_ON if key in request.headers}
    headers |= {key: ",".join(request.headers.getall(key)) for key in LISTS if key in headers}
    for key, value in headers.items():
        if any("\ud800" <= each <= "\udfff" for each in value):
            raise ProxyError(400, f"the header {key} is not valid UTF-8")
    return headers
