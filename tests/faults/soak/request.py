"""One request of the soak: its legs, their results and its outcome. Pure."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from layerpush.core.prefill_identity import TO_PREFILL
from tests.e2e.results import Finished
from tests.faults.soak.inhost import Record
from tests.faults.soak.kinds import Side
from tests.faults.soak.plan import PlannedRequest


class Outcome(Enum):
    """The outcome of a request for its client."""

    COMPLETED = "completed"
    RECOMPUTED = "recomputed"
    KEPT = "computed from a kept prefix"
    FAILED = "failed cleanly"
    ABORTED = "aborted"
    LOST = "lost with an engine that the soak ended"
    HUNG = "hung"


class State(Enum):
    """The state of a request on one side."""

    UNSENT = "unsent"
    SENT = "sent"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"
    LOST = "lost"


@dataclasses.dataclass
class Leg:
    """A request on the ``incarnation``-th process of ``engine``. ``wanted``: whether the soak ever sends it."""

    side: Side
    engine: str
    token_ids: tuple[int, ...]
    max_tokens: int
    incarnation: int = 0
    state: State = State.UNSENT
    wanted: bool = True
    output: Finished | None = None
    error: str | None = None
    record: Record | None = None
    expected: tuple[int, ...] | None = None

    @property
    def over(self) -> bool:
        return not self.wanted if self.state is State.UNSENT else self.state is not State.SENT

    @property
    def tokens_wrong(self) -> bool:
        """Whether the answer is not the plain engine's. False while the plain engine's is unknown."""
        if self.state is not State.FINISHED or self.output is None or self.expected is None:
            return False
        return self.output.token_ids != self.expected[: self.max_tokens]


@dataclasses.dataclass
class SoakRequest:
    """A planned request on its way. ``to_p``: P's ``kv_transfer_params``, with the turn before if there is one.
    ``faults``: the kinds that struck the request itself.
    """

    plan: PlannedRequest
    request_id: str
    p: Leg
    d: Leg
    sent_at: float
    to_p: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(TO_PREFILL))
    ended_at: float | None = None
    faults: set[str] = dataclasses.field(default_factory=set)
    hung: bool = False
    compared_cells: int = 0
    differing_cells: int = 0

    @property
    def legs(self) -> tuple[Leg, Leg]:
        return self.p, self.d

    @property
    def over(self) -> bool:
        return self.p.over and self.d.over

    @property
    def outcome(self) -> Outcome:
        """The outcome for D's client, or for P's client if the plan has no D."""
        leg = self.d if self.d.wanted else self.p
        if self.hung or not leg.over:
            return Outcome.HUNG
        if leg.state is State.FINISHED:
            if leg.record is None or not leg.record.load_failed:
                return Outcome.COMPLETED
            return Outcome.KEPT if leg.record.kept else Outcome.RECOMPUTED
        return {State.ABORTED: Outcome.ABORTED, State.LOST: Outcome.LOST}.get(leg.state, Outcome.FAILED)

    def compare_kv(self) -> list[tuple[int, int]]:
        """(layer, block) wherever D's bytes of a pushed prompt are not P's. Notes the number of compared cells."""
        ours, theirs = (leg.record.digest if leg.record else None for leg in self.legs)
        if self.outcome is not Outcome.COMPLETED or self.p.state is not State.FINISHED:
            return []
        if ours is None or theirs is None or ours.tokens != theirs.tokens:
            return []  # two different prompts: only tokens can be compared
        if "resend-p" in self.faults:
            return []  # D may have P's first KV, which another batch rounds differently
        cells = [sum(cell is not None for cell in row) for row in theirs.cells]
        if not any(cells):
            return []  # D's prefix cache had all blocks
        self.compared_cells = sum(cells)
        differing = ours.differing(theirs)
        self.differing_cells = len(differing)
        return differing

    def sample(self) -> dict[str, Any]:
        """The request's record for JSON."""
        return {
            "number": self.plan.number,
            "id": self.request_id,
            "prompt_tokens": [len(leg.token_ids) for leg in self.legs],
            "max_tokens": self.plan.max_tokens,
            "turn_before": self.to_p.get("remote_request_id"),
            "order": self.plan.order,
            "engines": [f"{leg.engine}#{leg.incarnation}" for leg in self.legs],
            "states": [leg.state.value for leg in self.legs],
            "errors": [leg.error for leg in self.legs],
            "outcome": self.outcome.value,
            "faults": sorted(self.faults),
            "seconds": None if self.ended_at is None else round(self.ended_at - self.sent_at, 3),
            "tokens_compared": self.d.expected is not None or self.p.expected is not None,
            "tokens_wrong": [leg.side for leg in self.legs if leg.tokens_wrong],
            "kv_cells_compared": self.compared_cells,
            "kv_cells_differing": self.differing_cells,
        }
