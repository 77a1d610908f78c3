"""P, D and the link between them: the same for the fake transport and for NIXL between two processes."""

from __future__ import annotations

import abc
import os
import signal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerpush.transport.base import Route, Transport
from layerpush.transport.locked import LockedAgent
from tests.contract import peer
from tests.contract.peer import PAUSE_SECONDS, new_agent, transport_over
from tests.contract.processes import context
from tests.support.fake_pair import POISON, ROUTE, Pair, unpoisoned

COUNT, SIZE = 4096, 1024

Pieces = NDArray[np.uint8]
"""Memory as ``[COUNT, SIZE]``: one row per descriptor."""


def source_pieces() -> Pieces:
    """The first content of P's memory."""
    return unpoisoned(COUNT, SIZE)


class Link(abc.ABC):
    """P's transport, and a test's access to D. D's memory is poisoned until a WRITE lands in it."""

    transport: Transport
    route: Route
    source: Pieces

    @abc.abstractmethod
    def memory(self) -> Pieces:
        """A copy of D's memory."""

    @abc.abstractmethod
    def inbox(self) -> list[tuple[str, bytes]]:
        """D's notifications since the last call."""

    @abc.abstractmethod
    def notify_from_peer(self, payload: bytes) -> None: ...

    @abc.abstractmethod
    def stranger(self) -> Transport:
        """Another transport, to which D is unknown."""

    @abc.abstractmethod
    def peer_contact(self) -> bytes:
        """D's contact."""

    @abc.abstractmethod
    def snapshot_at(self, payload: bytes) -> None:
        """Have D copy its memory at the moment at which this notification arrives."""

    @abc.abstractmethod
    def snapshot(self) -> Pieces | None:
        """That copy, once the notification has arrived."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Poison D's memory and forget all notifications."""

    @abc.abstractmethod
    def freeze(self) -> None: ...

    @abc.abstractmethod
    def thaw(self) -> None: ...

    @abc.abstractmethod
    def kill(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class FakeLink(Link):
    def __init__(self) -> None:
        pair = Pair(count=COUNT, size=SIZE)
        self.fabric, self.transport, self.peer, self.route = pair.fabric, pair.p, pair.d, ROUTE
        self.source, self.target = pair.source, pair.target
        self._awaited: bytes | None = None

    def memory(self) -> Pieces:
        return self.target.copy()

    def inbox(self) -> list[tuple[str, bytes]]:
        return self.peer.notifications()

    def notify_from_peer(self, payload: bytes) -> None:
        self.peer.notify("P", payload)

    def stranger(self) -> Transport:
        return self.fabric.endpoint("S")

    def peer_contact(self) -> bytes:
        return self.peer.contact()

    def snapshot_at(self, payload: bytes) -> None:
        self._awaited = payload

    def snapshot(self) -> Pieces | None:
        # No byte moves in the fake between a notification's arrival and this call.
        return self.memory() if self._awaited in [payload for _, payload in self.inbox()] else None

    def reset(self) -> None:
        self.target[:] = POISON
        self.inbox()

    def freeze(self) -> None:
        self.fabric.freeze("D")

    def thaw(self) -> None:
        self.fabric.thaw("D")

    def kill(self) -> None:
        self.fabric.kill("D")

    def close(self) -> None:
        assert not self.fabric.violations


class NixlLink(Link):
    """NIXL over TCP on loopback.

    Neither agent has a progress thread. D polls in a loop. P makes progress only inside the transport's own calls, the
    harder case for the contract: a progress thread would hide a transport that forgets to poll.
    """

    def __init__(self, backend: str = "UCX", threads: int = 0) -> None:
        self.backend = backend
        forking = context()
        self.commands, theirs = forking.Pipe()
        self.process = forking.Process(target=peer.main, args=(theirs, COUNT * SIZE, backend, threads), daemon=True)
        self.process.start()
        theirs.close()

        self.agent = new_agent("P", backend, threads)
        self.source = source_pieces()
        self.registration = self.agent.register_memory([(self.source.ctypes.data, self.source.nbytes, 0, "")], "DRAM")
        metadata, base = self.commands.recv()
        name = self.agent.add_remote_agent(metadata).decode()
        self.commands.send(self.agent.get_agent_metadata())
        while not self.commands.poll(PAUSE_SECONDS):
            self.agent.get_new_notifs()
        self.commands.recv()
        self.route = Route(name, 0, self._prepare("", self.source.ctypes.data), self._prepare(name, base))
        self.transport = transport_over(LockedAgent(self.agent), backend)

    def _prepare(self, agent: str, base: int) -> Any:
        pieces = np.zeros((COUNT, 3), np.uint64)
        pieces[:, 0] = base + np.arange(COUNT) * SIZE
        pieces[:, 1] = SIZE
        return self.agent.prep_xfer_dlist(agent, pieces, "DRAM")

    def _ask(self, *command: object) -> Any:
        self.commands.send(command)
        return self.commands.recv()

    def memory(self) -> Pieces:
        return _pieces(self._ask("memory"))

    def inbox(self) -> list[tuple[str, bytes]]:
        arrived: list[tuple[str, bytes]] = self._ask("inbox")
        return arrived

    def notify_from_peer(self, payload: bytes) -> None:
        self._ask("notify", "P", payload)

    def stranger(self) -> Transport:
        return transport_over(new_agent("S", self.backend), self.backend)

    def peer_contact(self) -> bytes:
        contact: bytes = self._ask("contact")
        return contact

    def snapshot_at(self, payload: bytes) -> None:
        self._ask("snapshot at", payload)

    def snapshot(self) -> Pieces | None:
        taken = self._ask("snapshot")
        return None if taken is None else _pieces(taken)

    def reset(self) -> None:
        self._ask("reset")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            self.commands.send(("quit",))
            self.process.join(5)
            self.kill()
        self.commands.close()
        self.agent.release_dlist_handle(self.route.local_descriptors)
        self.agent.release_dlist_handle(self.route.remote_descriptors)
        self.agent.remove_remote_agent(self.route.agent)
        self.agent.deregister_memory(self.registration)


def _pieces(memory: bytes) -> Pieces:
    return np.frombuffer(memory, np.uint8).reshape(COUNT, SIZE)
