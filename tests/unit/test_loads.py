"""Loads of a decode rank: reported once, when the end is sure, and never over blocks that an agent may write to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from layerpush.core import liveness
from layerpush.core.liveness import PeerAction, Verdict
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadNews,
    LoadParked,
    LoadToken,
    LoadUnregistered,
)
from layerpush.core.wire import (
    QUIET_PREFIX,
    Accepted,
    Cancel,
    Cancelled,
    Completed,
    Completion,
    Decline,
    Fail,
    FirstToken,
    Heartbeat,
    Message,
    PartSums,
    Ping,
    PrefixLanded,
    Registration,
    Unregister,
    Unregistered,
    WireError,
    encode,
    encode_completion,
    encode_quietly,
    encode_registration,
    read,
)
from layerpush.decode import early_messages, load_protocol
from layerpush.decode.early_messages import KEPT_S, LoadMessage
from layerpush.decode.load_session import RETRY_S, TOKEN_WAIT_S, LoadSession
from layerpush.decode.loads import Loads
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.telemetry.metrics.catalog import LOAD, LOADS, LOST_PEERS
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.connections import TRIES
from layerpush.transport.peers import Address
from tests.support.measured import measured
from tests.unit.fake_peers import FakePeers

PATIENCE_S = 20.0
RANK = 3
"""The rank of D whose loads these are."""
P = Address("P", "10.0.0.5", 5600, tp_size=1, notify_only=True)
EXTRA = {"remote_engine_id": "P", "remote_tp_size": 1}


def registration(request_id: str = "r", blocks: tuple[int, ...] = (1, 2), sampling: str | None = None) -> Registration:
    return Registration(
        request_id=request_id,
        decode_engine_id="D",
        decode_host="10.0.0.7",
        decode_port=5601,
        decode_tp_size=1,
        local_block_ids=(blocks,),
        layerpush=1,
        sampling=sampling,
    )


def payload_of(message: LoadMessage) -> bytes:
    if isinstance(message, Completion):
        return encode_completion(message.request_id, message.world_size)
    return encode(message)


def cancel_of(request_id: str = "r") -> Cancel:
    return Cancel(request_id, "D", "10.0.0.7", 5601, 1)


class ScriptedWatch:
    """``orders`` are given at the next look; all calls are noted."""

    def __init__(self) -> None:
        self.orders: list[PeerAction] = []
        self.sessions: dict[tuple[str, str], int] = {}
        self.speaking: dict[str, bool] = {}
        self.silent: set[str] = set()
        self.lost_agents: list[str] = []
        self.cut_agents: list[str] = []
        self.reconnections: list[tuple[str, ...]] = []
        self.verdicts: list[tuple[str, str, Verdict, float]] = []

    def await_agents(
        self, engine_id: str, agents: frozenset[str], now: float, speaks_layerpush: Container[str]
    ) -> None:
        for agent in agents:
            self.speaking[agent] = agent in speaks_layerpush
            self.sessions[engine_id, agent] = self.sessions.get((engine_id, agent), 0) + 1

    def release_agents(self, engine_id: str, agents: frozenset[str]) -> None:
        for agent in agents:
            self.sessions[engine_id, agent] -= 1

    def on_message(self, agent: str, now: float, speaks_layerpush: bool) -> None:
        self.speaking[agent] = self.speaking.get(agent, False) or speaks_layerpush

    def is_silent(self, agent: str) -> bool:
        return agent in self.silent

    def engine_of(self, agent: str) -> str | None:
        return next((engine_id for engine_id, each in self.sessions if each == agent), None)

    def send_failed(self, agent: str, now: float) -> None:
        self.lost_agents.append(agent)

    def connection_dropped(self, agent: str) -> None:
        self.cut_agents.append(agent)

    def reconnected(self, agents: Iterable[str]) -> None:
        self.reconnections.append(tuple(agents))

    def probe_ended(self, engine_id: str, agent: str, verdict: Verdict, now: float) -> None:
        self.verdicts.append((engine_id, agent, verdict, now))

    def due(self, now: float) -> list[PeerAction]:
        orders, self.orders = self.orders, []
        return orders


class Engine:
    """The worker of the loads, and their trace: ``known`` are the requests that its main thread tracks, ``reports`` the
    reports.
    """

    engine_id, tp_rank = "D", 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: list[LoadRecord] = []
        self.known: set[str] = set()
        self.misfit: str | None = None
        self.declined: list[Decline] = []
        self.reports: list[tuple[str, str]] = []
        self.kept: list[tuple[str, int]] = []
        self.on_report: Callable[[str, str], None] = lambda _, __: None

    def knows(self, request_id: str) -> bool:
        return request_id in self.known

    def mismatch(self, engine_id: str) -> str | None:
        assert engine_id == "P"
        return self.misfit

    def decline(self, address: Address, message: Decline) -> None:
        assert address == P
        self.declined.append(message)

    def loaded(self, completions: Sequence[bytes]) -> None:
        messages = [read(completion) for completion in completions]
        assert all(isinstance(message, Completion) for message in messages)
        self.completions = messages
        (request_id,) = {message.request_id for message in messages if isinstance(message, Completion)}
        self._note("loaded", request_id)

    def failed(self, request_id: str) -> None:
        self._note("failed", request_id)

    def report(self, news: LoadNews) -> None:
        match news:
            case LoadToken():
                self._note(f"first token {news.token}", news.request_id)
            case LoadParked(_, rank) | LoadCleared(_, rank) | LoadUnregistered(_, rank):
                assert rank == RANK, "another rank's load would count as ended"
                self._note(type(news).__name__.removeprefix("Load").lower(), news.request_id)
            case LoadKept():
                self.kept.append((news.request_id, news.tokens))
            case _:
                assert isinstance(news, LoadCompleted)

    def clock_offset(self, engine_id: str) -> None:
        """The clocks were not compared."""

    def write_record(self, record: LoadRecord) -> None:
        self.records.append(record)

    def _note(self, what: str, request_id: str) -> None:
        self.reports.append((what, request_id))
        self.on_report(what, request_id)


class World(FakePeers):
    """``ranks`` of prefill engine P, and a decode rank of an engine of ``world_size``."""

    def __init__(
        self,
        ranks: int = 1,
        world_size: int = 1,
        allowed: tuple[str, ...] | None = None,
        scripted: bool = True,
    ) -> None:
        super().__init__(allowed)
        self.agents = tuple(f"p-{rank}" for rank in range(ranks))
        self.network.listening = {"P": self.agents}
        self.watch, self.engine = ScriptedWatch(), Engine(world_size)
        self.peer_errors = PeerErrors(logging.getLogger("test"))
        self.recorder = Recorder()
        watch = self.watch if scripted else liveness.PeerWatch(PATIENCE_S)
        engine: Any = self.engine
        peers = PrefillPeers(engine, self.connections, watch, self.probe, self.recorder)
        peers.decline = self.engine.decline
        outcomes = Outcomes(engine, RANK, self.engine.report, engine, self.recorder)
        self.loads = Loads(engine, PATIENCE_S, peers, outcomes, self.peer_errors)
        self.compared = Compared()

    def awaits(self, request_id: str = "r", known: bool = True, sampling: str | None = None) -> None:
        self.engine.known |= {request_id} if known else set()
        self.loads.register(registration(request_id, sampling=sampling), P, EXTRA, self.now)
        self.settle()

    def awaiting(self, *speaking: str, request_id: str = "r") -> None:
        """A registered load; these agents have answered that they speak layerpush."""
        self.awaits(request_id)
        for agent in speaking:
            self.receives(Accepted(request_id), agent)
        self.mail.taken()

    def receives(self, message: LoadMessage | None, agent: str = "p-0") -> None:
        """A message arrives; None: it is about no load."""
        if message is None:
            self.loads.on_pong(agent, self.now)
        else:
            self.receives_before_tick(message, agent)
        self.tick()

    def receives_before_tick(self, message: LoadMessage, agent: str = "p-0") -> None:
        """As ``receives``, without the tick."""
        self.loads.on_message(agent, message, payload_of(message), self.now)

    def orders(self, *orders: PeerAction) -> None:
        self.watch.orders = list(orders)
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.settle()
        self.loads.tick(self.now)
        self.settle()

    def sent(self) -> list[tuple[str, Message]]:
        return self.mail.taken()

    @property
    def reports(self) -> list[str]:
        """The reports about the one request."""
        assert {request_id for _, request_id in self.engine.reports} <= {"r"}
        return [what for what, _ in self.engine.reports]

    def is_over(self) -> bool:
        loads = self.loads
        return not (len(loads) or loads._early or loads._outcomes or any(self.watch.sessions.values()))


# Registering.


def test_every_prefill_rank_gets_the_registration_and_is_watched() -> None:
    world = World(ranks=2)
    world.loads.register(registration(), P, EXTRA, world.now)
    assert (world.mail.sent, world.watch.sessions) == ([], {})
    world.settle()
    payload = encode_registration(registration(), **EXTRA)
    assert b"remote_tp_size" in payload
    assert world.mail.sent == [("p-0", payload), ("p-1", payload)]
    assert world.watch.sessions == {("P", "p-0"): 1, ("P", "p-1"): 1}
    assert world.network.handshakes == [P]
    assert (world.loads.engines_in_use, len(world.loads)) == ({"P"}, 1)
    world.tick()
    assert world.reports == []


def test_a_mismatched_prefill_engine_gets_no_registration() -> None:
    """It writes nothing, so the blocks are free at once."""
    world = World()
    world.engine.misfit = "its block size is 64 tokens, ours 32"
    world.awaits()
    world.tick()
    assert world.reports == ["failed"]
    assert world.sent() == []
    assert world.engine.records[-1].reason == world.engine.misfit
    assert world.engine.declined == [Decline("r", "D")]
    assert world.is_over()


def test_an_unreachable_prefill_engine_fails_the_load() -> None:
    world = World()
    world.network.listening = {}
    world.awaits()
    for _ in range(TRIES):
        assert world.reports == []
        world.network.reject("P", OSError("no route"))
        world.settle()
        world.tick(1.0)
    assert world.reports == ["failed"]
    assert world.engine.declined == [Decline("r", "D")], "P's blocks need not wait for the load"
    assert world.is_over()


def test_a_prefill_engine_on_a_host_that_is_not_allowed_fails_the_load() -> None:
    world = World(allowed=("10.9.9.9",))
    world.awaits()
    world.tick()
    assert world.reports == ["failed"]
    assert world.network.handshakes == []


def test_a_dead_connection_is_replaced() -> None:
    """The prefill engine was restarted under its old name and address."""
    world = World()
    world.awaiting("p-0", request_id="old")
    world.mail.lost = {"p-0"}
    world.network.listening["P"] = ("p-new",)
    world.awaits()
    assert world.network.forgotten == ["P"]
    assert [agent for agent, _ in world.sent()] == ["p-new"]
    assert world.watch.sessions["P", "p-new"] == 1
    assert len(world.loads) == 2


def test_a_second_dead_connection_fails_the_load() -> None:
    world = World()
    world.mail.lost = {"p-0"}
    world.awaits()
    world.tick()
    assert len(world.network.handshakes) == 2
    assert world.reports == ["failed"]
    assert world.is_over()


def test_registered_ranks_get_a_cancel_if_another_rank_is_unreachable() -> None:
    world = World(ranks=2)
    world.mail.lost = {"p-1"}
    world.awaits()
    assert [agent for agent, _ in world.mail.sent] == ["p-0", "p-0"]
    assert world.sent()[-1] == ("p-0", cancel_of())
    assert world.reports == []
    world.receives(Cancelled("r"))
    assert world.reports == ["failed"]
    assert world.is_over()


def test_a_load_that_cannot_be_registered_is_not_awaited() -> None:
    world = World()
    with pytest.raises(WireError, match="twice"):
        world.loads.register(registration(blocks=(4, 4)), P, EXTRA, world.now)
    assert len(world.loads) == 0
    world.engine.known = {"r"}
    world.loads.refuse("r", "it cannot be registered", world.now)
    world.tick()
    world.loads.time_out("r", "too late", world.now)
    world.tick()
    assert world.reports == ["failed"]
    assert world.mail.sent == []


# Completions.


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "world_size", "needed"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 2, 1), (4, 1, 2, 2), (1, 2, 1, 2)],
)
def test_a_load_needs_a_completion_from_every_rank_that_writes_here(
    tp_size: int, pp_size: int, world_size: int, needed: int
) -> None:
    world = World(tp_size * pp_size, world_size)
    world.engine.known = {"r"}
    world.loads.register(registration(), Address("P", "10.0.0.5", 5600, 1, pp_size), EXTRA, world.now)
    world.settle()
    for rank in range(needed):
        assert world.reports == []
        world.receives(Completion("r", tp_size), f"p-{rank}")
    assert world.reports == ["loaded"]
    assert world.engine.completions == [Completion("r", tp_size)] * needed
    assert world.is_over()


def test_a_repeated_completion_of_a_rank_counts_once() -> None:
    world = World(ranks=2)
    world.awaiting()
    for _ in range(3):
        world.receives(Completion("r", 2), "p-0")
    assert world.reports == []
    world.receives(Completion("r", 2), "p-1")
    world.receives(Completion("r", 2), "p-1")
    assert world.reports == ["loaded"]
    assert len(world.engine.completions) == 2


def test_messages_from_an_unregistered_agent_are_ignored() -> None:
    world = World()
    world.awaiting("p-0")
    for word in (Completion("r", 1), Cancelled("r"), Fail("r", 0, "no", True), Accepted("r")):
        world.receives(word, "x-0")
    assert world.reports == []
    assert world.peer_errors.counts == {"foreign status": 4}
    world.receives(Completion("r", 1))
    assert world.reports == ["loaded"]


@pytest.mark.parametrize("outcome", ["loaded", "failed"])
@pytest.mark.parametrize("step_s", [KEPT_S, 100 * KEPT_S])
def test_a_long_step_does_not_lose_the_outcome_of_a_load(outcome: str, step_s: float) -> None:
    """The main thread knows of a request after the forward of its step, which may compile for minutes."""
    world = World()
    world.awaits(known=False)
    world.receives(Completion("r", 1) if outcome == "loaded" else Fail("r", 0, "no", True))
    for _ in range(10):
        world.tick(step_s / 10)
    assert world.reports == []
    assert not world.is_over()
    world.engine.known = {"r"}
    world.tick()
    assert world.reports == [outcome]
    assert world.is_over()


# Early messages: any rank's registration starts the push for all.


@pytest.mark.parametrize("connecting", [True, False], ids=["while it connects", "before it was asked for"])
@pytest.mark.parametrize(("word", "outcome"), [(Completion("r", 1), "loaded"), (Fail("r", 0, "no", True), "failed")])
def test_an_early_message_is_not_lost(connecting: bool, word: Completion | Fail, outcome: str) -> None:
    world = World()
    if connecting:
        world.network.listening = {}
        world.awaits()
        world.receives(word)
        world.network.answer("P", "p-0")
    else:
        world.receives(word)
        world.awaits()
    assert world.reports == []
    world.tick()
    assert world.reports == [outcome]
    assert world.is_over()


@pytest.mark.parametrize("early", [False, True], ids=["registered", "before it was asked for"])
def test_a_completion_over_bytes_that_the_device_may_not_see_fails_the_load(
    early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sender writes no more, so the blocks are free at once. A stock one does not count as layerpush."""
    world, word = World(ranks=2), Completion("r", 2)
    if not early:
        world.awaiting()
    world.loads.on_invisible("p-0", word, payload_of(word), "no flush", world.now)
    if early:
        world.awaits()
    world.receives(word, "p-1")
    assert world.reports == ["failed"]
    assert "KV load of r from P failed: no flush" in caplog.text
    assert not any(world.watch.speaking.values())
    assert world.is_over()


