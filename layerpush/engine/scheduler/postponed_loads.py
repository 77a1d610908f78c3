"""Loads that give their blocks to other requests of this decode engine, because P has not begun them.

Running requests may need the blocks: see ``engine.scheduler.places``. Or both engines are full: P may be full of
prompts that this engine has not registered yet, for want of blocks, while the blocks here wait for a prompt that P
cannot begin. Neither engine could go on. P reports this (``Queued``), with names of the prompts that it holds. If one
of them waits for blocks here, this engine unregisters the load. It registers the load again when the requests that it
gave way to have their blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Names = frozenset[str]


class PostponedLoads:
    """Runs in the scheduler's thread. ``ranks`` is the number of this engine's ranks that report on a load."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[str, Names] = {}
        """Requests that have no blocks yet, each with its names on P."""
        self._queued: dict[str, Names] = {}
        self._asked: dict[str, Names] = {}
        """Loads that are being unregistered, each with the requests that it gives way to."""
        self._unregistered: dict[str, set[int]] = {}
        self._postponed: dict[str, set[str]] = {}
        """Requests that must not be registered yet, each with the requests that it gives way to. A request leaves these
        sets for good when it has its blocks: so no two requests wait for each other.
        """

    def request_waits(self, request_id: str, names: Collection[str]) -> None:
        """A request waits for blocks. P knows its prompt by one of these ``names``."""
        self._waiting[request_id] = frozenset(names)

    def request_placed(self, request_id: str) -> None:
        """A request has its blocks, or has ended without any."""
        self._waiting.pop(request_id, None)
        self._postponed.pop(request_id, None)
        for others in self._postponed.values():
            others.discard(request_id)

    def load_queued(self, request_id: str, computed: Names) -> None:
        """P cannot begin this load. It holds the prompts with these names."""
        self._queued[request_id] = computed

    def load_unregistered(self, request_id: str, rank: int) -> None:
        """This rank of the engine has unregistered the load."""
        self._unregistered.setdefault(request_id, set()).add(rank)

    def to_unregister(self, short_of_blocks: bool, spared: Sequence[str] = ()) -> list[str]:
        """The loads that are to be unregistered now; each is returned once for each of P's reports. ``spared``: loads
        whose blocks running requests need.
        """
        queued, self._queued = self._queued, {}
        chosen = {
            request_id: self._asked[request_id] if request_id in self._asked else Names() for request_id in spared
        }
        for request_id, computed in queued.items() if short_of_blocks else ():
            others = {each for each, own in self._waiting.items() if own & computed and not self.must_wait(each)}
            if others:
                chosen[request_id] = frozenset(others)
        self._asked.update(chosen)
        return list(chosen)

    def is_asked(self, request_id: str) -> bool:
        """Whether the load is being unregistered. If it ends as failed, its request is not to fail."""
        return request_id in self._asked

    def load_ended(self, request_id: str) -> bool:
        """A load is over on all ranks. True if the request is to wait for blocks again: every rank unregistered it."""
        others, ranks = self._asked.pop(request_id, None), self._unregistered.pop(request_id, set())
        self._queued.pop(request_id, None)
        if others is None or len(ranks) < self._ranks:
            return False
        self._postponed[request_id] = set(others & self._waiting.keys())
        return True

    def must_wait(self, request_id: str) -> bool:
        """Whether a request that it gives way to still waits for blocks."""
        return bool(self._postponed.get(request_id))

    def request_finished(self, request_id: str) -> None:
        """The engine has finished the request, in any state."""
        self.load_ended(request_id)
        self.request_placed(request_id)
