"""``Transport``: the network, as far as pushes and loads use it.

``NixlTransport`` is the real one; tests use a fake that keeps the same contract and adds faults. The class below has
the contract. ``transport.nixl`` lists the promises that NIXL makes, and those that it does not make.

- Threads: only the writer thread calls a transport, or the main thread while the writer does not run. vLLM's handshakes
  run on a thread of their own; ``LockedAgent`` keeps two threads from calling one agent at the same time.
- Names: a transport knows agents by name and memory by prepared descriptor lists. A ``Route`` names both. vLLM
  connects and prepares the lists, at the request of ``Connections``; a transport makes no handshake.
- The way of a WRITE: a session's ``Write`` -> ``Writes.post`` -> ``DirectPlanner.descriptors`` -> ``post_write``, once
  for each route. With staging memory, ``GatherStrategy`` may send it through ``transport.gather`` instead.
- The life of a WRITE: ``post_write``, ``poll`` until it has landed or failed, ``release``. Its memory on both sides is
  in use until then. No call cancels a WRITE, and a transport has no deadlines: ``Push.poll`` has one.
- The completion of a push is a notification of its own, sent after all WRITEs have landed. An attached one could
  arrive early: it waits for one WRITE only.
- ``LANDED`` means the peer's memory on every network. Where NIXL's ``DONE`` does not, ``transport.acknowledged`` waits
  for the peer's answer.
- Errors: a transport raises ``TransportError`` and nothing else. ``PeerLostError`` means that the connection is gone:
  the caller has it dropped, and the next handshake makes a new one.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

DescriptorIds = NDArray[np.int32]
WriteHandle = Hashable


class WriteState(enum.Enum):
    """State of a posted WRITE: on the wire, or in the peer's memory. ``poll`` raises an error for one that is lost."""

    PENDING = "pending"
    LANDED = "landed"


@dataclass(frozen=True)
class Route:
    """How one local rank reaches one remote rank.

    ``local_descriptors`` and ``remote_descriptors`` name prepared descriptor lists; descriptor ids index into them.
    """

    agent: str
    remote_rank: int
    local_descriptors: Hashable
    remote_descriptors: Hashable


class TransportError(RuntimeError):
    """A call to the transport failed. Part of it may have reached the peer, unless the method excludes that."""


class PeerLostError(TransportError):
    """The connection to the peer is gone. If its process died, nothing of ours can still land in its memory."""


class Transport(Protocol):
    """One-sided WRITEs and notifications. Only the writer thread calls these methods.

    Contract, kept by the fake and by the real one:

    - WRITEs land in any order, from their posting on; a WRITE may need ``poll`` calls to get anywhere.
    - A WRITE that ``poll`` reports as ``LANDED`` is wholly in the peer's memory; a notification sent after that
      cannot overtake it. A notification sent earlier can.
    - A WRITE for which ``poll`` raises may have landed in part, but is over: no more bytes of it land. As long as some
      may, ``poll`` returns ``PENDING``, and ``post_write`` raises nothing.
    - ``release`` before the end of a WRITE is no cancel: the bytes may still land, later.
    """

    def post_write(
        self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b""
    ) -> WriteHandle:
        """Start one WRITE of ``local[i]`` onto ``remote[i]``: descriptor ids, int32 of shape ``(n,)``.

        The peer gets ``notification``, if it is not empty, after all bytes of this WRITE.

        Raises ``TransportError`` when nothing of it was sent, or ``PeerLostError``.
        """

    def poll(self, handle: WriteHandle) -> WriteState:
        """Make progress on a WRITE, and return its state.

        Raises ``TransportError`` with the reason when the WRITE has failed and is over, ``PeerLostError`` when the peer
        died under it.
        """

    def release(self, handle: WriteHandle) -> None:
        """Forget a WRITE. Raises ``TransportError`` when the handle must be kept and released later."""

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a notification to a peer. Raises ``TransportError`` or ``PeerLostError``."""

    def contact(self) -> bytes:
        """The address of this agent. Another agent that has passed it to ``meet`` can notify this one without a
        handshake. Raises ``TransportError`` if the transport has no such addresses.
        """

    def meet(self, contact: bytes) -> str:
        """Prepare for notifications to the agent of this contact. Returns its name. Raises ``TransportError``."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take the notifications since the last call: ``(sender's agent name, payload)``, in order for each sender."""