def test_a_promised_token_may_come_late_and_is_ignored_after_the_wait() -> None:
    for late in (False, True):
        world = World()
        world.awaits(sampling="greedy")
        world.receives(Accepted("r", first_token=True))
        world.receives(Completion("r", 1))
        world.tick(0.9 * TOKEN_WAIT_S)
        assert world.reports == []
        if late:
            world.tick(0.2 * TOKEN_WAIT_S)
        world.receives(FirstToken("r", 7))
        world.receives(FirstToken("r", 8))
        assert world.reports == [f"first token {'late' if late else 7}", "loaded"]
        assert world.is_over(), "no message is kept for a load that is over"


def test_parameters_that_differ_on_p_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level("WARNING", "vllm.layerpush"):
        for number, other in enumerate([(), ("top_p",), ("top_p",), ("min_p", "top_p")]):
            world.awaits(f"r{number}", sampling="greedy")
            world.receives(FirstToken(f"r{number}", None, other))
    lines = [line for line in caplog.messages if "first tokens" in line]
    assert [line.partition("has other sampling parameters: ")[2] for line in lines] == ["top_p", "min_p, top_p"]
    assert all(f"prefill engine {P.engine_id} samples" in line for line in lines)


def test_a_load_does_not_wait_for_a_token_that_p_did_not_promise() -> None:
    world = World()
    world.awaits(sampling="greedy")
    world.receives(Accepted("r"))
    world.receives(Completion("r", 1))
    assert world.reports == ["first token not_promised", "loaded"]


