"""The options of a soak. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence

from tests.faults.soak.kinds import KINDS, Kind
from tests.faults.soak.specs import PLAIN, LineUp


@dataclasses.dataclass(frozen=True)
class Settings:
    """Duration, load and seed. ``engines``: so many Ps, and as many Ds, of each line-up in turn."""

    minutes: float
    seed: int
    kinds: Sequence[Kind] = KINDS
    engines: int = 2
    in_flight: int = 8
    round_s: float = 45.0
    corrupt: bool = False
    line_ups: Sequence[LineUp] = (PLAIN,)

    def command_line(self) -> str:
        """The command for the same requests and faults."""
        names = ",".join(kind.name for kind in self.kinds) or "none"
        options = ["--seed", str(self.seed), "--minutes", f"{self.minutes:g}"]
        options += [] if tuple(self.kinds) == KINDS else ["--faults", names]
        options += ["--line-ups", ",".join(line_up.name for line_up in self.line_ups)]
        options += ["--engines", str(self.engines), "--in-flight", str(self.in_flight)]
        options += ["--round-seconds", f"{self.round_s:g}", *(["--corrupt"] if self.corrupt else [])]
        return shlex.join(["scripts/soak", *options])

    def turns(self) -> Iterator[tuple[LineUp, Settings]]:
        """The line-ups, each with the settings of its turn: its share of the time, its own requests, its faults."""
        share = self.minutes / len(self.line_ups)
        for number, line_up in enumerate(self.line_ups):
            kinds = line_up.kinds(self.kinds)
            yield line_up, dataclasses.replace(self, minutes=share, seed=self.seed + number, kinds=kinds)
