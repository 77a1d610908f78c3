"""WRITEs that the peer acknowledges, on a fabric on which a WRITE ends before it lands."""

from __future__ import annotations

import numpy as np
import pytest

from layerpush.core.wire import MAX_ACKNOWLEDGED, Acknowledged, HasLanded, Landed, encode, read
from layerpush.transport.acknowledged import ASK_S, AcknowledgedTransport
from layerpush.transport.base import PeerLostError, TransportError, WriteHandle, WriteState
from tests.support.fake_pair import ALL, ROUTE, Pair
from tests.support.fake_transport import Faults


class Sides:
    """P and D on an unordered fabric, each with a transport of its own."""

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.pair = Pair(faults, seed, ordered=False)
        self.now = 0.0
        self.p = AcknowledgedTransport(self.pair.p, lambda: self.now)
        self.d = AcknowledgedTransport(self.pair.d, lambda: self.now)

    def post(self, notification: bytes = b"") -> WriteHandle:
        return self.p.post_write(ROUTE, ALL, ALL, notification)

    def land(self, handle: WriteHandle, looks: int = 1000) -> list[tuple[str, bytes]]:
        """Poll until the WRITE has landed. Returns D's notifications."""
        taken = []
        for _ in range(looks):
            taken += self.d.notifications()
            if self.p.poll(handle) is WriteState.LANDED:
                return taken
        pytest.fail("it has not landed")

    def send(self, handle: WriteHandle) -> None:
        """Poll until all bytes have left P."""
        while self.pair.p.poll(handle) is WriteState.PENDING:
            pass


def test_a_write_that_has_ended_has_not_landed() -> None:
    sides = Sides()
    handle = sides.post()
    sides.send(handle)
    assert sides.pair.landed() == set()
    assert sides.p.poll(handle) is WriteState.PENDING


@pytest.mark.parametrize("seed", range(20))
def test_all_bytes_are_there_when_it_has_landed(seed: int) -> None:
    sides = Sides(seed=seed)
    handle = sides.post()
    sides.land(handle)
    np.testing.assert_array_equal(sides.pair.target, sides.pair.source)
    sides.p.release(handle)
    with pytest.raises(TransportError, match="released"):
        sides.p.poll(handle)


@pytest.mark.parametrize("seed", range(20))
def test_the_callers_notification_comes_with_the_bytes(seed: int) -> None:
    sides = Sides(seed=seed)
    sides.send(handle := sides.post(b"request-1:1"))
    taken: list[tuple[str, bytes]] = []
    while not taken:
        taken = sides.d.notifications()
    np.testing.assert_array_equal(sides.pair.target, sides.pair.source)
    assert taken == [("P", b"request-1:1")]
    assert sides.land(handle) == []


def test_the_writes_of_one_turn_are_acknowledged_together() -> None:
    sides = Sides()
    handles = [sides.post() for _ in range(5)]
    for handle in handles:
        sides.send(handle)
    while any(write.is_on_the_wire for write in sides.pair.fabric.writes):
        sides.pair.fabric.carry(sides.pair.d)
    sides.d.notifications()
    [(_, answer)] = sides.pair.p.notifications()
    assert sorted(read(answer).numbers) == [0, 1, 2, 3, 4]


def test_other_notifications_pass_in_their_order() -> None:
    sides = Sides()
    unreadable = b"LAYERPUSH:x"
    for payload in (b"HB:a", unreadable, b"request-1:1"):
        sides.p.notify("D", payload)
    assert sides.d.notifications() == [("P", b"HB:a"), ("P", unreadable), ("P", b"request-1:1")]


def test_a_lost_answer_is_asked_for_again() -> None:
    sides = Sides(Faults(drop_notifications={1}))  # 0 is the WRITE's own
    handle = sides.post()
    sides.send(handle)
    for _ in range(50):
        sides.d.notifications()
        assert sides.p.poll(handle) is WriteState.PENDING
    sides.now += ASK_S
    sides.land(handle, looks=2)


def test_a_question_about_a_write_that_is_on_its_way_is_not_answered() -> None:
    sides = Sides()
    sides.p.notify("D", encode(HasLanded(0)))
    assert sides.d.notifications() == []
    assert sides.pair.p.notifications() == []


def test_only_the_writes_own_peer_can_acknowledge_it() -> None:
    sides = Sides()
    handle = sides.post()
    sides.send(handle)
    sides.pair.fabric.endpoint("E").notify("P", encode(Acknowledged((0,))))
    assert sides.p.poll(handle) is WriteState.PENDING
    assert sides.p.notifications() == []


def test_a_doubled_answer_changes_nothing() -> None:
    sides = Sides()
    handle = sides.post()
    sides.land(handle)
    sides.pair.d.notify("P", encode(Acknowledged((0, 0, 7))))
    assert sides.p.poll(handle) is WriteState.LANDED
    assert sides.p.notifications() == []


def test_the_death_of_a_peer_that_owes_an_answer_is_noticed() -> None:
    sides = Sides()
    handle = sides.post()
    sides.send(handle)
    sides.p.poll(handle)
    sides.pair.fabric.kill("D")
    sides.now += ASK_S
    with pytest.raises(PeerLostError):
        sides.p.poll(handle)


def test_an_answer_that_cannot_be_sent_costs_no_notification() -> None:
    sides = Sides()
    sides.p.notify("D", encode(Landed(0, b"request-1:1")))
    sides.pair.fabric.kill("P")
    assert sides.d.notifications() == [("P", b"request-1:1")]


def test_many_answers_fit_into_messages() -> None:
    sides = Sides()
    for number in range(MAX_ACKNOWLEDGED + 1):
        sides.p.notify("D", encode(Landed(number)))
    sides.d.notifications()
    assert len(sides.pair.p.notifications()) == 2


def test_a_write_that_failed_is_over_for_good() -> None:
    sides = Sides(Faults(fail_writes={0}))
    handle = sides.post()
    with pytest.raises(TransportError, match="ended in an error"):
        sides.land(handle)
    sides.p.release(handle)
    assert sides.p.notifications() == []
    assert not sides.p._unacknowledged
