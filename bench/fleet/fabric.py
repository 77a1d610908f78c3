"""The network: WRITEs as flows that share links, notifications, the death of processes.

A WRITE takes ``write_s`` and ``DESCRIPTOR_S`` for each descriptor, and then moves its bytes. WRITEs between two
processes move one after the other, as on a queue pair. A flow crosses the sender's card, the uplink of its rack, the
downlink of D's rack and D's card. A rack's links have the sum of its cards' bandwidths, divided by the
oversubscription. Flows share links by max-min fairness (progressive filling: Bertsekas and Gallager, Data Networks,
section 6.5.2), as in other flow-level simulators. So there are neither packets, nor losses, nor pauses that spread
(PFC): the model is an ideal congestion control.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bench.fleet.clock import Clock
from bench.fleet.presets import CONTACT_BYTES, DESCRIPTOR_S, LOST_S, MESSAGE_S
from layerpush.core.wire import read
from layerpush.transport.base import DescriptorIds, PeerLostError, Route, TransportError, WriteHandle, WriteState

if TYPE_CHECKING:
    from bench.fleet.worker import Worker


class BrokenRuleError(BaseException):
    """A rule that must hold in every run is broken. The text has its number. No ``except Exception`` takes it for a
    defect of one push.
    """


@dataclass(eq=False)
class FabricLink:
    """``capacity`` in bytes a second."""

    capacity: float
    flows: dict[Flow, None] = field(default_factory=dict)
    moved: float = 0.0


@dataclass(eq=False)
class Flow:
    """One WRITE, and its handle. ``left`` bytes of it are to be moved."""

    source: Endpoint
    target: Endpoint
    local: DescriptorIds
    remote: DescriptorIds
    owners: DescriptorIds
    """The prompt of each block."""
    path: tuple[FabricLink, ...]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0
    state: WriteState | TransportError = WriteState.PENDING


class Fabric:
    """``links`` of an engine are its host's: they stay when the engine is restarted."""

    def __init__(self, clock: Clock, write_s: float, block_bytes: int) -> None:
        self.clock, self.write_s, self.block_bytes = clock, write_s, block_bytes
        self.endpoints: dict[str, Endpoint] = {}
        self.messages: Counter[str] = Counter()
        self.message_bytes: Counter[str] = Counter()
        self.writes = 0

    def kill(self, dead: Endpoint) -> None:
        """No byte leaves or reaches the process from now on. Its peers notice that ``LOST_S`` later."""
        dead.died_at = self.clock.now
        of_dead = [flow for queue in dead.queues.values() for flow in queue]
        to_dead = [flow for each in self.endpoints.values() for flow in each.queues.pop(dead.name, ())]
        dead.queues.clear()
        self._stop(of_dead + to_dead)
        for flow in to_dead:
            self.clock.after(LOST_S, partial(self._lose, flow))

    def _lose(self, flow: Flow) -> None:
        flow.state = PeerLostError(f"{flow.target.name} died under a WRITE")
        flow.source.worker.write_ended()

    def post(self, flow: Flow) -> None:
        self.writes += 1
        if flow.target.died_at is not None:
            self.clock.after(LOST_S, partial(self._lose, flow))
            return
        queue = flow.source.queues.setdefault(flow.target.name, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._begin(flow)

    def _begin(self, flow: Flow) -> None:
        self.clock.after(self.write_s + DESCRIPTOR_S * len(flow.local), partial(self._move, flow))

    def _move(self, flow: Flow) -> None:
        if flow in flow.source.queues.get(flow.target.name, ()):
            flow.since = self.clock.now
            for link in flow.path:
                link.flows[flow] = None
            self._share(flow.path)

    def _stop(self, flows: Iterable[Flow]) -> None:
        links: dict[FabricLink, None] = {}
        for flow in flows:
            flow.version += 1
            for link in flow.path:
                if link.flows.pop(flow, True) is None:
                    links[link] = None
        self._share(links)

    def _share(self, links: Iterable[FabricLink]) -> None:
        """New rates for all flows that share a link with these links' flows, directly or through others."""
        room: dict[FabricLink, float] = {}
        flows: dict[Flow, None] = {}
        near = list(links)
        while near:
            link = near.pop()
            if link not in room:
                room[link] = link.capacity
                for flow in link.flows:
                    if flow not in flows:
                        flows[flow] = None
                        near += flow.path
        open_flows = {link: len(link.flows) for link in room}
        rates: dict[Flow, float] = {}
        while len(rates) < len(flows):
            tightest = min((link for link in room if open_flows[link]), key=lambda link: room[link] / open_flows[link])
            rate = room[tightest] / open_flows[tightest]
            for flow in [flow for flow in tightest.flows if flow not in rates]:
                rates[flow] = rate
                for link in flow.path:
                    room[link] -= rate
                    open_flows[link] -= 1
        for flow, rate in rates.items():
            if rate != flow.rate:
                now = self.clock.now
                flow.left -= flow.rate * (now - flow.since)
                flow.rate, flow.since, flow.version = rate, now, flow.version + 1
                self.clock.after(max(0.0, flow.left) / rate, partial(self._land, flow, flow.version))

    def _land(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.source.worker.write_lands()
        self._stop([flow])
        flow.target.check_owners(flow, "lands in")
        flow.source.check_owners(flow, "was read from")
        flow.target.landed[flow.remote] = True
        flow.target.link.moved += len(flow.local) * self.block_bytes
        flow.state = WriteState.LANDED
        queue = flow.source.queues[flow.target.name]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        else:
            del flow.source.queues[flow.target.name]
        flow.source.worker.write_ended()


class Endpoint:
    """One process: a ``Transport``, and the owners of the blocks in its memory. ``path`` leads from its card out of
    its rack, for a decode engine from outside to its card.
    """

    def __init__(
        self, fabric: Fabric, name: str, worker: Worker, path: tuple[FabricLink, ...], layers: int, blocks: int
    ):
        self.fabric, self.name, self.worker, self.path, self.blocks = fabric, name, worker, path, blocks
        self.link = path[0]
        self.died_at: float | None = None
        self.queues: dict[str, deque[Flow]] = {}
        self.inbox: list[tuple[str, bytes]] = []
        self.owners = np.zeros(blocks, np.int32)
        """The prompt in each block; 0: none."""
        self.landed = np.zeros(layers * blocks, bool)
        """The (layer, block) pairs whose bytes have landed."""
        fabric.endpoints[name] = self

    def check_owners(self, flow: Flow, deed: str) -> None:
        """Rule 3."""
        ids = flow.local if self is flow.source else flow.remote
        if (self.owners[ids % self.blocks] != flow.owners).any():
            raise BrokenRuleError(f"rule 3: a WRITE {deed} blocks of {self.name} that belong to another prompt")

    def _peer(self, agent: str) -> Endpoint:
        peer = self.fabric.endpoints[agent]
        if peer.died_at is not None and self.fabric.clock.now >= peer.died_at + LOST_S:
            raise PeerLostError(f"{agent} is dead")
        return peer

    # layerpush.transport.base.Transport

    def post_write(self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b"") -> Flow:
        assert not notification
        target = self._peer(route.agent)
        owners = self.owners[local % self.blocks]
        size = float(len(local) * self.fabric.block_bytes)
        flow = Flow(self, target, local, remote, owners, (*self.path, *target.path), size)
        if target.died_at is None:
            target.check_owners(flow, "is posted to")
        self.fabric.post(flow)
        return flow

    def poll(self, handle: WriteHandle) -> WriteState:
        assert isinstance(handle, Flow)
        if isinstance(handle.state, TransportError):
            raise handle.state
        return handle.state

    def release(self, handle: WriteHandle) -> None:
        assert isinstance(handle, Flow)
        if handle.state is WriteState.PENDING:
            raise BrokenRuleError("rule 3: a WRITE is released before its end")

    def notify(self, agent: str, payload: bytes) -> None:
        peer, kind = self._peer(agent), type(read(payload)).__name__
        self.fabric.messages[kind] += 1
        self.fabric.message_bytes[kind] += len(payload)
        self.fabric.clock.after(MESSAGE_S, partial(peer.receive, self.name, payload))

    def receive(self, sender: str, payload: bytes) -> None:
        if self.died_at is None:
            self.inbox.append((sender, payload))
            self.worker.message_arrived()

    def contact(self) -> bytes:
        return self.name.encode().ljust(CONTACT_BYTES, b".")

    def meet(self, contact: bytes) -> str:
        return contact.rstrip(b".").decode()

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived, self.inbox = self.inbox, []
        return arrived
