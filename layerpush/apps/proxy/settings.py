"""The options of `layerpush proxy`, each written once: the command line, the defaults and the page come from here.

Options that vllm-project/router has, too, have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

import typer

from layerpush.apps.proxy.policy import Policy
from layerpush.core.hosts import is_host

if TYPE_CHECKING:
    from layerpush.apps.proxy.identity import Identity

IDENTITY = "--prefill-identity"
DNS = "dns://"
"""Begins the option of a DNS name that has the addresses of several engines."""
_ENGINES, _DISPATCH, _LIMITS, _HEALTH = "Engines", "Dispatch", "Limits", "Health checks"


def engine_url(url: str) -> str:
    """The base URL without a slash at the end. Raises ``typer.BadParameter``."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and _has_host(url, parts) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise typer.BadParameter(f"{url!r} is no URL of an engine; write http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise typer.BadParameter(f"{url!r}: write only http://HOST:PORT; the proxy adds /v1/... itself")
    return f"{parts.scheme}://{parts.netloc}"


def engine_option(text: str) -> str:
    """The URL of one engine, or ``dns://HOST:PORT``. Raises ``typer.BadParameter``."""
    if not text.startswith(DNS):
        return engine_url(text)
    try:
        parts = urlsplit(text)
        usable = (
            _has_host(text, parts)
            and bool(parts.port)
            and text.rstrip("/") == DNS + parts.netloc
            and not parts.username
        )
    except ValueError:
        usable = False
    if not usable:
        raise typer.BadParameter(f"{text!r} is no DNS name of engines; write dns://HOST:PORT, with the engines' port")
    return DNS + parts.netloc


def _has_host(url: str, parts: SplitResult) -> bool:
    """Whether a URL has a host name or an address. ``urlsplit`` drops line breaks, and takes any text as a host.

    An address with a scope (`fe80::1%eth0`) has no form in a URL on which all programs agree.
    """
    host = parts.hostname or ""
    return url.isprintable() and is_host(host) and "%" not in host


def _option(help_text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class Settings:
    """The operator's settings. Names that end in ``_s`` are durations in seconds."""

    prefill: Annotated[
        list[str] | None,
        _option(
            "API server of a prefill engine, or dns://HOST:PORT for all addresses of a name; repeat it for more.",
            _ENGINES,
            metavar="URL",
            parser=engine_option,
        ),
    ] = None
    decode: Annotated[
        list[str] | None,
        _option(
            "API server of a decode engine, or dns://HOST:PORT for all addresses of a name; repeat it for more.",
            _ENGINES,
            metavar="URL",
            parser=engine_option,
        ),
    ] = None
    engines_file: Annotated[
        Path | None,
        _option(
            "JSON or TOML file with the lists `prefill` and `decode`, in the place of these options.",
            _ENGINES,
            metavar="FILE",
        ),
    ] = None
    prefill_identity: Annotated[
        list[str] | None,
        _option(
            "Identity of a prefill engine, so that the proxy need not ask for it: remote_engine_id, remote_host, "
            "remote_port, tp_size, pp_size, as in kv_transfer_params.",
            _ENGINES,
            metavar="URL=JSON",
        ),
    ] = None
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
    policy: Annotated[Policy, _option("How to choose the engine for a request.", _DISPATCH)] = (
        "least_outstanding_tokens"
    )
    prefill_policy: Annotated[Policy | None, _option("Policy for prefill engines only.", _DISPATCH)] = None
    decode_policy: Annotated[Policy | None, _option("Policy for decode engines only.", _DISPATCH)] = None
    sequential: Annotated[
        bool, _option("Ask D only after P has answered. Then P pushes whole requests after prefill.", _DISPATCH)
    ] = False
    retry_max_retries: Annotated[int, _option("Retries of a request before its first token.", _DISPATCH, min=0)] = 2
    max_concurrent_requests: Annotated[int, _option("Largest number of requests at a time.", _LIMITS, min=1)] = 1024
    queue_size: Annotated[
        int, _option("Largest number of waiting requests; further ones get HTTP status 429.", _LIMITS, min=0)
    ] = 100
    queue_timeout_s: Annotated[float, _option("Longest wait in the queue.", _LIMITS, min=0.001)] = 60.0
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
    request_timeout_s: Annotated[
        float, _option("Deadline for a whole request, including its wait in the queue.", _LIMITS, min=0.001)
    ] = 1800.0
    drain_timeout_s: Annotated[int, _option("After SIGTERM, deadline for the requests that run.", _LIMITS, min=0)] = 300
    health_check_interval_s: Annotated[
        float,
        _option(
            "Time between two checks of an engine, and between two reads of DNS names or of the file.",
            _HEALTH,
            min=0.01,
        ),
    ] = 5.0
    health_check_timeout_s: Annotated[float, _option("Deadline for one check.", _HEALTH, min=0.001)] = 5.0
    health_failure_threshold: Annotated[
        int, _option("Failed checks in a row that take an engine out of service.", _HEALTH, min=1)
    ] = 3
    health_success_threshold: Annotated[
        int, _option("Passed checks in a row that bring an engine back into service.", _HEALTH, min=1)
    ] = 2
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _option("Lowest severity to log.")] = "info"

    def __post_init__(self) -> None:
        """Raises ``typer.BadParameter``."""
        if self.engines_file is not None and (self.prefill or self.decode):
            raise typer.BadParameter("--engines-file has all engines; give either it, or --prefill and --decode")
        if self.engines_file is None and not (self.prefill and self.decode):
            raise typer.BadParameter("give --prefill and --decode, or --engines-file")
        if self.max_payload_size > self.max_total_payload_size:
            raise typer.BadParameter("--max-payload-size is larger than --max-total-payload-size")
        check_roles(self.prefill or (), self.decode or ())
        _ = self.identities

    @cached_property
    def identities(self) -> Mapping[str, Identity]:
        """The identities that the operator gave, by prefill URL. Raises ``typer.BadParameter``."""
        found: dict[str, Identity] = {}
        for value in self.prefill_identity or ():
            url, identity = _identity(value, [each for each in self.prefill or () if not each.startswith(DNS)])
            if url in found:
                raise typer.BadParameter(f"{url} is given twice; an engine has one identity", param_hint=IDENTITY)
            found[url] = identity
        return found


def check_roles(prefill: Sequence[str], decode: Sequence[str]) -> None:
    """Raises ``typer.BadParameter`` if an engine is listed twice."""
    for role, urls in (("prefill", prefill), ("decode", decode)):
        if len(set(urls)) < len(urls):
            raise typer.BadParameter(f"{role} names the same engine twice")
    both = set(prefill) & set(decode)
    if both:
        raise typer.BadParameter(f"prefill and decode are both {min(both)}; an engine has one role")


def _identity(value: str, prefill: Sequence[str]) -> tuple[str, Identity]:
    """Read ``URL={"remote_engine_id": ...}``. Raises ``typer.BadParameter``."""
    import msgspec

    from layerpush.apps.proxy.identity import Identity, IdentityError

    url, equals, text = value.partition("=")
    url = engine_url(url) if equals else url
    if not equals:
        problem = f"{value!r}: write URL=JSON, the URL being one of --prefill"
    elif url not in prefill:
        problem = f"{url}: no --prefill has this URL" + (f"; they are {', '.join(prefill)}" if prefill else "")
    else:
        try:
            return url, Identity.from_params(msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            problem = f"{url}: the text after = is not a JSON object: {error}"
        except IdentityError as error:
            problem = f"{url}: {error}"
    raise typer.BadParameter(problem, param_hint=IDENTITY)
