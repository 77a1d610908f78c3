"""A network in memory, with real bytes and scripted faults: the whole double of `NixlTransport`.

Two processes and a WRITE::

    fabric = FakeFabric(Faults(hold_writes={0: 5}))
    p, d = fabric.endpoint("P"), fabric.endpoint("D")
    p.describe("kv", p_memory, offsets, length)
    d.describe("kv", d_memory, offsets, length)
    handle = p.post_write(Route("D", 0, "kv", "kv"), local_ids, remote_ids)   # p is a Transport

`ownership` decides which memory a WRITE may touch.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from layerpush.transport.base import DescriptorIds, PeerLostError, Route, TransportError, WriteHandle, WriteState
from tests.support.ownership import Bytes, Descriptors, Owners, Violation, common_owners
from tests.support.transport_faults import Faults

__all__ = ["Bytes", "Descriptors", "FakeFabric", "FakeTransport", "FakeWrite", "Faults", "Violation"]


@dataclass(eq=False)
class FakeWrite:
    """One WRITE and its progress. It is its own handle."""

    number: int
    source: FakeTransport
    target: FakeTransport
    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    unmoved: list[int]
    """Positions in ``local`` and ``remote`` that have not landed, in the order of landing."""
    meant_for: list[Owners]
    """By position: the owners for whom the WRITE is."""
    polls_left: int
    fails: bool
    state: WriteState | TransportError = WriteState.PENDING
    lingers: int = 0
    """The WRITE goes on after its source's death for as many looks of the target."""
    notification: bytes = b""
    """The WRITE's own: it arrives after the bytes."""
    carried: dict[int, Bytes] = field(default_factory=dict)
    """On an unordered fabric: bytes that have left the source, and have not landed. By position."""

    def __str__(self) -> str:
        return f"WRITE {self.number} from {self.source.name!r} to {self.target.name!r}"

    @property
    def is_on_the_wire(self) -> bool:
        """Whether a byte of it may still land."""
        return self.state is WriteState.PENDING or bool(self.carried)

    def progress(self) -> None:
        """Land a share of the rest, with the source's present bytes, not those at the post. On an unordered fabric they
        only leave the source.
        """
        fabric = self.source.fabric
        if self.state is not WriteState.PENDING or not self.target.alive or (self.target.frozen and fabric.ordered):
            return
        if self.polls_left == 1 and self.fails:
            self.state = TransportError("a WRITE ended in an error")
            self.carried.clear()
            return
        share = -(-len(self.unmoved) // self.polls_left)
        for position in self.unmoved[:share]:
            source = self._read(position)
            if fabric.ordered:
                self._land(position, source)
            else:
                self.carried[position] = source.copy()
        del self.unmoved[:share]
        self.polls_left -= 1
        if self.polls_left == 0:
            self.state = WriteState.LANDED
            if fabric.ordered:
                self._notify()

    def arrive(self) -> None:
        """The target looks: some carried bytes land, in any order, and the notification after the last one."""
        draw = self.source.fabric.random
        for position in draw.sample(sorted(self.carried), draw.randint(0, len(self.carried))):
            self._land(position, self.carried.pop(position))
        if self.state is WriteState.LANDED and not self.carried:
            self._notify()

    def _notify(self) -> None:
        if self.notification:
            number = self.source.fabric.reach("notify")
            self.source.enqueue(self.target, self.notification, number, lost=False)
            self.notification = b""

    def _read(self, position: int) -> Bytes:
        local, meant_for = int(self.local[position]), self.meant_for[position]
        return self.source.touch(self.route.local_descriptors, local, meant_for, f"{self} reads from")

    def _land(self, position: int, source: Bytes) -> None:
        remote, meant_for = int(self.remote[position]), self.meant_for[position]
        self.target.touch(self.route.remote_descriptors, remote, meant_for, f"{self} lands in")[:] = source


@dataclass
class _Notification:
    sender: str
    payload: bytes
    looks_in_vain: int


class FakeFabric:
    """The endpoints, the faults, and a record of all events. Any thread may use its endpoints.

    ``ordered``: a WRITE has landed when it ends, as over UCX. Otherwise it ends when its bytes have left the source.
    They land later, in any order, and a notification that is sent by itself overtakes them; only the WRITE's own waits.

    Deterministic: the same calls with the same ``seed`` and faults give the same landings.
    """

    def __init__(self, faults: Faults | None = None, seed: int = 0, *, ordered: bool = True) -> None:
        self.faults = faults or Faults()
        self.ordered = ordered
        self.random = random.Random(seed)
        self.writes: list[FakeWrite] = []
        """Every WRITE that was posted, in order."""
        self.violations: list[Violation] = []
        self.reached: Counter[str] = Counter()
        """Number of moments so far, by name. The next moment gets this number."""
        self.lock = threading.RLock()
        self._endpoints: dict[str, FakeTransport] = {}
        self._lingering: list[FakeWrite] = []

    def endpoint(self, name: str) -> FakeTransport:
        """A new process. As in NIXL, no other one ever has its name."""
        if name in self._endpoints:
            raise ValueError(f"endpoint {name!r} exists")
        self._endpoints[name] = FakeTransport(self, name)
        return self._endpoints[name]

    def kill(self, name: str, lingers: int = 0) -> None:
        """The process dies: no WRITE lands there, and calls of its peers raise ``PeerLostError``.

        Its posted WRITEs go on until a target has looked ``lingers`` times for notifications, as bytes in a socket do.
        """
        with self.lock:
            dead = self._endpoints[name]
            dead.alive = False
            for write in self.writes:
                if write.source is dead and write.is_on_the_wire and lingers:
                    write.lingers = lingers
                    self._lingering.append(write)
                elif write.source is dead:
                    write.carried.clear()

    def freeze(self, name: str) -> None:
        """The process stops, or its link is cut: WRITEs to it stay ``PENDING``, and no peer gets a message."""
        self._endpoints[name].frozen = True

    def thaw(self, name: str) -> None:
        self._endpoints[name].frozen = False

    def settle(self) -> None:
        """Land every WRITE that was released too early, as a network would in the end."""
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
        """Count a moment, run its script, return its number."""
        number = self.reached[moment]
        self.reached[moment] += 1
        action = self.faults.at.get((moment, number))
        if action is not None:
            action(self)
        return number

    def progress_lingering(self, target: FakeTransport) -> None:
        for write in self._lingering:
            if write.target is target:
                write.progress()
                write.lingers -= 1
        self._lingering = [write for write in self._lingering if write.lingers and write.target.alive]

    def carry(self, target: FakeTransport) -> None:
        """Land bytes of ended WRITEs, and of others that are on their way, at a look of the target."""
        if self.ordered:
            return
        for write in self.writes:
            may_move = write.source.alive or write.lingers > 0
            if write.target is target and may_move and (write.carried or write.notification):
                write.arrive()


class FakeTransport:
    """One process on the fabric: a `Transport`, plus the memory that it registered."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.alive, self.frozen = True, False
        self.descriptors: dict[Hashable, Descriptors] = {}
        self._live: set[FakeWrite] = set()
        self._released: list[FakeWrite] = []
        self._inbox: list[_Notification] = []

    def describe(
        self,
        key: Hashable,
        memory: Bytes,
        offsets: Sequence[int],
        length: int,
        owned_as: Descriptors | None = None,
    ) -> Descriptors:
        """Register pieces of ``memory``, without a copy, as the descriptor list ``key`` of routes. ``owned_as``: they
        are parts of these pieces, so their owners are the same.
        """
        self.descriptors[key] = Descriptors(memory, offsets, length, owned_as)
        return self.descriptors[key]

    def post_write(
        self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b""
    ) -> WriteHandle:
        fabric = self.fabric
        with fabric.lock:
            self._require_running()
            number = fabric.reach("post")
            target = fabric.peer(route.agent)
            ours, theirs = self._pick(route.local_descriptors, local), target._pick(route.remote_descriptors, remote)
            if len(local) != len(remote) or ours.length != theirs.length:
                raise TransportError("the two sides of a WRITE differ in count or in length")
            if number in fabric.faults.fail_posts:
                raise TransportError(f"post {number} fails as scripted")
            unmoved = fabric.random.sample(range(len(local)), len(local))
            meant_for = [
                common_owners(ours.owners(source), theirs.owners(sink))
                for source, sink in zip(local.tolist(), remote.tolist(), strict=True)
            ]
            polls = 1 + fabric.faults.hold_writes.get(number, fabric.random.randint(0, 2))
            fails = number in fabric.faults.fail_writes
            write = FakeWrite(
                number, self, target, route, local.copy(), remote.copy(), unmoved, meant_for, polls, fails
            )
            write.notification = notification
            fabric.writes.append(write)
            self._live.add(write)
            self._accuse_strays(write)
            return write

    def poll(self, handle: WriteHandle) -> WriteState:
        with self.fabric.lock:
            self._require_running()
            write = self._require_live(handle)
            self.fabric.reach("poll")
            self.progress_released()
            write.progress()
            if write.state is WriteState.PENDING and not write.target.alive:
                raise PeerLostError(f"endpoint {write.target.name!r} died under a WRITE")
            if isinstance(write.state, TransportError):
                raise write.state
            return write.state

    def release(self, handle: WriteHandle) -> None:
        with self.fabric.lock:
            write = self._require_live(handle)
            self._live.remove(write)
            if write.state is WriteState.PENDING:
                self._released.append(write)

    def notify(self, agent: str, payload: bytes) -> None:
        with self.fabric.lock:
            self._require_running()
            number = self.fabric.reach("notify")  # the peer may die at this moment
            self.enqueue(self.fabric.peer(agent), payload, number)

    def enqueue(self, target: FakeTransport, payload: bytes, number: int, *, lost: bool = True) -> None:
        """Put the fabric's notification of this number into the target's inbox. ``lost``: it may be lost."""
        faults = self.fabric.faults
        looks_in_vain = faults.delay_notifications.get(number, 0)
        copies = 0 if lost and number in faults.drop_notifications else 1
        copies += copies and number in faults.duplicate_notifications
        place = 0 if number in faults.reorder_notifications else len(target._inbox)
        target._inbox[place:place] = [_Notification(self.name, payload, looks_in_vain) for _ in range(copies)]

    def contact(self) -> bytes:
        return self.name.encode()

    def meet(self, contact: bytes) -> str:
        return contact.decode()

    def notifications(self) -> list[tuple[str, bytes]]:
        with self.fabric.lock:
            self._require_running()
            self.fabric.carry(self)
            self.fabric.progress_lingering(self)
            self.progress_released()
            arrived = [(note.sender, note.payload) for note in self._inbox if note.looks_in_vain == 0]
            self._inbox = [note for note in self._inbox if note.looks_in_vain > 0]
            for note in self._inbox:
                note.looks_in_vain -= 1
            return arrived

    def touch(self, key: Hashable, index: int, meant_for: Owners, deed: str) -> Bytes:
        """A piece of memory that a WRITE reads or lands in. A violation if the WRITE may no longer touch it."""
        descriptors = self.descriptors[key]
        if meant_for and not descriptors.lets(index, meant_for):  # a WRITE for nobody was accused at its post
            self._accuse(key, index, meant_for, deed)
        return descriptors.pieces[index]

    def progress_released(self, to_the_end: bool = False) -> None:
        """A WRITE released in flight does not stop: it goes on whenever this process makes progress."""
        for write in self._released:
            for _ in range(write.polls_left if to_the_end else 1):
                write.progress()
        self._released = [write for write in self._released if write.state is WriteState.PENDING]

    def _accuse_strays(self, write: FakeWrite) -> None:
        """Accuse a WRITE of each piece from one owner's memory to another's, and of each piece without an owner."""
        for position, meant_for in enumerate(write.meant_for):
            if meant_for:
                continue
            source, target = int(write.local[position]), int(write.remote[position])
            owners = self.descriptors[write.route.local_descriptors].owners(source)
            if owners:
                write.target._accuse(write.route.remote_descriptors, target, owners, f"{write} is posted for")
            else:
                self._accuse(write.route.local_descriptors, source, owners, f"{write} is posted from")

    def _accuse(self, key: Hashable, index: int, meant_for: Owners, deed: str) -> None:
        owners = self.descriptors[key].owners(index)
        self.fabric.violations.append(Violation(self.name, key, index, deed, meant_for, owners))

    def _pick(self, key: Hashable, ids: DescriptorIds) -> Descriptors:
        if key not in self.descriptors:
            raise TransportError(f"{self.name!r} has no descriptor list {key!r}")
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= len(self.descriptors[key].pieces):
            raise TransportError(f"descriptor ids do not fit the list {key!r} of {self.name!r}")
        return self.descriptors[key]

    def _require_running(self) -> None:
        if not self.alive:
            raise RuntimeError(f"endpoint {self.name!r} is dead: it makes no calls")

    def _require_live(self, handle: WriteHandle) -> FakeWrite:
        if not isinstance(handle, FakeWrite) or handle not in self._live:
            raise TransportError(f"{handle!r} was released, or is no WRITE of this transport")
        return handle
