"""The faults that strike engines and their wires."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

from tests.e2e import wirefaults
from tests.faults.soak import scripted, vandal
from tests.faults.soak.agenda import Agenda
from tests.faults.soak.kinds import Kind, Side
from tests.faults.soak.plan import PlannedFault
from tests.faults.soak.seats import Seat, Seats
from tests.faults.soak.specs import PEER_TIMEOUT_S, WRITE_TIMEOUT_S

RETRY_S = 0.2
RESTART_S = (0.0, 1.0, 5.0)
SHUTDOWN_S = 20.0
LONG_S = 32.0  # longer than any deadline, and than outcomes wait for a stopped main thread
# Seconds beyond a deadline: in time for the first answer to it, or after D has set its blocks aside.
BEYOND_S = (1.0, PEER_TIMEOUT_S + 2.0, PEER_TIMEOUT_S + 6.0)
BURST = 3
OUR_MESSAGES = {"P": ("accepted", "fail", "cancelled", "pong"), "D": ("cancel", "ping")}


class Mischief:
    """Injects faults and ends them. Calls ``struck`` or ``skipped`` for each.

    ``busy``: whether an engine has requests. The death of an engine without requests tests nothing.
    ``burst`` sends so many long prompts. ``stuck`` gets an engine that does not obey.
    """

    def __init__(
        self,
        seats: Seats,
        agenda: Agenda,
        struck: Callable[[str], None],
        skipped: Callable[[str], None],
        busy: Callable[[Seat], bool],
        burst: Callable[[int], None],
        stuck: Callable[[Seat, str], None],
    ) -> None:
        self._seats, self._agenda = seats, agenda
        self._struck, self._skipped, self._busy, self._burst, self._stuck = struck, skipped, busy, burst, stuck
        self._restarts: dict[str, tuple[bool, float]] = {}
        self.outstanding = 0

    def strike(self, fault: PlannedFault, until: float) -> None:
        """Inject a fault as soon as its side is undisturbed and busy. Skip the fault at the time ``until``."""
        rng = random.Random(fault.draw)
        sides: tuple[Side, ...] = (fault.kind.side,) if fault.kind.side else ("P", "D")
        side = rng.choice(sides)
        calm = [seat for seat in self._seats.of(side) if seat.calm]
        disturbs = fault.kind.place == "engine" and fault.kind.name != "preempt"
        seat = rng.choice(calm) if calm else None
        if seat is None or (disturbs and (len(calm) < len(self._seats.of(side)) or not self._busy(seat))):
            at = time.monotonic() + RETRY_S
            if at > until:
                self._skipped(fault.kind.name)
            else:
                self._agenda.put(at, partial(self.strike, fault, until))
            return
        self._inject(fault.kind, seat, rng)

    def leave(self, seat: Seat) -> None:
        """An engine ends by itself: restart it under its own id."""
        seat.leaving = True
        self._restarts.setdefault(seat.name, (True, 0.0))

    def ended(self, seat: Seat) -> None:
        """An engine has ended as planned: put another in its place after a while."""
        same_id, after = self._restarts.pop(seat.name)
        self._outlast(after, partial(self._seats.replace, seat.name, same_id=same_id))

    def _inject(self, kind: Kind, seat: Seat, rng: random.Random) -> None:
        self._struck(kind.name)
        match kind.name:
            case "kill-p" | "kill-d" | "kill-p-new" | "kill-d-new":
                self._leave(seat, not kind.name.endswith("-new"), rng)
                seat.engine.kill()
            case "shutdown-p" | "shutdown-d":
                self._leave(seat, rng.random() < 0.5, rng)
                seat.engine.shut_down()
                self._outlast(SHUTDOWN_S, partial(self._must_have_ended, seat, seat.incarnation))
            case "stop-p" | "stop-d":
                seat.engine.pause()
                limit = PEER_TIMEOUT_S if kind.name == "stop-p" else WRITE_TIMEOUT_S
                self._outlast(limit + rng.choice((*BEYOND_S, LONG_S)), partial(self._resume, seat, seat.incarnation))
            case "preempt":
                self._burst(BURST)
            case "garbage-port":
                vandal.vandalise("127.0.0.1", seat.engine.port, rng)
            case "garbage-notes":
                seat.engine.call(scripted.throw_garbage, rng.randint(1, 20), rng.random())
            case _:
                self._arm(kind.name, seat, rng)

    def _arm(self, name: str, seat: Seat, rng: random.Random) -> None:
        engine, count = seat.engine, rng.randint(1, 8)
        match name:
            case "fail-post":
                engine.call(scripted.arm_posts, name, "fail", rng.randrange(6), count)
            case "err-handle":
                engine.call(scripted.arm_posts, name, "err", rng.randrange(6), count)
            case "stuck-handle":
                engine.call(scripted.arm_posts, name, "hold", rng.randrange(6), count)
                self._lift_after(seat, WRITE_TIMEOUT_S + rng.choice(BEYOND_S))
            case "fail-handshake":
                engine.call(scripted.arm_handshakes, name, rng.randint(1, 3))
            case "dup-registration":
                engine.call(scripted.arm_messages, name, "duplicate", "registration", count)
            case "drop-notes" | "dup-notes" | "delay-notes":
                fault = {"drop-notes": "drop", "dup-notes": "duplicate", "delay-notes": "hold"}[name]
                for kind in rng.sample(OUR_MESSAGES[engine.spec.role], k=2):
                    engine.call(scripted.arm_messages, name, fault, kind, count)
                if fault == "hold":
                    self._lift_after(seat, rng.choice((0.2, 1.0, PEER_TIMEOUT_S + 1.0)))

    def _leave(self, seat: Seat, same_id: bool, rng: random.Random) -> None:
        seat.leaving = True
        self._restarts[seat.name] = (same_id, rng.choice(RESTART_S))

    def _lift_after(self, seat: Seat, seconds: float) -> None:
        incarnation = seat.incarnation

        def lift() -> None:
            if seat.incarnation == incarnation and seat.engine.ready:
                seat.engine.call(wirefaults.lift)

        self._outlast(seconds, lift)

    def _resume(self, seat: Seat, incarnation: int) -> None:
        if seat.incarnation == incarnation and seat.engine.paused:
            seat.engine.resume()

    def _must_have_ended(self, seat: Seat, incarnation: int) -> None:
        if seat.incarnation == incarnation and seat.leaving and not seat.engine.ended:
            self._stuck(seat, f"did not shut down within {SHUTDOWN_S:.0f} s")

    def _outlast(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` later, even after the end of the round's load."""
        self.outstanding += 1

        def act() -> None:
            self.outstanding -= 1
            action()

        self._agenda.put(time.monotonic() + seconds, act)
