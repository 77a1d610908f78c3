"""The time for which an engine keeps stepping for unreported endings."""

from __future__ import annotations

from layerpush.core.unreported_aborts import SETTLE_S, UnreportedAborts


def test_pending_until_a_turn_that_began_after_it_has_ended() -> None:
    aborts = UnreportedAborts()
    assert not aborts.is_pending(10.0)
    before = aborts.count
    aborts.dropped(10.0)
    assert aborts.is_pending(10.0)
    aborts.settled(before)
    assert aborts.is_pending(10.1), "that turn may have missed it"
    aborts.settled(aborts.count)
    assert not aborts.is_pending(10.1)


def test_what_does_not_end_is_not_waited_for_for_ever() -> None:
    aborts = UnreportedAborts()
    aborts.dropped(10.0)
    assert aborts.is_pending(10.0 + SETTLE_S - 0.1)
    assert not aborts.is_pending(10.0 + SETTLE_S)
    aborts.dropped(12.0)
    assert aborts.is_pending(12.5)
