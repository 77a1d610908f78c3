"""References to the blocks that a prefill engine may write, so that the scheduler gives them to no other request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class BlockPool(Protocol):
    """The part of vLLM's block pool that the scheduler's side uses. The pool hands out only blocks without a reference.

    ``blocks`` are all blocks of the engine, by id. ``ref_cnt`` of a block is the number of its owners.
    """

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


@dataclass(slots=True)
class _Held:
    blocks: list[Any] = field(default_factory=list)
    parked: set[int] = field(default_factory=set)


class BlockHolds:
    """A reference of our own to each registered block, from its registration until no rank expects a WRITE.

    The engine's reference protects a block only until the load is reported as over. A load may be reported as failed
    while WRITEs are still possible: it is ``parked``. Our reference then lasts until every rank that parked the
    load has reported it as ``cleared``.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: dict[str, _Held] = {}
        self._settled: set[str] = set()
        self.awaited_blocks = 0
        """The number of blocks of requests that are not over for the engine."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def number_of(self, request_id: str) -> int:
        """The number of blocks of a request that are held here."""
        return len(self._held[request_id].blocks)

    @property
    def parked_requests(self) -> int:
        """The number of requests that are over for the engine and still have blocks here."""
        return len(self._settled)

    @property
    def parked_blocks(self) -> int:
        """The number of blocks of those requests."""
        return sum(len(self._held[request_id].blocks) for request_id in self._settled)

    def hold(self, request_id: str, blocks: Sequence[Any]) -> None:
        """Hold blocks that are about to be registered. If an id comes again, all of its blocks are freed together."""
        self._pool.touch(blocks)
        held = self._held.setdefault(request_id, _Held()).blocks
        self.awaited_blocks += len(blocks) + (len(held) if request_id in self._settled else 0)
        held.extend(blocks)
        self._settled.discard(request_id)

    def park(self, request_id: str, rank: int) -> None:
        """This rank reports that the load has failed, and that its blocks may still be written."""
        if request_id in self._held:
            self._held[request_id].parked.add(rank)

    def clear(self, request_id: str, rank: int) -> None:
        """This rank reports that no prefill rank may write into its blocks any more."""
        if request_id in self._held:
            self._held[request_id].parked.discard(rank)
            self._release(request_id)

    def load_ended(self, request_id: str) -> None:
        """All ranks have reported the load as done or failed; the engine drops its own reference."""
        if request_id in self._held:
            self.awaited_blocks -= 0 if request_id in self._settled else len(self._held[request_id].blocks)
            self._settled.add(request_id)
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        if request_id in self._settled and not self._held[request_id].parked:
            self._settled.discard(request_id)
            self._pool.free_blocks(reversed(self._held.pop(request_id).blocks))
