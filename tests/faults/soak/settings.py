"""The options of a soak. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from tests.faults.soak.kinds import KINDS, Kind


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long, how much, and from which seed. ``engines``: so many Ps, and as many Ds."""

    minutes: float
    seed: int
    kinds: Sequence[Kind] = KINDS
    engines: int = 2
    in_flight: int = 8
    round_s: float = 45.0
    corrupt: bool = False

    def command_line(self) -> str:
        """The command for the same requests and faults."""
        names = ",".join(kind.name for kind in self.kinds) or "none"
        options = ["--seed", str(self.seed), "--minutes", f"{self.minutes:g}"]
        options += [] if tuple(self.kinds) == KINDS else ["--faults", names]
        options += ["--engines", str(self.engines), "--in-flight", str(self.in_flight)]
        options += ["--round-seconds", f"{self.round_s:g}", *(["--corrupt"] if self.corrupt else [])]
        return shlex.join(["scripts/soak", *options])
