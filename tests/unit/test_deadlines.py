"""Times at which something is due, by key."""

from __future__ import annotations

from layerpush.decode.deadlines import Deadlines


def test_keys_are_due_once_and_in_order() -> None:
    deadlines = Deadlines()
    for key, at in {"c": 3.0, "a": 1.0, "b": 2.0}.items():
        deadlines.set(key, at)
    assert deadlines.due(0.9) == []
    assert deadlines.due(2.0) == ["a", "b"]
    assert deadlines.due(2.0) == []
    assert deadlines.due(9.0) == ["c"]


def test_the_last_time_of_a_key_counts() -> None:
    deadlines = Deadlines()
    for at in (1.0, 5.0, 5.0):
        deadlines.set("later", at)
    assert len(deadlines._soonest) == 2, "the same time again needs no place"
    for at in (9.0, 1.0):
        deadlines.set("sooner", at)
    deadlines.set("never", 1.0)
    deadlines.set("never", None)
    assert deadlines.due(4.0) == ["sooner"]
    assert deadlines.due(9.0) == ["later"]
    assert deadlines._soonest == []
