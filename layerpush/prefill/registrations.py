"""What decode engines ask of this prefill rank: registrations, withdrawals, signs of life. Writer thread only.

A registration is matched with the request that it means, whichever comes first. One that means a request which has
ended badly here is answered at once; one that means nothing yet is kept for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from layerpush.core.bounded_dict import Asked, BoundedDict
from layerpush.core.liveness import Verdict
from layerpush.core.pending_registrations import KEPT_S, PendingRegistrations
from layerpush.core.push_protocol import ReportFailure
from layerpush.core.request_names import RequestNames
from layerpush.core.wire import Accepted, Cancel, Cancelled, Fail, Ping, Pong, Registration, Window, encode
from layerpush.prefill.writer import PushWriter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import Address, Connections, Probe

logger = logging.getLogger("vllm.layerpush.desk")

REMEMBERED = 4096
ENDED_S = 60.0
MAX_REASON = 400
PROBES = 5
NO_REQUEST = "no such request came to the prefill engine"
OTHER_PROMPT = "the prefill engine's request of this id has another prompt"

Key = tuple[str, str]
Answer = Accepted | Fail | Cancelled


class Registrations:
    """``base_id`` strips the suffix that an engine adds to the id its router gave; ``digests`` holds a digest of the
    prompt of each live request, as far as this engine's scheduler told it.
    """

    def __init__(
        self,
        writer: PushWriter,
        peers: Connections,
        probe: Probe,
        peer_errors: PeerErrors,
        base_id: Callable[[str], str],
        digests: dict[str, str],
    ) -> None:
        self._writer = writer
        self._connections = peers
        self._probe = probe
        self._peer_errors = peer_errors
        self._naming = RequestNames(base_id)
        self._digests = digests
        self._pending = PendingRegistrations(self._is_for)
        self._served = BoundedDict(REMEMBERED)
        self._over = BoundedDict(REMEMBERED)
        self._asked = BoundedDict(REMEMBERED)
        self._unwanted = BoundedDict(REMEMBERED)
        self._bad_ends: dict[str, tuple[float, str]] = {}
        self._strangers: dict[str, list[tuple[str, Registration]]] = {}
        self._doomed: dict[str, str] = {}
        self._withheld: dict[str, list[tuple[float, Address, Answer]]] = {}
        self._lost = BoundedDict(REMEMBERED)

    @property
    def pending(self) -> int:
        """How many registrations wait for their request. Any thread."""
        return len(self._pending)

    # From decode engines.

    def registered(self, sender: str, registration: Registration, now: float) -> None:
        """A ``PUSH_REG`` arrived. Every rank of a decode engine sends its own; the first one counts for all."""
        if registration.decode_engine_id in self._doomed:
            self._hold(sender, registration)
            return
        if self._is_strange(sender, registration):
            return
        self._found(registration.decode_engine_id, now)
        if not self._note_asked(sender, registration, now):
            return
        if registration.layerpush:
            answer = self._over.get(registration.key, Accepted(registration.request_id))
            self._answer(registration, answer, now)
        if any(registration.key in known for known in (self._over, self._served, self._pending)):
            return  # another rank's, or the same once more
        waiting = self._writer.waiting()
        request_id = self.match(registration, waiting)
        if request_id is not None:
            self._served.note(registration.key, request_id)
            self._writer.register(request_id, registration)
            return
        if any(self._is_misnamed(registration, candidate) for candidate in waiting):
            self._refuse(registration, OTHER_PROMPT, now)
            return
        reason = self._bad_end(registration, now)
        if reason is not None and registration.layerpush:
            self._refuse(registration, reason, now)
            return
        for dropped in self._pending.add(registration, now):
            self._refuse(dropped, NO_REQUEST, now)

    def cancelled(self, sender: str, message: Cancel, now: float) -> None:
        """A decode engine wants the blocks of a registration back."""
        key = (message.decode_engine_id, message.request_id)
        asked = self._asked.get(key)
        if asked is not None and sender not in asked.senders | set(self._connections.agents(message.decode_engine_id)):
            self._peer_errors.add("foreign cancel", f"agent {sender} cancels {message.request_id}, not its own", now)
            return
        if message.decode_engine_id in self._doomed:
            return  # nothing can be said until the connection is gone; the decode engine asks again
        address = Address(message.decode_engine_id, message.decode_host, message.decode_port, message.decode_tp_size)
        self._found(message.decode_engine_id, now)
        kept = self._pending.drop(key)
        if kept is not None:
            self._unwanted.note(key, (now + KEPT_S, replace(kept, local_block_ids=())))
        request_id = self._writer.serving(key)
        if request_id is None or self._writer.withdraw(request_id, key):  # else ``retract`` follows
            self._over.note(key, Cancelled(message.request_id))
            self._connections.say(address, encode(Cancelled(message.request_id)), now)

    def pinged(self, sender: str, message: Ping) -> None:
        """A sign of life is wanted; a peer that we are not connected to gets none, and will ask in another way."""
        if sender in self._connections.agents(message.decode_engine_id):
            self._connections.notify(sender, encode(Pong(message.number)))

    # From the writer.

    def take(self, request_id: str, now: float) -> Registration | None:
        """The registration that came before its request, if one did."""
        self._bad_ends.pop(self._naming.base(request_id), None)
        for misnamed in self._pending.drop_if(lambda entry: self._is_misnamed(entry, request_id)):
            self._refuse(misnamed, OTHER_PROMPT, now)
        registration = self._pending.take(request_id, now)
        if registration is not None:
            self._served.note(registration.key, request_id)
        return registration

    def is_unwanted(self, request_id: str, now: float) -> bool:
        """Whether the registration of this request came and was withdrawn before the request was there."""
        for key, (deadline, registration) in list(self._unwanted.items()):
            if deadline <= now:
                del self._unwanted[key]
            elif self._is_for(registration, request_id):
                del self._unwanted[key]
                return True
        return False

    def is_current(self, registration: Registration) -> bool:
        """Whether the engine that we are connected to is the process that sent this registration.

        One that was restarted under its old name has given the blocks of that name to others.
        """
        engine_id = registration.decode_engine_id
        agents = set(self._connections.agents(engine_id))
        asked = self._asked.get(registration.key)
        return asked is not None and asked.is_for(registration) and not agents.isdisjoint(asked.senders)

    def window(self, registration: Registration, agent: str) -> Window | None:
        """What this agent offered with its registration: nobody else knows of its ring."""
        asked = self._asked.get(registration.key)
        return asked.windows.get(agent) if asked is not None and asked.is_for(registration) else None

    def retract(self, retraction: ReportFailure, withdrawn: bool, now: float) -> None:
        """Pass on that a completion will never come."""
        registration = retraction.registration
        if not registration.layerpush:
            if retraction.drained and retraction.reason == "aborted":
                self._served.pop(registration.key, None)
                for dropped in self._pending.add(registration, now):  # it cannot be told: the request may come again
                    self._refuse(dropped, NO_REQUEST, now)
            return
        message: Cancelled | Fail = Fail(
            registration.request_id, retraction.epoch, retraction.reason[:MAX_REASON], retraction.drained
        )
        if retraction.drained:
            message = Cancelled(registration.request_id) if withdrawn else message
            self._over.note(registration.key, message)
        self._answer(registration, message, now)

    def ended(self, request_id: str, failure: str | None, now: float) -> None:
        """A request is over here; who still waits for it, or comes to ask for it soon, is told why."""
        for key, (_, registration) in list(self._unwanted.items()):
            if self._is_for(registration, request_id):
                del self._unwanted[key]
        if failure is not None:
            self._bad_ends.pop(self._naming.base(request_id), None)
            self._bad_ends[self._naming.base(request_id)] = (now + ENDED_S, f"the prefill request has ended: {failure}")
            for registration in self._pending.meaning(request_id, now):
                if registration.layerpush:
                    self._pending.drop(registration.key)
                    self._refuse(registration, failure, now)
        self._digests.pop(request_id, None)

    def peer_lost(self, engine_id: str) -> None:
        """The connection to a decode engine is gone: what it asked for has failed, and the next ask connects anew."""
        self._doom(engine_id, "the connection to the decode engine was lost")

    def doom(self, engine_id: str) -> str | None:
        """Why the connection to a decode engine is about to be dropped, if it is: nothing new may be begun on it."""
        return self._doomed.get(engine_id)

    def tick(self, now: float) -> None:
        """Forget what is old; finish off connections that are gone."""
        while self._unwanted and next(iter(self._unwanted.values()))[0] <= now:
            self._unwanted.popitem(last=False)
        while self._bad_ends and next(iter(self._bad_ends.values()))[0] <= now:
            del self._bad_ends[next(iter(self._bad_ends))]
        for dropped in self._pending.expire(now):
            self._refuse(dropped, NO_REQUEST, now)
        self._forget_withheld(now)
        for engine_id, reason in list(self._doomed.items()):
            self._writer.fail_engine(engine_id, reason)
            if engine_id not in self._writer.engines_in_flight:
                del self._doomed[engine_id]
                self._connections.forget(engine_id)
                for sender, registration in self._strangers.pop(engine_id, []):
                    self.registered(sender, registration, now)

    def match(self, registration: Registration, candidates: list[str]) -> str | None:
        """Which request is meant: the one named exactly, else one with the same base id. Prompts have to be equal."""
        meant = [candidate for candidate in candidates if self._is_for(registration, candidate)]
        return next((each for each in meant if each == registration.prefill_request_id), next(iter(meant), None))

    def _is_for(self, registration: Registration, request_id: str) -> bool:
        return not self._prompts_differ(registration, request_id) and self._naming.agree(registration, request_id)

    def _is_misnamed(self, registration: Registration, request_id: str) -> bool:
        """Whether this very request was named, of another prompt: no other one will come."""
        named = registration.prefill_request_id == request_id and request_id in self._naming.names(registration)
        return named and self._prompts_differ(registration, request_id)

    def _prompts_differ(self, registration: Registration, request_id: str) -> bool:
        digest = self._digests.get(request_id)
        return digest is not None and registration.prompt_digest not in (None, digest)

    def _bad_end(self, registration: Registration, now: float) -> str | None:
        for base in map(self._naming.base, self._naming.names(registration)):
            deadline, reason = self._bad_ends.get(base, (0.0, ""))
            if deadline > now and base not in set(map(self._naming.base, list(self._digests))):
                return reason
        return None

    def _doom(self, engine_id: str, reason: str) -> None:
        self._lost.note(engine_id, None)
        self._doomed.setdefault(engine_id, reason)

    def _refuse(self, registration: Registration, reason: str, now: float) -> None:
        logger.warning("layerpush: no push for %s: %s", registration.request_id, reason)
        if registration.layerpush:
            message = Fail(registration.request_id, 0, reason[:MAX_REASON], True)
            self._over.note(registration.key, message)
            self._answer(registration, message, now)

    def _answer(self, registration: Registration, message: Answer, now: float) -> None:
        """Say it, or, if the connection is gone, keep it for a while: whether the decode engine lives will show."""
        engine_id = registration.decode_engine_id
        if engine_id in self._doomed or engine_id in self._lost:
            self._withheld.setdefault(engine_id, []).append((now + ENDED_S, address_of(registration), message))
        else:
            self._connections.say(address_of(registration), encode(message), now)

    def _found(self, engine_id: str, now: float) -> None:
        """A decode engine lives, and can be answered over a new connection if the old one was lost."""
        self._lost.pop(engine_id, None)
        for _, address, message in self._withheld.pop(engine_id, []):
            self._connections.say(address, encode(message), now)

    def _forget_withheld(self, now: float) -> None:
        for engine_id, answers in list(self._withheld.items()):
            self._withheld[engine_id] = [answer for answer in answers if answer[0] > now][-REMEMBERED:]
            if not self._withheld[engine_id]:
                del self._withheld[engine_id]

    def _note_asked(self, sender: str, registration: Registration, now: float) -> bool:
        """False if another registration under the same key is still being served: the process that it came from may
        have been replaced, or have given the same id to two requests, and only one can have the blocks' bytes.
        """
        key = registration.key
        asked = self._asked.get(key)
        if asked is not None and asked.is_for(registration):
            self._asked.note(key, asked.also(sender, registration.window), self._is_live)
            return True
        if asked is not None and self._writer.serving(key) is not None:
            reason = "another request of this id is being pushed"
            self._peer_errors.add("id in use", f"agent {sender} registers {registration.request_id}: {reason}", now)
            if registration.layerpush:
                self._answer(registration, Fail(registration.request_id, 0, reason, True), now)
            return False
        if asked is not None:
            self._pending.drop(key)
            self._over.pop(key, None)
            self._served.pop(key, None)
        self._asked.note(key, Asked(registration.fingerprint, {sender: registration.window}), self._is_live)
        return True

    def _is_live(self, key: Key) -> bool:
        return key in self._pending or self._writer.serving(key) is not None

    # A registration from an agent that is none of the engine's: the engine was restarted, or somebody uses its name.

    def _is_strange(self, sender: str, registration: Registration) -> bool:
        engine_id = registration.decode_engine_id
        known = self._connections.agents(engine_id)
        asked = self._asked.get(registration.key)
        is_sibling = registration.key in self._served and asked is not None and asked.is_for(registration)
        if not known or sender in known or is_sibling:
            return False
        if self._hold(sender, registration) == 1:
            self._ask_about(engine_id, known[0], PROBES)
        return True

    def _hold(self, sender: str, registration: Registration) -> int:
        """Keep a registration until it is clear what becomes of the connection to its engine; returns how many are."""
        waiting = self._strangers.setdefault(registration.decode_engine_id, [])
        if len(waiting) < REMEMBERED:
            waiting.append((sender, registration))
        return len(waiting)

    def _ask_about(self, engine_id: str, agent: str, left: int) -> None:
        address = self._connections.address(engine_id) or address_of(self._strangers[engine_id][0][1])
        rank = self._connections.rank_of(engine_id, agent)
        if rank is not None:
            self._probe(agent, rank, address, partial(self._answered, engine_id, agent, left))

    def _answered(self, engine_id: str, agent: str, left: int, verdict: Verdict, now: float) -> None:
        if agent not in self._connections.agents(
            engine_id
        ):  # the engine was forgotten meanwhile, and may be connected anew
            for sender, registration in self._strangers.pop(engine_id, []):
                self.registered(sender, registration, now)
            return
        if engine_id in self._doomed or engine_id not in self._strangers:  # heard when the connection is gone
            return
        if verdict is Verdict.UNKNOWN and left > 1:
            self._ask_about(engine_id, agent, left - 1)
            return
        if verdict is Verdict.ENDED:
            self._pending.drop_engine(engine_id)
            self._doom(engine_id, "the decode engine was restarted")
            return
        address = self._connections.address(engine_id)
        for sender, registration in self._strangers.pop(engine_id, []):
            elsewhere = address != address_of(registration)
            what = "which lives elsewhere" if elsewhere else "of which it is no living rank that we write to"
            text = f"agent {sender} registers {registration.request_id} as engine {engine_id}, {what}"
            self._peer_errors.add("engine id in use", text, now)


def address_of(registration: Registration) -> Address:
    """The way back to who sent a registration."""
    return Address(
        registration.decode_engine_id, registration.decode_host, registration.decode_port, registration.decode_tp_size
    )
