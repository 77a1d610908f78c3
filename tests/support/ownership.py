"""Owners of memory at each moment, and the WRITEs that touch memory of another owner.

A WRITE is for the owner of both its source and its target at the post. This owner must keep both until the WRITE has
landed. A WRITE that reads from, or lands in, a piece that its owner gave away is a violation, even if the piece has
another owner by then. A test chooses the owners, such as request ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Owner = Hashable
Owners = frozenset[Owner]

NOBODY: Owners = frozenset()
ANYONE = "anyone"
"""Owns every piece for which a test names no owner: WRITEs of every owner may touch it."""


class Descriptors:
    """Equal pieces of one endpoint's memory and their owners. Blocks that requests share have several owners."""

    def __init__(self, memory: Bytes, offsets: Sequence[int], length: int, owned_as: Descriptors | None = None) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1:
            raise ValueError("memory must be a flat array of uint8, so that pieces of it are views")
        self.length = length
        self.pieces = [memory[offset : offset + length] for offset in offsets]
        anyone: list[Owners] = [frozenset({ANYONE})] * len(self.pieces)
        self._owners = anyone if owned_as is None else owned_as._owners

    def owners(self, index: int) -> Owners:
        return self._owners[index]

    def lets(self, index: int, meant_for: Owners) -> bool:
        """Whether a WRITE for these owners may touch a piece now."""
        owners = self._owners[index]
        return ANYONE in owners or not owners.isdisjoint(meant_for)

    def hand_to(self, ids: Iterable[int], owner: Owner) -> None:
        """Give these to ``owner`` alone from now on. Name the owners before the post of a WRITE for them."""
        for index in ids:
            self._owners[int(index)] = frozenset({owner})

    def share_with(self, ids: Iterable[int], owner: Owner) -> None:
        """Make ``owner`` another owner of these."""
        for index in ids:
            self._owners[int(index)] |= {owner}

    def give_away(self, ids: Iterable[int], owner: Owner | None = None) -> None:
        """Take these from ``owner``, or from all owners."""
        for index in ids:
            if owner is not None and owner not in self._owners[int(index)]:
                raise ValueError(f"{owner!r} does not own descriptor {index}")
            self._owners[int(index)] -= self._owners[int(index)] if owner is None else {owner}


@dataclass(frozen=True)
class Violation:
    """A WRITE was posted for, read from or landed in a descriptor that was not, or no longer, its owner's.

    Two violations at the same descriptor are equal.
    """

    endpoint: str
    descriptors: Hashable
    descriptor: int
    deed: str = field(default="", compare=False)
    meant_for: Owners = field(default=NOBODY, compare=False)
    owners: Owners = field(default=NOBODY, compare=False)

    def __str__(self) -> str:
        return (
            f"{self.deed} descriptor {self.descriptor} in {self.descriptors!r} of endpoint {self.endpoint!r}: "
            f"the WRITE is for {_names(self.meant_for)}, the descriptor belongs to {_names(self.owners)}"
        )


def common_owners(source: Owners, target: Owners) -> Owners:
    """The owners of a WRITE from one piece to another. Empty: such a WRITE must not be posted."""
    if ANYONE in source:
        return target
    return source if ANYONE in target else source & target


def _names(owners: Owners) -> str:
    return " and ".join(sorted(map(repr, owners))) or "nobody"
