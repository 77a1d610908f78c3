"""The proxy's HTTP API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from layerpush.apps.proxy.core import Proxy
from layerpush.apps.proxy.errors import ProxyError, error_body
from layerpush.apps.proxy.legs import LegFailedError
from layerpush.apps.proxy.metrics import CONTENT_TYPE
from layerpush.apps.proxy.upload import TOO_SLOW, Upload

PASSED_ON = ("authorization", "traceparent", "tracestate", "baggage", "user-agent")
"""Headers of a client that are passed on to engines. Only the proxy sets X-Request-Id and X-data-parallel-rank."""
LISTS = ("tracestate", "baggage")
"""Headers that may come in several lines; these are joined into one."""
ENDPOINTS = "/v1/completions, /v1/chat/completions, /v1/models, /health, /metrics"


def make_app(proxy: Proxy) -> FastAPI:
    """The application. It runs the proxy's tasks while it lives."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with proxy.running():
            yield

    app = FastAPI(title="layerpush proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Upload(proxy, "completions", _passed_on(request))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Upload(proxy, "chat/completions", _passed_on(request))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await _models(proxy, _passed_on(request))

    @app.get("/health")
    async def health() -> Response:
        return _health(proxy)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(proxy.metrics.text(), media_type=CONTENT_TYPE)

    @app.exception_handler(ProxyError)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, ProxyError)
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        if error.status == TOO_SLOW:
            headers["Connection"] = "close"
        return _error(error.status, error.message, headers)

    @app.exception_handler(StarletteHTTPException)
    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException | StarletteHTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}; the proxy serves {ENDPOINTS}"
        return _error(error.status_code, message, error.headers)

    return app


async def _models(proxy: Proxy, headers: Mapping[str, str]) -> Response:
    for decode in proxy.fleet.healthy("decode"):
        try:
            answer = await proxy.engines.get(decode, "/v1/models", proxy.settings.health_check_timeout_s, headers)
        except LegFailedError as failure:
            proxy.monitor.heed(failure)
        else:
            return Response(answer.body, answer.status, dict(answer.headers))
    raise proxy.fleet.none_left("decode")


def _health(proxy: Proxy) -> Response:
    status = 200 if proxy.fleet.ready and not proxy.draining else 503
    engines = [
        {
            "role": each.role,
            "url": each.url,
            "healthy": each.healthy,
            **({} if each.healthy else {"problem": each.problem}),
            **({"dispatch": each.dispatch} if each.role == "prefill" else {}),
        }
        for each in proxy.fleet
    ]
    body = {"status": "draining" if proxy.draining else "ok" if status == 200 else "unavailable", "engines": engines}
    return Response(json.dumps(body), status, media_type="application/json")


def _passed_on(request: Request) -> dict[str, str]:
    headers = {key: request.headers[key] for key in PASSED_ON if key in request.headers}
    return headers | {key: ",".join(request.headers.getlist(key)) for key in LISTS if key in headers}


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(status, message), status, headers, media_type="application/json")
