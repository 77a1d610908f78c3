"""The calls of a run and their order. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

AGGREGATED, MOONCAKE, TOKEN = "aggregated", "mooncake", "token"
MODES = {
    AGGREGATED: "one engine that does everything, no transfer",
    "pull": "stock NixlConnector: D reads after P has answered",
    "push": "stock NixlPushConnector: P writes the whole request after prefill",
    MOONCAKE: "stock MooncakeConnector over TCP: as push, by Mooncake's transfer engine; run scripts/mooncake first",
    "request": "layerpush with layerwise: false; in this and the next three modes D computes the first token",
    "chunk": "layerpush with granularity: chunk",
    "layer": "layerpush with granularity: layer",
    "auto": "layerpush with granularity: auto",
    TOKEN: "layerpush's defaults: as auto, and D starts with P's first token",
}
LOOPBACK = "loopback"
Compare = Literal["aggregated", "shapes"]
COMPARE: dict[Compare, str] = {
    "aggregated": "with the aggregated engine's",
    "shapes": "with those of a mode whose engines compute in the same shapes, because kernels of other shapes round "
    "differently: token with aggregated, and all other modes with the first of them",
}
"""The answers with which a mode's answers are compared."""


@dataclass(frozen=True)
class Pace:
    """``concurrency`` requests at a time. Meanwhile D decodes ``background`` other streams."""

    concurrency: int = 1
    background: int = 0

    def __str__(self) -> str:
        pace = f"{self.concurrency} at a time"
        return f"{pace}, D decodes {self.background} streams" if self.background else pace

    @property
    def key(self) -> str:
        return f"c{self.concurrency}" + (f"-d{self.background}" if self.background else "")


@dataclass(frozen=True)
class Setup:
    """Each setup needs engines of its own."""

    link: str
    step_tokens: int

    def __str__(self) -> str:
        return f"{self.link}, {self.step_tokens} tokens a step"


@dataclass(frozen=True)
class Cell:
    """One point of the sweep, at which all modes are compared."""

    setup: Setup
    prompt_tokens: int
    load: Pace

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.setup.link}-b{self.setup.step_tokens}-p{self.prompt_tokens}-{self.load.key}"

    def __str__(self) -> str:
        return f"{self.prompt_tokens} tokens, {self.load}, {self.setup}"


@dataclass(frozen=True)
class Call:
    """One ``vllm bench serve``: a mode's share of a round."""

    cell: Cell
    round: int
    mode: str

    @property
    def key(self) -> str:
        return f"{self.cell.key}-{self.round:03d}-{self.mode}"


@dataclass(frozen=True)
class SweepPlan:
    """The whole sweep. ``requests`` is per call, and per stream where several run at a time."""

    modes: Sequence[str]
    lengths: Sequence[int]
    loads: Sequence[Pace]
    setups: Sequence[Setup]
    rounds: int
    requests: int
    answer_tokens: int
    seed: int
    compare: Compare = "aggregated"

    def cells(self, setup: Setup) -> list[Cell]:
        """The cells that the engines of one setup serve."""
        return [Cell(setup, length, load) for length in self.lengths for load in self.loads]

    def calls(self, setup: Setup) -> Iterator[Call]:
        """Round by round all modes in turn; each round begins with another one, so that drift hits all alike."""
        for cell in self.cells(setup):
            for number in range(self.rounds):
                first = number % len(self.modes)
                for mode in [*self.modes[first:], *self.modes[:first]]:
                    yield Call(cell, number, mode)

    def warm_up(self, setup: Setup, mode: str) -> Call:
        """A call with the longest prompts and the highest concurrency. It makes handshakes and touches KV memory."""
        widest = max(self.loads, key=lambda load: load.concurrency)
        return Call(Cell(setup, max(self.lengths), widest), self.rounds, mode)

    def prompts(self, call: Call) -> int:
        """The number of requests of a call."""
        return self.requests * call.cell.load.concurrency

    def seed_of(self, call: Call) -> int:
        """The seed of a call's prompts: equal in all modes of a round, different between rounds."""
        return self.seed + call.round

    def right(self, mode: str) -> str:
        """The mode whose answers a mode must give. The first mode with its shapes gets itself.

        In ``token`` P computes the first token with the prompt, as the aggregated engine does. In all other modes D
        computes it in a step of one token.
        """
        if self.compare == "aggregated" or mode in (AGGREGATED, TOKEN):
            return AGGREGATED
        return next(each for each in self.modes if each not in (AGGREGATED, TOKEN))

    @property
    def streams(self) -> int:
        """The most concurrent requests that are measured."""
        return max(load.concurrency for load in self.loads)

    @property
    def background(self) -> int:
        """The most streams that D decodes beside them."""
        return max(load.background for load in self.loads)
