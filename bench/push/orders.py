"""Messages beside NIXL: from the command to P, and from P to D."""

from __future__ import annotations

from dataclasses import dataclass

from bench.pair.tables import Draw
from bench.push.points import Point


@dataclass(frozen=True)
class Measure:
    """To P: so many rounds of every plan at a point. A ``Cell`` or a ``WrongBytesError`` comes back."""

    point: Point
    rounds: int


@dataclass(frozen=True)
class Check:
    """To D: check the blocks of a draw. The problem or None comes back."""

    draw: Draw
