"""Progress of a soak: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tests.faults.soak.engine_slots import EngineSlots
from tests.faults.soak.request import Outcome
from tests.faults.soak.tally import ILLS, Tally

SHOWN = 10
LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.5


class Display:
    """Call ``update`` at any time. ``total_s``: the planned duration of the load.

    The display shows the first problems at once. The report has all of them.
    """

    def __init__(self, console: Console, slots: EngineSlots, tally: Tally, total_s: float) -> None:
        self._console, self._slots, self._tally, self._total_s = console, slots, tally, total_s
        self._began = time.monotonic()
        self._next = 0.0
        self._told = 0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, phase: str) -> None:
        for problem in self._tally.problems[self._told : SHOWN]:
            self._console.print(
                f"[red]{problem.ill}[/] in round {problem.round}:", escape(problem.text), highlight=False
            )
        self._told = len(self._tally.problems)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (LINE_EVERY_S if self._live is None else REFRESH_EVERY_S)
        if self._live is None:
            self._console.print(self._line(phase), highlight=False)
        else:
            self._live.update(self._table(phase), refresh=True)

    def _line(self, phase: str) -> str:
        tally = self._tally
        engines = " ".join(f"{slot.name}{_mark(slot.usable, slot.engine.paused)}" for slot in self._slots)
        return (
            f"[{_clock(time.monotonic() - self._began)}] round {tally.rounds} {phase}: {tally.requests} requests, "
            f"{sum(tally.injected.values())} faults, {_ills(tally)} | {engines}"
        )

    def _table(self, phase: str) -> Table:
        tally = self._tally
        table = Table(title=f"soak {_clock(time.monotonic() - self._began)} of {_clock(self._total_s)}, {phase}")
        table.add_column("requests")
        table.add_column("faults")
        table.add_column("engines")
        table.add_row(
            "\n".join(f"{outcome.value}: {tally.outcomes[outcome]}" for outcome in Outcome),
            "\n".join(f"{kind}: {count}" for kind, count in sorted(tally.injected.items())) or "none yet",
            "\n".join(
                f"{slot.name}#{slot.incarnation}{_mark(slot.usable, slot.engine.paused)} "
                f"{max(memory.peak_mib for memory in self._slots.memories(slot.name)):.0f} MiB"
                for slot in self._slots
            ),
        )
        table.caption = f"round {tally.rounds}, {_ills(tally)}"
        return table


def _ills(tally: Tally) -> str:
    colour: Callable[[int], str] = lambda count: f"[red]{count}[/]" if count else "0"  # noqa: E731
    return ", ".join(f"{ill}: {colour(tally.count(ill))}" for ill in ILLS)


def _mark(usable: bool, paused: bool) -> str:
    return " stopped" if paused else "" if usable else " down"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
