"""A network in memory, with real bytes and scripted faults: the whole double of `NixlTransport`.

Two processes and a WRITE::

    fabric = FakeFabric(Faults(hold_writes={0: 5}))
    p, d = fabric.endpoint("P"), fabric.endpoint("D")
    p.describe("kv", p_memory, offsets, length)
    d.describe("kv", d_memory, offsets, length)
    handle = p.post_write(Route("D", 0, "kv", "kv"), local_ids, remote_ids)   # p is a Transport
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from layerpush.transport.base import DescriptorIds, PeerLostError, Route, TransportError, WriteHandle, WriteState

Bytes = NDArray[np.uint8]


@dataclass
class Faults:
    """What goes wrong, and when. Posts and notifications are numbered over the whole fabric, from 0.

    ``at`` runs an action just before a moment: ``{("post", 3): lambda fabric: fabric.kill("D")}``. Moments are
    ``"post"``, ``"poll"`` and ``"notify"``.
    """

    fail_posts: set[int] = field(default_factory=set)
    """Posts that raise ``TransportError``; nothing of them lands."""
    fail_writes: set[int] = field(default_factory=set)
    """Posts whose WRITE becomes ``FAILED``, with a part of it landed if it took more than one poll."""
    hold_writes: dict[int, int] = field(default_factory=dict)
    """Post -> polls for which its WRITE stays ``PENDING``; otherwise none, one or two."""
    drop_notifications: set[int] = field(default_factory=set)
    duplicate_notifications: set[int] = field(default_factory=set)
    reorder_notifications: set[int] = field(default_factory=set)
    """Notifications that overtake all that the receiver has not taken yet."""
    delay_notifications: dict[int, int] = field(default_factory=dict)
    """Notification -> times that the receiver looks in vain."""
    at: dict[tuple[str, int], Callable[[FakeFabric], None]] = field(default_factory=dict)

    @classmethod
    def seeded(cls, seed: int, rate: float = 0.05, span: int = 1000) -> Faults:
        """Each kind of fault, except death, at ``rate`` among the first ``span`` posts and notifications."""
        draw = random.Random(seed)

        def some() -> set[int]:
            return {number for number in range(span) if draw.random() < rate}

        def counts() -> dict[int, int]:
            return {number: draw.randint(1, 20) for number in sorted(some())}

        return cls(some(), some(), counts(), some(), some(), some(), counts())


@dataclass(frozen=True)
class Violation:
    """A WRITE that read from or landed in a descriptor after its owner gave it away."""

    endpoint: str
    descriptors: Hashable
    descriptor: int


class Descriptors:
    """Equal pieces of one endpoint's memory, and which of them WRITEs may still touch."""

    def __init__(self, memory: Bytes, offsets: Sequence[int], length: int) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1:
            raise ValueError("memory must be a flat array of uint8, so that pieces of it are views")
        self.length = length
        self.pieces = [memory[offset : offset + length] for offset in offsets]
        self.owned = set(range(len(offsets)))

    def give_away(self, ids: Iterable[int]) -> None:
        """These now belong to someone else: a WRITE that touches them is a violation."""
        self.owned -= {int(index) for index in ids}

    def take_back(self, ids: Iterable[int]) -> None:
        self.owned |= {int(index) for index in ids}


