"""The protocol of a push, drawn from the table that the code runs on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from layerpush.prefill import protocol
from layerpush.prefill.protocol import TRANSITIONS, Action, Event, State

_UNHAPPY_EVENTS = (protocol.Lost, protocol.Failed, protocol.Aborted, protocol.Evicted)
_UNHAPPY_STATES = (State.DRAINING, State.ABANDONED)


def course() -> str:
    """A Mermaid diagram of how a push gets to its end. With ``endings`` it shows every move of the table."""
    return _diagram(unhappy=False)


def endings() -> str:
    """A Mermaid diagram of how a push is cut short."""
    return _diagram(unhappy=True)


def states() -> str:
    """One row per state: what it means, what it takes without moving, where it can go."""
    rows = []
    for state in State:
        exits = TRANSITIONS[state]
        stays = [f"`{event.__name__}`" for event, targets in exits.items() if targets == {state}]
        leads = [
            f"`{event.__name__}` → {_either(state, targets)}" for event, targets in exits.items() if targets != {state}
        ]
        rows.append((f"`{state.name}`", state.value, ", ".join(stays), "; ".join(leads)))
    return _table(("state", "meaning", "stays on", "leads on"), rows)


def events() -> str:
    return _table(("event", "carries", "meaning"), [_described(kind) for kind in _kinds(Event)])


def actions() -> str:
    return _table(("action", "carries", "meaning"), [_described(kind) for kind in _kinds(Action)])


def _diagram(*, unhappy: bool) -> str:
    """Events that leave a state as it is are left out: ``states`` has them."""
    lines = ["```mermaid", "stateDiagram-v2"]
    if not unhappy:
        lines.append("    [*] --> WAITING")
    for state, exits in TRANSITIONS.items():
        labels: dict[State, list[str]] = defaultdict(list)
        for event, targets in exits.items():
            if (event in _UNHAPPY_EVENTS or state in _UNHAPPY_STATES) is unhappy:
                for target in targets - {state}:
                    labels[target].append(event.__name__)
        lines += [
            f"    {state.name} --> {target.name}: {', '.join(labels[target])}" for target in State if labels[target]
        ]
    return "\n".join([*lines, "    CLOSED --> [*]", "```"])


def _either(state: State, targets: set[State]) -> str:
    """The targets in the order of ``State``; a state that may also stay says so."""
    return " or ".join(f"`{one.name}`" if one is not state else "stay" for one in State if one in targets)


def _kinds(base: type) -> list[type]:
    """The kinds of ``base`` in the order in which the module defines them."""
    defined = vars(protocol).values()
    return [kind for kind in defined if isinstance(kind, type) and issubclass(kind, base) and kind is not base]


def _described(kind: type) -> tuple[str, str, str]:
    carried = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    text = kind.__doc__ or ""
    made_up_by_dataclass = text.startswith(f"{kind.__name__}(")
    return f"`{kind.__name__}`", carried, "" if made_up_by_dataclass else " ".join(text.split()).replace("``", "`")


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
