"""`layerpush proxy`."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import typer

from layerpush.apps.extras import require
from layerpush.apps.proxy.settings import Settings


def proxy(**options: Any) -> None:
    """Serve vLLM's OpenAI-compatible API in front of prefill and decode engines.

    The proxy sends every prompt to a prefill engine (P) and a decode engine (D) at the same time. So P can push each
    layer's KV while it computes the next one. The client gets D's answer, byte for byte.

    Example:  layerpush proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --port 8000

    Before the first request to a P, the proxy asks it for its engine id and side channel. If P does not give them, the
    proxy logs the reason and asks D only after P has answered.

    It serves /v1/completions, /v1/chat/completions, /v1/models and /health. If P fails, D's request ends at once. If
    an engine fails before the first token, the proxy sends the request to other engines. After SIGTERM it accepts no
    new connections and finishes the requests that run.

    Exit status: 0 after SIGTERM or SIGINT, 1 if the port is not available, 2 for bad options or a missing
    package.
    """
    settings = Settings(**options)
    require("proxy", "proxy")

    from layerpush.apps.proxy.server import serve

    if not serve(settings):
        raise typer.Exit(1)


proxy.__annotations__ = get_type_hints(Settings, include_extras=True)
proxy.__signature__ = inspect.signature(Settings, eval_str=True)  # type: ignore[attr-defined]  # typer reads both