def test_an_unrequested_first_token_is_ignored() -> None:
    world = World()
    world.awaiting("p-0")
    world.receives(FirstToken("r", 7))
    world.receives(FirstToken("s", 7))
    assert world.peer_errors.counts == {"foreign status": 1}, "the second one belongs to no load"
    world.receives(Completion("r", 1))
    assert world.reports == ["loaded"]


def test_a_first_token_from_an_unregistered_agent_is_ignored() -> None:
    world = World()
    world.awaits(sampling="greedy")
    world.receives(Accepted("r", first_token=True))
    world.receives(FirstToken("r", 8), "x-0")
    assert world.peer_errors.counts == {"foreign status": 1}
    world.receives(FirstToken("r", 7))
    world.receives(Completion("r", 1))
    assert world.reports == ["first token 7", "loaded"]


def test_a_first_token_before_the_rank_sends_its_registration_is_kept() -> None:
    world = World()
    world.loads.register(registration(sampling="greedy"), P, EXTRA, world.now)
    world.engine.known |= {"r"}
    world.receives_before_tick(FirstToken("r", 7))
    world.settle()
    world.receives(Completion("r", 1))
    assert world.reports == ["first token 7", "loaded"]


def test_an_agent_that_speaks_layerpush_does_so_for_the_next_request() -> None:
    """The answer about the next one may be lost."""
    world = World(ranks=2)
    world.awaiting("p-0", request_id="old")
    world.awaiting()
    assert world.watch.speaking == {"p-0": True, "p-1": False}
    world.loads.time_out("r", "no push", world.now)
    cancel = cancel_of()
    assert world.mail.sent == [("p-0", encode(cancel)), ("p-1", encode_quietly(cancel))]


def test_agents_that_no_load_awaits_are_not_remembered() -> None:
    """Neither those of an earlier process of the engine."""
    world = World()
    for number in range(50):
        world.receives(None, f"x-{number}")
    assert len(world.network.peers) == 0
    world.awaiting("p-0", request_id="old")
    assert world.network.peers["P"].speaks_layerpush == {"p-0"}
    world.network.connected["P"] = ("p-new",)
    world.awaits()
    assert world.network.peers["P"].speaks_layerpush == set()


def test_an_early_message_shows_that_its_sender_speaks_layerpush() -> None:
    """The rank is not connected when the message comes."""
    world = World(ranks=2)
    world.receives(Accepted("r"), "p-0")
    world.receives(Completion("r", 2), "p-1")
    world.awaits()
    assert world.network.peers["P"].speaks_layerpush == {"p-0"}


def test_an_early_message_from_an_unregistered_agent_is_ignored() -> None:
    world = World()
    world.receives(Completion("r", 1), "x-0")
    world.awaits()
    world.tick()
    assert world.reports == []
    assert world.peer_errors.counts == {"foreign status": 1}


def test_an_early_message_expires() -> None:
    world = World()
    world.receives(Completion("r", 1))
    world.receives(Fail("s", 0, "no", True))
    assert not world.is_over()
    world.tick(KEPT_S)
    assert world.peer_errors.counts == {"late completion": 1}
    assert world.is_over()
    world.awaits()
    world.tick()
    assert world.reports == []


def test_early_messages_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a completion's notification is kept: vLLM gets it as it came."""
    monkeypatch.setattr(early_messages, "KEPT_BYTES", 20_000)
    world = World()
    for number in range(50):
        padded = encode(Accepted(f"r{number}")) + b"x" * 10_000
        world.loads.on_message("p-0", Accepted(f"r{number}"), padded, world.now)
        world.receives(Fail(f"r{number}", 0, "x" * 500, True))
    assert 10 < len(world.loads._early) < 30
    assert world.loads._early.held_bytes <= 20_000


