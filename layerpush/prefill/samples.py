"""Checksums of a push: taken from P's KV as its WRITEs are posted, and sent with the completion. Writer thread only."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence

from layerpush.core.replica import STRIPE
from layerpush.core.wire import MAX_CHECKSUMS, MAX_PARTS, PartSums, Registration
from layerpush.core.write import Segment, Write
from layerpush.prefill.ready_blocks import ReadyBlocks
from layerpush.transport.kv_parts import CHECKSUM, KvParts, LayerKv, Place
from layerpush.transport.link import Link

SAMPLE_BYTES = 32 << 20
"""The most KV of one push that a rank reads for checksums: neither writer may be busy for long."""


class Sampler:
    """Chooses a ``share`` of the pushes, by a hash, so every rank chooses the same. ``parts`` is this rank's KV, and
    ``layers`` has the layers' names in the order of a WRITE's.
    """

    def __init__(self, parts: KvParts, layers: Sequence[str], share: float, draw: random.Random | None = None) -> None:
        self._parts = parts
        self._layers = layers
        self._share = share
        self._draw = draw or random.Random()

    def sample(self, registration: Registration, link: Link) -> Sample | None:
        """The sample of a push that begins; None if it is not chosen, or if its decode engine compares nothing."""
        chance = zlib.crc32(repr(registration.key).encode()) / (1 << 32)
        if registration.verifies != CHECKSUM or chance >= self._share:
            return None
        return Sample(self._parts, self._layers, registration.decode_tp_size, link, self._draw)


class Sample:
    """The checksums of one push. A decode rank gets those of the heads that it has: it is one of ``ranks``.

    Every block of every layer is in it, but of a long prompt a part of them, drawn by WRITE and layer.
    """

    def __init__(self, parts: KvParts, layers: Sequence[str], ranks: int, link: Link, draw: random.Random) -> None:
        self.tokens = 0
        """The tokens of the prompt."""
        self._parts = parts
        self._layers = layers
        self._ranks = ranks
        self._link = link
        self._draw = draw
        self._epoch = 0
        self._count, self._bytes = MAX_CHECKSUMS, SAMPLE_BYTES
        """How many checksums may still be taken, and of how much KV."""
        self._taken: dict[tuple[int, str], dict[int, tuple[int, bytes]]] = {}
        """For each decode rank and layer, by first token: the end, and the checksum."""

    def take_checksums(self, write: Write, blocks: ReadyBlocks) -> None:
        """A WRITE of ``blocks`` was posted: take checksums of what it reads from. Raises ``RuntimeError``."""
        if write.epoch != self._epoch:
            self._epoch = write.epoch
            self._drop_after(blocks.kept_tokens)
        self.tokens = blocks.prompt_tokens
        share = self._share(blocks)
        for part in write.segments:
            for name in self._layers[part.layers]:
                layer = self._parts.layers.get(name)
                if layer is not None and self._draw.random() < share:
                    self._take(name, layer, list(self._places(layer, part, blocks)))

    def sums(self, rank: int, end: int) -> tuple[PartSums, ...]:
        """The checksums for a decode rank of the prompt's first ``end`` tokens."""
        rows: list[PartSums] = []
        for (to, name), taken in self._taken.items():
            heads, run = self._heads(name, rank), list[int]()
            for start in sorted(start for start, (last, _) in taken.items() if last <= end) if to == rank else ():
                unit = taken[run[0]][0] - run[0] if run else 0
                if run and (taken[run[-1]][0] != start or start - run[-1] != unit):
                    rows.append(_row(name, heads, run, taken))
                    run = []
                run.append(start)
            if run:
                rows.append(_row(name, heads, run, taken))
        return tuple(rows[:MAX_PARTS])

    def _share(self, blocks: ReadyBlocks) -> float:
        """The part of each WRITE's layers that is read."""
        pieces, units, size = self._link.pieces, 0, 0
        for name, wanted in zip(self._layers, blocks.wanted, strict=True):
            if (layer := self._parts.layers.get(name)) is not None:
                units += wanted * (1 if pieces else layer.kernel_blocks)
                tokens = pieces.tokens if pieces else layer.kernel_blocks * layer.kernel_tokens
                size += wanted * layer.size(self._parts.heads(name), tokens)
        most = MAX_PARTS * STRIPE if any(one.count > 1 for one in self._link.replicas) else MAX_CHECKSUMS
        return min(1.0, most / max(1, units), SAMPLE_BYTES / max(1, size))

    def _places(self, layer: LayerKv, part: Segment, blocks: ReadyBlocks) -> Iterator[tuple[int, Place]]:
        """The parts of a segment in one layer, each with its first token. None of them is longer than a kernel block on
        either side.
        """
        pieces, kernel = self._link.pieces, layer.kernel_tokens
        unit, count = (kernel, layer.kernel_blocks) if pieces is None else (pieces.tokens, 1)
        for number, source in blocks.sources(part):
            for index in range(count):
                start = (number * count + index) * unit
                block, inside = (source * count + index, 0) if pieces is None else divmod(source, pieces.our_kernel)
                tokens = min(unit, blocks.prompt_tokens - start)
                if tokens > 0 and (layer.fields or tokens == kernel):
                    yield start, Place(block, inside * unit, tokens)

    def _take(self, name: str, layer: LayerKv, found: Sequence[tuple[int, Place]]) -> None:
        """Of as many neighbouring places as may still be read."""
        size = layer.size(self._parts.heads(name), layer.kernel_tokens)
        most = min(len(found), self._count, self._bytes // size)
        first = self._draw.randrange(len(found) - most + 1)
        places = found[first : first + most]
        self._count -= most
        self._bytes -= most * size
        sums: dict[range, bytes] = {}
        for route in self._link.routes if places else ():
            heads = self._heads(name, route.remote_rank)
            if heads:
                if heads not in sums:
                    sums[heads] = self._parts.checksums(name, heads, [place for _, place in places])
                taken = self._taken.setdefault((route.remote_rank, name), {})
                for index, (start, place) in enumerate(places):
                    taken[start] = start + place.tokens, sums[heads][4 * index :][:4]

    def _heads(self, name: str, rank: int) -> range:
        """The heads that this rank has, and a decode rank as well."""
        ours, theirs = self._parts.heads(name), self._parts.layers[name].heads_of(rank, self._ranks)
        return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))

    def _drop_after(self, tokens: int) -> None:
        """The prompt is computed again, but for its first tokens, which the decode engine may keep."""
        for key, taken in self._taken.items():
            self._taken[key] = {start: one for start, one in taken.items() if one[0] <= tokens}


def _row(name: str, heads: range, run: list[int], taken: dict[int, tuple[int, bytes]]) -> PartSums:
    """Of parts that follow one another. All but the last have the same length."""
    unit, end = taken[run[0]][0] - run[0], taken[run[-1]][0]
    values = b"".join(taken[start][1] for start in run)
    return PartSums(name, heads.start, heads.stop, run[0], end, unit, values)
