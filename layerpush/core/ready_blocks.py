"""The blocks of a prompt that are in memory, those of them that were posted, and their targets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerpush.core.coverage import check_blocks
from layerpush.core.machine import IllegalTransitionError
from layerpush.core.push_protocol import Segment
from layerpush.core.step_plan import Alignment, ChunkPlan
from layerpush.core.wire import NULL_BLOCK

PAIRS_KEPT = 8


class ReadyBlocks:
    """One epoch of one prompt. ``layer_groups`` and ``layer_bytes`` hold each layer's KV cache group and block size.

    Without ``by_layer`` a block is handed out only when every layer of its chunk is ready.
    """

    def __init__(self, layer_groups: Sequence[int], layer_bytes: Sequence[int], *, by_layer: bool) -> None:
        self._layer_groups = tuple(layer_groups)
        self._layer_bytes = tuple(layer_bytes)
        self._by_layer = by_layer
        self._alignments: tuple[Alignment, ...] = ()
        self._totals: tuple[int, ...] = ()
        self.rewind()

    def rewind(self) -> None:
        """Everything will be computed again, into other blocks; the decode engine's stay the same."""
        self.chunk_is_whole = False
        """Some chunk became ready in all its layers since this was last set to False."""
        self._tables: list[list[int]] = []
        self._pairs: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._chunk_ends: list[tuple[int, ...]] = []
        self._ready_layers: list[set[int]] = []
        self._complete: tuple[int, ...] = ()
        self._ready = [0] * len(self._layer_groups)
        self._posted = [0] * len(self._layer_groups)
        self._fresh: set[int] = set()  # layers that may have more than was posted: few of many, at any time
        self._unready = 0
        self._final = False

    @property
    def chunks(self) -> int:
        return len(self._chunk_ends)

    @property
    def is_complete(self) -> bool:
        """Every layer of the whole prompt is in this engine's memory."""
        return self._final and self._unready == 0

    @property
    def wanted(self) -> list[int]:
        """How many blocks each layer has to deliver."""
        return [len(self._alignments[group].targets) for group in self._layer_groups]

    def skipped(self, group: int) -> int:
        """How many leading blocks the decode engine has already."""
        return self._alignments[group].skipped

    def plan(self, chunk: ChunkPlan) -> None:
        """A step computes this chunk. Raises ``IllegalTransitionError`` if one before it is missing."""
        if chunk.index != len(self._chunk_ends):
            raise IllegalTransitionError(
                f"{chunk.request_id}: chunk {chunk.index} follows {len(self._chunk_ends)} chunks"
            )
        self._tables = self._tables or [[] for _ in chunk.groups]
        for table, part in zip(self._tables, chunk.groups, strict=True):
            table.extend(part.blocks)
        self._totals = tuple(part.total for part in chunk.groups)
        self._chunk_ends.append(tuple(part.end for part in chunk.groups))
        self._ready_layers.append(set())
        self._unready += len(self._layer_groups)
        self._final = chunk.final

    def ready(self, chunk: int, layer: int) -> None:
        """A layer of a chunk is in memory; more than once is fine."""
        layers = self._ready_layers[chunk]
        if layer in layers:
            return
        layers.add(layer)
        self._unready -= 1
        self._ready[layer] = max(self._ready[layer], self._chunk_ends[chunk][self._layer_groups[layer]])
        if self._by_layer:
            self._fresh.add(layer)
        if len(layers) == len(self._layer_groups):
            self._complete = self._chunk_ends[chunk]
            self.chunk_is_whole = True
            if not self._by_layer:
                self._fresh.update(range(len(self._layer_groups)))

    def align(self, targets: Sequence[tuple[int, ...]]) -> None:
        """The decode engine's blocks are known. Raises ``MismatchError`` if they are not the end of this prompt."""
        check_blocks(self._totals, targets)
        self._alignments = tuple(map(Alignment, self._totals, targets))
        self.chunk_is_whole = any(len(layers) == len(self._layer_groups) for layers in self._ready_layers)

    def pending(self) -> tuple[Segment, ...]:
        """Ready blocks that were not taken; neighbouring layers with equal blocks share a segment."""
        segments: list[Segment] = []
        for layer in sorted(self._fresh):
            group = self._layer_groups[layer]
            first, end = max(self._posted[layer], self.skipped(group)), self._reach(layer)
            if first >= end:
                continue
            last = segments[-1] if segments else None
            if last and (last.layers.stop, last.group, last.first, last.end) == (layer, group, first, end):
                segments[-1] = replace(last, layers=slice(last.layers.start, layer + 1))
                continue
            source, target = self._paired(group, first, end)
            segments.append(Segment(slice(layer, layer + 1), group, first, end, source, target, self.skipped(group)))
        return tuple(segments)

    def take(self) -> None:
        """The segments that ``pending`` returned are posted."""
        self.chunk_is_whole = False
        for layer in self._fresh:
            self._posted[layer] = max(self._reach(layer), self._posted[layer])
        self._fresh.clear()

    def size(self, segments: Sequence[Segment]) -> int:
        """Bytes of this engine's memory."""
        return sum(len(part.source) * sum(self._layer_bytes[part.layers]) for part in segments)

    def _reach(self, layer: int) -> int:
        """The end of the blocks of a layer that may be posted now."""
        if self._by_layer:
            return self._ready[layer]
        return self._complete[self._layer_groups[layer]] if self._complete else 0

    def _paired(self, group: int, first: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Our blocks and the decode engine's for prompt blocks ``[first, end)``, the same for every layer."""
        key = (group, first, end)
        if key not in self._pairs:
            skipped = self.skipped(group)
            targets = self._alignments[group].targets[first - skipped : end - skipped]
            pairs = [
                (source, target)
                for source, target in zip(self._tables[group][first:end], targets, strict=True)
                if source != NULL_BLOCK and target != NULL_BLOCK
            ]
            source, target = zip(*pairs, strict=True) if pairs else ((), ())
            self._pairs = {key: (source, target)} if len(self._pairs) > PAIRS_KEPT else self._pairs
            self._pairs[key] = (source, target)
        return self._pairs[key]
