"""Proves that a push is complete: every (layer, block) was posted once and landed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerpush.core.write import MismatchError


class CoverageError(AssertionError):
    """A block was posted or landed twice, or landed before it was posted. The push must not complete."""


def check_blocks(totals: Sequence[int], targets: Sequence[Sequence[int]]) -> None:
    """Check that ``targets``, the registered blocks of each KV cache group, can be the last blocks of a prompt that has
    ``totals`` blocks in these groups. Raises ``MismatchError``.
    """
    wanted = [len(group) for group in targets]
    if len(wanted) != len(totals):
        raise MismatchError(f"the registration has {len(wanted)} KV cache groups, the prompt {len(totals)}")
    if any(count > total for count, total in zip(wanted, totals, strict=True)):
        raise MismatchError(f"the registration wants {wanted} blocks of a prompt of {list(totals)}")
    if any(wanted) and any(total and not count for count, total in zip(wanted, totals, strict=True)):
        raise MismatchError(
            f"the registration wants {wanted} blocks of a prompt of {list(totals)}: without the last block of every"
            " group the decode engine cannot compute the last token"
        )


class Coverage:
    """Two bitmaps, bool of shape ``(layers, max(blocks))``: posted and landed.

    ``blocks[i]`` is the number of blocks of layer ``i`` that are pushed. The first ``kept[i]`` of them have landed
    before, and are not posted again.
    """

    def __init__(self, blocks: Sequence[int], kept: Sequence[int]) -> None:
        shape = (len(blocks), max(blocks, default=0))
        self._posted = np.ones(shape, dtype=bool)
        self._landed = np.ones(shape, dtype=bool)
        for layer, (first, end) in enumerate(zip(kept, blocks, strict=True)):
            self._posted[layer, first:end] = self._landed[layer, first:end] = False

    def post(self, layers: slice, first: int, end: int) -> None:
        """Blocks ``[first, end)`` of these layers were posted. Raises ``CoverageError``."""
        cells = self._posted[layers, first:end]
        if np.count_nonzero(cells):
            raise CoverageError(f"layers {layers.start}-{layers.stop - 1}, blocks {first}-{end - 1} were posted before")
        cells[:] = True

    def land(self, layers: slice, first: int, end: int) -> None:
        """Blocks ``[first, end)`` of these layers have landed. Raises ``CoverageError``."""
        cells = self._landed[layers, first:end]
        if np.count_nonzero(cells) or np.count_nonzero(self._posted[layers, first:end]) < cells.size:
            raise CoverageError(f"layers {layers.start}-{layers.stop - 1}, blocks {first}-{end - 1} cannot land now")
        cells[:] = True

    def has_landed(self, ends: Sequence[int]) -> bool:
        """Whether the first ``ends[i]`` blocks of each layer ``i`` have landed."""
        return all(bool(landed[:end].all()) for landed, end in zip(self._landed, ends, strict=True))

    @property
    def full(self) -> bool:
        """Whether every block has landed."""
        return bool(self._landed.all())
