"""The simulated fleet: its rules hold, it runs the product's code and not a copy, and its parts are what they say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, quantiles
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.fleet import engines
from bench.fleet.__main__ import app
from bench.fleet.arrivals import RECORDED, SHARES, TRACES, arrivals, generated, value
from bench.fleet.clock import Clock
from bench.fleet.fabric import BrokenRuleError, Fabric, FabricLink, Flow
from bench.fleet.fleet import Fleet, FleetRequest, Plan
from bench.fleet.presets import MODELS, RankModel
from layerpush.core.liveness import PeerWatch
from layerpush.core.push_mode import PushMode
from layerpush.decode import load_protocol, loads
from layerpush.decode.load_session import LoadSession
from layerpush.engine.worker import writer_thread
from layerpush.prefill import push_protocol, step_schedule
from layerpush.prefill.claims import Claims
from layerpush.prefill.push_session import PushSession
from layerpush.transport import connections, link_speed
from layerpush.transport.idle_connections import IdleConnections
from layerpush.transport.peers import Address

SMALL = RankModel("a small model with much KV", 8, 16384, 40e-6, 1.3e-9, 20e-3, 150_000)
QUIET = Plan(model="small", prefill=2, decode=2, seconds=8.0, warm_up=0.0, load=0.6)
STORMY = replace(QUIET, prefill=4, seconds=10.0, load=0.8, deaths=6, down_s=0.5, oversubscription=4.0, seed=2)
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: Patch) -> None:
    monkeypatch.setitem(MODELS, "small", SMALL)


def figures(plan: Plan) -> dict[str, Any]:
    return Fleet(plan).run()


sound = cache(figures)


@pytest.mark.parametrize("mode", [PushMode.AUTO, PushMode.WHOLE])
def test_all_requests_of_a_fleet_in_which_engines_die_end(mode: PushMode) -> None:
    found = sound(replace(STORMY, mode=mode))
    assert found["requests"] > 20
    assert found["pushes"]["completed"] > 20
    assert found["pushes"]["failed"], "no death has met a push"
    assert found["costs"][0]["handshakes"] > 8


def test_the_same_seed_gives_the_same_figures() -> None:
    assert figures(STORMY) == sound(STORMY)
    assert figures(replace(QUIET, seed=1)) != sound(QUIET)


# The simulation has no copy of a rule of the product: without the rule, it gives other figures.


def no_layer_waits(patch: Patch) -> None:
    patch.setattr(step_schedule, "layers_to_wait", lambda *_: 0)


def pings_are_twice_as_frequent(patch: Patch) -> None:
    await_agents = PeerWatch.await_agents

    def mutated(self: PeerWatch, *args: Any) -> None:
        self._beat_s = self._timeout_s / 8
        await_agents(self, *args)

    patch.setattr(PeerWatch, "await_agents", mutated)


def an_unknown_registration_is_refused_sooner(patch: Patch) -> None:
    time_out = Claims._time_out

    def mutated(self: Claims, now: float) -> None:
        self._unknown_timeout_s = 10.0
        time_out(self, now)

    patch.setattr(Claims, "_time_out", mutated)


def a_push_by_layer_waits_for_whole_chunks(patch: Patch) -> None:
    handle = PushSession.handle

    def mutated(self: PushSession, event: Any, now: float) -> Any:
        waits = isinstance(event, push_protocol.PostReady)
        return handle(self, push_protocol.PostReady(wait=True) if waits else event, now)

    patch.setattr(PushSession, "handle", mutated)


def slow_writes_are_forgotten_at_once(patch: Patch) -> None:
    patch.setattr(link_speed, "REMEMBERED_S", 1e-9)


def nobody_may_connect_to_one_engine(patch: Patch) -> None:
    patch.setattr(connections, "host_allowed", lambda host, _: host != "host-of-D1")


def idle_connections_are_left_alone(patch: Patch) -> None:
    patch.setattr(IdleConnections, "_update", lambda *_: None)


def messages_are_longer(patch: Patch) -> None:
    encode = loads.encode_registration
    patch.setattr(loads, "encode_registration", lambda *args, **extra: encode(*args, **extra, more="of it"))


def the_writer_looks_for_messages_less_often(patch: Patch) -> None:
    patch.setattr(writer_thread, "NOTIFICATION_POLL_S", 3e-3)


@pytest.mark.parametrize(
    ("mutant", "plan"),
    [
        (no_layer_waits, QUIET),
        (a_push_by_layer_waits_for_whole_chunks, QUIET),
        (messages_are_longer, QUIET),
        (nobody_may_connect_to_one_engine, QUIET),
        (the_writer_looks_for_messages_less_often, QUIET),
        (slow_writes_are_forgotten_at_once, STORMY),
        (an_unknown_registration_is_refused_sooner, replace(STORMY, seed=7)),
        (pings_are_twice_as_frequent, STORMY),
        (idle_connections_are_left_alone, STORMY),
    ],
)
def test_a_mutant_of_the_product_changes_the_figures(
    mutant: Callable[[Patch], None], plan: Plan, monkeypatch: Patch
) -> None:
    before = sound(plan)
    mutant(monkeypatch)
    assert figures(plan) != before


# The rules: without a guard, one of them is broken. The guard of rule 5 is the router's, all others the product's.


def a_completion_does_not_wait_for_writes(patch: Patch) -> None:
    settle = PushSession._settle

    def mutated(self: PushSession, actions: Any) -> Any:
        held, self.in_flight = self.in_flight, {}
        try:
            return settle(self, actions)
        finally:
            self.in_flight = held

    patch.setattr(PushSession, "_settle", mutated)
    patch.setattr("layerpush.prefill.coverage.Coverage.full", True)


def no_process_is_found_dead(patch: Patch) -> None:
    patch.setattr(PeerWatch, "_ended", lambda *_: None)


def an_overdue_load_gives_its_blocks_back_at_once(patch: Patch) -> None:
    handle = LoadSession.handle

    def mutated(self: LoadSession, event: Any, now: float) -> Any:
        if isinstance(event, load_protocol.TimedOut):
            self.state = load_protocol.State.CLOSED
            return [load_protocol.ReportFailed(event.reason)]
        return handle(self, event, now)

    patch.setattr(LoadSession, "handle", mutated)
    patch.setattr(engines, "PATIENCE_S", 0.3)


def a_load_reports_its_end_twice(patch: Patch) -> None:
    handle = LoadSession.handle

    def mutated(self: LoadSession, event: Any, now: float) -> Any:
        actions = handle(self, event, now)
        return actions * 2 if any(type(action).__name__ == "ReportLoaded" for action in actions) else actions

    patch.setattr(LoadSession, "handle", mutated)


def answered_requests_of_a_dead_engine_are_tried_again(patch: Patch) -> None:
    def mutated(self: engines.DecodeEngine) -> list[FleetRequest]:
        return [loading.request for loading in (*self._waiting, *self._loads.values())]

    patch.setattr(engines.DecodeEngine, "lost", property(mutated))


def a_task_of_the_writer_raises(patch: Patch) -> None:
    register = loads.Loads.register

    def mutated(self: loads.Loads, *args: Any) -> None:
        register(self, *args)
        raise RuntimeError("a mutant")

    patch.setattr(loads.Loads, "register", mutated)


@pytest.mark.parametrize(
    ("mutant", "plan", "rule"),
    [
        (a_load_reports_its_end_twice, QUIET, 1),
        (a_completion_does_not_wait_for_writes, replace(QUIET, seed=1), 2),
        (an_overdue_load_gives_its_blocks_back_at_once, QUIET, 3),
        (no_process_is_found_dead, STORMY, 4),
        (answered_requests_of_a_dead_engine_are_tried_again, STORMY, 5),
        (a_task_of_the_writer_raises, QUIET, 6),
    ],
)
def test_a_broken_guard_breaks_a_rule(
    mutant: Callable[[Patch], None], plan: Plan, rule: int, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(BrokenRuleError, match=rf"rule {rule}\b"):
        figures(plan)


# Its own parts.


def test_flows_share_links_by_max_min_fairness() -> None:
    """Three flows over two links: the narrow link's flows get half of it each, and the third one the rest."""
    fabric, wide, narrow = Fabric(Clock(), 0.0, 1), FabricLink(10.0), FabricLink(4.0)
    flows = {"wide": (wide,), "both": (wide, narrow), "narrow": (narrow,)}
    nothing: Any = SimpleNamespace()
    made, none = dict[str, Flow](), np.zeros(0, np.int32)
    for name, path in flows.items():
        made[name] = Flow(nothing, nothing, none, none, none, path, 100.0)
        for link in path:
            link.flows[made[name]] = None
    fabric._share([wide])
    assert {name: flow.rate for name, flow in made.items()} == {"wide": 8.0, "both": 2.0, "narrow": 2.0}
    fabric._stop([made["narrow"]])
    assert {name: flow.rate for name, flow in made.items() if name != "narrow"} == {"wide": 6.0, "both": 4.0}


