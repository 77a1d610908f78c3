"""Walks through all courses of a small world around one state machine, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

World = TypeVar("World")
Triple = tuple[Any, type[Any], Any]
"""The state before an event, the event's type, the state after it."""


def explore(
    first: World,
    moves: Callable[[World], Iterable[Callable[[World], None]]],
    copied: Callable[[World], World],
    likeness: Callable[[World], Hashable],
    machine: Callable[[World], Any],
) -> tuple[set[Triple], list[World]]:
    """The transitions of ``machine(world)``, and every reachable world. ``moves`` are a world's possible next moves;
    each is made on a copy. Worlds of equal ``likeness`` have the same future.
    """
    taken: set[Triple] = set()
    seen, queue, worlds = {likeness(first)}, deque([first]), [first]
    while queue:
        world = queue.popleft()
        for move in moves(world):
            after = copied(world)
            with watched(machine(after), taken):
                move(after)
            if (like := likeness(after)) not in seen:
                seen.add(like)
                queue.append(after)
                worlds.append(after)
    return taken, worlds


@contextmanager
def watched(machine: Any, taken: set[Triple]) -> Iterator[None]:
    """Note the transitions of a state machine."""
    handle = machine.handle

    def noting(event: Any, now: float) -> Any:
        before = machine.state
        actions = handle(event, now)
        taken.add((before, type(event), machine.state))
        return actions

    machine.handle = noting
    try:
        yield
    finally:
        del machine.handle
