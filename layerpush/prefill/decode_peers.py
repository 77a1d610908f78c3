"""The decode engines that this prefill rank is connected to: answers to them, and engines that were replaced.

The connection to a decode engine is *closing* when it was lost, or when the engine was restarted: its pushes fail, and
it is dropped when no WRITE is on its way. Until then nothing new begins on it, and registrations are held. Answers to
an engine whose connection was lost are kept for a while, in case it lives. An engine that was never connected gets the
end of a push without a handshake, if its registration had a ``contact``. Requests that are not here are no reason for a
handshake: anybody may name any host. Writer thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.liveness import Verdict
from layerpush.core.wire import Cancelled, Fail, Ping, Pong, Registration, encode
from layerpush.prefill.claim_protocol import Answer
from layerpush.prefill.links import address_of
from layerpush.prefill.writer import PushWriter
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import Address, Connections, Probe

HELD = 4096
HELD_BYTES = 128 << 20
WITHHELD_BYTES = 16 << 20
LOST_KEPT = 4096
LOST_BYTES = 8 << 20
ANSWERS_KEPT_S = 60.0
CONTACTS_KEPT = 4096
CONTACTS_BYTES = 16 << 20


class DecodePeers:
    """See the module's text. Times are in seconds, on the caller's clock."""

    def __init__(self, writer: PushWriter, connections: Connections, probe: Probe, peer_errors: PeerErrors) -> None:
        self._writer = writer
        self._connections = connections
        self._probe = probe
        self._peer_errors = peer_errors
        self._closing: dict[str, str] = {}
        self._lost: BoundedDict[str, None] = BoundedDict(LOST_KEPT, LOST_BYTES)
        self._withheld: BoundedIndex[tuple[Address, Answer]] = BoundedIndex(HELD, WITHHELD_BYTES, ANSWERS_KEPT_S)
        self._held: BoundedIndex[tuple[str, Registration]] = BoundedIndex(HELD, HELD_BYTES)
        self._contacts: BoundedIndex[tuple[str, bytes]] = BoundedIndex(CONTACTS_KEPT, CONTACTS_BYTES)
        """Each agent's, by engine, and by engine and agent."""

    def note_contact(self, sender: str, registration: Registration) -> None:
        """Remember how to reach the sender of a registration without a handshake. An engine has one contact a rank."""
        if registration.contact is None:
            return
        engine_id, entry = registration.decode_engine_id, (sender, registration.contact)
        self._contacts.drop([(engine_id, sender)])
        self._contacts.add(entry, [engine_id, (engine_id, sender)])
        for gone, _ in self._contacts.find([engine_id])[: -registration.decode_tp_size]:
            self._contacts.drop([(engine_id, gone)])

    def answer(self, address: Address, message: Answer, now: float, *, connect: bool = True) -> None:
        """Send to every rank. If the connection is gone, keep the answer until the engine shows that it lives.

        ``connect`` False: begin no handshake, and wait for none. Then an engine that is not connected gets the answer
        without one, if that is possible.
        """
        engine_id = address.engine_id
        send_unconnected = partial(self._send_end_unconnected, address, message)
        if engine_id in self._closing or engine_id in self._lost:
            self._withheld.add((address, message), [engine_id], now)
        elif not connect and not self._connections.agents(engine_id):
            if not self._send_unconnected(address, message) and isinstance(message, Fail | Cancelled):
                self._connections.notify_by_search(address, encode(message))
        elif self._connections.is_connecting(engine_id) or not send_unconnected():
            self._connections.broadcast(address, encode(message), now, send_unconnected)

    def pong(self, sender: str, ping: Ping) -> None:
        """Answer a ping of an agent that is connected or has registered: no handshake may be necessary for it yet.
        Others get no answer, and will probe the side channel.
        """
        engine_id, pong = ping.decode_engine_id, encode(Pong(ping.number))
        if sender in self._connections.agents(engine_id):
            self._connections.notify(sender, pong)
            return
        for _, contact in self._contacts.find([(engine_id, sender)]):
            if self._connections.allows_any_host:
                self._connections.notify_unconnected(contact, pong)
            else:  # an answer to its registration has met it
                self._connections.notify(sender, pong)

    def _send_end_unconnected(self, address: Address, message: Answer) -> bool:
        """Send the end of a push to an engine that is not connected; False if that is impossible, or not necessary."""
        if not isinstance(message, Fail | Cancelled) or self._connections.agents(address.engine_id):
            return False
        return self._send_unconnected(address, message)

    def _send_unconnected(self, address: Address, message: Answer) -> bool:
        """Send to an engine that is not connected; False if that is impossible.

        A contact may lead to any host. So ``allowed_hosts`` allows only contacts that D's side channel names.
        """
        engine_id = address.engine_id
        if not self._connections.allows_any_host:
            return self._connections.notify_by_search(address, encode(message))
        contacts = self._contacts.find([engine_id])
        reached = [self._connections.notify_unconnected(contact, encode(message)) for _, contact in contacts]
        return any(reached)

    def found(self, engine_id: str, now: float) -> None:
        """A decode engine lives: send the answers that were kept for it, if need be over a new connection."""
        self._lost.pop(engine_id, None)
        for address, message in self._withheld.drop([engine_id]):
            self._connections.broadcast(address, encode(message), now)

    def lost(self, engine_id: str) -> None:
        """The connection to a decode engine is gone: its pushes have failed, and its next message connects anew."""
        self.close(engine_id, "the connection to the decode engine was lost")

    def close(self, engine_id: str, reason: str) -> None:
        """Drop the connection as soon as no WRITE is on its way over it."""
        self._lost.note(engine_id, None)
        self._closing.setdefault(engine_id, reason)

    def closing(self, engine_id: str) -> str | None:
        """The reason why the connection to this engine is closing; None if it is not."""
        return self._closing.get(engine_id)

    def hold(self, sender: str, registration: Registration) -> bool:
        """Keep a registration until a probe has ended or the connection is gone; True if it is the engine's first."""
        is_first = registration.decode_engine_id not in self._held
        self._held.add((sender, registration), [registration.decode_engine_id])
        return is_first

    def holds(self, engine_id: str) -> bool:
        """Whether registrations of this engine are held."""
        return engine_id in self._held

    def take_held(self, engine_id: str) -> list[tuple[str, Registration]]:
        """Remove and return the held registrations of this engine, each with its sender."""
        return self._held.drop([engine_id])

    def probe(self, engine_id: str, agent: str, on_verdict: Callable[[Verdict, float], None]) -> None:
        """Probe whether the process that we are connected to still runs under this name."""
        address = self._connections.address(engine_id) or address_of(self._held.find([engine_id])[0][1])
        rank = self._connections.rank_of(engine_id, agent)
        if rank is not None:
            self._probe(agent, rank, address, on_verdict)

    def reject_held(self, engine_id: str, now: float) -> None:
        """The engine that we are connected to lives, so another process sent these registrations."""
        address = self._connections.address(engine_id)
        for sender, registration in self.take_held(engine_id):
            elsewhere = address != address_of(registration)
            what = "which lives elsewhere" if elsewhere else "of which it is no living rank that we write to"
            text = f"agent {sender} registers {registration.request_id} as engine {engine_id}, {what}"
            self._peer_errors.add("engine id in use", text, now)

    def tick(self, now: float) -> Iterator[str]:
        """Forget old answers; drop connections that can be dropped by now, and yield the ids of their engines."""
        self._withheld.expire(now)
        for engine_id, reason in list(self._closing.items()):
            self._writer.fail_engine(engine_id, reason)
            if engine_id not in self._writer.engines_in_flight:
                del self._closing[engine_id]
                self._connections.forget(engine_id)
                yield engine_id
