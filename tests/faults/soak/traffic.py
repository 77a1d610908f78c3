"""The load: sends requests as a P/D router does, injects the requests' own faults, and takes the results."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from tests.e2e.enginehost import Request
from tests.e2e.models import VOCABULARY
from tests.e2e.results import Finished
from tests.faults.soak import inhost
from tests.faults.soak.badparams import damaged_for_d, damaged_for_p
from tests.faults.soak.engine import Answer
from tests.faults.soak.engine_slots import EngineSlot, EngineSlots
from tests.faults.soak.plan import ANSWERS, PlannedRequest
from tests.faults.soak.reference import Reference
from tests.faults.soak.request import Leg, SoakRequest, State
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.sent import Sent
from tests.faults.soak.specs import LEASE_S, MAX_MODEL_LEN

LATE_AFTER_S = LEASE_S + 2.0
STALE_S = 4.0
SLOW = ("no-p", "no-d", "late-d")
EXTRA_TOKENS = (64, 96, 160)
LONGEST_PROMPT = MAX_MODEL_LEN - max(EXTRA_TOKENS) - max(ANSWERS)
TURNS = 3
"""The last turns that engines keep. A client may send one twice, or too late."""


class Traffic:
    """All requests on their way (``live``). ``outstanding`` counts these and those that await records or tokens.

    ``done`` gets each request when it is complete.
    """

    def __init__(
        self,
        slots: EngineSlots,
        reference: Reference,
        schedule: Schedule,
        struck: Callable[[str], None],
        done: Callable[[SoakRequest], None],
    ) -> None:
        self._slots, self._reference, self._schedule = slots, reference, schedule
        self._struck, self._done = struck, done
        self.live: dict[str, SoakRequest] = {}
        self.outstanding = 0
        self.sent = Sent(slots)
        self._turns: deque[tuple[tuple[int, ...], dict[str, Any]]] = deque(maxlen=TURNS)

    def send(self, plan: PlannedRequest) -> None:
        """Start a request on running engines. One of each side must run."""
        p = self._slots[plan.among("P", self._slots.usable("P"))]
        d = self._slots[plan.among("D", self._slots.usable("D"))]
        before, to_p = self._turn(plan)
        d_tokens = p_tokens = (before + plan.token_ids)[:LONGEST_PROMPT]
        if plan.fault == "unequal":
            rng = random.Random(plan.draw)
            d_tokens += tuple(rng.choices(VOCABULARY, k=rng.choice(EXTRA_TOKENS)))
        request = SoakRequest(
            plan,
            f"soak-{plan.number:06d}",
            Leg("P", p.name, p_tokens, 1, p.incarnation, wanted=plan.fault != "no-p"),
            Leg("D", d.name, d_tokens, plan.max_tokens, d.incarnation, wanted=plan.fault != "no-d"),
            sent_at=time.monotonic(),
            to_p=to_p,
        )
        self.live[request.request_id] = request
        self.outstanding += 1
        self.sent.note(request.request_id, request.d)
        if plan.fault in ("no-p", "no-d", "unequal", "late-d", "bad-params-p", "bad-params-d"):
            self._strike(request)
        d_params = self._params_for_d(request, p)
        waits_for_p = plan.order == "p-first" or plan.fault == "late-d"
        if request.d.wanted and not (waits_for_p and request.p.wanted):
            self._send_d(request, d_params)
        if plan.order == "d-first":
            self._later(plan.gap_s, partial(self._send_p, request))
        else:
            self._send_p(request)

    @property
    def quick(self) -> int:
        """The number of live requests that probably wait for no deadline: young, and without a slow fault."""
        stale = time.monotonic() - STALE_S
        return sum(request.plan.fault not in SLOW and request.sent_at > stale for request in self.live.values())

    def busy(self, slot: EngineSlot) -> bool:
        """Whether the engine has an unended request of the soak."""
        legs = (self._leg_on(request, slot) for request in self.live.values())
        return any(leg is not None and leg.state is State.SENT for leg in legs)

    def take(self, slot: EngineSlot, finished: Finished) -> None:
        """An engine has finished a request."""
        request = self.live.get(finished.request_id)
        if request is None:
            return
        leg = self._leg_on(request, slot)
        if leg is None or leg.state is not State.SENT:
            return
        leg.output = finished
        leg.state = State.FINISHED if finished.finish_reason == "length" else State.FAILED
        if leg.state is State.FAILED:
            leg.error = f"finish reason {finished.finish_reason}"
        if leg is request.d and finished.kv_transfer_params is not None:
            self._turns.append((leg.token_ids + finished.token_ids, finished.kv_transfer_params))
        self._leg_over(request, leg, finished.kv_transfer_params)

    def lose(self, slot: EngineSlot) -> None:
        """An engine has died."""
        for request in list(self.live.values()):
            leg = self._leg_on(request, slot)
            if leg is not None and leg.state is State.SENT:
                leg.state = State.LOST
                self._leg_over(request, leg, None)

    def give_up(self, request: SoakRequest) -> None:
        """Abort a hanging request on both sides, so that the soak can go on."""
        request.hung = True
        for leg in request.legs:
            if leg.state is State.UNSENT:
                leg.wanted = False
            self._abort(request, leg, then=None)
            leg.state = leg.state if leg.over else State.ABORTED
        self._finish(request)

    # Sending

    def _send_p(self, request: SoakRequest) -> None:
        if not request.p.wanted or request.p.over:
            return
        params = dict(request.to_p)
        if request.plan.fault == "bad-params-p":
            params = damaged_for_p(params, request.plan.draw)
        self._send_leg(request, request.p, params)
        if request.p.state is State.SENT:
            self._plan_aborts(request)

    def _send_d(self, request: SoakRequest, params: dict[str, Any]) -> None:
        if request.d.over or request.d.state is State.SENT:
            return
        if request.plan.fault == "bad-params-d":
            params = damaged_for_d(params, request.plan.draw)
        self._send_leg(request, request.d, params)

    def _send_leg(self, request: SoakRequest, leg: Leg, params: dict[str, Any]) -> None:
        slot = self._slots[leg.engine]
        if not slot.usable:
            leg.state = State.LOST
            self._leg_over(request, leg, None)
            return
        leg.incarnation, leg.state = slot.incarnation, State.SENT
        wire = Request(request.request_id, list(leg.token_ids), params, leg.max_tokens)
        slot.engine.add(wire, then=partial(self._added, request, leg))

    def _added(self, request: SoakRequest, leg: Leg, answer: Answer) -> None:
        if answer.error is not None and leg.state is State.SENT:
            leg.state, leg.error = State.FAILED, answer.error.strip().splitlines()[-1]
            self._leg_over(request, leg, None)

    def _turn(self, plan: PlannedRequest) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The tokens of the turn before, and the parameters with which the next one goes to P."""
        if plan.turn is None or not self._turns:
            return (), dict(TO_PREFILL)
        return self._turns[int(plan.turn * len(self._turns))]

    def _params_for_d(self, request: SoakRequest, p: EngineSlot) -> dict[str, Any]:
        """The parameters that a router knows in advance."""
        identity = PrefillIdentity(p.engine.engine_id, "127.0.0.1", p.engine.port, p.engine.spec.ranks)
        return identity.to_decode(request.request_id)

    # A request's own faults

    def _plan_aborts(self, request: SoakRequest) -> None:
        fault, after = request.plan.fault, request.plan.after_s
        if fault in ("abort-p", "abort-both", "resend-p"):
            resend = partial(self._send_again, request) if fault == "resend-p" else None
            self._later(after, partial(self._abort_planned, request, request.p, resend))
        if fault in ("abort-d", "abort-both"):
            self._later(after + request.plan.gap_s, partial(self._abort_planned, request, request.d, None))

    def _abort_planned(self, request: SoakRequest, leg: Leg, then: Callable[[], None] | None) -> None:
        if leg.state is State.SENT:
            self._strike(request)
            self._abort(request, leg, then)

    def _abort(self, request: SoakRequest, leg: Leg, then: Callable[[], None] | None) -> None:
        slot = self._slots[leg.engine]
        if leg.state is State.SENT and slot.incarnation == leg.incarnation:
            slot.engine.abort(request.request_id, then=partial(self._aborted, request, leg, then))

    def _aborted(self, request: SoakRequest, leg: Leg, then: Callable[[], None] | None, answer: Answer) -> None:
        if answer.gone or leg.state is not State.SENT:
            return  # the request or the engine has ended by itself
        if then is not None:
            then()
            return
        leg.state = State.ABORTED
        self._leg_over(request, leg, None)

    def _send_again(self, request: SoakRequest) -> None:
        request.p.state = State.UNSENT
        self._send_leg(request, request.p, dict(request.to_p))

    def _strike(self, request: SoakRequest) -> None:
        assert request.plan.fault is not None
        if request.plan.fault not in request.faults:
            request.faults.add(request.plan.fault)
            self._struck(request.plan.fault)

    # Ending

    def _leg_over(self, request: SoakRequest, leg: Leg, returned: dict[str, Any] | None) -> None:
        if leg is request.p and request.d.wanted and request.d.state is State.UNSENT:
            params = returned or self._params_for_d(request, self._slots[leg.engine])
            late = LATE_AFTER_S if request.plan.fault == "late-d" else request.plan.d_after_s
            self._later(late, partial(self._send_d, request, params))
        if request.over:
            self._finish(request)

    def _finish(self, request: SoakRequest) -> None:
        """Fetch the engines' records of a request and the right tokens. Then it is done."""
        if self.live.pop(request.request_id, None) is None:
            return
        request.ended_at = time.monotonic()
        Finishing(request, self._slots, self._reference, self._account).begin()

    def _account(self, request: SoakRequest) -> None:
        self.outstanding -= 1
        self._done(request)

    def _leg_on(self, request: SoakRequest, slot: EngineSlot) -> Leg | None:
        for leg in request.legs:
            if (leg.engine, leg.incarnation) == (slot.name, slot.incarnation) and leg.state is not State.UNSENT:
                return leg
        return None

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._schedule.put(time.monotonic() + seconds, action)


