"""Engines for the soak's own tests: they only keep their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.e2e.enginehost import Request
from tests.e2e.results import Finished
from tests.faults.soak.engine import Answer
from tests.faults.soak.engine_slots import EngineSlot, EngineSlots
from tests.faults.soak.inhost import Record, collect
from tests.faults.soak.plan import PlannedRequest, RequestPlan
from tests.faults.soak.reference import Reference
from tests.faults.soak.request import SoakRequest
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.traffic import Traffic

RIGHT = (5, 6, 7)
LATER = float("inf")


@dataclasses.dataclass
class FakeSpec:
    name: str
    role: str
    ranks: int = 1
    leaves_last_token: bool = False


class FakeEngine:
    """Answers everything at once."""

    def __init__(self, name: str) -> None:
        self.spec = FakeSpec(name, name[0])
        self.engine_id, self.port = f"{name}-1", 26000
        self.ready, self.paused, self.ended = True, False, False
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.called: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.signals: list[str] = []
        self.refusal: str | None = None
        self.answers: Any = None
        self.waiting_since: float | None = None
        self.exit_code, self.log_path = None, f"{name}/log"

    def add(self, request: Request, then: Callable[[Answer], None]) -> None:
        self.added.append(request)
        then(Answer(error=self.refusal))

    def abort(self, request_id: str, then: Callable[[Answer], None]) -> None:
        self.aborted.append(request_id)
        then(Answer())

    def call(self, function: Callable[..., Any], *args: Any, then: Callable[[Answer], None] | None = None) -> None:
        self.called.append((function, args))
        if then is not None:
            records = (
                {request_id: Record(None, False) for request_id in args[0]} if function is collect else self.answers
            )
            then(Answer(value=records))

    def waits_since(self) -> float | None:
        return self.waiting_since

    def log_tail(self) -> str:
        return "the end of the log"

    def dump_stacks(self) -> None:
        self.signals.append("stacks")

    def kill(self) -> None:
        self.signals.append("kill")
        self.ready = False

    def pause(self) -> None:
        self.signals.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.signals.append("resume")
        self.paused = False

    def shut_down(self) -> None:
        self.signals.append("shut down")


class FakeSlots(EngineSlots):
    """The soak's slots, with engines that only keep their calls."""

    def __init__(self, *names: str) -> None:
        self.slots = {name: EngineSlot(FakeEngine(name)) for name in names}
        self.replaced: list[tuple[str, bool, bool]] = []

    def replace(self, name: str, *, same_id: bool, same_port: bool) -> None:
        self.replaced.append((name, same_id, same_port))


class SoakRig:
    """One P, one D, the plain engine, and the traffic between them."""

    def __init__(self) -> None:
        self.slots = FakeSlots("P1", "D1", "R")
        self.schedule = Schedule()
        self.struck: list[str] = []
        self.done: list[SoakRequest] = []
        self.reference = Reference(self.slots, "R")
        self.traffic = Traffic(self.slots, self.reference, self.schedule, self.struck.append, self.done.append)
        self.p, self.d, self.r = (self.slots[name].engine for name in ("P1", "D1", "R"))

    def send(self, **changes: Any) -> PlannedRequest:
        plan = dataclasses.replace(RequestPlan(0, ()).next(), **{"max_tokens": 3, "order": "together", **changes})
        self.traffic.send(plan)
        return plan

    def pass_time(self) -> None:
        """Runs everything that was put off, until nothing is left."""
        while len(self.schedule):
            self.schedule.run_due(LATER)

    def finish(self, name: str, tokens: tuple[int, ...] = RIGHT, reason: str = "length", params: Any = None) -> None:
        """The engine finishes its last request."""
        engine = self.slots[name].engine
        length = engine.added[-1].max_tokens
        finished = Finished(engine.added[-1].request_id, tokens[:length], params, reason)
        if name == "R":
            self.reference.take(finished)
        else:
            self.traffic.take(self.slots[name], finished)
