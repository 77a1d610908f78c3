"""The end of a soak: its report, its file and the exit status."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from tests.faults.soak.engine import Memory
from tests.faults.soak.report import as_json, faults_table, memory_table, requests_table, turns_table, verdict
from tests.faults.soak.settings import Settings
from tests.faults.soak.tally import Tally

PASSED, FAILED, BROKEN, INTERRUPTED = 0, 1, 2, 130
SHOWN_PROBLEMS = 20


@dataclasses.dataclass(frozen=True)
class Ending:
    """A finished run, with its conditions. ``broken``: it failed by itself; ``stopped``: a signal ended it early."""

    settings: Settings
    tally: Tally
    memories: Mapping[str, Sequence[Memory]]
    logs: Path
    seconds: float
    about: Mapping[str, object]
    broken: bool = False
    stopped: bool = False

    @property
    def exit_status(self) -> int:
        if self.broken:
            return BROKEN
        if self.tally.problems or (verdict(self.tally) and not self.stopped):
            return FAILED
        return INTERRUPTED if self.stopped else PASSED

    def write(self, out: Path) -> None:
        """The JSON file: provenance, figures and a record of each request."""
        run = {
            "minutes": self.settings.minutes,
            "seconds": round(self.seconds),
            "again": self.settings.command_line(),
            "interrupted": self.stopped,
            "broken": self.broken,
        }
        figures = as_json(self.tally, self.settings.kinds, self.memories)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**self.about, **run, **figures}, indent=1) + "\n")

    def show(self, console: Console, out: Path) -> None:
        tally = self.tally
        console.print(
            requests_table(tally),
            turns_table(tally),
            faults_table(tally, self.settings.kinds),
            memory_table(self.memories),
        )
        console.print(f"Figures: {out}. {self.seconds:.0f} s in all.", highlight=False)
        if self.exit_status == PASSED:
            console.print("[green]Nothing was wrong.[/]")
        elif self.exit_status == INTERRUPTED:
            console.print("[yellow]Interrupted; nothing was wrong until then.[/]")
        else:
            self._show_problems(console, out)

    def _show_problems(self, console: Console, out: Path) -> None:
        console.print(f"[red]FAILED[/]: {'; '.join(verdict(self.tally)) or 'it broke off'}", highlight=False)
        problems = self.tally.problems
        for problem in problems[:SHOWN_PROBLEMS]:
            console.print(f"  {problem.ill}, round {problem.round}: {problem.text}", markup=False, highlight=False)
        if len(problems) > SHOWN_PROBLEMS:
            console.print(f"  and {len(problems) - SHOWN_PROBLEMS} more, in {out}", highlight=False)
        console.print(f"The same requests and faults again: {self.settings.command_line()}", highlight=False)
        console.print(f"Logs: {self.logs}", highlight=False)
