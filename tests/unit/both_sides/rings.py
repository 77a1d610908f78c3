"""P's staging memory with owners: each copy and each WRITE that touches foreign bytes is noted.

A span of the ring belongs to one WRITE. Free bytes are poisoned, so a late reader gets poison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerpush.core.layout import BlockIds, CacheLayout
from layerpush.transport.base import WriteState
from layerpush.transport.gather.memory import Copy
from layerpush.transport.gather.ring import Ring
from layerpush.transport.gather.strategy import GatherStrategy
from tests.support.numpy_staging import NumpyStaging

if TYPE_CHECKING:
    from tests.unit.both_sides.prefill_rank import PrefillRank

RING_POISON = 0xDD
LOOKS = 12


@dataclass(frozen=True)
class Packing:
    """A world's packing. ``plan``: "off", "gather" or "mixed"; ``blocks``: the size of a rank's ring; ``slow`` and
    ``broken``: shares of copies.
    """

    plan: str = "off"
    blocks: int = 12
    slow: float = 0.0
    looks: int = LOOKS
    broken: float = 0.0
    seed: int = 0

    @classmethod
    def drawn(cls, draw: random.Random, **given: object) -> Packing:
        """A random packing, except for the ``given`` values."""
        drawn: dict[str, object] = {
            "plan": draw.choice(["off", "gather", "gather", "mixed"]),
            "blocks": draw.choice([2, 6, 24, 96]),
            "slow": draw.choice([0.0, 0.3, 0.9]),
            "broken": draw.choice([0.0, 0.0, 0.02]),
            "seed": draw.randrange(1 << 16),
        }
        return cls(**(drawn | given))


class WatchedRing(Ring):
    """Reports each span that is given back."""

    def __init__(self, size: int, given: Callable[[range], None]) -> None:
        super().__init__(size)
        self._given = given

    def free(self, offset: int) -> None:
        size = self._sizes.get(offset, 0)
        super().free(offset)
        self._given(range(offset, offset + size))


@dataclass(frozen=True, eq=False)
class Running:
    """A running gather: bytes of the ring, and descriptor ids of the cache."""

    packed: range
    blocks: frozenset[int]


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


class PrefillStaging(NumpyStaging):
    """Staging memory of a prefill rank. The world's packing sets how long copies take; some break."""

    def __init__(self, rank: PrefillRank, layout: CacheLayout) -> None:
        super().__init__(layout, rank.memory, rank.world.packing.blocks * rank.piece)
        self.rank = rank
        self.memory[:] = RING_POISON
        self.ring = WatchedRing(len(self.memory), self._given)
        self.running: list[Running] = []
        starts = range(0, len(self.memory), rank.piece)
        self.blocks = rank.endpoint.describe("blocks", self.memory, starts, rank.piece)
        self.blocks.give_away(range(len(starts)))

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:
        packed = range(offset, offset + sum(len(packed) for packed, _ in self._pairs(layers, blocks, offset)))
        owners = {self.rank.engine.holders.get(block) for block in blocks.tolist()}
        if None in owners or len(owners) != 1:
            self.rank.accuse(f"blocks {blocks.tolist()} are gathered, which belong to {owners}")
        self._check_wire(packed, "are gathered into")
        ids = frozenset(self.rank.descriptor_ids(layers, blocks.tolist()))
        begun = self._begin(Running(packed, ids), lambda: super(PrefillStaging, self).gather(layers, blocks, offset))
        self.blocks.hand_to(self._blocks_of(packed), next(iter(owners)))
        return begun

    def _begin(self, running: Running, start: Callable[[], Copy]) -> Copy:
        packing, draw = self.rank.world.packing, self.rank.world.copies
        fate = self._fate()
        if fate == "refused":
            raise RuntimeError("no memory for block ids")
        self.looks.append(draw.randint(1, packing.looks) if draw.random() < packing.slow else 0)
        self.running.append(running)
        return _Watched(start(), lambda: self.running.remove(running), breaks=fate == "broken")

    def _fate(self) -> str | None:
        """Of the next copy: None, "refused" or "broken"."""
        drawn, broken = self.rank.world.copies.random(), self.rank.world.packing.broken
        if drawn >= broken:
            return None
        return "refused" if drawn < broken / 2 else "broken"

    def check_post(self, key: object, ids: Sequence[int]) -> None:
        """A WRITE from the ring is posted only after its gather."""
        for running in self.running if key == "blocks" else ():
            if any(overlap(running.packed, self._bytes_of(each)) for each in ids):
                self.rank.accuse("a WRITE is posted from bytes that are still gathered")

    def _given(self, span: range) -> None:
        for running in self.running:
            if overlap(running.packed, span):
                self.rank.accuse(f"bytes {span} of the ring are given back while a gather goes on")
        self._check_wire(span, "are given back")
        self.memory[span.start : span.stop] = RING_POISON
        self.blocks.give_away(self._blocks_of(span))

    def _check_wire(self, span: range, deed: str) -> None:
        for write in self.rank.world.fabric.writes:
            ours = write.source is self.rank.endpoint and write.route.local_descriptors == "blocks"
            if not ours or write.state is not WriteState.PENDING or not write.target.alive:
                continue
            if any(overlap(span, self._bytes_of(each)) for each in write.local.tolist()):
                self.rank.accuse(f"bytes {span} of the ring {deed} while {write} is on the wire")

    def _blocks_of(self, span: range) -> range:
        return range(span.start // self.rank.piece, span.stop // self.rank.piece)

    def _bytes_of(self, block: int) -> range:
        return range(block * self.rank.piece, (block + 1) * self.rank.piece)


class MixedStrategy(GatherStrategy):
    """Chooses any plan."""

    draw: random.Random

    def _gathers(self, *_: object) -> bool:
        return self.draw.choice([True, False])


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
