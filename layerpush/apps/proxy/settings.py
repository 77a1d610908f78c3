"""The options of `layerpush proxy`, each written once: the command line, the defaults and the page come from here.

Options that vllm-project/router has, too, have the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

import typer

from layerpush.core.hosts import is_host

Policy: TypeAlias = Literal["least_loaded", "round_robin"]
_ENGINES, _DISPATCH, _LIMITS = "Engines", "Dispatch", "Limits"


def engine_url(url: str) -> str:
    """The base URL without a slash at the end. Raises ``typer.BadParameter``.

    ``urlsplit`` drops line breaks and takes any text as a host. An address with a scope (`fe80::1%eth0`) has no form in
    a URL on which all programs agree.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        has_host = url.isprintable() and is_host(host) and "%" not in host
        usable = parts.scheme in ("http", "https") and has_host and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise typer.BadParameter(f"{url!r} is no URL of an engine; write http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise typer.BadParameter(f"{url!r}: write only http://HOST:PORT; the proxy adds /v1/... itself")
    return f"{parts.scheme}://{parts.netloc}"


def _option(help_text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


def _engines(role: str) -> Any:
    text = f"API server of a {role} engine; repeat it for more."
    return _option(text, _ENGINES, metavar="URL", parser=engine_url)


@dataclass(frozen=True)
class Settings:
    """The operator's settings. Names that end in ``_s`` are durations in seconds."""

    prefill: Annotated[list[str], _engines("prefill")]
    decode: Annotated[list[str], _engines("decode")]
    api_key: Annotated[
        str | None,
        _option(
            "API key for the proxy's own requests to engines. The proxy passes on clients' own keys.",
            _ENGINES,
            envvar="VLLM_API_KEY",
            show_envvar=True,
        ),
    ] = None
    host: Annotated[str, _option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen on.", min=0, max=65535)] = 30000
    policy: Annotated[Policy, _option("How to choose the engines for a request.", _DISPATCH)] = "least_loaded"
    retry_max_retries: Annotated[int, _option("Retries of a request before its first token.", _DISPATCH, min=0)] = 2
    max_concurrent_requests: Annotated[
        int, _option("Largest number of requests at a time; further ones get HTTP status 429.", _LIMITS, min=1)
    ] = 1024
    max_payload_size: Annotated[int, _option("Largest request body, in bytes.", _LIMITS, min=1)] = 64 << 20
    max_total_payload_size: Annotated[
        int,
        _option("Largest size of all bodies that wait for a first token, in bytes; beyond: 429.", _LIMITS, min=1),
    ] = 256 << 20
    upload_timeout_s: Annotated[float, _option("Deadline for the arrival of a body.", _LIMITS, min=0.001)] = 60.0
    connect_timeout_s: Annotated[float, _option("Deadline for a connection to an engine.", _LIMITS, min=0.001)] = 5.0
    first_token_timeout_s: Annotated[
        float, _option("Deadline for P's answer, and for the beginning of D's.", _LIMITS, min=0.001)
    ] = 600.0
    stream_idle_timeout_s: Annotated[float, _option("Longest pause in D's answer.", _LIMITS, min=0.001)] = 300.0
    request_timeout_s: Annotated[float, _option("Deadline for a whole request.", _LIMITS, min=0.001)] = 1800.0
    drain_timeout_s: Annotated[float, _option("After SIGTERM, deadline for the requests that run.", _LIMITS, min=0)] = (
        300.0
    )
    health_check_interval_s: Annotated[
        float, _option("Time between two checks of an engine, and the deadline for one.", min=0.01)
    ] = 5.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _option("Lowest severity to log.")] = "info"

    def __post_init__(self) -> None:
        """Raises ``typer.BadParameter``."""
        if self.max_payload_size > self.max_total_payload_size:
            raise typer.BadParameter("--max-payload-size is larger than --max-total-payload-size")
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if len(set(urls)) < len(urls):
                raise typer.BadParameter(f"{role} names the same engine twice")
        both = set(self.prefill) & set(self.decode)
        if both:
            raise typer.BadParameter(f"prefill and decode are both {min(both)}; an engine has one role")
