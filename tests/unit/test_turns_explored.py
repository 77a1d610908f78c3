"""All courses of one turn, on D and on P: each order of events, each state of the table.

1. D's blocks are held while a rank holds the turn: before, a WRITE may read them. They are freed once.
2. P loads a turn or declines it, once.
3. Tokens count as loaded only after a load that has not failed.
4. Another request with the turn's id changes nothing on D.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from layerpush.core.machine import IllegalTransitionError
from layerpush.engine.scheduler import turn_protocol as protocol
from layerpush.engine.scheduler.turn_protocol import IGNORED, TRANSITIONS, Event, State
from layerpush.engine.scheduler.turns import Turn, Turns
from tests.unit.builders import BlockPool
from tests.unit.clones import clone
from tests.unit.exploration import Triple, explore

RANKS, BLOCKS = 2, [1, 2]
REGISTER = protocol.Register(8, "digest")


class TurnWorld:
    def __init__(self, *, keeps: bool) -> None:
        self.pool = BlockPool(4)
        self.turns = Turns(self.pool, RANKS)
        self.holding = set(range(RANKS)) if keeps else set[int]()
        """Ranks of D that hold the turn."""
        self.told: list[str] = []
        """What D hears of P, and what P counts."""
        if keeps:
            self.turns.keep("r", BLOCKS)
        else:
            self.turns.bring("r", REGISTER)
        self.turn = self.turns._turns["r"]
        self.check()

    @property
    def state(self) -> State:
        return self.turn.state

    def check(self) -> None:
        assert self.pool.owned == (BLOCKS if self.holding else []), "1: blocks are held while a rank may read them"
        assert ("r" in self.turns) == (self.state is not State.CLOSED)

    # D.

    def give_way(self) -> None:
        self.turns.give_way(0, 0.0, short=True)
        self.check()

    def reset(self) -> None:
        with self.turns.lent():
            assert self.pool.owned == []
        self.turns.release(0.0)
        self.check()

    def end(self, rank: int) -> None:
        """A rank may report it twice."""
        self.holding.discard(rank)
        self.turns.handle("r", protocol.RankEnded(rank))
        self.check()

    def other_request(self, event: Event) -> None:
        before = likeness(self)
        assert self.turns.handle("r", event) == []
        assert likeness(self) == before, "4: another request changes nothing"

    # P.

    def request(self, event: Event) -> None:
        for action in self.turns.handle("r", event):
            match action:
                case protocol.Register() | protocol.SendDecline():
                    assert self.told == [], "2: it is loaded or declined, once"
                    self.told.append("register" if action == REGISTER else "decline")
                case protocol.Count(tokens):
                    assert event == protocol.LoadEnded(failed=False), "3: only what is loaded counts"
                    assert tokens == REGISTER.tokens
                    self.told.append("count")
        loaded = event == protocol.LoadEnded(failed=False)
        assert ("count" in self.told) == loaded, "3: what is loaded counts"
        assert self.told or self.state is State.BROUGHT, "2: it is loaded or declined, once"
        self.check()


REQUEST = {
    State.BROUGHT: [protocol.Placed(0), protocol.Placed(8), protocol.Finished()],
    State.RETURNING: [protocol.LoadEnded(failed=True), protocol.LoadEnded(failed=False), protocol.Finished()],
}


def moves(world: TurnWorld) -> Iterator[Callable[[TurnWorld], None]]:
    for event in REQUEST.get(world.state, ()):
        yield lambda w, event=event: w.request(event)
    if world.holding:
        yield TurnWorld.give_way
        yield TurnWorld.reset
        for rank in range(RANKS):
            yield lambda w, rank=rank: w.end(rank)
        for event in (protocol.Placed(8), protocol.LoadEnded(failed=False), protocol.Finished()):
            yield lambda w, event=event: w.other_request(event)


def likeness(world: TurnWorld) -> tuple[object, ...]:
    """Equal for worlds with the same future."""
    references = tuple(block.ref_cnt for block in world.pool.blocks)
    return world.state, world.turn._ended, frozenset(world.holding), tuple(world.told), references


def walk(*, keeps: bool) -> tuple[set[Triple], list[TurnWorld]]:
    """The transitions of a turn, and every reachable world."""
    return explore(TurnWorld(keeps=keeps), moves, clone, likeness, lambda world: world.turn)


def walk_both() -> tuple[set[Triple], list[TurnWorld]]:
    taken, worlds = walk(keeps=True)
    more_taken, more_worlds = walk(keeps=False)
    return taken | more_taken, worlds + more_worlds


def test_the_tables_hold_exactly_reachable_transitions() -> None:
    table = {(at, event, to) for at, row in TRANSITIONS.items() for event, after in row.items() for to in after}
    ignored = {(at, event, at) for at, events in IGNORED.items() for event in events}
    assert not table & ignored
    taken, worlds = walk_both()
    assert taken == table | ignored
    assert {world.state for world in worlds} == set(State)


def test_a_turn_can_end_from_every_state() -> None:
    for world in walk_both()[1]:
        for rank in list(world.holding):
            world.end(rank)
        if world.state is not State.CLOSED:
            world.request(protocol.Finished())
        assert world.state is State.CLOSED


def test_every_event_has_a_handler_and_every_state_a_row() -> None:
    events = {kind for kind in vars(protocol).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert set(Turn.HANDLERS) == events - {Event}
    assert set(TRANSITIONS) == set(State)


def test_an_illegal_event_is_refused_and_changes_nothing() -> None:
    samples = [protocol.Released(), protocol.RankEnded(0), *itertools.chain(*REQUEST.values())]
    for world in walk_both()[1]:
        before = likeness(world)
        for event in samples:
            if not world.turn.accepts(type(event)):
                with pytest.raises(IllegalTransitionError, match=f"{type(event).__name__} while {world.state.name}"):
                    world.turn.handle(event, 0.0)
                assert likeness(world) == before


# Removed guards: each breaks a rule in some order of events.


def _replaced(patch: pytest.MonkeyPatch, event: type[Event], change: Callable[..., None]) -> None:
    """``change`` gets the turn, the event and the actions of its handler."""
    handler = Turn.HANDLERS[event]

    def changed(turn: Turn, happened: Any, actions: list[Any]) -> State:
        state = State(handler(turn, happened, actions))
        change(turn, happened, actions)
        return state

    patch.setitem(Turn.HANDLERS, event, changed)


def _leaves_out(*events: type[Event]) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(patch: pytest.MonkeyPatch) -> None:
        for event in events:
            _replaced(patch, event, lambda turn, event, actions: actions.clear())

    return remove


def _first_rank_ends_it(patch: pytest.MonkeyPatch) -> None:
    keep = Turns.keep

    def mutated(self: Turns, request_id: str, blocks: Iterable[int]) -> None:
        self._ranks = 1
        keep(self, request_id, blocks)

    patch.setattr(Turns, "keep", mutated)


def _counts_reports(patch: pytest.MonkeyPatch) -> None:
    """And not ranks."""
    plain = Turn._on_rank_ended

    def mutated(turn: Turn, event: protocol.RankEnded, actions: list[Any]) -> State:
        return plain(turn, protocol.RankEnded(len(turn._ended)), actions)

    patch.setitem(Turn.HANDLERS, protocol.RankEnded, mutated)


def _another_request_ends_it(patch: pytest.MonkeyPatch) -> None:
    handle = Turns.handle

    def mutated(self: Turns, request_id: str, event: Event, now: float = 0.0) -> list[Any]:
        is_over = isinstance(event, protocol.Finished)
        return handle(self, request_id, protocol.RankEnded(0) if is_over else event, now)

    patch.setattr(Turns, "handle", mutated)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the first rank ends a turn": _first_rank_ends_it,
    "reports count, not ranks": _counts_reports,
    "a turn that gives way is free at once": lambda patch: _replaced(
        patch, protocol.Released, lambda turn, event, actions: actions.append(protocol.Free())
    ),
    "the blocks are never freed": _leaves_out(protocol.RankEnded),
    "a request that ends declines nothing": _leaves_out(protocol.Finished),
    "a request that computes its prompt declines nothing": _leaves_out(protocol.Placed),
    "what is loaded does not count": _leaves_out(protocol.LoadEnded),
    "a failed load counts": lambda patch: _replaced(
        patch,
        protocol.LoadEnded,
        lambda turn, event, actions: actions.append(protocol.Count(8)) if event.failed else None,
    ),
    "a load that ends with its request is declined": lambda patch: _replaced(
        patch, protocol.Finished, lambda turn, event, actions: actions.append(protocol.SendDecline(REGISTER.digest))
    ),
    "a request of a kept turn's id ends it": _another_request_ends_it,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_removed_guard_breaks_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"\d: "):  # not an ``IllegalTransitionError``
        walk_both()
