"""Staging memory of both engines with owners: each copy and each WRITE that touches foreign bytes is noted.

A span of P's ring belongs to one WRITE, a window of D's to one request. Free bytes are poisoned, so a late reader
gets poison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layerpush.core.layout import BlockIds, CacheLayout
from layerpush.transport.base import WriteState
from layerpush.transport.packing.cost_model import Plan, TransferSize
from layerpush.transport.packing.memory import PIECE_BYTES, Copy
from layerpush.transport.packing.ring import Ring
from layerpush.transport.packing.strategy import PackingStrategy
from layerpush.transport.packing.windows import Windows
from tests.support.fake_transport import Bytes, Descriptors, FakeWrite
from tests.support.ownership import common_owners
from tests.unit.staging_rig import NumpyStaging

if TYPE_CHECKING:
    from tests.unit.both_sides.decode import DecodeEngine
    from tests.unit.both_sides.prefill_rank import PrefillRank
    from tests.unit.both_sides.process import Process

RING_POISON = 0xDD
LOOKS = 12


@dataclass(frozen=True)
class Packing:
    """A world's packing. ``plan``: "off", "gather", "packed" or "mixed"; ``slow`` and ``broken``: shares of copies."""

    plan: str = "off"
    pieces: int = 3
    windows: int = 2
    window_pieces: int = 2
    slow: float = 0.0
    looks: int = LOOKS
    broken: float = 0.0
    seed: int = 0

    @classmethod
    def drawn(cls, draw: random.Random, **given: object) -> Packing:
        """A random packing, except for the ``given`` values."""
        drawn: dict[str, object] = {
            "plan": draw.choice(["off", "gather", "packed", "packed", "mixed", "mixed"]),
            "pieces": draw.choice([1, 3, 6]),
            "windows": draw.choice([1, 4, 8]),
            "window_pieces": draw.choice([1, 2, 4]),
            "slow": draw.choice([0.0, 0.3, 0.9]),
            "broken": draw.choice([0.0, 0.0, 0.02]),
            "seed": draw.randrange(1 << 16),
        }
        return cls(**(drawn | given))  # type: ignore[arg-type]


class WatchedRing(Ring):
    """Reports each span that is given back."""

    def __init__(self, size: int, given: Callable[[range], None]) -> None:
        super().__init__(size)
        self._given = given

    def give(self, offset: int) -> None:
        size = self._sizes.get(offset, 0)
        super().give(offset)
        self._given(range(offset, offset + size))


@dataclass(frozen=True, eq=False)
class Running:
    """A running copy: bytes of the ring, and descriptor ids of the cache."""

    what: str
    packed: range
    blocks: frozenset[int]

    def touches(self, span: range) -> bool:
        return overlap(self.packed, span)


class _Watched:
    """A copy that reports its end."""

    def __init__(self, copy: Copy, on_end: Callable[[], None], breaks: bool) -> None:
        self._copy, self._on_end, self._breaks, self._ended = copy, on_end, breaks, False

    def is_over(self) -> bool:
        if self._breaks:
            self._end()
            raise RuntimeError("the device is tired")
        over = self._copy.is_over()
        if over:
            self._end()
        return over

    def device_s(self) -> float:
        return self._copy.device_s()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end()


