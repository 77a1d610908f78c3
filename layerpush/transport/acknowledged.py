"""WRITEs that the peer acknowledges, over a network on which a WRITE may end before its bytes are in the peer's memory.

UCX ends a WRITE with a flush of its endpoint, so ``DONE`` means landed. LIBFABRIC flushes nothing: ``DONE`` means that
the source may change. The bytes may land later, in any order, and a notification that is sent after ``DONE`` may
overtake them. One promise is left: the target holds a WRITE's *own* notification back until it has counted all parts of
that WRITE.

So each WRITE carries a ``Landed`` with a number of its own, and the peer answers ``Acknowledged`` as soon as it gets
that. ``poll`` returns ``LANDED`` after the answer. Then everything that the callers build on it holds as over UCX: the
completion, the end of an epoch, the report that a push has drained.

No WRITE goes without a ``Landed``. The target counts parts by a number of 16 bits, and forgets the count of a WRITE
only with its notification: the count of a WRITE without one would be added to that of a later WRITE.

A ``Landed`` comes with its WRITE, or never. An ``Acknowledged`` may be lost. Then the sender asks again every ``ASK_S``
seconds, and the peer answers from its table. LIBFABRIC does not report the death of a peer: a WRITE without an answer
stays ``PENDING``, and callers have deadlines. Over TCP, ``notify`` to a dead peer may never return.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.wire import (
    MAX_ACKNOWLEDGED,
    PEER_PREFIX,
    Acknowledged,
    HasLanded,
    Landed,
    Message,
    WireError,
    encode,
    read,
)
from layerpush.transport.base import (
    DescriptorIds,
    PeerLostError,
    Route,
    Transport,
    TransportError,
    WriteHandle,
    WriteState,
)

ASK_S = 1.0
LANDED_KEPT = 4096
"""For each agent: no agent can push out the WRITEs of another."""
LANDED_BYTES = 2 << 20
AGENTS_KEPT = 1024
AGENTS_BYTES = 64 << 20


@dataclass(slots=True)
class _Posted:
    """A WRITE that has not been released. ``ask_at`` is the time of the next ``HasLanded``, None until it is sent."""

    agent: str
    number: int
    ask_at: float | None = None
    acknowledged: bool = False


class AcknowledgedTransport:
    """A `Transport` over ``network``. Each of its peers must have one, too. ``clock`` returns seconds."""

    def __init__(self, network: Transport, clock: Callable[[], float] = time.perf_counter) -> None:
        self._network = network
        self._clock = clock
        self._numbers = itertools.count()
        self._posted: dict[WriteHandle, _Posted] = {}
        self._unacknowledged: dict[int, _Posted] = {}
        self._inbox: list[tuple[str, bytes]] = []
        self._landed: BoundedDict[str, BoundedDict[int, None]] = BoundedDict(AGENTS_KEPT, AGENTS_BYTES)
        self.notify, self.contact, self.meet = network.notify, network.contact, network.meet

    def post_write(
        self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b""
    ) -> WriteHandle:
        """Start one WRITE; see ``Transport``."""
        number = self.number()
        handle = self._network.post_write(route, local, remote, self.attached(number, notification))
        self.adopt(handle, route.agent, number)
        return handle

    def number(self) -> int:
        """The number of the next WRITE."""
        return next(self._numbers)

    def attached(self, number: int, notification: bytes) -> bytes:
        """The notification that WRITE ``number`` has to carry, with the one of its caller."""
        return encode(Landed(number, notification))

    def adopt(self, handle: WriteHandle, agent: str, number: int) -> None:
        """Take over a WRITE that was posted with ``attached``."""
        self._posted[handle] = self._unacknowledged[number] = _Posted(agent, number)

    def poll(self, handle: WriteHandle) -> WriteState:
        """Make progress; see ``Transport``. Asks the peer again if it has not answered."""
        posted = self._posted.get(handle)
        if posted is None:
            raise TransportError(f"{handle!r} was released, or is no WRITE of this transport")
        if self._network.poll(handle) is WriteState.PENDING:
            return WriteState.PENDING
        if not posted.acknowledged:
            self._receive()
        if posted.acknowledged:
            return WriteState.LANDED
        now = self._clock()
        if posted.ask_at is None:
            posted.ask_at = now + ASK_S
        elif now >= posted.ask_at:
            posted.ask_at = now + ASK_S
            self._send(posted.agent, HasLanded(posted.number))
        return WriteState.PENDING

    def release(self, handle: WriteHandle) -> None:
        """Forget a WRITE; see ``Transport``."""
        self._network.release(handle)
        posted = self._posted.pop(handle, None)
        if posted is not None:
            self._unacknowledged.pop(posted.number, None)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take the notifications that have arrived, and answer the peers' WRITEs."""
        self._receive()
        taken, self._inbox = self._inbox, []
        return taken

    def _receive(self) -> None:
        answers: dict[str, list[int]] = {}
        for agent, payload in self._network.notifications():
            match _read(payload):
                case Landed(number, notification):
                    self._note_landed(agent, number)
                    answers.setdefault(agent, []).append(number)
                    if notification:
                        self._inbox.append((agent, notification))
                case HasLanded(number):
                    if number in self._landed.get(agent, ()):
                        answers.setdefault(agent, []).append(number)
                case Acknowledged(landed):
                    for number in landed:
                        self._acknowledge(agent, number)
                case _:
                    self._inbox.append((agent, payload))
        for agent, numbers in answers.items():
            self._answer(agent, numbers)

    def _note_landed(self, agent: str, number: int) -> None:
        numbers = self._landed.get(agent) or BoundedDict(LANDED_KEPT, LANDED_BYTES)
        numbers.put(number, None)
        self._landed.put(agent, numbers)

    def _acknowledge(self, agent: str, number: int) -> None:
        posted = self._unacknowledged.get(number)
        if posted is not None and posted.agent == agent:
            posted.acknowledged = True
            del self._unacknowledged[number]

    def _answer(self, agent: str, numbers: list[int]) -> None:
        for first in range(0, len(numbers), MAX_ACKNOWLEDGED):
            try:
                self._send(agent, Acknowledged(tuple(numbers[first : first + MAX_ACKNOWLEDGED])))
            except PeerLostError:
                return  # nobody waits for the answer

    def _send(self, agent: str, message: HasLanded | Acknowledged) -> None:
        """Raises ``PeerLostError``. After another error the question comes again."""
        try:
            self._network.notify(agent, encode(message))
        except PeerLostError:
            raise
        except TransportError:
            pass


def _read(payload: bytes) -> Message | None:
    """One of our messages; None for any other notification, and for one that cannot be read."""
    if not payload.startswith(PEER_PREFIX):
        return None
    try:
        return read(payload)
    except WireError:
        return None
