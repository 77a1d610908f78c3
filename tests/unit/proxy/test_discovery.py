"""Engines that appear and disappear while the proxy runs, found by name or listed in a file."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layerpush.apps.proxy.discovery import (
    MAX_ADDRESSES,
    EnginesFile,
    EnginesFileError,
    Listing,
    Names,
    Source,
    read_engines_file,
    resolve,
    source_of,
)
from layerpush.apps.proxy.settings import Settings
from tests.unit.proxy.stub import Stub
from tests.unit.proxy.world import World, asynchronous, until, world


class Zone:
    """A DNS server. ``addresses``: those of each host, or the error of its resolution."""

    def __init__(self, **addresses: Sequence[str] | OSError) -> None:
        self.addresses = addresses

    def resolve(self, host: str, port: int) -> Sequence[str]:
        found = self.addresses.get(host, ())
        if isinstance(found, OSError):
            raise found
        return found


NO_ANSWER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def names(zone: Zone, prefill: Sequence[str] = ("dns://p:8000",), decode: Sequence[str] = ("dns://d:8001",)) -> Names:
    return Names(prefill, decode, zone.resolve)


def test_a_name_has_an_engine_at_each_address() -> None:
    listing = names(Zone(p=["10.0.0.2", "10.0.0.1"], d=["fd00::1"])).read()
    assert listing.urls == {
        "prefill": ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        "decode": ["http://[fd00::1]:8001"],
    }
    assert listing.problems == []


def test_urls_and_dns_names_may_be_mixed() -> None:
    prefill = ["http://10.0.0.1:8000", "dns://p:8000", "https://other"]
    listing = names(Zone(p=["10.0.0.1", "10.0.0.2"], d=["10.0.0.3"]), prefill).read()
    assert listing.urls["prefill"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "https://other"]


def test_a_name_without_a_record_has_no_engine() -> None:
    zone = Zone(p=["10.0.0.1"], d=["10.0.0.2"])
    source = names(zone)
    source.read()
    zone.addresses["p"] = []
    assert source.read() == Listing(
        {"prefill": [], "decode": ["http://10.0.0.2:8001"]}, ["dns://p:8000 has no address: waiting for one"]
    )


def test_while_a_name_cannot_be_resolved_its_engines_stay() -> None:
    zone = Zone(p=["10.0.0.1"], d=["10.0.0.2"])
    source = names(zone)
    before = source.read()
    zone.addresses |= {"p": NO_ANSWER, "d": ["10.0.0.3"]}
    listing = source.read()
    assert listing.urls == {**before.urls, "decode": ["http://10.0.0.3:8001"]}
    (problem,) = listing.problems
    assert problem.startswith("dns://p:8000 cannot be resolved: ")
    assert problem.endswith("Temporary failure in name resolution; its engines stay as they were")


def test_an_address_with_two_roles_changes_nothing() -> None:
    zone = Zone(p=["10.0.0.1"], d=["10.0.0.2"])
    source = names(zone, decode=["dns://d:8000"])
    before = source.read()
    zone.addresses["d"] = ["10.0.0.1"]
    listing = source.read()
    assert listing.urls == before.urls
    assert listing.problems == [
        "prefill and decode are both http://10.0.0.1:8000; an engine has one role; the list of engines stays as it was"
    ]


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_the_resolver_finds_no_address(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(code, "no address")

    monkeypatch.setattr(socket, "getaddrinfo", none)
    assert resolve("p", 8000) == []


def test_the_resolver_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: Any, **__: Any) -> Any:
        raise NO_ANSWER

    monkeypatch.setattr(socket, "getaddrinfo", again)
    with pytest.raises(socket.gaierror):
        resolve("p", 8000)


def test_the_resolver_returns_addresses() -> None:
    assert resolve("127.0.0.1", 8000) == ["127.0.0.1"]
    assert resolve("::1", 8000) == ["::1"]


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "0.0.0.0", "::", "224.0.0.1", "not one"],
)
def test_other_addresses_are_no_engines(address: str) -> None:
    listing = names(Zone(p=["10.0.0.1", address], d=["10.0.0.2"])).read()
    assert listing.urls["prefill"] == ["http://10.0.0.1:8000"]
    assert listing.problems == ["dns://p:8000: 1 of its addresses cannot be an engine's"]


def test_a_name_has_a_largest_number_of_engines() -> None:
    addresses = [f"10.0.{index // 256}.{index % 256}" for index in range(20_000)]
    listing = names(Zone(p=addresses, d=["10.9.0.2"])).read()
    assert len(listing.urls["prefill"]) == MAX_ADDRESSES
    assert listing.problems == ["dns://p:8000 has 20000 addresses: only 1024 of them are used"]


GOOD = {"prefill": ["http://p:1", "http://p:2/"], "decode": ["http://d:1"]}


def test_a_file_is_json_or_toml(tmp_path: Path) -> None:
    toml, other = tmp_path / "engines.toml", tmp_path / "engines"
    toml.write_text('prefill = ["http://p:1", "http://p:2/"]\ndecode = ["http://d:1"]\n')
    other.write_text(json.dumps(GOOD))
    for path in (toml, other):
        assert EnginesFile(path).read() == Listing(
            {"prefill": ["http://p:1", "http://p:2"], "decode": ["http://d:1"]}, []
        )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "truncated"),
        ("a.json", "prefill = []", "malformed"),
        ("a.toml", "{", "Invalid"),
        ("a.json", "\udcff", "nvalid"),
        ("a.toml", "\udcff", "utf-8"),
        ("a.json", json.dumps({"prefill": []}), "missing required field `decode`"),
        ("a.json", json.dumps(GOOD | {"prefil": []}), "unknown field `prefil`"),
        ("a.json", json.dumps(GOOD | {"prefill": "http://p:1"}), "Expected `array`, got `str` - at `$.prefill`"),
        ("a.json", json.dumps(GOOD | {"prefill": ["p:1"]}), "write http://HOST:PORT"),
        ("a.json", json.dumps(GOOD | {"prefill": ["dns://p:1"]}), "write http://HOST:PORT"),
        ("a.json", json.dumps(GOOD | {"prefill": ["http://p:0"]}), "write http://HOST:PORT"),
        ("a.json", json.dumps(GOOD | {"decode": ["http://p:1"]}), "an engine has one role"),
        ("a.json", json.dumps(GOOD | {"decode": ["http://d:1", "http://d:1/"]}), "the same engine twice"),
    ],
)
def test_a_broken_file_is_described(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EnginesFileError) as raised:
        read_engines_file(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["a.toml", "a.json"])
def test_a_file_that_is_nested_too_deeply_is_described(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(("x = " if name == "a.toml" else '{"prefill": ') + "[" * 100_000)
    with pytest.raises(EnginesFileError, match=re.escape(str(path))):
        read_engines_file(path)


def test_a_file_is_reread_and_a_broken_one_keeps_the_last_lists(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    source = EnginesFile(path)
    assert source.read().urls == {"prefill": (), "decode": ()}
    path.write_text(json.dumps(GOOD))
    good = source.read()
    assert good == Listing({"prefill": ["http://p:1", "http://p:2"], "decode": ["http://d:1"]}, [])
    path.write_text("{")
    broken = source.read()
    assert broken.urls == good.urls
    assert broken.problems[0].startswith(f"{path}: ")
    assert broken.problems[0].endswith("; the list of engines stays as it was")
    path.write_text(json.dumps(GOOD | {"decode": ["http://d:2"]}))
    assert source.read().urls["decode"] == ["http://d:2"]


def test_a_file_may_list_no_engine_yet(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text(json.dumps({"prefill": [], "decode": ["http://d:1"]}))
    listing = EnginesFile(path).read()
    assert listing.urls == {"prefill": [], "decode": ["http://d:1"]}
    assert listing.problems == [f"{path} lists no prefill engine yet"]


def test_settings_choose_the_source() -> None:
    assert source_of(Settings(prefill=["http://p"], decode=["http://d"])) is None
    assert isinstance(source_of(Settings(prefill=["http://p"], decode=["dns://d:1"])), Names)
    assert isinstance(source_of(Settings(engines_file=Path("engines.json"))), EnginesFile)


class Changing:
    """A source that a test changes."""

    def __init__(self, prefill: Sequence[Stub], decode: Sequence[Stub]) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.problems: list[str] = []
        self.reads = 0

    def read(self) -> Listing:
        self.reads += 1
        lists = {"prefill": [each.url for each in self.prefill], "decode": [each.url for each in self.decode]}
        return Listing(lists, list(self.problems))  # type: ignore[arg-type]


class Made:
    """Makes a source for a world, and keeps it. The world begins with p0 and d0 in the list."""

    source: Changing

    def __call__(self, prefill: list[Stub], decode: list[Stub]) -> Source:
        self.source = Changing(prefill[:1], decode[:1])
        return self.source


async def ready(here: World, engines: int = 2) -> None:
    fleet = here.proxy.fleet
    await until(lambda: len(list(fleet)) == engines and all(each.healthy for each in fleet), "all engines healthy")


async def unlisted(here: World, stub: Stub) -> None:
    await until(lambda: stub.url not in [each.url for each in here.proxy.fleet], f"{stub.engine_id} is not listed")


def watched() -> set[str]:
    return {task.get_name().rpartition(" ")[2] for task in asyncio.all_tasks() if task.get_name().startswith("watch ")}


@asynchronous
async def test_a_new_engine_gets_requests() -> None:
    made = Made()
    async with world(2, 1, listed=made, wait=False, policy="round_robin") as here:
        await ready(here)
        made.source.prefill.append(here.prefill[1])
        await ready(here, 3)
        for _ in range(4):
            assert (await here.post()).status == 200
        assert [len(stub.seen) for stub in here.prefill] == [2, 2]
        assert all(len(stub.probes) == 1 for stub in here.prefill)
        assert await here.metric('layerpush_proxy_dispatches_total{mode="concurrent"}') == 4


@asynchronous
async def test_a_removed_engine_finishes_its_requests_and_gets_no_new_ones() -> None:
    made = Made()
    async with world(1, 2, listed=made, wait=False) as here:
        await ready(here)
        here.d.step = asyncio.Semaphore(1)
        async with here.stream() as response:
            first = await response.content.readuntil(b"\n\n")
            made.source.decode = [here.decode[1]]
            await unlisted(here, here.d)
            await ready(here)
            for _ in range(2):
                assert (await here.post()).headers["X-Engine"] == "d1"
            assert here.d.active == 1
            for _ in range(3):
                here.d.step.release()
            rest = await response.content.read()
        assert first + rest == here.d.sent[here.d.seen[0].request_id]
        assert len(here.d.seen) == 1
        assert await here.metric("layerpush_proxy_engine_healthy") == 2
        assert here.d.url not in (await here.get("/health")).body.decode()


@asynchronous
async def test_a_removed_engine_is_no_longer_checked(caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    async with world(1, 2, listed=made, wait=False) as here:
        await ready(here)
        with caplog.at_level(logging.INFO, "layerpush.proxy"):
            made.source.decode = [here.decode[1]]
            await until(lambda: watched() == {here.p.url, here.decode[1].url}, "its watch has ended")
        assert f"decode {here.d.url} is no longer listed: it gets no new requests" in caplog.messages
        checks, others = here.d.checks, here.decode[1].checks
        await until(lambda: here.decode[1].checks > others + 1, "the others are still checked")
        assert here.d.checks == checks


@asynchronous
async def test_a_failure_of_a_removed_engine_ends_only_its_own_request() -> None:
    made = Made()
    async with world(1, 2, listed=made, wait=False) as here:
        await ready(here)
        here.d.step = asyncio.Semaphore(1)
        here.d.faults.append("cut")
        async with here.stream() as response:
            await response.content.readuntil(b"\n\n")
            made.source.decode = [here.decode[1]]
            await unlisted(here, here.d)
            here.d.step.release()
            here.d.step.release()
            assert b"broke the connection" in await response.content.read()
        await ready(here)
        assert (await here.post()).status == 200


@asynchronous
async def test_a_returning_engine_is_probed_again() -> None:
    """Another engine may have its address."""
    made = Made()
    async with world(listed=made, wait=False) as here:
        await ready(here)
        made.source.prefill = []
        await unlisted(here, here.p)
        here.network.engines.discard("p0")
        here.p.engine_id = "p0-again"
        here.network.engines.add("p0-again")
        made.source.prefill = [here.p]
        await ready(here)
        assert (await here.post()).status == 200
        assert here.d.seen[0].params["remote_engine_id"] == "p0-again"
        assert len(here.p.seen) == 1


@asynchronous
async def test_a_pending_health_check_ends_after_its_engine_is_removed() -> None:
    made = Made()
    async with world(listed=made, wait=False) as here:
        await ready(here)
        (instance,) = here.proxy.fleet.healthy("decode")
        here.d.hold_health = asyncio.Event()
        before = here.d.checks
        await until(lambda: here.d.checks > before, "it is being checked")
        waiting = asyncio.create_task(here.proxy.monitor.check([instance]))
        made.source.decode = []
        await unlisted(here, here.d)
        assert not waiting.done()
        here.d.hold_health.set()
        await waiting


@asynchronous
async def test_the_proxy_waits_for_its_first_engines(caplog: pytest.LogCaptureFixture) -> None:
    zone = Zone(d=NO_ANSWER)

    def by_name(prefill: list[Stub], decode: list[Stub]) -> Source:
        return names(zone, [f"dns://p:{prefill[0].port}"], [f"dns://d:{decode[0].port}"])

    with caplog.at_level(logging.WARNING, "layerpush.proxy"):
        async with world(listed=by_name, wait=False) as here:
            await until(lambda: len(caplog.messages) == 2, "it says what is missing")
            assert (await here.get("/health")).status == 503
            assert (await here.get("/metrics")).status == 200
            answer = await here.post()
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert b"no healthy decode instance: none is known yet" in answer.body
            zone.addresses = {"p": ["127.0.0.1"], "d": ["127.0.0.1"]}
            await ready(here)
            assert (await here.get("/health")).status == 200
            assert (await here.post()).status == 200
    assert f"dns://p:{here.p.port} has no address: waiting for one" in caplog.messages
    assert len(caplog.messages) == 2


@asynchronous
async def test_a_problem_is_logged_once_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    made = Made()

    async def read_again(here: World) -> None:
        before = made.source.reads
        await until(lambda: made.source.reads > before + 1, "it is read again")

    with caplog.at_level(logging.WARNING, "layerpush.proxy"):
        async with world(listed=made, wait=False) as here:
            for problems in (["broken"], ["broken", "worse"], [], ["broken"]):
                made.source.problems = problems
                await read_again(here)
    assert caplog.messages == ["broken", "worse", "broken"]


@asynchronous
async def test_a_slow_resolution_delays_no_request() -> None:
    answer, asked = threading.Event(), threading.Event()
    released = False

    def slow(host: str, port: int) -> Sequence[str]:
        if released:
            asked.set()
            answer.wait(30)
        return ["127.0.0.1"]

    def by_name(prefill: list[Stub], decode: list[Stub]) -> Source:
        return Names([f"dns://p:{prefill[0].port}"], [f"dns://d:{decode[0].port}"], slow)

    async with world(listed=by_name, wait=False) as here:
        await ready(here)
        released = True
        try:
            await until(asked.is_set, "a name is being resolved")
            assert (await here.post()).status == 200
        finally:
            answer.set()


@asynchronous
async def test_a_defect_of_a_source_is_logged_and_the_engines_stay(caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    async with world(listed=made, wait=False) as here:
        await ready(here)
        made.source.decode = None  # type: ignore[assignment]
        await until(lambda: "the engines cannot be listed" in caplog.text, "it says so")
        assert (await here.post()).status == 200
