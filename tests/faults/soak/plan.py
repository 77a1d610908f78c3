"""Requests and faults with their times, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from tests.e2e.models import VOCABULARY
from tests.faults.soak.kinds import Kind, Side

T = TypeVar("T")
Order = Literal["together", "d-first", "p-first"]

LENGTHS = (1, 31, 32, 33, 64, 96, 149, 150, 151, 255, 256, 257, 400, 512, 700, 900, 1200)
PREFIXES = (64, 200, 480)
BURST_LENGTHS = (1100, 1250)
ANSWERS = (1, 4, 8, 8, 8, 16)
FAULTY_REQUESTS = 0.35
NEXT_TURNS = 0.4
HELD_FOR_S = 3.0
ENGINE_FAULT_EVERY_S = 6.0
WIRE_FAULT_EVERY_S = 3.0
FIRST_FAULT_S = 1.5


@dataclass(frozen=True)
class PlannedRequest:
    """One request. ``draw`` (0 to 1) decides the open choices of its fault, ``after_s`` the fault's time.

    ``gap_s``: P's delay after D (``d-first``). ``d_after_s``: D's delay after P's answer (``p-first``). ``turn`` (0 to
    1) chooses one of the last turns: the tokens continue it. None: they are the whole prompt.
    """

    number: int
    token_ids: tuple[int, ...]
    max_tokens: int
    p_rank: int
    d_rank: int
    order: Order
    gap_s: float
    fault: str | None
    after_s: float
    draw: float
    d_after_s: float = 0.0
    turn: float | None = None

    def among(self, side: Side, names: Sequence[str]) -> str:
        """This request's engine among ``names``."""
        return names[(self.p_rank if side == "P" else self.d_rank) % len(names)]


@dataclass(frozen=True)
class PlannedFault:
    """One fault, ``at_s`` seconds after the round's start. ``draw`` (0 to 1) decides the engine and details."""

    kind: Kind
    at_s: float
    draw: float


class RequestPlan:
    """An endless list of requests."""

    def __init__(self, seed: int, kinds: Sequence[Kind]) -> None:
        self._rng, self._burst_rng = random.Random(f"{seed}/requests"), random.Random(f"{seed}/bursts")
        self._bag = Bag(self._rng, [kind.name for kind in kinds if kind.place == "request"])
        self._prefixes = [tuple(self._rng.choices(VOCABULARY, k=length)) for length in PREFIXES]
        self._count = 0

    def next(self) -> PlannedRequest:
        rng = self._rng
        fault = self._bag.take() if self._bag and rng.random() < FAULTY_REQUESTS else None
        request = self._request(rng, self._prompt(rng.choice(LENGTHS), shares=fault != "unequal"), fault)
        return replace(request, turn=rng.random() if rng.random() < NEXT_TURNS else None)

    def burst(self, size: int) -> list[PlannedRequest]:
        """Long prompts without a common prefix, all for the first P. P must keep one of them until its D comes."""
        rng = self._burst_rng
        prompts = [tuple(rng.choices(VOCABULARY, k=rng.choice(BURST_LENGTHS))) for _ in range(size)]
        burst = [replace(self._request(rng, prompt, None), p_rank=0, order="d-first", gap_s=0.2) for prompt in prompts]
        burst[0] = replace(burst[0], order="p-first", d_after_s=HELD_FOR_S)
        return burst

    def _prompt(self, length: int, *, shares: bool) -> tuple[int, ...]:
        """A prompt, maybe with a shared prefix if it ``shares``. A prefix in D's cache hides D's number of blocks."""
        prefix = self._rng.choice(self._prefixes) if shares and self._rng.random() < 0.4 else ()
        own = max(1, length - len(prefix))
        return prefix + tuple(self._rng.choices(VOCABULARY, k=own))

    def _request(self, rng: random.Random, token_ids: tuple[int, ...], fault: str | None) -> PlannedRequest:
        self._count += 1
        return PlannedRequest(
            number=self._count,
            token_ids=token_ids,
            max_tokens=rng.choice(ANSWERS),
            p_rank=rng.randrange(64),
            d_rank=rng.randrange(64),
            order=rng.choice(("together", "together", "d-first", "p-first")),
            gap_s=rng.uniform(0, 0.5),
            fault=fault,
            after_s=rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.4), rng.uniform(0, 2.0))),
            draw=rng.random(),
        )


class FaultPlan:
    """The faults of all rounds: every kind comes up once before any comes up again."""

    def __init__(self, seed: int, kinds: Sequence[Kind]) -> None:
        self._rng = random.Random(f"{seed}/faults")
        self._engine = Bag(self._rng, [kind for kind in kinds if kind.place == "engine"])
        self._wire = Bag(self._rng, [kind for kind in kinds if kind.place == "wire"])

    def round(self, load_s: float) -> list[PlannedFault]:
        """The faults of one round in order of time."""
        faults = self._strew(self._engine, ENGINE_FAULT_EVERY_S, load_s) + self._strew(
            self._wire, WIRE_FAULT_EVERY_S, load_s
        )
        return sorted(faults, key=lambda fault: fault.at_s)

    def _strew(self, bag: Bag[Kind], every_s: float, load_s: float) -> list[PlannedFault]:
        faults: list[PlannedFault] = []
        at = FIRST_FAULT_S + self._rng.uniform(0, every_s / 2)
        while bag and at < load_s:
            faults.append(PlannedFault(bag.take(), at, self._rng.random()))
            at += self._rng.uniform(0.5, 1.5) * every_s
        return faults


class Bag(Generic[T]):
    """Draws each thing once before it repeats any."""

    def __init__(self, rng: random.Random, things: Sequence[T]) -> None:
        self._rng = rng
        self._things = list(things)
        self._left: list[T] = []

    def __bool__(self) -> bool:
        return bool(self._things)

    def take(self) -> T:
        if not self._left:
            self._left = list(self._things)
            self._rng.shuffle(self._left)
        return self._left.pop()
