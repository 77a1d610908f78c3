"""The decode engines of this prefill rank: answers to them, and registrations of engines that may be replaced.

While the connection to a decode engine is closing (``Connections.close``), its registrations are held. Answers to an
engine whose connection was lost are kept for a while, in case it lives. An engine that was never connected gets the
end of a push without a handshake, if its registration had a ``contact``. A registration begins no handshake before its
request has come to P: anybody may name any host. Writer thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from layerpush.core.bounded_index import BoundedIndex
from layerpush.core.liveness import Verdict
from layerpush.core.wire import Cancelled, Fail, Ping, Pong, Registration, encode
from layerpush.prefill.claim_protocol import Answer
from layerpush.prefill.links import address_of
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import Connections, Probe, two_engines
from layerpush.transport.peers import Address

HELD = 4096
HELD_BYTES = 128 << 20
WITHHELD_BYTES = 16 << 20
ANSWERS_KEPT_S = 60.0


class DecodePeers:
    """See the module's text. Times are in seconds, on the caller's clock."""

    def __init__(self, connections: Connections, probe: Probe, peer_errors: PeerErrors) -> None:
        self._connections = connections
        self._peers = connections.peers
        self._probe = probe
        self._peer_errors = peer_errors
        self._withheld: BoundedIndex[tuple[Address, Answer]] = BoundedIndex(HELD, WITHHELD_BYTES, ANSWERS_KEPT_S)
        self._held: BoundedIndex[tuple[str, Registration]] = BoundedIndex(HELD, HELD_BYTES)

    def note_contact(self, sender: str, registration: Registration) -> None:
        """Remember how to reach the sender of a registration without a handshake. An engine has one contact a rank."""
        if registration.contact is None:
            return
        peer = self._peers[registration.decode_engine_id]
        peer.contacts[sender] = registration.contact
        for gone in list(peer.contacts)[: -registration.decode_tp_size]:
            del peer.contacts[gone]
        self._peers.keep(peer)

    def answer(self, address: Address, message: Answer, now: float, *, connect: bool = True) -> None:
        """Send to every rank. If the connection is gone, keep the answer until the engine shows that it lives.

        ``connect`` False: begin no handshake, and wait for none. Then an engine that is not connected gets the answer
        without one, if that is possible.
        """
        engine_id = address.engine_id
        peer = self._peers.get(engine_id)
        send_unconnected = partial(self._send_end_unconnected, address, message)
        if self._connections.is_elsewhere(address):
            self._connections.notify_by_search(address, encode(message))
        elif peer is not None and peer.is_lost:
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
        contact = self._contacts(engine_id).get(sender)
        if contact is None:
            return
        if self._connections.allows_any_host:
            self._connections.notify_unconnected(contact, pong)
        else:  # an answer to its registration has met it
            self._connections.notify(sender, pong)

    def _contacts(self, engine_id: str) -> Mapping[str, bytes]:
        peer = self._peers.get(engine_id)
        return {} if peer is None else peer.contacts

    def _send_end_unconnected(self, address: Address, message: Answer) -> bool:
        """Send the end of a push to an engine that is not connected; False if that is impossible, or not necessary."""
        if not isinstance(message, Fail | Cancelled) or self._connections.agents(address.engine_id):
            return False
        return self._send_unconnected(address, message)

    def _send_unconnected(self, address: Address, message: Answer) -> bool:
        """Send to an engine that is not connected; False if that is impossible.

        A contact may lead to any host. So ``allowed_hosts`` allows only contacts that D's side channel names.
        """
        if not self._connections.allows_any_host:
            return self._connections.notify_by_search(address, encode(message))
        contacts = list(self._contacts(address.engine_id).values())
        reached = [self._connections.notify_unconnected(contact, encode(message)) for contact in contacts]
        return any(reached)

    def engine_alive(self, alive: Address, now: float) -> None:
        """A decode engine lives: send the answers that were kept for it, if need be over a new connection."""
        peer = self._peers.get(alive.engine_id)
        if peer is not None:
            peer.is_lost = False
        for address, message in self._withheld.drop([alive.engine_id]):
            if address.is_at(alive):  # else a process that was replaced has missed it
                self._connections.broadcast(address, encode(message), now)

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
        rank = self._connections.agents(engine_id).get(agent)
        if rank is not None:
            self._probe(agent, rank, address, on_verdict)

    def reject_held(self, engine_id: str, now: float) -> list[tuple[str, Registration, str]]:
        """The engine that we are connected to lives, so another process sent these registrations. Returns those that
        come from another address, each with its sender and the reason of its refusal.
        """
        found, rejected = self._connections.address(engine_id), list[tuple[str, Registration, str]]()
        for sender, registration in self.take_held(engine_id):
            address = address_of(registration)
            if found is not None and self._connections.is_elsewhere(address):
                what = two_engines(found, address)
                rejected.append((sender, registration, what))
            else:  # perhaps a living rank that we do not write to: it hears of the load from others
                what = f"it is no living rank of engine {engine_id} that we write to"
            text = f"agent {sender} registers {registration.request_id}: {what}"
            self._peer_errors.count("engine id in use", text, now)
        return rejected

    def refuse(self, refused: Sequence[tuple[Registration, Fail]]) -> None:
        """Report to engines that are not connected, and cannot be, that their registrations are refused."""
        searched: dict[Address, list[bytes]] = {}
        for registration, answer in refused:
            if self._connections.allows_any_host and registration.contact is not None:
                self._connections.notify_unconnected(registration.contact, encode(answer))
            else:
                searched.setdefault(address_of(registration), []).append(encode(answer))
        for address, answers in searched.items():
            self._connections.notify_by_search(address, *answers)

    def tick(self, now: float) -> None:
        """Forget old answers."""
        self._withheld.expire(now)
