"""The turns that a decode engine keeps for their next one, and those that requests of a prefill engine bring. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from layerpush.core.machine import Machine
from layerpush.engine.scheduler import turn_protocol as protocol
from layerpush.engine.scheduler.block_holds import BlockPool
from layerpush.engine.scheduler.turn_protocol import IGNORED, TRANSITIONS, Action, Event, Register, State

SPARE_PART = 8
"""Kept turns give way while less than one of so many parts of the cache is free."""
LEAVING_S = 1.0
"""Seconds for which the blocks of a turn that gives way count as free, although they are not yet."""

S = State


class Turn(Machine[State, Event, Action]):
    """``turn_protocol`` has its tables. A turn that D keeps has ``blocks``, by id, and ``ranks`` ranks of D end it. One
    that P's request brings has the registration ``register``.

    1. D's blocks are held until every rank has ended the turn (``_on_rank_ended``): before, a WRITE may read them.
    2. P loads a turn once, or declines it once (``_on_placed``, ``_on_finished``).
    3. P declines no turn of another conversation (``_decline``).
    """

    TRANSITIONS: ClassVar = TRANSITIONS
    IGNORED: ClassVar = IGNORED

    def __init__(
        self, request_id: str, blocks: Sequence[int] = (), ranks: int = 0, register: Register | None = None
    ) -> None:
        super().__init__(request_id, S.BROUGHT if register else S.KEPT)
        self.blocks, self.register = blocks, register
        self.left_at = float("-inf")
        self._ranks, self._ended = ranks, frozenset[int]()

    def _on_released(self, _: protocol.Released, actions: list[Action]) -> State:
        self.left_at = self.now
        actions.append(protocol.End())
        return S.LEAVING

    def _on_rank_ended(self, event: protocol.RankEnded, actions: list[Action]) -> State:
        self._ended |= {event.rank}
        if len(self._ended) < self._ranks:
            return self.state
        actions.append(protocol.Free())
        return S.CLOSED

    def _on_placed(self, event: protocol.Placed, actions: list[Action]) -> State:
        assert self.register is not None
        if event.tokens:
            actions.append(self.register)
        else:
            self._decline(actions)
        return S.RETURNING if event.tokens else S.CLOSED

    def _on_load_ended(self, event: protocol.LoadEnded, actions: list[Action]) -> State:
        assert self.register is not None
        if not event.failed:
            actions.append(protocol.Count(self.register.tokens))
        return S.CLOSED

    def _on_finished(self, _: protocol.Finished, actions: list[Action]) -> State:
        if self.state is S.BROUGHT:
            self._decline(actions)
        return S.CLOSED

    def _decline(self, actions: list[Action]) -> None:
        assert self.register is not None
        if self.register.digest:
            actions.append(protocol.SendDecline(self.register.digest))

    HANDLERS: ClassVar = {
        protocol.Released: _on_released,
        protocol.RankEnded: _on_rank_ended,
        protocol.Placed: _on_placed,
        protocol.LoadEnded: _on_load_ended,
        protocol.Finished: _on_finished,
    }


class Turns:
    """By request id, oldest first, until they are closed. D has a reference of its own to each block of a turn: vLLM
    would step on for ever while it holds a request. Runs in the scheduler's thread. ``ranks``: how many report. Times
    are the caller's clock.
    """

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._turns: dict[str, Turn] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._turns

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must step until its ranks have ended a turn, although it may have no request left."""
        return any(turn.state is S.LEAVING for turn in self._turns.values())

    def keep(self, request_id: str, blocks: Iterable[int]) -> None:
        """D has answered the request: hold the turn's ``blocks``, before vLLM frees them."""
        turn = self._turns[request_id] = Turn(request_id, list(blocks), self._ranks)
        self._pool.touch([self._pool.blocks[block] for block in turn.blocks])

    def bring(self, request_id: str, register: Register) -> None:
        """P's request brings a turn."""
        self._turns[request_id] = Turn(request_id, register=register)

    def shared(self, request_id: str) -> int | None:
        """The number of first tokens that a request shares with a turn. None: it brings none, or has tried it."""
        turn = self._turns.get(request_id)
        return turn.register.tokens if turn and turn.register and turn.state is S.BROUGHT else None

    def is_returning(self, request_id: str) -> bool:
        """Whether the request is loading a turn."""
        return request_id in self._turns and self._turns[request_id].state is S.RETURNING

    def handle(self, request_id: str, event: Event, now: float = 0.0) -> list[Action]:
        """What an event of a request means for its turn; nothing if it has none. The blocks of a turn are freed."""
        if (turn := self._turns.get(request_id)) is None:
            return []
        actions = turn.handle(event, now)
        if turn.state is S.CLOSED:
            del self._turns[request_id]
        if protocol.Free() in actions:
            self._pool.free_blocks(reversed([self._pool.blocks[block] for block in turn.blocks]))
        return actions

    def give_way(self, free: int, now: float, *, short: bool) -> list[str]:
        """The turns whose time ends now, oldest first, because the cache has only ``free`` free blocks. ``short``: a
        request waits for more. A turn that a WRITE reads may stay: after ``LEAVING_S`` seconds others go in its place.
        """
        missing, freed = len(self._pool.blocks) // SPARE_PART - free, 0
        leaving, released = Counter[int](), list[str]()
        going = [turn for turn in self._of(S.LEAVING) if turn.left_at > now - LEAVING_S]
        for turn in [*going, *self._of(S.KEPT)]:
            if turn.state is S.KEPT:
                if freed >= missing and (freed or not short):
                    break
                self.handle(turn.request_id, protocol.Released(), now)
                released.append(turn.request_id)
            for block in turn.blocks:
                leaving[block] += 1
                freed += self._pool.blocks[block].ref_cnt == leaving[block]  # nobody else has it
        return released

    def release(self, now: float) -> list[str]:
        """D keeps no turn any more. Returns those whose time ends now."""
        kept = [turn.request_id for turn in self._of(S.KEPT)]
        for request_id in kept:
            self.handle(request_id, protocol.Released(), now)
        return kept

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The blocks of turns count as free meanwhile. Nobody may take one."""
        blocks = [self._pool.blocks[block] for turn in self._turns.values() for block in turn.blocks]
        self._pool.free_blocks(blocks)
        try:
            yield
        finally:
            self._pool.touch(blocks)

    def _of(self, state: State) -> list[Turn]:
        return [turn for turn in self._turns.values() if turn.state is state]