def test_the_number_of_early_messages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_messages, "KEPT", 10)
    world = World()
    for number in range(50):
        world.receives(Completion(f"r{number}", 1))
    assert len(world.loads._early) <= 10


# Giving up.


@pytest.mark.parametrize("place", ["message", "task", "tick"])
def test_a_defect_ends_one_load(place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """P is asked to stop. Its answer frees the blocks, as after any other failure."""
    world = World()
    world.awaiting("p-0")
    world.awaiting("p-0", request_id="s")
    kind, event = {
        "message": (load_protocol.AgentCompleted, lambda: world.receives(Completion("r", 1))),
        "task": (load_protocol.GaveWay, lambda: world.loads.unregister("r", world.now)),
        "tick": (load_protocol.AgentSilent, lambda: world.orders(liveness.ReportSilent("p-0", "silent"))),
    }[place]

    def broken(session: LoadSession, event: Any, _: Any) -> Any:
        if session.request_id == "r":
            raise KeyError("broken")
        return session.state

    monkeypatch.setitem(LoadSession.HANDLERS, kind, broken)
    event()
    assert world.sent() == [("p-0", cancel_of("r"))]
    assert "a defect ends the load of r" in caplog.text
    world.receives(Cancelled("r"))
    assert world.engine.reports == [("failed", "r")]
    monkeypatch.undo()
    world.receives(Completion("s", 1))
    assert world.engine.reports == [("failed", "r"), ("loaded", "s")]
    assert world.is_over()


@pytest.mark.parametrize("begun", ["not begun", "begun", "complete"])
def test_a_load_that_gives_way_while_it_connects_asks_once_it_has_registered(begun: str) -> None:
    """Another rank of D has registered it: P may have begun. If that rank was faster to give way, P has dropped it."""
    world = World()
    world.engine.known.add("r")
    world.loads.register(registration(), P, EXTRA, world.now)
    world.loads.unregister("r", world.now)
    world.loads.unregister("r", world.now)
    if begun == "complete":
        world.receives(Completion("r", 1))
    world.settle()
    assert [type(message) for _, message in world.sent()] == [Registration, Unregister]
    world.tick()
    assert world.reports == (["loaded"] if begun == "complete" else [])
    world.receives(Completion("r", 1) if begun == "begun" else Unregistered("r", 0))
    assert world.reports == (["unregistered", "failed"] if begun == "not begun" else ["loaded"])
    assert world.is_over()


class Injected(Exception):
    """A defect, or memory that is short."""


class RaisesOnce:
    """Counts the calls that a load and its outcome make. One of them raises, before it does anything."""

    def __init__(self, world: World, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._number = number
        loads = world.loads
        parts: list[tuple[object, tuple[str, ...]]] = [
            (loads._outcomes, ("report_ended", "report_cleared", "report")),
            (loads.peers, ("send", "send_registration", "decline", "await_agents", "reconnected")),
            (world.recorder, ("record_ended",)),
            (world.engine, ("loaded", "failed", "knows", "clock_offset", "write_record", "mismatch")),
            (logging.getLogger("vllm.layerpush.decode.load"), ("log", "info")),
        ]
        for part, names in parts:
            for name in names:
                monkeypatch.setattr(part, name, partial(self._call, name, getattr(part, name)))

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        if len(self.calls) - 1 == self._number:
            raise Injected(name)
        return call(*args, **kwargs)


def times_out(world: World) -> None:
    world.loads.time_out("r", "no push", world.now)


COURSES: dict[str, list[Callable[[World], object]]] = {
    "loaded": [World.awaits, lambda world: world.receives(Completion("r", 1))],
    "failed": [World.awaits, lambda world: world.receives(Fail("r", 0, "it ended", True))],
    "aborted": [
        World.awaits,
        lambda world: world.loads.abort("r", "aborted", world.now),
        lambda world: world.receives(Cancelled("r")),
    ],
    "unregistered": [
        World.awaits,
        lambda world: world.loads.unregister("r", world.now),
        lambda world: world.receives(Unregistered("r", 0)),
    ],
    "parked": [
        World.awaits,
        times_out,
        lambda world: world.tick(PATIENCE_S),
        lambda world: world.receives(Cancelled("r")),
    ],
    "unreachable": [lambda world: world.network.listening.clear(), World.awaits, times_out],
    "refused": [
        lambda world: world.engine.known.add("r"),
        lambda world: world.loads.refuse("r", "it is of no use", world.now),
    ],
}


@pytest.mark.parametrize("end", COURSES)
def test_an_outcome_survives_whatever_raises_on_its_way(end: str) -> None:
    """Each call on the way raises once. The request ends all the same, and its blocks come back."""

    def run(number: int | None) -> tuple[World, RaisesOnce]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            world = World()
            raises = RaisesOnce(world, number, monkeypatch)
            for move in COURSES[end]:
                with suppress(Injected):
                    move(world)
                for _ in range(3):
                    with suppress(Injected):
                        world.tick()
            if len(world.loads):  # the registration failed: P is asked to stop
                world.tick(RETRY_S)
                world.receives(Cancelled("r"))
        return world, raises

    sound, raises = run(None)
    wanted = [what for what in sound.reports if what in ("loaded", "failed")]
    for number, call in enumerate(raises.calls):
        if (end, call) == ("refused", "report_ended"):
            continue  # there is no load that could try again; the call needs memory for its report, nothing else
        world, _ = run(number)
        assert len(world.loads) + len(world.loads._outcomes) == 0, (number, call)
        ends = [what for what in world.reports if what in ("loaded", "failed")]
        assert ends == wanted or (ends == ["failed"] and call in REGISTERS), (number, call, world.reports)
        assert world.reports.count("parked") == world.reports.count("cleared")


REGISTERS = ("mismatch", "send_registration", "await_agents")


def test_an_abort_sends_cancels_and_waits_for_the_prefill_ranks() -> None:
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.loads.abort("r", "aborted", world.now)
    assert world.sent() == [("p-0", cancel_of()), ("p-1", cancel_of())]
    world.receives(Cancelled("r"), "p-1")
    world.tick(RETRY_S)
    assert world.sent() == [("p-0", cancel_of())], "the cancel is repeated"
    world.tick(100 * PATIENCE_S)
    assert world.reports == [], "the engine itself holds the blocks meanwhile"
    world.receives(Fail("r", 0, "it ended", True), "p-0")
    assert world.reports == ["failed"]
    assert world.engine.declined == []
    assert world.is_over()


def test_an_abort_before_the_registration_declines_the_load_and_sends_no_other_message() -> None:
    world = World()
    world.network.listening = {}
    world.awaits()
    world.loads.abort("r", "aborted", world.now)
    assert world.engine.declined == [Decline("r", "D")]
    world.tick()
    assert world.reports == ["failed"]
    world.network.answer("P", "p-0")
    world.settle()
    assert world.mail.sent == []
    assert world.is_over()


@pytest.mark.parametrize("end", ["abort", "time_out"])
def test_a_rank_that_still_connects_asks_p_before_its_blocks_are_free(end: str) -> None:
    """Another rank of D may have registered, and P writes to all of them then."""
    world = World(world_size=2)
    world.engine.known.add("r")
    world.loads.register(registration(), P, EXTRA, world.now)
    getattr(world.loads, end)("r", "over", world.now)
    world.tick()
    assert world.reports == ([] if end == "abort" else ["parked", "failed"])
    world.settle()
    assert [type(message) for _, message in world.sent()] == [Registration, Cancel]
    world.receives(Cancelled("r"))
    assert world.reports == (["failed"] if end == "abort" else ["parked", "failed", "cleared"])
    assert world.is_over()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_whose_cancel_has_no_answer_registers_again(world_size: int) -> None:
    """P may know the load from another rank of D only. Then it takes the cancel for a stranger's."""
    world = World(world_size=world_size)
    world.awaiting("p-0")
    world.loads.abort("r", "aborted", world.now)
    world.sent()
    world.tick(RETRY_S)
    again = [Registration] if world_size > 1 else []
    assert [type(message) for _, message in world.sent()] == [*again, Cancel]


def test_an_abort_or_timeout_of_an_unknown_or_finished_load_is_ignored() -> None:
    world = World()
    world.loads.abort("r", "aborted", world.now)
    world.loads.time_out("r", "too late", world.now)
    world.awaiting()
    world.receives(Completion("r", 1))
    world.loads.abort("r", "aborted", world.now)
    world.tick()
    assert world.reports == ["loaded"]


def test_blocks_are_parked_before_the_failure_is_reported() -> None:
    """The failure is reported only when the engine knows the request, the parking at once."""
    world = World()
    world.awaits(known=False)
    world.loads.time_out("r", "no push", world.now)
    world.tick(PATIENCE_S)
    assert world.reports == ["parked"]
    world.engine.known = {"r"}
    world.tick()
    assert world.reports == ["parked", "failed"]


def test_a_possibly_stock_prefill_engine_gets_a_quiet_cancel() -> None:
    """It may speak layerpush: the registration, or the answer, may be lost."""
    world = World()
    world.awaiting()
    world.loads.time_out("r", "no push", world.now)
    assert world.mail.sent == [("p-0", encode_quietly(cancel_of()))]
    world.tick(PATIENCE_S)
    assert world.reports == ["parked", "failed"]
    world.mail.taken()
    world.receives(Accepted("r"))
    world.tick(2 * RETRY_S)
    assert set(world.mail.sent) == {("p-0", encode(cancel_of()))}, "the engine speaks layerpush"
    world.receives(Completion("r", 1))
    assert world.reports == ["parked", "failed", "cleared"]


def test_a_possibly_stock_prefill_engine_is_asked_quietly_for_the_blocks() -> None:
    """A stock engine decodes each notification as text, and ends at one that is none."""
    world = World()
    world.awaiting()
    world.loads.unregister("r", world.now)
    world.tick(2 * RETRY_S)
    assert world.mail.sent
    for _, payload in world.mail.sent:
        assert payload.startswith(QUIET_PREFIX), payload
        payload.decode()
    world.receives(Completion("r", 1))
    assert world.reports == ["loaded"]


@pytest.mark.parametrize(("wish", "level"), [("abort", logging.INFO), ("time_out", logging.WARNING)])
def test_a_failure_is_logged_once_and_an_abort_at_level_info(
    wish: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.awaiting("p-0")
    with caplog.at_level(logging.INFO, "vllm.layerpush"):
        getattr(world.loads, wish)("r", "the reason", world.now)
        world.receives(Cancelled("r"))
    (record,) = [record for record in caplog.records if "KV load of r from P failed: the reason" in record.getMessage()]
    assert record.levelno == level


# Signs of life.


def test_an_agent_that_speaks_layerpush_gets_pings_and_another_gets_empty_heartbeats() -> None:
    world = World(ranks=2)
    world.awaiting("p-0")
    world.orders(liveness.SendPing("P", "p-0", True), liveness.SendPing("P", "p-1", False))
    world.orders(liveness.SendPing("P", "p-0", True))
    (_, first), silent, (_, second) = world.sent()
    assert isinstance(first, Ping)
    assert isinstance(second, Ping)
    assert first.decode_engine_id == second.decode_engine_id == "D"
    assert first.number != second.number
    assert silent == ("p-1", Heartbeat(()))
    assert world.watch.lost_agents == []
    world.mail.lost = {"p-0"}
    world.orders(liveness.SendPing("P", "p-0", True))
    assert world.watch.lost_agents == ["p-0"]


def test_every_message_of_an_agent_reaches_the_watch() -> None:
    world = World(ranks=3)
    world.awaiting()
    world.receives(None, "p-0")
    world.receives(Completion("nothing", 1), "p-1")
    world.receives(Cancelled("nothing"), "p-2")
    assert world.watch.speaking == {"p-0": True, "p-1": False, "p-2": True}


def test_a_probe_uses_the_engines_address_and_the_watch_gets_its_verdict() -> None:
    world = World()
    world.awaiting()
    world.orders(liveness.StartProbe("P", "p-0"))
    asked = world.probe.answer(Verdict.ENDED, 7.0)
    assert (asked.agent, asked.address) == ("p-0", P)
    assert world.watch.verdicts == [("P", "p-0", Verdict.ENDED, 7.0)]


@pytest.mark.parametrize(("verdict", "speaks"), [(Verdict.SPEAKS_LAYERPUSH, True), (Verdict.ALIVE, False)])
def test_the_answer_of_the_side_channel_holds_for_the_next_load(verdict: Verdict, speaks: bool) -> None:
    world = World()
    world.awaiting()
    world.orders(liveness.StartProbe("P", "p-0"))
    world.probe.answer(verdict, 7.0)
    world.awaiting(request_id="another")
    assert world.watch.speaking == {"p-0": speaks}


def test_the_silence_of_an_agent_fails_all_its_loads() -> None:
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.orders(liveness.ReportSilent("p-0", "nothing came"))
    assert world.sent() == [("p-0", cancel_of()), ("p-1", cancel_of())]
    world.receives(Cancelled("r"), "p-1")
    world.tick(PATIENCE_S)
    assert world.reports == ["parked", "failed"]


def test_the_death_of_an_agent_fails_its_loads_without_parking_blocks() -> None:
    world = World()
    world.awaiting("p-0")
    world.awaiting("p-0", request_id="s")
    world.engine.known = {"r", "s"}
    world.orders(liveness.ReportGone("P", "p-0", "it has ended"))
    world.tick()
    assert sorted(world.engine.reports) == [("failed", "r"), ("failed", "s")]
    assert world.network.forgotten == ["P"]
    assert world.is_over()


def test_an_order_for_an_ended_session_is_harmless() -> None:
    """Orders of one look: the first may end the last session of the engine."""
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.receives(Fail("r", 0, "no", True), "p-1")
    world.sent()
    world.orders(
        liveness.ReportGone("P", "p-0", "it has ended"),
        liveness.SendPing("P", "p-1", True),
        liveness.StartProbe("P", "p-1"),
        liveness.ReportSilent("p-1", "nothing came"),
        liveness.Reconnect("P", "p-0"),
    )
    assert world.reports == ["failed"]
    assert world.probe.asked == []


def test_a_living_engine_with_a_dead_connection_is_reconnected() -> None:
    world = World()
    world.awaiting("p-0")
    world.orders(liveness.Reconnect("P", "p-0"))
    assert world.network.forgotten == ["P"]
    assert world.network.connected == {"P": ("p-0",)}
    world.receives(Completion("r", 1))
    assert world.reports == ["loaded"]


def test_a_failed_reconnection_is_logged_and_left_to_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.awaiting("p-0")
    world.network.listening = {}
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        world.orders(liveness.Reconnect("P", "p-0"))
        world.network.reject("P", OSError("no route"))
        world.settle()
    assert "no route" in caplog.text
    assert not world.connections._retries
    assert world.reports == []


def test_a_living_rank_keeps_its_connection_after_the_death_of_another() -> None:
    """Sends to it would fail, and that would count as its death."""
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.mail.lost = {"p-0"}
    world.orders(liveness.ReportGone("P", "p-0", "it has ended"))
    assert world.sent() == [("p-1", cancel_of())]
    assert world.network.forgotten == []
    world.orders(liveness.SendPing("P", "p-1", True))
    world.tick(RETRY_S)
    assert [agent for agent, _ in world.sent()] == ["p-1", "p-1"]
    assert (world.watch.lost_agents, world.watch.cut_agents, world.reports) == ([], [], [])
    world.orders(liveness.ReportGone("P", "p-1", "it has ended"))
    assert world.network.forgotten == ["P"]
    assert world.reports == ["failed"]


def test_a_rank_that_another_request_awaits_keeps_its_connection() -> None:
    world = World(ranks=2)
    world.awaiting("p-0", "p-1", request_id="s")
    world.awaiting("p-0", "p-1")
    world.receives(Fail("r", 0, "no", True), "p-1")
    world.orders(liveness.ReportGone("P", "p-0", "it has ended"))
    assert world.engine.reports == [("failed", "r")]
    assert world.network.forgotten == []


def test_a_living_rank_is_not_reported_gone_after_the_death_of_its_sibling() -> None:
    """Its engine's listener ends with the sibling, so only successful sends show that it lives."""
    world = World(ranks=2, scripted=False)
    world.awaiting("p-0", "p-1")
    world.mail.lost = {"p-0"}
    for _ in range(60):
        world.receives(None, "p-1")
        dies_a_little(world)
    for _ in range(120):  # it computes, and sends nothing meanwhile
        dies_a_little(world)
    assert world.reports == ["parked", "failed"], "its blocks are not given back"
    assert "p-1" in {agent for agent, _ in world.sent()}
    world.receives(Cancelled("r"), "p-1")
    assert world.reports == ["parked", "failed", "cleared"]


def test_a_send_without_a_connection_is_no_evidence_of_a_death() -> None:
    world = World()
    world.awaiting("p-0")
    world.network.listening = {}
    world.orders(liveness.Reconnect("P", "p-0"))
    world.orders(liveness.SendPing("P", "p-0", True))
    world.loads.abort("r", "aborted", world.now)
    assert world.watch.lost_agents == []
    assert set(world.watch.cut_agents) == {"p-0"}
    assert world.watch.reconnections == []
    world.network.answer("P", "p-0")
    world.tick()
    assert world.watch.reconnections == [("p-0",)]
    world.mail.lost = {"p-0"}
    world.orders(liveness.SendPing("P", "p-0", True))
    assert world.watch.lost_agents == ["p-0"]


def dies_a_little(world: World) -> None:
    """A quarter of a second passes, and every probe finds that the agent has ended."""
    world.tick(0.25)
    while world.probe.asked:
        world.probe.answer(Verdict.ENDED, world.now)


def test_a_probe_names_the_registered_rank_even_without_a_connection() -> None:
    """Another rank's answer would not name the agent: the agent would count as dead while it writes."""
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.network.listening = {}
    world.orders(liveness.Reconnect("P", "p-0"))
    assert world.network.connected == {}
    world.orders(liveness.StartProbe("P", "p-1"))
    [asked] = world.probe.asked
    assert (asked.agent, asked.rank, asked.address) == ("p-1", (0, 1), P)


def test_a_probe_uses_the_address_of_the_handshake_and_not_of_a_later_request() -> None:
    """A client names the address. At a wrong one, every probe would find a death."""
    world = World()
    world.awaiting("p-0", request_id="honest")
    world.engine.known |= {"r"}
    nowhere = Address("P", "10.6.6.6", 1, tp_size=1, notify_only=True)
    world.loads.register(registration(), nowhere, EXTRA, world.now)
    world.asked(Verdict.UNKNOWN)
    assert world.watch.sessions["P", "p-0"] == 2
    world.receives(Completion("honest", 1))
    world.orders(liveness.StartProbe("P", "p-0"), liveness.Reconnect("P", "p-0"))
    assert [asked.address for asked in world.probe.asked] == [P]
    assert world.network.handshakes == [P, P]


MOVED = Address("P", "10.0.0.6", 5600, tp_size=1, notify_only=True)
"""Of another process with P's id."""


def replaced() -> World:
    """Load r waits for P's process, which does not answer. Load s has another address of P, where another one does."""
    world = World(scripted=False)
    world.awaiting("p-0")
    world.network.listening = {"P": ("new-0",)}
    world.engine.known |= {"s"}
    world.loads.register(registration("s"), MOVED, EXTRA, world.now)
    for verdict in (Verdict.REPLACED, Verdict.UNKNOWN, Verdict.UNKNOWN):
        world.asked(verdict)
    assert [agent for agent, _ in world.sent()] == ["new-0"]
    return world


@pytest.mark.parametrize("end", ["it answers", "it is gone"])
def test_a_load_ends_with_its_process_after_another_process_has_the_name(end: str) -> None:
    """The old process may still write, and its death still has two witnesses."""
    world = replaced()
    world.receives(Completion("s", 1), "new-0")
    while ("failed", "r") not in world.engine.reports:
        world.tick(0.25)
        while world.probe.asked:
            world.probe.answer(Verdict.UNKNOWN, world.now)
    assert world.engine.reports == [("loaded", "s"), ("parked", "r"), ("failed", "r")]
    assert {agent for agent, _ in world.sent()} == {"p-0"}, "pings and cancels"
    if end == "it answers":
        world.receives(Cancelled("r"))
    else:
        world.mail.lost = {"p-0"}
        for _ in range(4 * 20):
            dies_a_little(world)
    assert world.engine.reports[3:] == [("cleared", "r")]
    world.tick()
    assert world.network.retired == set()
    assert [*world.connections.agents("P")] == ["new-0"]


def test_a_process_that_has_lost_its_name_does_not_take_the_connection_back() -> None:
    world = replaced()
    world.mail.lost = {"p-0"}
    for _ in range(4 * 30):
        world.tick(0.25)
        world.receives(None, "new-0")
        while world.probe.asked:
            world.probe.answer(Verdict.SPEAKS_LAYERPUSH, world.now)
    assert world.network.handshakes == [P, MOVED]


def test_a_load_from_the_second_of_two_living_engines_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    world, declined = World(), list[Address]()
    world.loads.peers.decline = lambda address, _: declined.append(address)
    world.network.connect(P, "p-0")
    world.engine.known |= {"r"}
    world.loads.register(registration(), MOVED, EXTRA, world.now)
    world.asked(Verdict.REPLACED)
    world.asked(Verdict.ALIVE)
    world.tick()
    assert world.reports == ["failed"]
    assert world.sent() == []
    assert declined == [MOVED], "it need not keep its blocks"
    assert "two engines have the id 'P': one lives at 10.0.0.5:5600, and another at 10.0.0.6:5600" in caplog.text


def test_a_silent_engine_gets_no_load_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Else each request would park its blocks."""
    world = World(scripted=False)
    world.awaiting("p-0")
    world.tick(PATIENCE_S / 4)
    world.tick(PATIENCE_S)
    assert {type(message) for _, message in world.sent()} == {Ping, Cancel}
    world.awaits("s")
    assert world.sent() == []
    world.tick()
    assert ("failed", "s") in world.engine.reports
    assert "KV load of s from P failed: prefill agent p-0 is silent, and earlier loads wait for it" in caplog.text
    assert world.engine.declined == [], "nobody would hear it"
    world.receives(None)
    world.awaits("t")
    assert [message.request_id for _, message in world.sent()] == ["t"]


def test_a_request_with_a_different_number_of_ranks_is_not_awaited() -> None:
    world = World(ranks=2)
    two = Address("P", "10.0.0.5", 5600, tp_size=2)
    world.network.connect(two, *world.agents)
    world.loads.register(registration("s"), two, EXTRA, world.now)
    world.awaits()
    world.tick()
    assert world.reports == ["failed"]
    assert {read(payload).request_id for _, payload in world.mail.sent} == {"s"}


def test_pushes_to_an_engine_fail_before_its_connection_is_dropped() -> None:
    world, ended = World(), list[tuple[str, list[str]]]()
    world.network.end_pushes = lambda engine_id, _: ended.append((engine_id, list(world.network.connected))) or True
    world.awaiting("p-0")
    world.orders(liveness.Reconnect("P", "p-0"))
    assert world.watch.reconnections == [("p-0",)]
    world.mail.lost = {"p-0"}
    world.awaits("s")
    world.orders(liveness.ReportGone("P", "p-0", "it has ended"))
    assert ended == 3 * [("P", ["P"])]
    assert world.network.forgotten == ["P", "P", "P"]


def test_a_connection_with_pushes_in_flight_is_kept() -> None:
    """Then no new connection is made, and the failure remains."""
    world = World()
    world.network.end_pushes = lambda _, __: False
    world.awaiting("p-0")
    world.orders(liveness.Reconnect("P", "p-0"))
    world.mail.lost = {"p-0"}
    world.awaits("s")
    world.tick()
    assert world.network.forgotten == []
    assert world.engine.reports == [("failed", "s")]
    assert world.watch.lost_agents == ["p-0"]
    assert world.watch.cut_agents == []
    assert world.watch.reconnections == []
    assert world.network.handshakes == [P]


def test_a_reconnection_by_a_registration_is_reported_to_the_watch() -> None:
    world = World()
    world.awaiting("p-0")
    world.network.connected["P"] = ("p-old",)
    world.mail.lost = {"p-old"}
    world.awaits("s")
    assert world.watch.lost_agents == world.watch.cut_agents == ["p-old"]
    assert world.watch.reconnections == [("p-0",)]


@pytest.mark.parametrize(("ranks", "lost"), [(1, ["p-0"]), (2, [])])
def test_a_connection_lost_elsewhere_is_evidence_only_against_a_lone_agent(ranks: int, lost: list[str]) -> None:
    world = World(ranks)
    world.awaiting(*world.agents)
    world.connections.on_lost(world.agents, world.now)
    assert world.watch.lost_agents == lost
    assert world.watch.cut_agents == list(world.agents)


def test_a_request_id_with_parked_blocks_is_not_registered_again() -> None:
    """Messages about the old request would count for the new one."""
    world = World()
    world.awaiting("p-0")
    world.loads.time_out("r", "no push", world.now)
    world.tick(PATIENCE_S)
    assert world.reports == ["parked", "failed"]
    world.sent()
    world.loads.register(registration(blocks=(7, 8)), P, EXTRA, world.now)
    world.tick()
    assert world.sent() == []
    assert world.reports == ["parked", "failed", "failed"]
    assert len(world.loads) == 1
    world.receives(Cancelled("r"))
    assert world.reports == ["parked", "failed", "failed", "cleared"]
    assert world.is_over()
    world.awaits()
    assert len(world.sent()) == 1


# Counters.


def counted(world: World) -> tuple[dict[str, int], dict[str, int], int]:
    """Loads by outcome, lost peers by cause, and the number of load times."""
    tally = measured(world.recorder)
    return tally.counters.get(LOADS.key, {}), tally.counters.get(LOST_PEERS.key, {}), tally.observed(LOAD).count


def test_a_load_that_succeeds_is_counted_with_its_time() -> None:
    world = World()
    world.awaiting()
    world.now += 3.0
    world.receives(Completion("r", 1))
    tally = measured(world.recorder)
    assert tally.counters == {LOADS.key: {"loaded": 1}}
    assert tally.observed(LOAD).total == pytest.approx(3.0)


def test_unsuccessful_loads_are_counted_by_outcome() -> None:
    world = World()
    world.awaiting("p-0", request_id="failed")
    world.receives(Fail("failed", 0, "no such request", True))
    world.awaiting("p-0", request_id="aborted")
    world.loads.abort("aborted", "aborted", world.now)
    world.receives(Cancelled("aborted"))
    world.loads.refuse("refused", "bad address", world.now)
    world.awaiting("p-0", request_id="parked")
    world.loads.time_out("parked", "no push", world.now)
    world.tick(PATIENCE_S)
    world.receives(Cancelled("parked"))
    assert counted(world) == ({"failed": 1, "aborted": 1, "refused": 1, "parked": 1}, {}, 0)


def test_lost_peers_are_counted_by_cause() -> None:
    world = World(ranks=2)
    world.awaiting("p-0", "p-1")
    world.orders(liveness.ReportSilent("p-0", "nothing came"), liveness.ReportGone("P", "p-1", "it ended"))
    assert counted(world)[1] == {"silent": 1, "gone": 1}


# The cost of a turn.


def test_a_turn_looks_at_no_load_that_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """D turns a thousand times a second while a load waits."""
    world, looks = World(), list[str]()
    for number in range(50):
        world.awaits(f"waiting-{number}")
        world.awaits(f"cancelled-{number}")
        world.loads.time_out(f"cancelled-{number}", "late", world.now)
    for name in ("next_due", "handle"):
        method = getattr(LoadSession, name)

        def counted(self: LoadSession, *args: Any, method: Any = method) -> Any:
            looks.append(self.request_id)
            return method(self, *args)

        monkeypatch.setattr(LoadSession, name, counted)
    world.tick()
    world.tick(RETRY_S - 0.01)
    assert looks == []
    world.tick(0.02)
    assert {name.partition("-")[0] for name in looks} == {"cancelled"}
    assert len(looks) == 100
    world.tick(0.1)
    assert len(looks) == 100


@pytest.mark.parametrize(("number", "named", "kept"), [(7, 7, 64), (7, 6, 0), (0, 0, 0)])
def test_a_prefix_of_another_registration_does_not_count(number: int, named: int, kept: int) -> None:
    world = World()
    world.engine.known.add("r")
    world.loads.register(replace(registration(), number=number), P, EXTRA, world.now)
    world.settle()
    world.receives(PrefixLanded("r", named, 64))
    world.receives(Fail("r", 0, "cut off", drained=True))
    assert world.engine.kept == [("r", kept)]
    assert world.engine.reports == [("failed", "r")]


WRONG = PartSums("a", 0, 1, 0, 16, 16, b"wrong")
RIGHT = PartSums("a", 0, 1, 0, 16, 16, b"right")


class Compared:
    """In the place of ``Checks``."""

    count = 0

    def difference(self, registration: Registration, tokens: int, sums: Sequence[PartSums], _: object) -> str | None:
        assert tokens == 96
        self.count += 1
        return "layer a" if WRONG in sums else None


def verified(*prefixes: PartSums, ranks: int = 2) -> World:
    """Each rank of P has told a load of 48 of 96 tokens, with its checksums."""
    world = World(ranks)
    loads: Any = world.loads
    loads._checks = world.compared = Compared()
    world.engine.known.add("r")
    world.loads.register(replace(registration(), number=7), P, EXTRA, world.now)
    world.settle()
    for agent, sums in zip(world.agents, prefixes, strict=True):
        world.receives(PrefixLanded("r", 7, 48, 96, (sums,)), agent)
    return world


DOUBTS: dict[str, Callable[[World], None]] = {
    "no end": lambda world: None,
    "deadline": lambda world: world.loads.time_out("r", "overdue", world.now),
    "silence": lambda world: world.orders(liveness.ReportSilent("p-0", "silent")),
    "failure": lambda world: world.receives(Fail("r", 0, "a WRITE is on the wire", drained=False)),
    "abort": lambda world: world.loads.abort("r", "aborted", world.now),
    "give-way": lambda world: world.loads.unregister("r", world.now),
}


@pytest.mark.parametrize("sums", [WRONG, RIGHT], ids=["wrong", "right"])
@pytest.mark.parametrize("doubt", DOUBTS)
def test_no_completion_counts_that_differs(doubt: str, sums: PartSums, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a part of the load kept, although the other rank's is right."""
    world = verified(RIGHT, RIGHT)
    DOUBTS[doubt](world)
    with caplog.at_level(logging.INFO):
        world.receives(Completed("r", 2, 96, (sums,)), "p-1")
        world.receives(Completed("r", 2, 96, (RIGHT,)), "p-0")
    if sums is WRONG:
        assert world.reports == ["failed"]
        assert world.engine.kept == [("r", 0)]
        (line,) = caplog.records
        assert (line.levelname, line.message) == (
            "ERROR", "KV load of r from P failed: the KV from p-1 is not what it has sent: layer a",
        )  # fmt: skip
    else:
        assert world.reports == (["failed"] if doubt == "abort" else ["loaded"])
    assert world.is_over()


def test_what_is_parked_is_not_compared() -> None:
    """The engine has used the kept blocks again."""
    world = verified(RIGHT, RIGHT)
    world.loads.time_out("r", "overdue", world.now)
    world.tick(PATIENCE_S)
    assert world.engine.kept == [("r", 48)]
    compared = world.compared.count
    for agent in world.agents:
        world.receives(Completed("r", 2, 96, (WRONG,)), agent)
    assert world.reports == ["parked", "failed", "cleared"]
    assert world.compared.count == compared


ENDS: dict[str, Callable[[World], None]] = {
    "failure": lambda world: world.receives(Fail("r", 0, "cut off", drained=True)),
    "death": lambda world: world.orders(liveness.ReportGone("P", "p-0", "cut off")),
    "abort": lambda world: world.loads.abort("r", "cut off", world.now),
    "silence": lambda world: (world.orders(liveness.ReportSilent("p-0", "cut off")), world.tick(PATIENCE_S))[1],
}


@pytest.mark.parametrize(
    ("prefixes", "kept"), [((RIGHT, RIGHT), 48), ((RIGHT, WRONG), 0), ((WRONG, RIGHT), 0)], ids=["right", "p-1", "p-0"]
)
@pytest.mark.parametrize("end", ENDS)
def test_no_prefix_is_kept_that_differs(
    end: str, prefixes: tuple[PartSums, ...], kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = verified(*prefixes)
    ENDS[end](world)
    for agent in world.agents:
        world.receives(Cancelled("r"), agent)
    assert world.engine.kept == [("r", kept)]
    assert ("cut off; the KV from p-" in caplog.text) == (not kept)


def test_the_checksums_of_the_longest_prefix_count() -> None:
    """Messages may overtake each other."""
    world = verified(RIGHT, ranks=1)
    world.receives(PrefixLanded("r", 7, 64, 96, (WRONG,)))
    world.receives(PrefixLanded("r", 7, 56, 96, (RIGHT,)))
    world.receives(Fail("r", 0, "cut off", drained=True))
    assert world.engine.kept == [("r", 0)]


@pytest.mark.parametrize("drained", [True, False])
def test_no_prefix_is_kept_that_p_doubts(drained: bool) -> None:
    world = verified(RIGHT, RIGHT)
    world.receives(Fail("r", 0, "CoverageError", drained, void=True))
    for agent in world.agents:
        world.receives(Fail("r", 0, "CoverageError", drained=True), agent)
    assert world.reports == ["failed"]
    assert world.engine.kept == [("r", 0)]


def test_a_rank_that_has_all_of_the_kv_says_nothing_of_a_prefix() -> None:
    world = World()
    world.awaits("whole")
    world.receives(Completion("whole", 1))
    assert world.engine.reports == [("loaded", "whole")]
    world.loads.refuse("refused", "it is of no use", world.now)
    world.tick()
    assert world.engine.kept == [("refused", 0)]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (None, "failed"),
        (Accepted("r"), "failed"),
        (Accepted("r", prefix_tokens=16), "failed"),
        (Accepted("r", prefix_tokens=32), "loaded"),
    ],
)
def test_only_an_engine_that_knows_prefix_tokens_completes_a_return(answer: Accepted | None, outcome: str) -> None:
    """A stock engine pushes the request that has the same base id, or an older one the whole prompt."""
    world = World()
    world.engine.known.add("r")
    world.loads.register(replace(registration("r"), prefix_tokens=32), P, EXTRA, world.now)
    world.settle()
    if answer is not None:
        world.receives(answer)
    world.receives(Completion("r", 1))
    assert world.reports == [outcome]