def routed(router: str, patch: Patch) -> list[tuple[int, str, str]]:
    """The conversation, P and D of each request, in the order in which they come."""
    found, submit = [], engines.DecodeEngine.submit

    def spied(self: engines.DecodeEngine, request: FleetRequest, prefill: Address) -> None:
        found.append((request.conversation, prefill.engine_id, self.engine_id))
        submit(self, request, prefill)

    patch.setattr(engines.DecodeEngine, "submit", spied)
    figures(replace(QUIET, router=router))
    return found


def test_in_turn_each_p_meets_each_d(monkeypatch: Patch) -> None:
    pairs = [pair for _, *pair in routed("round_robin", monkeypatch)]
    assert pairs[:4] == [["P0", "D0"], ["P1", "D0"], ["P0", "D1"], ["P1", "D1"]]
    assert pairs[4:8] == pairs[:4]


def test_a_sticky_router_sends_a_conversation_to_the_same_engines(monkeypatch: Patch) -> None:
    for conversation, *pair in routed("sticky", monkeypatch):
        assert pair == [f"P{conversation % 2}", f"D{conversation % 2}"]


@pytest.mark.parametrize("name", TRACES)
def test_arrivals_have_the_lengths_of_the_trace(name: str) -> None:
    trace = TRACES[name]
    turns = list(arrivals(trace, 5.0, 0.0, 4000.0, random.Random(1)))
    assert turns == sorted(turns, key=lambda turn: turn.at)
    assert len(turns) / 4000.0 == pytest.approx(5.0, rel=0.15)
    firsts = [turn.tokens for turn in turns if not turn.prefix]
    for share, wanted in zip(SHARES[2:7], trace.prompt[2:7], strict=True):
        assert quantiles(firsts, n=100)[round(share * 100) - 1] == pytest.approx(wanted, rel=0.1)
    assert value(trace.answer, 0.0) == pytest.approx(trace.answer[0])
    assert value(trace.answer, 1.0) == pytest.approx(trace.answer[-1])
    assert all(turn.prefix <= turn.tokens for turn in turns)


