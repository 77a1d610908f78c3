"""The protocols of a push, drawn from the tables that the code runs on."""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from bench.markdown import Row
from layerpush.decode import load_protocol as decode
from layerpush.engine.scheduler import turn_protocol as turn
from layerpush.prefill import claim_protocol as claim
from layerpush.prefill import push_protocol as prefill
from scripts.docgen.tables import sentence, table

Move = Callable[[enum.Enum, type], bool]


@dataclass(frozen=True)
class StateMachine:
    """A state machine as its module defines it: ``State``, ``Event`` and ``TRANSITIONS``."""

    module: ModuleType

    def diagram(self, *, shows: Move = lambda _, __: True) -> str:
        """A Mermaid diagram of the moves for which ``shows`` is true. ``states`` has events that change no state."""
        first, last = next(iter(self._states)), list(self._states)[-1]
        led_to = {to for at, exits in self._transitions.items() for targets in exits.values() for to in targets - {at}}
        begins = [f"    [*] --> {state.name}" for state in self._states if state is first or state not in led_to]
        arrows = []
        for state, exits in self._transitions.items():
            labels: dict[enum.Enum, list[str]] = defaultdict(list)
            for event, targets in exits.items():
                for target in targets - {state} if shows(state, event) else ():
                    labels[target].append(event.__name__)
            arrows += [
                f"    {state.name} --> {target.name}: {', '.join(labels[target])}"
                for target in self._states
                if labels[target]
            ]
        ends = [] if self._transitions[last] else [f"    {last.name} --> [*]"]
        return "\n".join(["```mermaid", "stateDiagram-v2", *begins, *arrows, *ends, "```"])

    def states(self) -> str:
        """One row per state: its meaning, the events that it stays on, its exits."""
        rows = []
        for state in self._states:
            exits = self._transitions[state]
            stays = [f"`{event.__name__}`" for event, targets in exits.items() if targets == {state}]
            leads = [
                f"`{event.__name__}` → {self._either(state, targets)}"
                for event, targets in exits.items()
                if targets != {state}
            ]
            rows.append((f"`{state.name}`", state.value, ", ".join(stays), "; ".join(leads)))
        return table(("state", "meaning", "stays on", "leads on"), rows)

    def events(self) -> str:
        """One row per event: its fields and its meaning."""
        return table(("event", "carries", "meaning"), [_described(kind) for kind in self._events])

    @property
    def _states(self) -> type[enum.Enum]:
        states: type[enum.Enum] = self.module.State
        return states

    @property
    def _transitions(self) -> Mapping[enum.Enum, Mapping[type, set[enum.Enum]]]:
        transitions: Mapping[enum.Enum, Mapping[type, set[enum.Enum]]] = self.module.TRANSITIONS
        return transitions

    def _either(self, state: enum.Enum, targets: set[enum.Enum]) -> str:
        """The targets in the order of the states; "stay" stands for the state itself."""
        return " or ".join(f"`{one.name}`" if one is not state else "stay" for one in self._states if one in targets)

    @property
    def _events(self) -> list[type]:
        """In the order in which the module defines them."""
        defined, base = vars(self.module).values(), self.module.Event
        return [kind for kind in defined if isinstance(kind, type) and issubclass(kind, base) and kind is not base]


PREFILL, DECODE, CLAIM, TURN = StateMachine(prefill), StateMachine(decode), StateMachine(claim), StateMachine(turn)

_UNHAPPY_EVENTS = (prefill.WriteLost, prefill.Failed, prefill.CancelledByD, prefill.Aborted, prefill.LeaseExpired)
_UNHAPPY_STATES = (prefill.State.DRAINING, prefill.State.ABANDONED)


def course() -> str:
    """The moves of a successful push on P. ``endings`` has the other moves of the table."""
    return PREFILL.diagram(shows=lambda state, event: not _is_unhappy(state, event))


def endings() -> str:
    """The moves on P that end a push without success."""
    return PREFILL.diagram(shows=_is_unhappy)


def final_statuses() -> str:
    """The possible ends of an agent's part of a load."""
    return table(("status", "meaning"), [(f"`{status.name}`", status.value) for status in decode.FinalStatus])


def _is_unhappy(state: enum.Enum, event: type) -> bool:
    return event in _UNHAPPY_EVENTS or state in _UNHAPPY_STATES


def _described(kind: type) -> Row:
    carried = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    made_up_by_dataclass = (kind.__doc__ or "").startswith(f"{kind.__name__}(")
    return f"`{kind.__name__}`", carried, "" if made_up_by_dataclass else sentence(kind.__doc__)
