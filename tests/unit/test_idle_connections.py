"""Idle connections, on a simulated clock: pings, the proof of an end, and nothing else that drops a connection."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from layerpush.core.liveness import Verdict
from layerpush.core.wire import Heartbeat, Ping
from layerpush.transport.base import Transport
from layerpush.transport.connections import Connections
from layerpush.transport.idle_connections import CHECK_EVERY_S, PING_EVERY_S, IdleConnections
from layerpush.transport.peers import Address
from tests.unit.fake_peers import FakeMail, FakeNetwork, FakeProbe, FakeSearch

MINUTE = PING_EVERY_S


class World:
    """An engine ``us``, and its peers. ``answers``: the verdict of a probe of each engine; UNKNOWN without one."""

    def __init__(self, delays: tuple[float, ...] = (0.0,)) -> None:
        self.network = FakeNetwork()
        self.mail = FakeMail(lambda: itertools.chain(*self.network.connected.values()))
        self.probe = FakeProbe()
        self.in_use: set[str] = set()
        self.busy_with_writes: set[str] = set()
        self.alive: set[str] = set()
        """Agents that answer pings."""
        self.answers: dict[str, Verdict] = {}
        self.sent: Counter[str] = Counter()
        self.now = 1000.0
        self.network.end_pushes = lambda engine_id, _: engine_id not in self.busy_with_writes
        transport: Transport = self.mail
        self.connections = Connections(self.network, transport, None, FakeSearch(), self.probe, lambda: self.now)
        waits = itertools.cycle(delays)
        self.idle = IdleConnections("us", self.connections, self.probe, lambda: self.in_use, lambda: next(waits))

    def connect(self, engine_id: str, *agents: str) -> None:
        self.network.connect(Address(engine_id, "host", 5600, len(agents)), *agents)
        self.alive |= set(agents)
        self.answers[engine_id] = Verdict.SPEAKS_LAYERPUSH

    def kill(self, engine_id: str) -> None:
        self.alive -= set(self.network.connected[engine_id])
        self.mail.lost |= set(self.network.connected[engine_id])
        self.answers[engine_id] = Verdict.ENDED

    def run(self, seconds: float, pause: float = CHECK_EVERY_S) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += pause
            self.connections.tick(self.now)
            self.idle.tick(self.now)
            for asked in self.probe.asked:
                asked.on_verdict(self.answers.get(asked.address.engine_id, Verdict.UNKNOWN), self.now)
            self.probe.asked.clear()
            for agent, message in self.mail.taken():
                self.sent[agent] += 1
                assert message == Heartbeat(()) or isinstance(message, Ping)
                if isinstance(message, Ping) and agent in self.alive:
                    assert message.decode_engine_id == "us"
                    self.idle.on_pong(agent, self.now)


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_idle_engine_that_ends_is_forgotten(ranks: int) -> None:
    world = World()
    world.connect("peer", *(f"a-{rank}" for rank in range(ranks)))
    world.connect("other", "b-0")
    world.run(10 * MINUTE)
    assert world.network.forgotten == []
    world.kill("peer")
    world.run(4 * MINUTE)
    assert world.network.forgotten == ["peer"]
    assert len(world.idle) == 1


def test_restarts_under_new_names_leave_nothing_behind() -> None:
    world = World()
    for number in range(20):
        world.connect(f"peer-{number}", f"a-{number}")
        world.run(MINUTE)
        world.kill(f"peer-{number}")
        world.run(4 * MINUTE)
        assert not world.network.connected
        assert len(world.idle) == len(world.idle._watch) == 0


def test_pings_are_rare_and_spread() -> None:
    world = World(delays=tuple(number * MINUTE / 100 for number in range(100)))
    for number in range(100):
        world.connect(f"peer-{number}", f"a-{number}")
    world.run(4 * MINUTE)
    world.sent.clear()
    at_once = []
    for _ in range(int(10 * MINUTE)):
        before = world.sent.total()
        world.run(CHECK_EVERY_S)
        at_once.append(world.sent.total() - before)
    assert set(world.sent.values()) <= {9, 10, 11}
    assert max(at_once) <= 4


def test_engines_in_use_are_left_to_their_loads_and_pushes() -> None:
    world = World()
    world.connect("peer", "a-0")
    world.in_use = {"peer"}
    world.kill("peer")
    world.run(10 * MINUTE)
    assert not world.sent
    assert world.network.forgotten == []
    world.in_use = set()
    world.run(4 * MINUTE)
    assert world.network.forgotten == ["peer"]


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.ALIVE, Verdict.SPEAKS_LAYERPUSH])
def test_silence_alone_drops_nothing(verdict: Verdict) -> None:
    """It may be stopped, or its link cut. Or it has lost its connection to us, and so answers no ping."""
    world = World()
    world.connect("peer", "a-0")
    world.run(2 * MINUTE)
    world.alive.clear()
    world.answers["peer"] = verdict
    world.run(60 * MINUTE)
    assert world.network.forgotten == []


@pytest.mark.parametrize("lost", [True, False])
def test_one_witness_is_not_enough(lost: bool) -> None:
    """A send fails, and no probe is answered. Or no listener answers, although the agent answers pings."""
    world = World()
    world.connect("peer", "a-0")
    world.run(2 * MINUTE)
    if lost:
        world.mail.lost.add("a-0")
    world.answers["peer"] = Verdict.UNKNOWN if lost else Verdict.ENDED
    world.run(60 * MINUTE)
    assert world.network.forgotten == []


def test_a_living_engine_that_no_message_reaches_is_forgotten() -> None:
    """Its next request connects anew."""
    world = World()
    world.connect("peer", "a-0")
    world.run(2 * MINUTE)
    world.mail.lost.add("a-0")
    world.run(4 * MINUTE)
    assert world.network.forgotten == ["peer"]


def test_a_connection_with_writes_on_their_way_stays_until_they_end() -> None:
    world = World()
    world.connect("peer", "a-0")
    world.busy_with_writes = {"peer"}
    world.kill("peer")
    world.run(10 * MINUTE)
    assert "peer" in world.network.connected
    world.busy_with_writes = set()
    world.run(10 * MINUTE)
    assert "peer" not in world.network.connected


def test_a_new_connection_under_an_old_name_is_watched_anew() -> None:
    world = World()
    world.connect("peer", "a-0")
    world.run(MINUTE)
    world.kill("peer")
    world.connect("peer", "a-1")
    world.run(10 * MINUTE)
    assert world.network.connected == {"peer": ("a-1",)}


def test_a_thousand_idle_engines_cost_nothing_between_two_looks() -> None:
    world = World()
    for number in range(1000):
        world.connect(f"peer-{number}", f"a-{number}")
    looks: list[float] = []
    world.network.engines = lambda: looks.append(world.now) or []
    world.run(10.0, pause=0.001)
    assert len(looks) == pytest.approx(10 / CHECK_EVERY_S, abs=1)
