"""The time for which an engine keeps stepping for unreported endings."""

from __future__ import annotations

from layerpush.core.unreported_aborts import SETTLE_S, UnreportedAborts


def test_pending_until_a_turn_that_began_after_it_has_ended() -> None:
    settling = UnreportedAborts()
    assert not settling.is_pending(10.0)
    before = settling.count
    settling.dropped(10.0)
    assert settling.is_pending(10.0)
    settling.settled(before)
    assert settling.is_pending(10.1), "that turn may have missed it"
    settling.settled(settling.count)
    assert not settling.is_pending(10.1)


def test_what_does_not_end_is_not_waited_for_for_ever() -> None:
    settling = UnreportedAborts()
    settling.dropped(10.0)
    assert settling.is_pending(10.0 + SETTLE_S - 0.1)
    assert not settling.is_pending(10.0 + SETTLE_S)
    settling.dropped(12.0)
    assert settling.is_pending(12.5)
