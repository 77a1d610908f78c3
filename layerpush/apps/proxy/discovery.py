"""Lists the engines again and again, where the list may change: from DNS, or from a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
import typer

from layerpush.apps.proxy.fleet import Fleet
from layerpush.apps.proxy.instance import Role
from layerpush.apps.proxy.monitor import Monitor
from layerpush.apps.proxy.settings import DNS, Settings, check_roles, engine_url

logger = logging.getLogger("layerpush.proxy")

Urls: TypeAlias = Mapping[Role, Sequence[str]]
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host, none if it has none. The second argument is the port. Raises ``OSError``."""

MAX_ADDRESSES = 1024
"""The most engines of one name. Each one has a task, a connection and metrics."""

_NO_RECORD = (socket.EAI_NONAME, socket.EAI_NODATA)


class EnginesFileError(Exception):
    """The engines file cannot be used. The message names it, and the reason."""


@dataclass(frozen=True)
class Listing:
    """The engines' URLs at one time. ``problems``: the reasons why the list may be too short or too old."""

    urls: Urls
    problems: Sequence[str] = ()


class Source(Protocol):
    """Lists the engines."""

    def read(self) -> Listing:
        """List the engines now. It may block, and runs in a thread of its own, one call at a time. Raises nothing."""
        ...


class EnginesFile:
    """A JSON or TOML file with the lists `prefill` and `decode`. While it is broken, its last good lists are valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Urls = {"prefill": (), "decode": ()}

    def read(self) -> Listing:
        try:
            self._last = read_engines_file(self._path)
        except EnginesFileError as error:
            return Listing(self._last, [f"{error}; the list of engines stays as it was"])
        empty = [f"{self._path} lists no {role} engine yet" for role, urls in self._last.items() if not urls]
        return Listing(self._last, empty)


class Names:
    """URLs, and DNS names with an engine at each of their addresses.

    A name without a record has no engine. While the DNS server does not answer, the last addresses are valid.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], resolve: Resolve) -> None:
        self._options: dict[Role, Sequence[str]] = {"prefill": prefill, "decode": decode}
        self._resolve = resolve
        self._addresses: dict[str, list[str]] = {}
        self._last: Urls = {"prefill": (), "decode": ()}

    def read(self) -> Listing:
        problems: list[str] = []
        found: dict[Role, list[str]] = {"prefill": [], "decode": []}
        for role, options in self._options.items():
            for option in options:
                found[role] += self._urls(option, problems) if option.startswith(DNS) else [option]
            found[role] = list(dict.fromkeys(found[role]))
        try:
            check_roles(**found)
        except typer.BadParameter as error:
            problems.append(f"{error}; the list of engines stays as it was")
        else:
            self._last = found
        return Listing(self._last, problems)

    def _urls(self, name: str, problems: list[str]) -> list[str]:
        parts = urlsplit(name)
        assert parts.hostname is not None
        assert parts.port is not None
        try:
            found = sorted(self._resolve(parts.hostname, parts.port))
        except (OSError, UnicodeError) as error:
            problems.append(f"{name} cannot be resolved: {error}; its engines stay as they were")
            return self._addresses.get(name, [])
        addresses = [each for text in found if (each := _address(text))]
        if len(addresses) < len(found):
            problems.append(f"{name}: {len(found) - len(addresses)} of its addresses cannot be an engine's")
        if not addresses:
            problems.append(f"{name} has no address: waiting for one")
        if len(addresses) > MAX_ADDRESSES:
            problems.append(f"{name} has {len(addresses)} addresses: only {MAX_ADDRESSES} of them are used")
        hosts = [f"[{each}]" if each.version == 6 else str(each) for each in addresses[:MAX_ADDRESSES]]
        self._addresses[name] = [f"http://{host}:{parts.port}" for host in hosts]
        return self._addresses[name]


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """An address at which an engine may be. None for others: a cloud's metadata service, for one, is link-local."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    v4 = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    meant = v4 or address
    return None if meant.is_link_local or meant.is_multicast or meant.is_unspecified else address


class Discovery:
    """Keeps fleet and monitor equal to a source. Used by the event loop's thread only."""

    def __init__(self, source: Source, fleet: Fleet, monitor: Monitor, interval_s: float) -> None:
        self._source = source
        self._fleet = fleet
        self._monitor = monitor
        self._interval_s = interval_s
        self._problems: Sequence[str] = ()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the source every ``interval_s`` seconds while the block runs."""
        task = asyncio.create_task(self._run(), name="discovery")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Read the source once. A problem is logged when it begins, or changes."""
        listing = await asyncio.to_thread(self._source.read)
        for problem in listing.problems:
            if problem not in self._problems:
                logger.warning("%s", problem)
        self._problems = listing.problems
        self._fleet.update(listing.urls)
        self._monitor.follow()

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:  # any defect: the list must still follow the source
                logger.exception("the engines cannot be listed")
            await asyncio.sleep(self._interval_s)


def source_of(settings: Settings) -> Source | None:
    """The source that the settings name. None if they have the URL of every engine."""
    if settings.engines_file is not None:
        return EnginesFile(settings.engines_file)
    prefill, decode = settings.prefill or (), settings.decode or ()
    if any(each.startswith(DNS) for each in (*prefill, *decode)):
        return Names(prefill, decode, resolve)
    return None


def resolve(host: str, port: int) -> list[str]:
    """The IPv4 and IPv6 addresses of a host, none if it has none. Blocks. Raises ``OSError`` if nobody knows."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_RECORD:
            return []
        raise
    return [str(address[0]) for *_, address in found]


class _Lists(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str]
    decode: list[str]


def read_engines_file(path: Path) -> Urls:
    """Read `prefill` and `decode`: TOML if the name ends in `.toml`, else JSON. Raises ``EnginesFileError``."""
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        lists = decode(path.read_bytes(), type=_Lists)
        urls = {"prefill": [engine_url(each) for each in lists.prefill], "decode": list(map(engine_url, lists.decode))}
        check_roles(**urls)
    except OSError as error:
        raise EnginesFileError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, typer.BadParameter) as error:
        raise EnginesFileError(f"{path}: {error}") from None
    except RecursionError:
        raise EnginesFileError(f"{path} is nested too deeply") from None
    return {"prefill": urls["prefill"], "decode": urls["decode"]}