@dataclass(eq=False)
class FakeWrite:
    """One WRITE: what was asked for, and how far it is. Also its own handle."""

    source: FakeTransport
    target: FakeTransport
    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    unmoved: list[int]
    """Positions in ``local`` and ``remote`` that have not landed, in the order in which they will."""
    polls_left: int
    fails: bool
    state: WriteState = WriteState.PENDING

    def progress(self) -> None:
        """Land a share of what is left; the bytes are the source's of this moment, not of the post."""
        if self.state is not WriteState.PENDING or not self.target.alive or self.target.frozen:
            return
        if self.polls_left == 1 and self.fails:
            self.state = WriteState.FAILED
            return
        share = -(-len(self.unmoved) // self.polls_left)
        for position in self.unmoved[:share]:
            source = self.source.touch(self.route.local_descriptors, int(self.local[position]))
            self.target.touch(self.route.remote_descriptors, int(self.remote[position]))[:] = source
        del self.unmoved[:share]
        self.polls_left -= 1
        if self.polls_left == 0:
            self.state = WriteState.LANDED


@dataclass
class _Notification:
    sender: str
    payload: bytes
    looks_in_vain: int


class FakeFabric:
    """The endpoints, the faults, and a record of what happened. Any thread may use its endpoints.

    Deterministic: the same calls with the same ``seed`` and faults give the same landings.
    """

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.writes: list[FakeWrite] = []
        """Every WRITE that was posted, in order."""
        self.violations: list[Violation] = []
        self.lock = threading.RLock()
        self._endpoints: dict[str, FakeTransport] = {}
        self._reached: Counter[str] = Counter()

    def endpoint(self, name: str) -> FakeTransport:
        """A new process of this name; one that died before is replaced, with none of its descriptors."""
        if name in self._endpoints and self._endpoints[name].alive:
            raise ValueError(f"endpoint {name!r} exists")
        self._endpoints[name] = FakeTransport(self, name)
        return self._endpoints[name]

    def kill(self, name: str) -> None:
        """The process dies: nothing lands there any more, and peers that ask are told so."""
        self._endpoints[name].alive = False

    def freeze(self, name: str) -> None:
        """The process stops, or its link is cut: WRITEs to it stay ``PENDING`` and nobody is told."""
        self._endpoints[name].frozen = True

    def thaw(self, name: str) -> None:
        self._endpoints[name].frozen = False

    def settle(self) -> None:
        """Land everything that was released too early, as a network would in the end."""
        with self.lock:
            for endpoint in self._endpoints.values():
                if endpoint.alive:
                    endpoint.progress_released(to_the_end=True)

    def peer(self, name: str) -> FakeTransport:
        if name not in self._endpoints:
            raise TransportError(f"no endpoint {name!r}")
        if not self._endpoints[name].alive:
            raise PeerLostError(f"endpoint {name!r} is dead")
        return self._endpoints[name]

    def reach(self, moment: str) -> int:
        """Count a moment, run what was scripted for it, return its number."""
        number = self._reached[moment]
        self._reached[moment] += 1
        action = self.faults.at.get((moment, number))
        if action is not None:
            action(self)
        return number


class FakeTransport:
    """One process on the fabric: a `Transport`, plus the memory that it registered."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.alive, self.frozen = True, False
        self.descriptors: dict[Hashable, Descriptors] = {}
        self._live: set[FakeWrite] = set()
        self._released: list[FakeWrite] = []
        self._inbox: list[_Notification] = []

    def describe(self, key: Hashable, memory: Bytes, offsets: Sequence[int], length: int) -> Descriptors:
        """Register pieces of ``memory``, shared and not copied, as the descriptor list that routes call ``key``."""
        self.descriptors[key] = Descriptors(memory, offsets, length)
        return self.descriptors[key]

    def post_write(self, route: Route, local: DescriptorIds, remote: DescriptorIds) -> WriteHandle:
        fabric = self.fabric
        with fabric.lock:
            number = fabric.reach("post")
            target = fabric.peer(route.agent)
            sides = self._pick(route.local_descriptors, local), target._pick(route.remote_descriptors, remote)
            if len(local) != len(remote) or sides[0].length != sides[1].length:
                raise TransportError("the two sides of a WRITE differ in count or in length")
            if number in fabric.faults.fail_posts:
                raise TransportError(f"post {number} fails as scripted")
            unmoved = fabric.random.sample(range(len(local)), len(local))
            polls = 1 + fabric.faults.hold_writes.get(number, fabric.random.randint(0, 2))
            fails = number in fabric.faults.fail_writes
            write = FakeWrite(self, target, route, local.copy(), remote.copy(), unmoved, polls, fails)
            fabric.writes.append(write)
            self._live.add(write)
            return write

    def poll(self, handle: WriteHandle) -> WriteState:
        with self.fabric.lock:
            write = self._require_live(handle)
            self.fabric.reach("poll")
            self.progress_released()
            write.progress()
            if write.state is WriteState.PENDING and not write.target.alive:
                raise PeerLostError(f"endpoint {write.target.name!r} died under a WRITE")
            return write.state

    def release(self, handle: WriteHandle) -> None:
        with self.fabric.lock:
            write = self._require_live(handle)
            self._live.remove(write)
            if write.state is WriteState.PENDING:
                self._released.append(write)

    def notify(self, agent: str, payload: bytes) -> None:
        with self.fabric.lock:
            number, faults = self.fabric.reach("notify"), self.fabric.faults
            inbox = self.fabric.peer(agent)._inbox
            looks_in_vain = faults.delay_notifications.get(number, 0)
            copies = 0 if number in faults.drop_notifications else 2 if number in faults.duplicate_notifications else 1
            place = 0 if number in faults.reorder_notifications else len(inbox)
            inbox[place:place] = [_Notification(self.name, payload, looks_in_vain) for _ in range(copies)]

    def notifications(self) -> list[tuple[str, bytes]]:
        with self.fabric.lock:
            self.progress_released()
            arrived = [(note.sender, note.payload) for note in self._inbox if note.looks_in_vain == 0]
            self._inbox = [note for note in self._inbox if note.looks_in_vain > 0]
            for note in self._inbox:
                note.looks_in_vain -= 1
            return arrived

    def touch(self, key: Hashable, index: int) -> Bytes:
        """A piece of memory that a WRITE reads or lands in, and a violation if it is no longer the WRITE's to touch."""
        descriptors = self.descriptors[key]
        if index not in descriptors.owned:
            self.fabric.violations.append(Violation(self.name, key, index))
        return descriptors.pieces[index]

    def progress_released(self, to_the_end: bool = False) -> None:
        """Releasing a WRITE in flight does not stop it: it goes on whenever this process makes progress."""
        for write in self._released:
            for _ in range(write.polls_left if to_the_end else 1):
                write.progress()
        self._released = [write for write in self._released if write.state is WriteState.PENDING]

    def _pick(self, key: Hashable, ids: DescriptorIds) -> Descriptors:
        if key not in self.descriptors:
            raise TransportError(f"{self.name!r} has no descriptor list {key!r}")
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= len(self.descriptors[key].pieces):
            raise TransportError(f"descriptor ids do not fit the list {key!r} of {self.name!r}")
        return self.descriptors[key]

    def _require_live(self, handle: WriteHandle) -> FakeWrite:
        if not isinstance(handle, FakeWrite) or handle not in self._live:
            raise TransportError(f"{handle!r} was released, or is no WRITE of this transport")
        return handle
