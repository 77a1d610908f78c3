"""The fleet: engines, a router, deaths and restarts, and the rules that every run checks.

1. A load ends once: loaded or failed.
2. D uses a block only after the bytes of all its layers have landed.
3. A WRITE reads blocks of one prompt on P, and lands in blocks of the same prompt on D, from its post to its end. So
   nothing lands for an earlier life of an engine, and nobody gives away a block under a WRITE.
4. Every wait ends: when all requests are over, no load, push, claim, handshake, WRITE or block is left.
5. The client gets one first token for each request, or its last try has failed.
6. The product logs no exception.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from bench.fleet.arrivals import TRACES, Arrival, arrivals
from bench.fleet.clock import Clock
from bench.fleet.engines import DecodeEngine, FleetEngine, PrefillEngine, PrefixCache
from bench.fleet.fabric import BrokenRuleError, Endpoint, Fabric, FabricLink
from bench.fleet.presets import MODELS, PATIENCE_S, RACK, WRITE_S, RankModel
from bench.fleet.worker import Worker
from bench.rank import Defects
from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import PushRecord

TRIES = 3
HISTORY_S = 600.0
"""Before the run, the caches take up the turns of so many seconds."""


@dataclass(frozen=True)
class Plan:
    """``load`` is the share of P's time that prefill takes, caches left out. Requests come for ``seconds``; those of
    the first ``warm_up`` do not count. ``card`` in bytes a second, ``write_s`` of a WRITE of any size.
    ``oversubscription`` of a rack's links; 1: none. ``restart_at``: all engines die, and start again ``down_s`` later.
    ``deaths``: engines that do so at random times. ``answer``: tokens of each answer, None: the trace's;
    ``kv_tokens``: of each KV cache, None: the model's.
    """

    prefill: int = 4
    decode: int = 4
    model: str = "llama-8b"
    trace: str = "mooncake"
    mode: PushMode = PushMode.AUTO
    load: float = 0.5
    seconds: float = 60.0
    warm_up: float = 10.0
    card: float = 12.5e9
    write_s: float = WRITE_S
    oversubscription: float = 1.0
    router: str = "least_loaded"
    restart_at: float | None = None
    down_s: float = 5.0
    deaths: int = 0
    answer: int | None = None
    kv_tokens: int | None = None
    seed: int = 0


@dataclass(eq=False)
class FleetRequest:
    """``number`` is 1 or more, and names it in memory."""

    number: int
    arrived: float
    conversation: int
    tokens: int
    answer: int
    prefix: int
    tries: int = 0
    first_token_at: float | None = None
    has_failed: bool = False

    @property
    def is_over(self) -> bool:
        return self.first_token_at is not None or self.has_failed

    @property
    def name(self) -> str:
        """Its name at the router: each try has one of its own."""
        return f"r{self.number}.{self.tries}"


@dataclass
class Outcome:
    """Times in seconds, of requests and pushes after the warm-up."""

    ttft: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    pushes: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    by_second: dict[int, list[float]] = field(default_factory=dict)
    """Times to the first token, by the second in which the request came."""


class Fleet:
    """``model`` and ``turns``: None for the plan's model and for draws from its trace."""

    prefill_engine = PrefillEngine

    def __init__(self, plan: Plan, model: RankModel | None = None, turns: Iterable[Arrival] | None = None) -> None:
        self.plan, self.model, self.mode, self.turns = plan, model or MODELS[plan.model], plan.mode, turns
        self.kv_tokens = plan.kv_tokens or self.model.kv_tokens
        self.clock, self.draw, self.outcome = Clock(), random.Random(plan.seed), Outcome()
        self.began = self.clock.now
        self.fabric = Fabric(self.clock, plan.write_s, self.model.token_bytes * self.model.block_tokens)
        self.blocks = (self.kv_tokens // self.model.block_tokens,) * 2
        self.probes = self.most_handshakes = 0
        self.handshake_s: list[float] = []
        self._costs: list[dict[str, Any]] = []
        self._costs_from = self.began
        self.requests: list[FleetRequest] = []
        self.engines: dict[str, FleetEngine] = {}
        self._ids, self._lives = itertools.count(1), Counter[str]()
        self._turns = itertools.count()
        self._sides: tuple[list[str], list[str]]
        self._sides = [f"P{n}" for n in range(plan.prefill)], [f"D{n}" for n in range(plan.decode)]
        self._racks: dict[tuple[str, int], FabricLink] = {}
        self._paths = {name: self._path(name, number) for side in self._sides for number, name in enumerate(side)}
        self._caches = {name: self.empty_cache() for name in self._paths}
        for name in self._paths:
            self.start(name)

    # What engines ask for.

    def endpoint(self, name: str, worker: Worker, layers: int, blocks: int) -> Endpoint:
        return Endpoint(self.fabric, name, worker, self._paths[worker.engine_id], layers, blocks)

    def _path(self, name: str, number: int) -> tuple[FabricLink, ...]:
        """An engine's card, and the link of its rack if it is narrower than the cards of the rack."""
        card, rack = FabricLink(self.plan.card), (name[0], number // RACK)
        if self.plan.oversubscription <= 1:
            return (card,)
        engines = min(RACK, len(self._sides[name[0] == "D"]) - rack[1] * RACK)
        uplink = self._racks.setdefault(rack, FabricLink(engines * self.plan.card / self.plan.oversubscription))
        return (card, uplink)

    def prefixes(self, engine_id: str) -> PrefixCache:
        return self._caches[engine_id]

    def empty_cache(self) -> PrefixCache:
        return PrefixCache(self.kv_tokens, self.model.block_tokens)

    def new_id(self, request: FleetRequest) -> str:
        """An engine's own id."""
        return f"{request.name}-{next(self._ids):08x}"

    @staticmethod
    def base_id(request_id: str) -> str:
        return request_id.rpartition("-")[0]

    def handshake_ended(self, at_once: int, seconds: float) -> None:
        """``at_once``: of the engine that began it."""
        self.most_handshakes = max(self.most_handshakes, at_once)
        self.handshake_s.append(seconds)

    @staticmethod
    def rule(number: str, holds: bool, *why: str) -> None:
        if not holds:
            raise BrokenRuleError(f"rule {number} is broken: {', '.join(why)}")

    def _counts(self, at: float) -> bool:
        return at >= self.began + self.plan.warm_up

    def push_ended(self, record: PushRecord) -> None:
        exposed = record.exposed_s(record.t_last_ready)
        if record.t_first_planned is not None and self._counts(record.t_first_planned):
            self.outcome.pushes[record.outcome] += 1
            if record.outcome == "completed" and exposed is not None:
                self.outcome.exposed.append(exposed)

    def first_token(self, request: FleetRequest) -> None:
        self.rule("5", not request.is_over)
        request.first_token_at = self.clock.now
        if self._counts(request.arrived):
            ttft = self.clock.now - request.arrived
            self.outcome.ttft.append(ttft)
            self.outcome.by_second.setdefault(int(request.arrived - self.began), []).append(ttft)

    def failed(self, request: FleetRequest) -> None:
        """The router tries again, with other engines if it can."""
        if request.tries + 1 < TRIES:
            request.tries += 1
            self.clock.after(0.0, lambda: self.route(request))
        else:
            request.has_failed = True
            self.outcome.failed += 1

    # The router. It sends each request to both engines at once.

    def route(self, request: FleetRequest) -> None:
        prefill, decode = (self._choose(side, request) for side in self._sides)
        if prefill is None or decode is None:
            self.clock.after(1.0, lambda: self.route(request))
            return
        assert isinstance(prefill, PrefillEngine)
        assert isinstance(decode, DecodeEngine)
        decode.submit(request, prefill.address)
        prefill.submit(request)

    def _choose(self, names: list[str], request: FleetRequest) -> FleetEngine | None:
        living = [engine for name in names if (engine := self.engines[name]).is_alive]
        if not living:
            return None
        if self.plan.router == "sticky":
            home = self.engines[names[request.conversation % len(names)]]
            if home.is_alive:
                return home
        if self.plan.router == "round_robin":
            turn = next(self._turns) // 2 // (1 if names is self._sides[0] else self.plan.prefill)
            return living[turn % len(living)]
        offset = self.draw.randrange(len(living))
        return min(living[offset:] + living[:offset], key=lambda engine: engine.load)

    # Lives and deaths.

    def start(self, engine_id: str) -> None:
        life = self._lives[engine_id]
        self._lives[engine_id] += 1
        kind = self.prefill_engine if engine_id.startswith("P") else DecodeEngine
        self.engines[engine_id] = kind(self, engine_id, life)

    def kill(self, engine_id: str) -> None:
        engine = self.engines[engine_id]
        if engine.is_alive:
            engine.is_alive = False
            self.fabric.kill(engine.worker.transport)
            if isinstance(engine, DecodeEngine):
                for request in engine.lost:
                    self.failed(request)
            self.clock.after(self.plan.down_s, lambda: self.start(engine_id))

    # The run.

    def run(self) -> dict[str, Any]:
        """Run the plan, and check the rules. Returns the figures. Raises ``BrokenRuleError``."""
        plan = self.plan
        for turn in self._arrivals() if self.turns is None else self.turns:
            if turn.at >= 0:
                self.clock.after(turn.at, partial(self._arrive, turn))
            else:
                self._remember(turn)
        if plan.restart_at is not None:
            self.clock.after(plan.restart_at, self._note_costs)
            for name in self.engines:
                self.clock.after(plan.restart_at, partial(self.kill, name))
        for _ in range(plan.deaths):
            self.clock.after(
                self.draw.uniform(0.0, plan.seconds), partial(self.kill, self.draw.choice([*self.engines]))
            )
        log, defects = logging.getLogger("vllm.layerpush"), Defects()
        log.addHandler(defects)
        try:
            self._run()
        finally:
            log.removeHandler(defects)
        self.rule("5", all((each.first_token_at is not None) != each.has_failed for each in self.requests))
        self.rule("6", not defects.seen, *defects.seen[:1])
        return {"requests": len(self.requests), "costs": self._costs, **self._times()}

    def _run(self) -> None:
        """Requests come, and then all end."""
        self.clock.run(self.began + self.plan.seconds)
        self._note_costs()
        end = self.clock.now + 4 * PATIENCE_S
        while self.clock.now < end and self._open_ends():
            self.clock.run(self.clock.now + 1.0)
        left = self._open_ends()
        self.rule("4", not left, *left)

    def _arrivals(self) -> Iterator[Arrival]:
        trace, sample = TRACES[self.plan.trace], random.Random(0)
        lengths = [turn.tokens for turn in arrivals(trace, 1.0, -HISTORY_S, HISTORY_S, sample)]
        mean_s = fmean(self.model.seconds(0, tokens) for tokens in lengths)
        rate = self.plan.load * self.plan.prefill / mean_s
        return arrivals(trace, rate, -HISTORY_S if trace.follows else 0.0, self.plan.seconds, self.draw)

    def _arrive(self, turn: Arrival) -> None:
        number, now = len(self.requests) + 1, self.clock.now
        answer = turn.answer if self.plan.answer is None else self.plan.answer
        request = FleetRequest(number, now, turn.conversation, turn.tokens, answer, turn.prefix)
        self.requests.append(request)
        self.route(request)

    def _remember(self, turn: Arrival) -> None:
        """A turn before the run is in a cache of each side."""
        for side in self._sides:
            home = turn.conversation if self.plan.router == "sticky" else self.draw.randrange(len(side))
            self._caches[side[home % len(side)]].keep(turn)

    def _open_ends(self) -> list[str]:
        waiting = [f"{request.name} waits" for request in self.requests if not request.is_over]
        return waiting + [end for engine in self.engines.values() if engine.is_alive for end in engine.open_ends]

    # Figures.

    def _note_costs(self) -> None:
        """The costs since the last call, or since the beginning."""
        fabric, seconds = self.fabric, self.clock.now - self._costs_from
        living = [engine.worker for engine in self.engines.values()]
        held = [sum(worker.peers[name].held_bytes for name in worker.connected) for worker in living]
        moved = [self._paths[name][0].moved for name in self._sides[1]]
        self._costs.append(
            {
                "seconds": seconds,
                "messages_per_s": {kind: count / seconds for kind, count in sorted(fabric.messages.items())},
                "message_bytes_per_s": sum(fabric.message_bytes.values()) / seconds,
                "handshakes": len(self.handshake_s),
                "handshake_s": percentiles(self.handshake_s),
                "most_handshakes_of_an_engine": self.most_handshakes,
                "probes": self.probes,
                "writes": fabric.writes,
                "most_peers": max(len(worker.connected) for worker in living),
                "most_peer_bytes": max(held),
                "most_card_use_of_d": max(moved) / (self.plan.card * seconds),
            }
        )
        self._costs_from, self.handshake_s = self.clock.now, []
        self.probes = self.most_handshakes = fabric.writes = 0
        fabric.messages.clear()
        fabric.message_bytes.clear()
        for name in self._sides[1]:
            self._paths[name][0].moved = 0.0

    def _times(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "ttft_s": percentiles(outcome.ttft),
            "exposed_s": percentiles(outcome.exposed),
            "pushes": dict(outcome.pushes),
            "failed": outcome.failed,
            "ttft_by_second": [
                [second, *percentiles(found).values()] for second, found in sorted(outcome.by_second.items())
            ],
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{share}": float(np.percentile(values, share)) if values else None for share in (50, 99)}
