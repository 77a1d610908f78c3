"""Heartbeats on their way to a main thread that may take no step for long."""

from __future__ import annotations

from layerpush.compat import heartbeats
from layerpush.compat.heartbeats import Heartbeats


def test_requests_are_announced_once_until_they_are_taken() -> None:
    beats = Heartbeats()
    assert [beats.add_requests(named) for named in ([], ["a"], ["a", "b"])] == [False, True, False]
    assert beats.take_requests() == {"a", "b"}
    assert beats.take_requests() == set()
    assert beats.add_requests(["a"])


def test_a_flood_of_heartbeats_is_bounded() -> None:
    beats = Heartbeats()
    announced = [beats.add_requests(f"r{number}-{each}" for each in range(1000)) for number in range(50)]
    assert sum(announced) == 1
    assert len(beats.take_requests()) == heartbeats.KEPT
