"""Faults of a fake network and their times."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.support.fake_transport import FakeFabric


class Counts(Protocol):
    """A count for some numbers, as in a dict."""

    def get(self, number: int, default: int, /) -> int: ...


@dataclass(frozen=True)
class Chance:
    """An endless set of numbers: each is in it with probability ``rate``. Equal seeds and kinds give equal sets."""

    seed: int
    kind: str
    rate: float

    def __contains__(self, number: object) -> bool:
        return self.draw(number).random() < self.rate

    def draw(self, number: object) -> random.Random:
        return random.Random(f"{self.seed}:{self.kind}:{number}")


@dataclass(frozen=True)
class ChanceCounts:
    """A count from 1 to ``most`` for each number in ``chance``."""

    chance: Chance
    most: int

    def get(self, number: int, default: int, /) -> int:
        if number not in self.chance:
            return default
        return self.chance.draw(f"count of {number}").randint(1, self.most)


@dataclass
class Faults:
    """Faults and their times. Posts and notifications are numbered over the whole fabric, from 0.

    ``at`` runs an action just before a moment: ``{("post", 3): lambda fabric: fabric.kill("D")}``. Moments are
    ``"post"``, ``"poll"`` and ``"notify"``. A fabric may be given other faults at any time.
    """

    fail_posts: Container[int] = field(default_factory=set)
    """Posts that raise ``TransportError``; nothing of them lands."""
    fail_writes: Container[int] = field(default_factory=set)
    """Posts whose WRITE becomes ``FAILED``, with a part of it landed if it took more than one poll."""
    hold_writes: Counts = field(default_factory=dict[int, int])
    """Post -> polls for which its WRITE stays ``PENDING``. Without an entry: none, one or two."""
    drop_notifications: Container[int] = field(default_factory=set)
    duplicate_notifications: Container[int] = field(default_factory=set)
    reorder_notifications: Container[int] = field(default_factory=set)
    """Notifications that overtake all others that the receiver has not taken yet."""
    delay_notifications: Counts = field(default_factory=dict[int, int])
    """Notification -> number of the receiver's looks in vain."""
    at: dict[tuple[str, int], Callable[[FakeFabric], None]] = field(default_factory=dict)

    @classmethod
    def endless(
        cls,
        seed: int,
        *,
        fail_posts: float = 0.0,
        fail_writes: float = 0.0,
        hold_writes: float = 0.0,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        delay: float = 0.0,
        most: int = 20,
    ) -> Faults:
        """Each kind of fault at a rate of its own, for ever; it holds or delays ``most`` times at most."""

        def chance(kind: str, rate: float) -> Chance:
            return Chance(seed, kind, rate)

        return cls(
            fail_posts=chance("fail post", fail_posts),
            fail_writes=chance("fail write", fail_writes),
            hold_writes=ChanceCounts(chance("hold", hold_writes), most),
            drop_notifications=chance("drop", drop),
            duplicate_notifications=chance("duplicate", duplicate),
            reorder_notifications=chance("reorder", reorder),
            delay_notifications=ChanceCounts(chance("delay", delay), most),
        )
