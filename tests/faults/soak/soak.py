"""The soak itself: rounds of load and faults, each followed by calm and an audit of every engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tests.e2e.results import Finished
from tests.faults.soak.audits import Auditor
from tests.faults.soak.counting import Counting
from tests.faults.soak.engine import Ended
from tests.faults.soak.engine_faults import EngineFaults
from tests.faults.soak.engine_slots import EngineSlot, EngineSlots
from tests.faults.soak.plan import FaultPlan, PlannedFault, RequestPlan
from tests.faults.soak.reference import Reference
from tests.faults.soak.request import SoakRequest
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.settings import Settings
from tests.faults.soak.tally import Tally
from tests.faults.soak.traffic import Traffic

START_S = 180.0
HANG_S = 90.0
SILENCE_S = 60.0
TURN_S = 0.05
MEMORY_EVERY_S = 1.0
DISTURBED_FOR_S = 30.0


class NotStartedError(RuntimeError):
    """An engine did not start at the beginning. The message has the end of its log."""


class ReferenceLostError(RuntimeError):
    """The plain engine has ended, so no answer can be checked."""


class Soak:
    """One run. It calls ``watch`` often, for progress. `stop` ends the load, a second `stop` the run."""

    def __init__(self, settings: Settings, slots: EngineSlots, tally: Tally, watch: Callable[[str], None]) -> None:
        self.slots, self.tally, self._settings, self._watch = slots, tally, settings, watch
        self._requests = RequestPlan(settings.seed, settings.kinds)
        self._faults = FaultPlan(settings.seed, settings.kinds)
        self._schedule = Schedule()
        self._reference = Reference(slots, "R")
        self.traffic = Traffic(slots, self._reference, self._schedule, self._struck, self._account)
        self._engine_faults = EngineFaults(
            slots, self._schedule, self._struck, self._skipped, self.traffic.busy, self._burst, self._stuck
        )
        self._counting = Counting(slots, tally.effects)
        self._last_struck = float("-inf")
        self._last_memory = 0.0
        self._stops = 0

    def stop(self) -> None:
        self._stops += 1

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def start(self) -> None:
        """Wait for all engines. Raises NotStartedError."""
        deadline = time.monotonic() + START_S
        while not self.slots.all_calm:
            for slot, event in self.slots.wait(TURN_S):
                if isinstance(event, Ended):
                    raise NotStartedError(f"{slot.name} did not start:\n{event.crash or ''}\n{slot.engine.log_tail()}")
            self._watch("starting")
            if time.monotonic() > deadline:
                raise NotStartedError(f"not all engines were up after {START_S:.0f} s")
            if self.stopped:
                return

    def run(self) -> None:
        end = time.monotonic() + 60 * self._settings.minutes
        while not self.stopped and time.monotonic() < end:
            self.tally.begin_round()
            self._load(min(self._settings.round_s, max(5.0, end - time.monotonic())))
            self._calm_down()
            if self._stops < 2:
                self._audit()
            self.tally.end_round()

    # Phases of a round

    def _load(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for fault in self._faults.round(seconds):
            self._schedule.put(time.monotonic() + fault.at_s, partial(self._strike, fault, until))
        while time.monotonic() < until and not self.stopped:
            self._top_up()
            self._turn("load")

    def _calm_down(self) -> None:
        """Wait until no request and no fault is left, and every engine is up."""
        while self._stops < 2 and not self._is_calm():
            self._turn("calming down")

    def _is_calm(self) -> bool:
        return not (self.traffic.outstanding or self._engine_faults.outstanding) and self.slots.all_calm

    def _audit(self) -> None:
        auditor = Auditor([slot for slot in self.slots if slot.name != "R"], self.traffic.sent)
        while not auditor.over(time.monotonic()) and self._stops < 2:
            self._turn("audit")
        for text in auditor.leaks():
            self.tally.problem("leak", text)
        for slot in auditor.leaking():
            self._end_engine(slot)
        auditor.learn()
        self.slots.measure_memory(idle=True)
        self.traffic.sent.clear()

    # One turn

    def _turn(self, phase: str) -> None:
        for slot, event in self.slots.wait(TURN_S):
            if isinstance(event, Ended):
                self._ended(slot, event)
            elif isinstance(event, Finished):
                self._reference.take(event) if slot.name == "R" else self.traffic.take(slot, event)
        now = time.monotonic()
        self._schedule.run_due(now)
        self._look_for_hangs(now)
        self._counting.advance(now)
        if now > self._last_memory + MEMORY_EVERY_S:
            self._last_memory = now
            self.slots.measure_memory()
        self._watch(phase)

    def _top_up(self) -> None:
        room = self.traffic.quick < self._settings.in_flight and len(self.traffic.live) < 2 * self._settings.in_flight
        if room and all(self.slots.usable(side) for side in ("P", "D")):
            self.traffic.send(self._requests.next())

    def _burst(self, count: int) -> None:
        for plan in self._requests.burst(count):
            if all(self.slots.usable(side) for side in ("P", "D")):
                self.traffic.send(plan)

    def _account(self, request: SoakRequest) -> None:
        request.compare_kv()
        self.tally.account(request, disturbed=self._last_struck > request.sent_at - DISTURBED_FOR_S)

    # Faults and their consequences

    def _strike(self, fault: PlannedFault, until: float) -> None:
        if self.stopped:
            self._skipped(fault.kind.name)
        else:
            self._engine_faults.strike(fault, until)

    def _skipped(self, kind: str) -> None:
        self.tally.skipped[kind] += 1

    def _struck(self, kind: str) -> None:
        self._last_struck = time.monotonic()
        self.tally.struck(kind)

    def _ended(self, slot: EngineSlot, event: Ended) -> None:
        if slot.name == "R":
            raise ReferenceLostError(f"the plain engine died:\n{event.crash or ''}\n{slot.engine.log_tail()}")
        self.traffic.lose(slot)
        if not slot.leaving:
            text = (event.crash or f"exit code {slot.engine.exit_code}").strip()
            self.tally.problem("death", f"{slot.name} ({slot.engine.log_path}) died: {text[-2000:]}")
            self._engine_faults.leave(slot)
        self._engine_faults.ended(slot)

    def _look_for_hangs(self, now: float) -> None:
        for request in list(self.traffic.live.values()):
            if now - request.sent_at > HANG_S:
                states = ", ".join(f"{leg.engine} {leg.state.value}" for leg in request.legs)
                self.tally.problem(
                    "hang", f"{request.request_id} ({request.plan.fault or 'no fault of its own'}): {states}"
                )
                for leg in request.legs:
                    self.slots[leg.engine].engine.dump_stacks()
                self.traffic.give_up(request)
        for slot in self.slots:
            since = slot.engine.waits_since()
            if slot.engine.ready and not slot.engine.paused and since is not None and now - since > SILENCE_S:
                self._stuck(slot, f"has not answered for {SILENCE_S:.0f} s")

    def _stuck(self, slot: EngineSlot, what: str) -> None:
        """An engine hangs: write its stacks to the log, and put a fresh one in its place."""
        self.tally.problem("hang", f"{slot.name} ({slot.engine.log_path}) {what}")
        slot.engine.dump_stacks()
        self._end_engine(slot)

    def _end_engine(self, slot: EngineSlot) -> None:
        self._engine_faults.leave(slot)
        slot.engine.kill()
