"""The findings of a soak: counts and problems. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Literal

from tests.faults.soak.request import Outcome, SoakRequest

Ill = Literal["mismatch", "leak", "hang", "death"]
ILLS: tuple[Ill, ...] = ("mismatch", "leak", "hang", "death")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A defect. Any problem makes the soak a failure."""

    ill: Ill
    round: int
    text: str


@dataclasses.dataclass
class Turn:
    """Counts of one line-up. ``pushes`` had their KV on D compared with P's: ``layer_blocks`` in all."""

    name: str
    reads_kv: bool
    requests: int = 0
    faults: int = 0
    tokens: int = 0
    pushes: int = 0
    layer_blocks: int = 0


@dataclasses.dataclass
class Tally:
    """Counts of the whole run, and of each line-up's turn. A fault is survived if its round ends without a problem.

    ``effects``: each kind's number of struck WRITEs, notifications or preemptions. One fault may have many, or none.
    It also has the engines' metrics of verified loads, and of turns that P has loaded from D.
    """

    rounds: int = 0
    outcomes: Counter[Outcome] = dataclasses.field(default_factory=Counter)
    injected: Counter[str] = dataclasses.field(default_factory=Counter)
    survived: Counter[str] = dataclasses.field(default_factory=Counter)
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    effects: Counter[str] = dataclasses.field(default_factory=Counter)
    unexplained: list[str] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _this_round: Counter[str] = dataclasses.field(default_factory=Counter)
    _problems_before: int = 0

    def begin_turn(self, name: str, *, reads_kv: bool) -> None:
        """A line-up's engines are up."""
        self.turns.append(Turn(name, reads_kv))

    def begin_round(self) -> None:
        self.rounds += 1
        self._this_round.clear()
        self._problems_before = len(self.problems)

    def end_round(self) -> None:
        if len(self.problems) == self._problems_before:
            self.survived.update(self._this_round)

    def struck(self, kind: str) -> None:
        """The soak has injected a fault of this kind."""
        self.injected[kind] += 1
        self.turns[-1].faults += 1
        self._this_round[kind] += 1

    def problem(self, ill: Ill, text: str) -> None:
        self.problems.append(Problem(ill, self.rounds, text))

    def count(self, ill: Ill) -> int:
        return sum(problem.ill == ill for problem in self.problems)

    def account(self, request: SoakRequest, *, disturbed: bool) -> None:
        """Count an ended request with its records and the right tokens. Mismatches become problems."""
        self.outcomes[request.outcome] += 1
        turn = self.turns[-1]
        turn.requests += 1
        self.samples.append({"line_up": turn.name} | request.sample())
        turn.tokens += any(leg.expected is not None and leg.output is not None for leg in request.legs)
        for leg in request.legs:
            if leg.tokens_wrong and leg.output is not None:
                self.problem(
                    "mismatch",
                    f"{request.request_id}: {leg.engine} answered {list(leg.output.token_ids)}, "
                    f"the plain engine {list(leg.expected or ())}",
                )
        if request.compared_cells:
            turn.pushes += 1
            turn.layer_blocks += request.compared_cells
        if request.differing_cells:
            self.problem(
                "mismatch",
                f"{request.request_id}: {request.differing_cells} of {request.compared_cells} (layer, block) cells "
                f"of its KV differ between {request.p.engine} and {request.d.engine}",
            )
        undone = request.outcome in (Outcome.RECOMPUTED, Outcome.KEPT, Outcome.FAILED)
        if undone and not disturbed and not request.faults:
            self.unexplained.append(f"{request.request_id} {request.outcome.value}: {request.d.error or 'load failed'}")

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())
