"""Tracks which blocks of a prompt are in memory and which were posted, and pairs them with D's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from layerpush.core.machine import IllegalTransitionError
from layerpush.core.pieces import Pieces, pieces_of
from layerpush.core.replica import ALONE, Replica
from layerpush.core.step_plan import Alignment, ChunkPlan
from layerpush.core.wire import NULL_BLOCK
from layerpush.core.write import Segment
from layerpush.prefill.coverage import check_blocks

PAIRS_KEPT = 8


class ReadyBlocks:
    """One epoch of one prompt. ``layer_groups`` and ``layer_bytes`` hold each layer's KV cache group and block size.

    Without ``by_layer`` a block is handed out only when every layer of its chunk is ready.

    If the decode engine has another block size, ``align`` cuts the blocks into pieces. Segments then count and name
    pieces.
    """

    def __init__(self, layer_groups: Sequence[int], layer_bytes: Sequence[int], *, by_layer: bool) -> None:
        self._layer_groups = tuple(layer_groups)
        self._layer_bytes = tuple(layer_bytes)
        self._group_bytes = dict.fromkeys(layer_groups, 0)  # a group may have no layer here
        for group, size in zip(layer_groups, layer_bytes, strict=True):
            self._group_bytes[group] += size
        self._by_layer = by_layer
        self._alignments: tuple[Alignment, ...] = ()
        self._skipped: tuple[int, ...] = ()
        self._totals: tuple[int, ...] = ()
        self.prompt_tokens = 0
        """The tokens of the prompt. 0 before ``plan``."""
        self._parts = 1
        self._kept = (0,) * (1 + max(layer_groups, default=0))
        self.kept_tokens = 0
        """The prompt's first tokens that the decode engine may keep: their blocks are never posted again."""
        self.rewind()

    def rewind(self) -> None:
        """The prompt will be computed again, into other blocks. The decode engine's blocks stay the same."""
        self._tables: list[list[int]] = []
        self._pairs: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._chunk_ends: list[tuple[int, ...]] = []
        self._filled: list[int] = []
        self._ready_layers: list[set[int]] = []
        self._complete: tuple[int, ...] = ()
        self._ready = [0] * len(self._layer_groups)
        self._posted = [self._kept[group] for group in self._layer_groups]
        self._fresh: set[int] = set()  # layers that may have unposted blocks; a set, since few do
        self._unready = 0
        self.has_last_chunk = False
        """Whether the last chunk of the prompt is planned."""
        self.next_part = 0.0
        """The prompt's tokens after the newest chunk, divided by the tokens of that chunk; 1 at most."""
        self.planned_bytes = self.kept_bytes if self.kept_tokens else 0
        """Bytes of all planned chunks that the decode engine does not have already. 0 before ``align``."""
        self.chunk_bytes = 0
        """The newest chunk's part of ``planned_bytes``."""

    @property
    def chunks(self) -> int:
        """The number of planned chunks of this epoch."""
        return len(self._chunk_ends)

    @property
    def is_complete(self) -> bool:
        """Whether every layer of the whole prompt is in this engine's memory."""
        return self.has_last_chunk and self._unready == 0

    @property
    def has_whole_chunk(self) -> bool:
        """Whether ``pending`` has blocks of a chunk whose layers are all ready."""
        return bool(self._complete) and any(
            max(self._posted[layer], self._skipped[group]) < self._up_to(group, self._complete[group])
            for layer in self._fresh
            for group in (self._layer_groups[layer],)
        )

    @property
    def wanted(self) -> list[int]:
        """For each layer, the number of blocks to write."""
        return [len(self._alignments[group].targets) for group in self._layer_groups]

    @property
    def kept(self) -> list[int]:
        """For each layer, the number of blocks to write that the decode engine may keep."""
        return self._counted(self._kept)

    @property
    def kept_bytes(self) -> int:
        """This rank's bytes of those blocks."""
        return self._bytes_before(self._kept)

    def up_to(self, chunk: int) -> tuple[int, int, list[int]]:
        """The prompt's tokens whose blocks are full after a chunk, this rank's bytes of those blocks, and their number
        in each layer. Blocks that the decode engine has already do not count.
        """
        return self._filled[chunk], self._bytes_up_to(chunk + 1), self._counted(self._ends(chunk))

    def keep(self, chunk: int) -> None:
        """The decode engine may keep the prompt up to this chunk."""
        self._kept, self.kept_tokens = self._ends(chunk), self._filled[chunk]

    def plan(self, chunk: ChunkPlan) -> None:
        """A step computes this chunk. Raises ``IllegalTransitionError`` if one before it is missing."""
        if chunk.index != len(self._chunk_ends):
            raise IllegalTransitionError(
                f"{chunk.request_id}: chunk {chunk.index} follows {len(self._chunk_ends)} chunks"
            )
        self._tables = self._tables or [[] for _ in chunk.groups]
        for table, part in zip(self._tables, chunk.groups, strict=True):
            table.extend(part.blocks)
        self._totals, self.prompt_tokens = tuple(part.total for part in chunk.groups), chunk.prompt_tokens
        self._chunk_ends.append(tuple(part.end for part in chunk.groups))
        self._filled.append(chunk.filled)
        self._ready_layers.append(set())
        self._unready += len(self._layer_groups)
        self.has_last_chunk = chunk.final
        self.next_part = min(1.0, max(0, chunk.prompt_tokens - chunk.end) / max(1, chunk.end - chunk.start))
        self._count_bytes()

    def ready(self, chunk: int, layer: int) -> None:
        """A layer of a chunk is in memory. A repeated call changes nothing."""
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
            if not self._by_layer:
                self._fresh.update(range(len(self._layer_groups)))

    def align(
        self, targets: Sequence[tuple[int, ...]], replicas: Sequence[Replica] = (), pieces: Pieces | None = None
    ) -> None:
        """The decode engine's blocks are known. ``replicas``: this rank's part of them in each group; empty: all.
        ``pieces``: of blocks whose sizes differ.

        Raises ``MismatchError`` if they are not the end of this prompt.
        """
        totals = self._totals
        if pieces is None:
            check_blocks(totals, targets)
        else:
            theirs = -(-self.prompt_tokens // (pieces.theirs * pieces.tokens))
            check_blocks([theirs] * len(totals), targets)
            self._parts, total = pieces.ours, -(-self.prompt_tokens // pieces.tokens)
            totals = (total,) * len(totals)
            # the last block may have more pieces than the prompt
            wanted = [total - (theirs - len(group)) * pieces.theirs for group in targets]
            targets = [
                tuple(pieces_of(group, pieces.theirs)[:count]) for group, count in zip(targets, wanted, strict=True)
            ]
        self._alignments = tuple(map(Alignment, totals, targets, replicas or [ALONE] * len(targets)))
        self._skipped = tuple(alignment.skipped for alignment in self._alignments)
        self._count_bytes()

    def pending(self) -> tuple[Segment, ...]:
        """Ready blocks that were not taken; neighbouring layers with equal blocks share a segment."""
        runs: list[tuple[int, int, int, int, int]] = []  # layers [start, stop), group, blocks [first, end)
        for layer in sorted(self._fresh):
            group = self._layer_groups[layer]
            first, end = max(self._posted[layer], self._skipped[group]), self._postable_end(layer)
            if first >= end:
                continue
            start = layer
            if runs and runs[-1][1:] == (layer, group, first, end):
                start = runs.pop()[0]
            runs.append((start, layer + 1, group, first, end))
        return tuple(
            Segment(slice(start, stop), group, first, end, *self._paired(group, first, end), self._skipped[group])
            for start, stop, group, first, end in runs
        )

    def take_pending(self) -> None:
        """The segments that ``pending`` returned are posted."""
        for layer in self._fresh:
            self._posted[layer] = max(self._postable_end(layer), self._posted[layer])
        self._fresh.clear()

    def size(self, segments: Sequence[Segment]) -> int:
        """The segments' size in bytes of this engine's memory."""
        return sum(len(part.source) * sum(self._layer_bytes[part.layers]) for part in segments) // self._parts

    def sources(self, part: Segment) -> list[tuple[int, int]]:
        """The number in the prompt and this engine's id of each block of a segment of this epoch."""
        return [(number, source) for number, source, _ in self._pairs_of(part.group, part.first, part.end)]

    def _count_bytes(self) -> None:
        kept = self.kept_bytes if self.kept_tokens else 0
        self.planned_bytes = max(kept, self._bytes_up_to(len(self._chunk_ends)))
        self.chunk_bytes = self.planned_bytes - max(kept, self._bytes_up_to(len(self._chunk_ends) - 1))

    def _bytes_up_to(self, chunks: int) -> int:
        return self._bytes_before(self._ends(chunks - 1)) if chunks > 0 and self._alignments else 0

    def _bytes_before(self, ends: Sequence[int]) -> int:
        return sum(
            self._alignments[group].replica.owned_before(max(0, ends[group] - self._skipped[group]))
            * (size // self._parts)
            for group, size in self._group_bytes.items()
        )

    def _ends(self, chunk: int) -> tuple[int, ...]:
        """For each group, the pieces of the prompt up to this chunk."""
        return tuple(self._up_to(group, end) for group, end in enumerate(self._chunk_ends[chunk]))

    def _counted(self, ends: Sequence[int]) -> list[int]:
        """For each layer, the number of blocks to write before ``ends``, the end in each group."""
        return [max(0, ends[group] - self._skipped[group]) for group in self._layer_groups]

    def _up_to(self, group: int, blocks: int) -> int:
        """The pieces of the prompt in its first ``blocks`` blocks. Call it after ``align``."""
        return min(blocks * self._parts, self._alignments[group].total)

    def _postable_end(self, layer: int) -> int:
        """The end of the blocks of a layer that may be posted now."""
        group = self._layer_groups[layer]
        if self._by_layer:
            return self._up_to(group, self._ready[layer])
        return self._up_to(group, self._complete[group]) if self._complete else 0

    def _paired(self, group: int, first: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """This rank's blocks and the decode engine's for prompt blocks ``[first, end)``, the same for every layer."""
        key = (group, first, end)
        if key not in self._pairs:
            pairs = [(source, target) for _, source, target in self._pairs_of(group, first, end)]
            source, target = zip(*pairs, strict=True) if pairs else ((), ())
            self._pairs = {key: (source, target)} if len(self._pairs) > PAIRS_KEPT else self._pairs
            self._pairs[key] = (source, target)
        return self._pairs[key]

    def _pairs_of(self, group: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The number in the prompt, this rank's block and the decode engine's of each block that this rank sends."""
        skipped, alignment = self._skipped[group], self._alignments[group]
        targets = alignment.targets[first - skipped : end - skipped]
        block, offset = divmod(first, self._parts)
        sources = pieces_of(self._tables[group][block : -(-end // self._parts)], self._parts)
        both = zip(sources[offset : offset + end - first], targets, strict=True)
        for number, (source, target) in enumerate(both, first):
            if source != NULL_BLOCK and target != NULL_BLOCK and alignment.replica.owns(number - skipped):
                yield number, source, target
