"""The time for which an engine keeps stepping for unreported endings."""

from __future__ import annotations

from layerpush.engine.unreported_aborts import ABORT_REPORT_S, UnreportedAborts


def test_an_abort_is_pending_until_the_end_of_a_later_turn() -> None:
    aborts = UnreportedAborts()
    assert not aborts.is_pending(10.0)
    before = aborts.count
    aborts.abort_began(10.0)
    assert aborts.is_pending(10.0)
    aborts.aborts_drained(before)
    assert aborts.is_pending(10.1), "that turn may have missed it"
    aborts.aborts_drained(aborts.count)
    assert not aborts.is_pending(10.1)


def test_an_unreported_abort_is_pending_for_a_limited_time() -> None:
    aborts = UnreportedAborts()
    aborts.abort_began(10.0)
    assert aborts.is_pending(10.0 + ABORT_REPORT_S - 0.1)
    assert not aborts.is_pending(10.0 + ABORT_REPORT_S)
    aborts.abort_began(12.0)
    assert aborts.is_pending(12.5)
