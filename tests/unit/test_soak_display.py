"""Progress, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.faults.soak import display
from tests.faults.soak.display import Display
from tests.faults.soak.engine import Memory
from tests.faults.soak.tally import Tally
from tests.unit.soak_world import FakeSeats


class SeatsWithMemory(FakeSeats):
    def __iter__(self):
        return iter(self.seats.values())

    def memories(self, name: str) -> list[Memory]:
        return [Memory(512.0)]


@pytest.mark.parametrize("terminal", [True, False])
def test_counts_engines_and_problems_are_shown(terminal: bool):
    file, tally, seats = io.StringIO(), Tally(), SeatsWithMemory("P1", "D1")
    seats["P1"].engine.paused = True
    seats["D1"].leaving = True
    tally.begin_round()
    tally.struck("kill-d")
    tally.problem("leak", "D1 [/tmp/log] keeps [3] blocks")
    console = Console(file=file, force_terminal=terminal, width=150, color_system=None)
    with Display(console, seats, tally, 600.0) as shown:  # type: ignore[arg-type]
        shown.update("load")
        text = file.getvalue()
    assert "leak in round 1: D1 [/tmp/log] keeps [3] blocks" in text
    assert "round 1" in text
    assert "leak: 1" in text
    for words in ("kill-d: 1", "P1#1 stopped 512 MiB", "D1#1 down") if terminal else ("1 faults", "P1 stopped D1 down"):
        assert words in text


def test_in_a_log_there_is_a_line_every_few_seconds_only(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    file = io.StringIO()
    shown = Display(Console(file=file, width=150), SeatsWithMemory("P1"), Tally(), 600.0)  # type: ignore[arg-type]
    for _ in range(50):
        shown.update("load")
        clock[0] += 0.5
    assert len(file.getvalue().splitlines()) == 3


def test_a_flood_of_problems_is_left_to_the_report():
    file, tally = io.StringIO(), Tally()
    for number in range(100):
        tally.problem("mismatch", f"number {number}")
    shown = Display(Console(file=file, width=150), SeatsWithMemory("P1"), tally, 600.0)  # type: ignore[arg-type]
    shown.update("load")
    assert file.getvalue().count("mismatch in round") == display.SHOWN