class WatchedStaging(NumpyStaging):
    """Staging memory of one process. The world's packing sets how long copies take; some break."""

    def __init__(self, process: Process, layout: CacheLayout, cache: Bytes, pieces: int) -> None:
        super().__init__(layout, cache, pieces * PIECE_BYTES)
        self.process = process
        self.memory[:] = RING_POISON
        self.ring = WatchedRing(len(self.memory), self._given)
        self.running: list[Running] = []

    def accuse(self, text: str) -> None:
        self.process.world.wrongs.append(f"{self.process.name}: {text}")

    def pieces(self, key: str) -> Descriptors:
        """The ring as a list of NIXL descriptors without an owner."""
        starts = range(0, len(self.memory), PIECE_BYTES)
        described = self.process.endpoint.describe(key, self.memory, starts, PIECE_BYTES)
        described.give_away(range(len(starts)))
        return described

    def _begin(self, running: Running, start: Callable[[], Copy], on_end: Callable[[], None]) -> Copy:
        packing, draw = self.process.world.packing, self.process.world.copies
        fate = draw.random()
        if fate < packing.broken / 2:
            raise RuntimeError("no memory for block ids")
        self.looks.append(draw.randint(1, packing.looks) if draw.random() < packing.slow else 0)
        self.running.append(running)

        def ended() -> None:
            self.running.remove(running)
            on_end()

        return _Watched(start(), ended, breaks=fate < packing.broken)

    def _packed(self, layers: slice, blocks: BlockIds, offset: int) -> range:
        return range(offset, offset + sum(len(packed) for packed, _ in self._pairs(layers, blocks, offset)))

    def _given(self, span: range) -> None:
        for running in self.running:
            if running.touches(span):
                self.accuse(f"bytes {span} of the ring are given back while {running.what} goes on")
        self._check_wire(span, "are given back")
        self.memory[span.start : span.stop] = RING_POISON

    def _check_wire(self, span: range, deed: str) -> None:
        for write in self._on_the_wire():
            if any(overlap(span, at) for at in self._spans_of(write)):
                self.accuse(f"bytes {span} of the ring {deed} while {write} is on the wire")

    def _on_the_wire(self) -> Iterator[FakeWrite]:
        raise NotImplementedError

    def _spans_of(self, write: FakeWrite) -> Iterator[range]:
        raise NotImplementedError


