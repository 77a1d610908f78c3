"""The engines of one test session: started at their first use, shared, a few at a time, paused between tests."""

import pathlib
from collections import OrderedDict

import pytest

from bench.servers.ports import PortAllocator
from tests.e2e import engines
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import EngineSpec
from tests.e2e.models import ModelShelf

MAX_LIVE = 10


class Fleet:
    """Hosts by spec. Replaces a broken host. Beyond `MAX_LIVE` hosts, stops the least recently used ones,
    first of the specs that one file uses.

    A host runs only while a test uses it: the threads of an idle engine wake up two thousand times a second.
    """

    def __init__(self, models: ModelShelf, scratch: pathlib.Path, ports: PortAllocator) -> None:
        self._models = models
        self._scratch = scratch
        self._take_port = ports.next_free
        self._hosts: OrderedDict[EngineSpec, EngineHost] = OrderedDict()
        self._in_use: list[EngineHost] = []
        self._guests: list[EngineHost] = []

    def get(self, *specs: EngineSpec) -> list[EngineHost]:
        """Ready hosts for the specs, in their order. Missing ones start at the same time. All run until `rest`.

        A host that a test has ended is replaced.
        """
        self._stop_hosts([spec for spec, host in self._hosts.items() if spec in specs and (host.broken or host.ended)])
        missing = [spec for spec in specs if spec not in self._hosts]
        self._make_room(len(missing), keep=set(specs))
        for spec in missing:
            self._hosts[spec] = self._start(spec, self._take_port())
        for spec in specs:
            self._hosts.move_to_end(spec)
            host = self._hosts[spec]
            host.wait_ready()
            if host not in self._in_use:
                self._in_use.append(host)
                host.begin_use()
        return [self._hosts[spec] for spec in specs]

    def rest(self) -> None:
        """A test has ended: pause the hosts that it used."""
        while self._in_use:
            self._in_use.pop().end_use()

    def spawn(self, *specs: EngineSpec) -> list[EngineHost]:
        """Ready hosts for one test, which may end or damage them. `discard` them."""
        self._make_room(len(specs), keep=set())
        hosts = [self._start(spec, self._take_port()) for spec in specs]
        self._guests += hosts
        for host in hosts:
            host.wait_ready()
        return hosts

    def namesake(self, host: EngineHost) -> EngineHost:
        """A ready host for one test, as of `spawn`, with the engine id of another one that has not ended."""
        self._make_room(1, keep=set())
        other = self._start(host.spec, self._take_port(), host.engine_id)
        self._guests.append(other)
        other.wait_ready()
        return other

    def respawn(self, host: EngineHost, *, same_id: bool) -> EngineHost:
        """A new process in the place of an ended host: the same port, the same engine id or a new one."""
        assert host.ended
        is_guest = host in self._guests
        self.discard(host)
        successor = self._start(host.spec, host.port, host.engine_id if same_id else None)
        if is_guest:
            self._guests.append(successor)
        else:
            self._hosts[host.spec] = successor
            self._in_use.append(successor)
        successor.wait_ready()
        return successor

    def in_use(self) -> list[EngineHost]:
        """The hosts of this test that have not ended."""
        return [host for host in (*self._in_use, *self._guests) if not host.ended]

    def discard(self, host: EngineHost) -> None:
        if host in self._guests:
            self._guests.remove(host)
        elif self._hosts.get(host.spec) is host:
            self._remove(host.spec)
        host.stop()

    def end(self, *specs: EngineSpec) -> None:
        """Stop the hosts of these specs that run."""
        self._stop_hosts([spec for spec in specs if spec in self._hosts])

    def discard_guests(self) -> None:
        """End all hosts of `spawn`, and their successors."""
        for host in self._guests:
            host.begin_stop()
        while self._guests:
            self._guests.pop().stop()

    def stop(self) -> None:
        self.discard_guests()
        self._stop_hosts(list(self._hosts))

    def _start(self, spec: EngineSpec, port: int, engine_id: str | None = None) -> EngineHost:
        return EngineHost(spec, self._models.path(spec.model), self._scratch, port, engine_id)

    def _make_room(self, count: int, keep: set[EngineSpec]) -> None:
        idle = sorted((spec for spec in self._hosts if spec not in keep), key=lambda spec: spec in engines.SHARED)
        excess = idle[: max(0, len(self._hosts) + len(self._guests) + count - MAX_LIVE)]
        self._stop_hosts(excess)

    def _stop_hosts(self, specs: list[EngineSpec]) -> None:
        """Stop hosts while all others run: UCX complains if a peer has ended while its own process was paused."""
        resting = [host for host in self._hosts.values() if host not in self._in_use] if specs else []
        for host in resting:
            host.resume()
        for spec in specs:
            self._hosts[spec].begin_stop()
        for spec in specs:
            self._remove(spec).stop()
        for host in resting:
            if host in self._hosts.values():
                host.pause()

    def _remove(self, spec: EngineSpec) -> EngineHost:
        host = self._hosts.pop(spec)
        if host in self._in_use:
            self._in_use.remove(host)
        return host


FLEET = pytest.StashKey[Fleet]()
"""The fleet of a session, once a test uses engines."""
