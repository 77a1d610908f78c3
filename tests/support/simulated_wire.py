"""One prompt over a simulated wire: the times of ready layers and of WRITEs. No threads, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from layerpush.prefill.write_schedule import SAFETY, Progress, Speeds, layers_to_wait
from layerpush.transport.link_speed import LinkSpeed

Rule = Callable[[Speeds, Progress], int]


def by_layer(_: Speeds, __: Progress) -> int:
    return 0


@dataclass(frozen=True)
class Case:
    """``load`` is the time of a layer's transfer divided by that of its computation. The last chunk of several is
    ``last_part`` as large as the others. ``jitter`` is the share by which layers' and WRITEs' times may differ.
    ``contended`` maps a layer's number to the factor by which the wire is slower from then on.
    """

    layers: int = 32
    chunks: int = 1
    layer_s: float = 5e-3
    layer_bytes: int = 1 << 20
    last_part: float = 1.0
    load: float = 0.1
    write_s: float = 2e-4
    jitter: float = 0.0
    contended: dict[int, float] = field(default_factory=dict)
    seed: int = 0


@dataclass
class Outcome:
    exposed_s: float
    writes: list[tuple[float, float, int]]
    """Times of each post and landing, and the number of layers."""
    idle_while_ready: int
    """How often no WRITE left although the wire was idle and a layer was ready."""

    @property
    def largest_s(self) -> float:
        return max(landed - posted for posted, landed, _ in self.writes)


def known(case: Case, wrong_by: float = 1.0) -> LinkSpeed:
    """An engine's measured speed of ``case``'s wire, or a wrong speed: ``wrong_by`` times as slow."""
    speed, at = LinkSpeed(), 0.0
    for key, size in enumerate([1, 4, 1, 4, case.layers]):
        nbytes = size * case.layer_bytes
        speed.write_posted(-1 - key, nbytes, at)
        at += (case.write_s + size * case.load * case.layer_s) * wrong_by
        speed.write_ended(-1 - key, at, landed=True)
    return speed


def push(case: Case, rule: Rule = layers_to_wait, speed: LinkSpeed | None = None) -> Outcome:
    """Push with a writer that decides when a layer is ready, and when a WRITE has landed."""
    wire = _Wire(case, rule, speed or LinkSpeed())
    rng = random.Random(case.seed)
    for number in range(case.layers * case.chunks):
        wire.chunk, layer = divmod(number, case.layers)
        ready_at = wire.now + wire.part * case.layer_s * (1 + rng.uniform(-case.jitter, case.jitter))
        wire.noise = rng.uniform(0, case.jitter)
        while wire.in_flight and wire.in_flight[0][1] <= ready_at:
            wire.land()
            wire.look()
        wire.now = ready_at
        wire.slower = case.contended.get(number, wire.slower)
        wire.ready = layer + 1
        wire.layers, wire.size = wire.layers + 1, wire.size + int(wire.part * case.layer_bytes)
        wire.look()
    return Outcome(wire.free - wire.now, wire.writes, wire.idle_while_ready)


@dataclass
class _Wire:
    case: Case
    rule: Rule
    speed: LinkSpeed
    now: float = 100.0
    free: float = 100.0
    chunk: int = 0
    ready: int = 0
    layers: int = 0
    size: int = 0
    slower: float = 1.0
    noise: float = 0.0
    idle_while_ready: int = 0
    has_landed: bool = False
    in_flight: list[tuple[int, float]] = field(default_factory=list)
    writes: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def part(self) -> float:
        return self.case.last_part if self.is_last and self.case.chunks > 1 else 1.0

    @property
    def is_last(self) -> bool:
        return self.chunk == self.case.chunks - 1

    @property
    def next_part(self) -> float:
        if self.is_last:
            return 0.0
        return self.case.last_part if self.chunk == self.case.chunks - 2 else 1.0

    def land(self) -> None:
        key, self.now = self.in_flight.pop(0)
        self.speed.write_ended(key, self.now, landed=True)
        self.has_landed = True

    def look(self) -> None:
        case, speed = self.case, self.speed
        if not self.layers:
            return
        layer_bytes = int(self.part * case.layer_bytes)
        slowdown, (write_s, byte_s) = speed.slowdown(self.now), speed.line
        progress = Progress(
            layers=case.layers,
            ready=self.ready,
            writes=1,
            layer_bytes=layer_bytes,
            unposted_bytes=self.size + (case.layers - self.ready) * layer_bytes,
            busy_s=speed.busy_s(self.now, SAFETY),
            next_part=self.next_part,
            probed=self.has_landed,
        )
        speeds = Speeds()
        if speed.is_known:
            speeds = Speeds(self.part * case.layer_s, byte_s * slowdown, write_s * slowdown, speed.proven_bytes)
        if self.rule(speeds, progress):
            self.idle_while_ready += not self.in_flight
            return
        true_byte_s = case.load * case.layer_s / case.layer_bytes
        landed = max(self.now, self.free) + (case.write_s + self.size * true_byte_s) * self.slower * (1 + self.noise)
        speed.write_posted(len(self.writes), self.size, self.now)
        self.in_flight.append((len(self.writes), landed))
        self.writes.append((self.now, landed, self.layers))
        self.layers, self.size, self.free = 0, 0, landed
