"""The operator's settings. A bad value is refused with its flag and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from layerpush.apps.proxy.identity import Identity, IdentityError
from layerpush.apps.proxy.policy import Policy


class SettingsError(ValueError):
    """A flag has a value that cannot be used."""


@dataclass(frozen=True)
class Settings:
    """Durations are in seconds, ``max_payload_size`` in bytes. ``identities`` are by prefill URL."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    identities: Mapping[str, Identity] = field(default_factory=dict)
    prefill_policy: Policy = Policy.LEAST_OUTSTANDING_TOKENS
    decode_policy: Policy = Policy.LEAST_OUTSTANDING_TOKENS
    sequential: bool = False
    api_key: str | None = None
    max_concurrent_requests: int = 1024
    queue_size: int = 100
    queue_timeout_s: float = 60.0
    max_payload_size: int = 512 << 20
    retry_max_retries: int = 2
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 300.0
    request_timeout_s: float = 1800.0
    health_check_interval_s: float = 5.0
    health_check_timeout_s: float = 5.0
    health_failure_threshold: int = 3
    health_success_threshold: int = 2

    def __post_init__(self) -> None:
        """Raises ``SettingsError``."""
        for flag, urls in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not urls:
                raise SettingsError(f"{flag} is missing; give it the URL of an engine's API server")
            if len(set(urls)) < len(urls):
                raise SettingsError(f"{flag} names the same engine twice")
        both = set(self.prefill) & set(self.decode)
        if both:
            raise SettingsError(f"--prefill and --decode are both {both.pop()}; an engine has one role")


def engine_urls(flag: str, urls: Sequence[str]) -> tuple[str, ...]:
    """The base URLs without a slash at the end. Raises ``SettingsError``."""
    return tuple(_engine_url(flag, url) for url in urls)


def _engine_url(flag: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable:
        raise SettingsError(f"{flag} {url!r} is no URL of an engine; write http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"{flag} {url!r}: write only http://HOST:PORT; the proxy adds /v1/... itself")
    return f"{parts.scheme}://{parts.netloc}"


def identities(flag: str, values: Sequence[str], prefill: Sequence[str]) -> dict[str, Identity]:
    """Read values ``URL={"remote_engine_id": ...}``, at most one per prefill URL. Raises ``SettingsError``."""
    found: dict[str, Identity] = {}
    for value in values:
        url, equals, text = value.partition("=")
        if not equals:
            raise SettingsError(f"{flag} {value!r}: write URL=JSON, the URL being one of --prefill")
        (url,) = engine_urls(flag, [url])
        if url not in prefill:
            raise SettingsError(f"{flag} {url}: no --prefill has this URL; they are {', '.join(prefill)}")
        if url in found:
            raise SettingsError(f"{flag} {url}: given twice; an engine has one identity")
        try:
            found[url] = Identity.from_params(msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise SettingsError(f"{flag} {url}: the text after = is not a JSON object: {error}") from None
        except IdentityError as error:
            raise SettingsError(f"{flag} {url}: {error}") from None
    return found