class PrefillStaging(WatchedStaging):
    """Staging memory of a prefill rank."""

    def __init__(self, rank: PrefillRank, layout: CacheLayout) -> None:
        super().__init__(rank, layout, rank.memory, rank.world.packing.pieces)
        self.rank = rank
        self.lists = {
            "pieces": (PIECE_BYTES, self.pieces("pieces")),
            "blocks": (
                rank.piece,
                rank.endpoint.describe("blocks", self.memory, self._starts_of_blocks(), rank.piece),
            ),
        }
        self.lists["blocks"][1].give_away(range(len(self._starts_of_blocks())))

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:  # type: ignore[override]
        packed = self._packed(layers, blocks, offset)
        owners = {self.rank.engine.holders.get(block) for block in blocks.tolist()}
        if None in owners or len(owners) != 1:
            self.accuse(f"blocks {blocks.tolist()} are gathered, which belong to {owners}")
        self._check_wire(packed, "are gathered into")
        ids = frozenset(self.rank.descriptor_ids(layers, blocks.tolist()))
        running = Running("a gather", packed, ids)
        begun = self._begin(running, lambda: super(PrefillStaging, self).gather(layers, blocks, offset), lambda: None)
        for size, described in self.lists.values():
            described.hand_to(_elements(packed, size), next(iter(owners)))
        return begun

    def check_post(self, key: object, ids: Sequence[int]) -> None:
        """A WRITE from the ring is posted only after its gather."""
        if not isinstance(key, str) or key not in self.lists:
            return
        size, _ = self.lists[key]
        for running in self.running:
            if any(running.touches(range(each * size, (each + 1) * size)) for each in ids):
                self.accuse("a WRITE is posted from bytes that are still gathered")

    def _given(self, span: range) -> None:
        super()._given(span)
        for size, described in self.lists.values():
            described.give_away(range(-(-span.start // size), span.stop // size))

    def _starts_of_blocks(self) -> range:
        return range(0, len(self.memory), self.rank.piece)

    def _on_the_wire(self) -> Iterator[FakeWrite]:
        for write in self.process.world.fabric.writes:
            if write.source is self.process.endpoint and write.state is WriteState.PENDING and write.target.alive:
                yield write

    def _spans_of(self, write: FakeWrite) -> Iterator[range]:
        size, _ = self.lists.get(write.route.local_descriptors, (0, None))  # type: ignore[call-overload]
        for each in write.local.tolist() if size else ():
            yield range(each * size, (each + 1) * size)


class DecodeStaging(WatchedStaging):
    """Staging memory of a decode engine. A scatter into blocks counts as a write."""

    def __init__(self, engine: DecodeEngine, layout: CacheLayout) -> None:
        packing = engine.world.packing
        spare = packing.window_pieces // 2  # too little for one more window
        super().__init__(engine, layout, engine.memory, packing.windows * packing.window_pieces + spare)
        self.engine = engine
        self.owned = self.pieces("ring")

    def scatter(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:  # type: ignore[override]
        packed = self._packed(layers, blocks, offset)
        ids = frozenset(self.engine.descriptor_ids(layers, blocks.tolist()))
        running = Running(f"a scatter into {sorted(ids)}", packed, ids)
        self._check_owners(running, "begins")
        self._check_wire(packed, "are scattered")
        self.engine.check_blocks(ids, "are scattered into")
        return self._begin(
            running,
            lambda: super(DecodeStaging, self).scatter(layers, blocks, offset),
            lambda: self._check_owners(running, "ends"),
        )

    def check_post(self, key: object, ids: Sequence[int]) -> None:
        """No WRITE is posted into memory that a copy or another WRITE uses."""
        if key == "ring":
            for each in ids:
                span = range(each * PIECE_BYTES, (each + 1) * PIECE_BYTES)
                self._check_wire(span, "are written to again")
                if any(running.touches(span) for running in self.running):
                    self.accuse(f"bytes {span} of the ring are written to while they are scattered")
        elif self.writes_into(set(ids)):
            self.accuse(f"a WRITE is posted into {list(ids)} while they are scattered into")

    def writes_into(self, ids: set[int]) -> bool:
        return any(ids & running.blocks for running in self.running)

    def _check_owners(self, running: Running, moment: str) -> None:
        ring = [self.owned.owners(piece) for piece in _elements(running.packed, PIECE_BYTES)]
        for index in running.blocks:
            into = self.engine.owned.owners(index)
            if not into or not all(common_owners(owners, into) for owners in ring):
                self.accuse(f"{running.what} {moment}: descriptor {index} belongs to {into}, the ring to {ring}")

    def _given(self, span: range) -> None:
        super()._given(span)
        self.owned.give_away(_elements(span, PIECE_BYTES))

    def _on_the_wire(self) -> Iterator[FakeWrite]:
        yield from self.engine.on_the_wire()

    def _spans_of(self, write: FakeWrite) -> Iterator[range]:
        for piece in write.remote.tolist() if write.route.remote_descriptors == "ring" else ():
            yield range(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)


class OwnedWindows(Windows):
    """A window belongs to its request. WRITEs of other requests into it are violations."""

    def __init__(self, engine: DecodeEngine, staging: DecodeStaging, size: int) -> None:
        super().__init__(staging.ring, size)
        self._engine, self._staging = engine, staging

    def open(self, request_id: str) -> int | None:
        offset = super().open(request_id)
        if offset is not None:
            owner = self._engine.loads[request_id].prompt.text
            self._staging.owned.hand_to(_elements(range(offset, offset + self.size), PIECE_BYTES), owner)
        return offset

    def offset_of(self, request_id: str) -> int | None:
        window = self._windows.get(request_id)
        return None if window is None else window.offset


class MixedStrategy(PackingStrategy):
    """Chooses any possible plan."""

    draw: random.Random

    def _plan(self, engine_id: str, transfer: TransferSize, possible: set[Plan]) -> Plan:
        return self.draw.choice(sorted(possible, key=lambda plan: plan.value))


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _elements(span: range, size: int) -> list[int]:
    """Elements of ``size`` bytes that a span touches."""
    return np.arange(span.start // size, -(-span.stop // size)).tolist()
