"""The faults that strike engines and their wires."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.e2e import wirefaults
from tests.faults.soak import noise, scripted
from tests.faults.soak.engine_slots import EngineSlot, EngineSlots
from tests.faults.soak.kinds import Kind, Side
from tests.faults.soak.plan import PlannedFault
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.specs import PEER_TIMEOUT_S, WRITE_TIMEOUT_S

RETRY_S = 0.2
RESTART_S = (0.0, 1.0, 5.0)
SHUTDOWN_S = 20.0
DEAD_THREAD_S = 10.0
LONG_S = 32.0  # longer than any deadline, and than outcomes wait for a stopped main thread
# Seconds beyond a deadline: in time for the first answer to it, or after D has parked its blocks.
BEYOND_S = (1.0, PEER_TIMEOUT_S + 2.0, PEER_TIMEOUT_S + 6.0)
BURST = 3
OUR_MESSAGES = ("accepted", "fail", "cancelled", "pong", "cancel", "ping", "prefixlanded")


class Restart(NamedTuple):
    """How an ended engine comes back, and after how many seconds."""

    same_id: bool
    same_port: bool
    after_s: float


class EngineFaults:
    """Injects faults and ends them. Calls ``struck`` or ``skipped`` for each.

    ``busy``: whether an engine has requests. The death of an engine without requests tests nothing.
    ``burst`` sends so many long prompts. ``stuck`` gets an engine that does not obey.
    """

    def __init__(
        self,
        slots: EngineSlots,
        schedule: Schedule,
        struck: Callable[[str], None],
        skipped: Callable[[str], None],
        busy: Callable[[EngineSlot], bool],
        burst: Callable[[int], None],
        stuck: Callable[[EngineSlot, str], None],
    ) -> None:
        self._slots, self._schedule = slots, schedule
        self._struck, self._skipped, self._busy, self._burst, self._stuck = struck, skipped, busy, burst, stuck
        self._restarts: dict[str, Restart] = {}
        self.outstanding = 0

    def strike(self, fault: PlannedFault, until: float) -> None:
        """Inject a fault as soon as its side is undisturbed and busy. Skip the fault at the time ``until``."""
        rng = random.Random(fault.draw)
        sides: tuple[Side, ...] = (fault.kind.side,) if fault.kind.side else ("P", "D")
        side = rng.choice(sides)
        calm = [slot for slot in self._slots.of(side) if slot.calm]
        disturbs = fault.kind.place == "engine" and fault.kind.name != "preempt"
        slot = rng.choice(calm) if calm else None
        if slot is None or (disturbs and (len(calm) < len(self._slots.of(side)) or not self._busy(slot))):
            at = time.monotonic() + RETRY_S
            if at > until:
                self._skipped(fault.kind.name)
            else:
                self._schedule.put(at, partial(self.strike, fault, until))
            return
        self._inject(fault.kind, slot, rng)

    def leave(self, slot: EngineSlot) -> None:
        """An engine ends by itself: restart it under its own id."""
        slot.leaving = True
        self._restarts.setdefault(slot.name, Restart(True, True, 0.0))

    def ended(self, slot: EngineSlot) -> None:
        """An engine has ended as planned: start another one for it after a while."""
        again = self._restarts.pop(slot.name)
        act = partial(self._slots.replace, slot.name, same_id=again.same_id, same_port=again.same_port)
        self._outlast(again.after_s, act)

    def _inject(self, kind: Kind, slot: EngineSlot, rng: random.Random) -> None:
        self._struck(kind.name)
        match kind.name:
            case "kill-p" | "kill-d" | "kill-p-new" | "kill-d-new" | "move-p" | "move-d":
                new = kind.name.endswith("-new")
                self._leave(slot, rng, same_id=not new, same_port=not new and not kind.name.startswith("move"))
                slot.engine.kill()
            case "writer-p" | "writer-d":
                self._leave(slot, rng)
                slot.engine.call(scripted.end_writer)
                self._outlast(DEAD_THREAD_S, partial(self._must_have_ended, slot, slot.incarnation, DEAD_THREAD_S))
            case "shutdown-p" | "shutdown-d":
                same = rng.random() < 0.5
                self._leave(slot, rng, same_id=same, same_port=same)
                slot.engine.shut_down()
                self._outlast(SHUTDOWN_S, partial(self._must_have_ended, slot, slot.incarnation, SHUTDOWN_S))
            case "stop-p" | "stop-d":
                slot.engine.pause()
                limit = PEER_TIMEOUT_S if kind.name == "stop-p" else WRITE_TIMEOUT_S
                self._outlast(limit + rng.choice((*BEYOND_S, LONG_S)), partial(self._resume, slot, slot.incarnation))
            case "preempt":
                self._burst(BURST)
            case "garbage-port":
                noise.send_noise("127.0.0.1", slot.engine.port, rng)
            case "garbage-notes":
                slot.engine.call(scripted.throw_garbage, rng.randint(1, 20), rng.random())
            case _:
                self._arm(kind.name, slot, rng)

    def _arm(self, name: str, slot: EngineSlot, rng: random.Random) -> None:
        engine, count = slot.engine, rng.randint(1, 8)
        match name:
            case "fail-post":
                engine.call(scripted.arm_posts, name, "fail", rng.randrange(6), count)
            case "err-handle":
                engine.call(scripted.arm_posts, name, "err", rng.randrange(6), count)
            case "stuck-handle":
                engine.call(scripted.arm_posts, name, "hold", rng.randrange(6), count)
                self._lift_after(slot, WRITE_TIMEOUT_S + rng.choice(BEYOND_S))
            case "fail-handshake":
                engine.call(scripted.arm_handshakes, name, rng.randint(1, 3))
            case "dup-registration":
                engine.call(scripted.arm_messages, name, "duplicate", "registration", count)
            case "drop-notes" | "dup-notes" | "delay-notes":
                fault = {"drop-notes": "drop", "dup-notes": "duplicate", "delay-notes": "hold"}[name]
                for kind in rng.sample(OUR_MESSAGES, k=2):
                    engine.call(scripted.arm_messages, name, fault, kind, count)
                if fault == "hold":
                    self._lift_after(slot, rng.choice((0.2, 1.0, PEER_TIMEOUT_S + 1.0)))

    def _leave(self, slot: EngineSlot, rng: random.Random, *, same_id: bool = True, same_port: bool = True) -> None:
        slot.leaving = True
        self._restarts[slot.name] = Restart(same_id, same_port, rng.choice(RESTART_S))

    def _lift_after(self, slot: EngineSlot, seconds: float) -> None:
        incarnation = slot.incarnation

        def lift() -> None:
            if slot.incarnation == incarnation and slot.engine.ready:
                slot.engine.call(wirefaults.lift)

        self._outlast(seconds, lift)

    def _resume(self, slot: EngineSlot, incarnation: int) -> None:
        if slot.incarnation == incarnation and slot.engine.paused:
            slot.engine.resume()

    def _must_have_ended(self, slot: EngineSlot, incarnation: int, within_s: float) -> None:
        if slot.incarnation == incarnation and slot.leaving and not slot.engine.ended:
            self._stuck(slot, f"did not end within {within_s:.0f} s")

    def _outlast(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` later, even after the end of the round's load."""
        self.outstanding += 1

        def act() -> None:
            self.outstanding -= 1
            action()

        self._schedule.put(time.monotonic() + seconds, act)