class Finishing:
    """Gathers the records of an ended request from both engines, and the right tokens."""

    def __init__(
        self, request: SoakRequest, slots: EngineSlots, reference: Reference, done: Callable[[SoakRequest], None]
    ) -> None:
        self._request, self._slots, self._reference, self._done = request, slots, reference, done
        self._missing = 1

    def begin(self) -> None:
        request = self._request
        for leg in request.legs:
            slot = self._slots[leg.engine]
            if leg.state is State.UNSENT or slot.incarnation != leg.incarnation or not slot.engine.ready:
                continue
            self._missing += 1
            slot.engine.call(inhost.collect, [request.request_id], then=partial(self._collected, leg))
        for leg in request.legs:
            if leg.state is State.FINISHED:
                self._missing += 1
                short = self._slots[leg.engine].engine.spec.leaves_last_token and len(leg.token_ids) > 1
                prompt = leg.token_ids[:-1] if short else leg.token_ids
                self._reference.ask(prompt, request.d.max_tokens, partial(self._answered, leg))
        self._one_less()

    def _collected(self, leg: Leg, answer: Answer) -> None:
        if answer.value is not None:
            leg.record = answer.value[self._request.request_id]
        self._one_less()

    def _answered(self, leg: Leg, tokens: tuple[int, ...]) -> None:
        leg.expected = tokens
        self._one_less()

    def _one_less(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._done(self._request)
