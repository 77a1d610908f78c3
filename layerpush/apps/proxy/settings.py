"""The options of `layerpush proxy`, each written once: the command line, the defaults and the page come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from layerpush.core.hosts import is_host


def engine_url(url: str) -> str:
    """The base URL without a slash at the end. Raises ``typer.BadParameter``.

    ``urlsplit`` drops line breaks and takes any text as a host. An address with a scope (`fe80::1%eth0`) has no form in
    a URL on which all programs agree.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        usable = parts.scheme in ("http", "https") and url.isprintable() and is_host(host) and "%" not in host
        usable = usable and parts.port != 0 and parts.username is None
        usable = usable and not (parts.path.strip("/") or parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable:
        raise typer.BadParameter(f"{url!r} is no URL of an engine; write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def _option(text: str, **more: Any) -> Any:
    return typer.Option(help=text, **more)


@dataclass(frozen=True)
class Settings:
    """The operator's settings. Names that end in ``_secs`` are durations in seconds."""

    prefill: Annotated[
        list[str], _option("API server of a prefill engine; repeat it for more.", metavar="URL", parser=engine_url)
    ]
    decode: Annotated[
        list[str], _option("API server of a decode engine; repeat it for more.", metavar="URL", parser=engine_url)
    ]
    host: Annotated[str, _option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen on.", min=0, max=65535)] = 30000
    max_concurrent_requests: Annotated[int, _option("Most requests at a time; beyond: 429.", min=1)] = 1024
    max_total_payload_size: Annotated[
        int, _option("Most bytes of all bodies that wait for a first token; beyond: 429.", min=1)
    ] = 256 << 20
    engine_timeout_secs: Annotated[
        float, _option("Deadline for P's answer, and for each pause in a stream of D's.", min=0.001)
    ] = 600.0
    request_timeout_secs: Annotated[float, _option("Deadline for a whole request.", min=0.001)] = 1800.0

    def __post_init__(self) -> None:
        """Raises ``typer.BadParameter``."""
        urls = [*self.prefill, *self.decode]
        if len(set(urls)) < len(urls):
            raise typer.BadParameter(f"{max(urls, key=urls.count)} comes twice; an engine has one role")
