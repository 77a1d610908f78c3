"""`layerpush proxy`."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

import typer

from layerpush.apps.extras import require
from layerpush.apps.proxy.settings import Settings


def proxy(**options: Any) -> None:
    """Serve vLLM's OpenAI-compatible API in front of prefill and decode engines.

    The proxy sends every prompt to a prefill engine (P) and a decode engine (D) at the same time. So P can push each
    layer's KV while it computes the next one. The client gets D's answer, byte for byte.

    Example:  layerpush proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --port 8000

    The proxy asks each P for its engine id and side channel, at the start and whenever P comes back. If P does not
    give them, the proxy logs the reason and asks D only after P has answered.

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


def _declare_options() -> None:
    """Give the command one option for each field of ``Settings``: ``drain_timeout_s`` is ``--drain-timeout-secs``."""
    proxy.__annotations__ = get_type_hints(Settings, include_extras=True)
    parameters = inspect.signature(Settings).parameters.values()
    for each in parameters:
        (option,) = proxy.__annotations__[each.name].__metadata__
        option.param_decls = ("--" + re.sub("_s$", "_secs", each.name).replace("_", "-"),)
    signature = inspect.Signature([each.replace(annotation=proxy.__annotations__[each.name]) for each in parameters])
    proxy.__signature__ = signature  # type: ignore[attr-defined]  # typer and the page's table read it


_declare_options()
