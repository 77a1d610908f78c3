"""A whole run: every link in turn, every case on it, and the lines on the first of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.forward.cases import Case, Growing, time_left
from bench.forward.cells import Cell
from bench.forward.links import wire_of
from bench.forward.orders import Measure
from bench.forward.settings import ForwardSettings
from bench.pair.processes import Pair
from layerpush.apps.demo.interrupts import Interrupts


@dataclass(frozen=True)
class Wanted:
    """What is to be measured. ``growing`` is measured on the first link only."""

    links: Sequence[str]
    cases: Sequence[Case]
    growing: Sequence[Growing]
    modes: tuple[str, ...]
    rounds: int

    @property
    def orders(self) -> list[tuple[str, Case, Growing | None]]:
        grown = [(self.links[0], each.case, each) for each in self.growing]
        known = [(link, case, None) for link in self.links for case in self.cases]
        return sorted([*known, *grown], key=lambda each: self.links.index(each[0]))


@dataclass
class Measured:
    """``about`` is what the processes say of themselves, by link."""

    cells: list[Cell] = field(default_factory=list)
    grown: list[tuple[str, int, Cell]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def measure(
    wanted: Wanted, settings: ForwardSettings, interrupts: Interrupts, on_cell: Callable[[Cell, float], None]
) -> Measured:
    """``on_cell`` hears of every cell, and in how many seconds the run will end. Raises ``WrongBytesError``,
    ``PairError`` or ``LinkError``.
    """
    measured = Measured()
    waiting = wanted.orders
    done: list[Case] = []
    spent = 0.0
    with tempfile.TemporaryDirectory(prefix="layerpush-forward-") as logs:
        for link in wanted.links:
            with wire_of(link, interrupts) as wire, Pair("bench.forward", wire, settings, Path(logs)) as pair:
                measured.about[link] = pair.about
                while waiting and waiting[0][0] == link:
                    _, case, growing = waiting.pop(0)
                    began = time.monotonic()
                    cell: Cell = pair.ask(Measure(case, wanted.modes, wanted.rounds))
                    spent += time.monotonic() - began
                    done.append(case)
                    if growing is None:
                        measured.cells.append(cell)
                    else:
                        measured.grown.append((growing.what, growing.value, cell))
                    on_cell(cell, time_left([each for _, each, _ in waiting], done, spent))
    return measured