@pytest.mark.parametrize("name", TRACES)
def test_an_hour_of_requests_is_like_the_recorded_one(name: str) -> None:
    """Answers of Azure's code are rare above 251 tokens, and the generator draws too many of these."""
    found, recorded = generated(name), RECORDED[name]
    assert found[:3] == pytest.approx(recorded[:3], rel=0.05)
    assert found.answer_mean == pytest.approx(recorded.answer_mean, rel=0.25)
    assert found.shared == pytest.approx(recorded.shared, rel=0.1)


def test_one_p_alone_is_in_time_with_few_writes() -> None:
    one = Plan(prefill=1, decode=1, kv_tokens=8_000_000, load=0.6)
    cells = {mode: figures(replace(one, mode=mode)) for mode in (PushMode.LAYER, PushMode.AUTO)}
    writes = {mode: sum(part["writes"] for part in cell["costs"]) / cell["requests"] for mode, cell in cells.items()}
    assert writes[PushMode.AUTO] < 0.25 * writes[PushMode.LAYER]
    assert cells[PushMode.AUTO]["exposed_s"]["p99"] < 1.1 * cells[PushMode.LAYER]["exposed_s"]["p99"]


@pytest.mark.exhaustive
def test_just_in_time_still_is_in_time_when_six_p_push_into_one_d() -> None:
    """When a slow WRITE counted for some WRITEs instead of some seconds, ``auto`` exposed three times as much as
    ``layer`` here.
    """
    six = Plan(prefill=6, decode=1, kv_tokens=8_000_000, load=0.6, seconds=20.0, warm_up=2.0, seed=3)
    means = {}
    for mode in (PushMode.LAYER, PushMode.AUTO):
        fleet = Fleet(replace(six, mode=mode))
        fleet.run()
        means[mode] = fmean(fleet.outcome.exposed)
    assert means[PushMode.AUTO] < 1.5 * means[PushMode.LAYER]


def test_the_command_writes_the_figures_of_a_fleet(tmp_path: Path, monkeypatch: Patch) -> None:
    """And the revision that it began with, whatever is committed meanwhile."""
    revision = ["first"]
    monkeypatch.setattr("bench.provenance._git", lambda *_: revision[-1])
    monkeypatch.setattr("bench.fleet.__main__._line", lambda *_: str(revision.append("second")))
    options = ["--prefill", "1", "--decode", "1", "--trace", "azure-code", "--seconds", "2", "--gbit", "50"]
    done = CliRunner().invoke(
        app, [*options, "--warm-up", "0", "--mode", "layer", "--out", str(tmp_path / "fleet.json")]
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "fleet.json").read_text())
    (cell,) = result["studies"]["fleet"]
    assert cell["plan"] | {"card": 6.25e9, "mode": "layer", "seconds": 2.0} == cell["plan"]
    assert cell["requests"] > 0
    assert (result["seed"], result["git_sha"]) == (0, "first")


@pytest.mark.parametrize("wrong", [["--model", "llama"], ["--studies", "load,all"], ["--mode", "chunks"]])
def test_the_command_refuses_unknown_names(wrong: list[str]) -> None:
    done = CliRunner().invoke(app, wrong)
    assert done.exit_code == 2
    assert "is none of" in done.output
