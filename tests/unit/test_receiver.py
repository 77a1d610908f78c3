"""Completions wait for their request, heartbeats wait for nobody."""

from __future__ import annotations

from layerpush.decode.receiver import Receiver


def test_what_is_known_goes_on_at_once_and_in_order() -> None:
    receiver = Receiver(lambda request_id: True)
    for payload in (b"a:1", b"HB:x,y", b"b:2"):
        receiver.accept(payload, 0.0)
    assert list(receiver.due(0.0)) == [b"a:1", b"HB:x,y", b"b:2"]
    assert len(receiver) == 0


def test_a_completion_waits_until_its_request_is_known() -> None:
    known: set[str] = set()
    receiver = Receiver(known.__contains__, hold=10.0)
    receiver.accept(b"early:with:colons:2", 0.0)
    receiver.accept(b"HB:x", 0.0)
    assert list(receiver.due(1.0)) == [b"HB:x"]
    assert list(receiver.due(2.0)) == []
    known.add("early:with:colons")
    assert list(receiver.due(3.0)) == [b"early:with:colons:2"]
    assert list(receiver.due(4.0)) == []


def test_a_completion_that_nobody_claims_is_passed_on_at_last() -> None:
    receiver = Receiver(lambda request_id: False, hold=10.0)
    receiver.accept(b"nobody:1", 5.0)
    assert list(receiver.due(14.9)) == []
    assert list(receiver.due(15.0)) == [b"nobody:1"]


def test_bytes_that_are_no_text_are_not_lost() -> None:
    receiver = Receiver(lambda request_id: False, hold=1.0)
    receiver.accept(b"\xff\xfe", 0.0)
    assert list(receiver.due(1.0)) == [b"\xff\xfe"]
