"""Messages beside NIXL: from the command to P, and from P to D."""

from __future__ import annotations

from dataclasses import dataclass

from bench.forward.cases import Case


@dataclass(frozen=True)
class Measure:
    """To P: so many rounds of every mode in a case. A ``Cell`` or a ``WrongBytesError`` comes back."""

    case: Case
    modes: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Register:
    """To D: expect these blocks, and register them with P as a decode engine does, by a notification."""

    request_id: str
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Check:
    """To D: check that these requests were completed, and that their blocks hold the KV of forward ``turn``.

    The KV is that of one request after the other. D then poisons the blocks. A ``Checked`` comes back.
    """

    turn: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """``problem`` is None if all is right. ``cpu_s`` are the processor seconds of D's process meanwhile."""

    problem: str | None
    cpu_s: float


@dataclass(frozen=True)
class CheckCeiling:
    """To D: check that the ring begins with the first ``size`` bytes of the noise. D then poisons these bytes."""

    size: int
