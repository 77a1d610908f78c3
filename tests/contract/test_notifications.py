"""Notifications: whole, in order, and never ahead of bytes that had landed when they were sent."""

from __future__ import annotations

import numpy as np
import pytest

from layerpush.transport.base import PeerLostError, Transport, TransportError
from tests.contract.link import COUNT, Link, Pieces, source_pieces
from tests.contract.waiting import land
from tests.support.waiting import until


def arrived(link: Link, count: int) -> list[tuple[str, bytes]]:
    taken: list[tuple[str, bytes]] = []

    def look() -> bool:
        link.transport.notifications()  # P's progress: without it, notifications may stay on P
        taken.extend(link.inbox())
        return len(taken) >= count

    until(look)
    return taken


def test_without_a_notification_both_inboxes_are_empty(link: Link) -> None:
    assert link.transport.notifications() == []
    assert link.inbox() == []


def test_content_and_order_are_kept(link: Link) -> None:
    payloads = [b"", b"text", b"a\0b\xff\xfe", bytes(range(256)) * 16, *[f"number {i}".encode() for i in range(50)]]
    for payload in payloads:
        link.transport.notify(link.route.agent, payload)

    assert arrived(link, len(payloads)) == [("P", payload) for payload in payloads]
    assert link.inbox() == []


def test_the_peer_notifies_back(link: Link) -> None:
    for number in range(20):
        link.notify_from_peer(b"%d" % number)

    taken: list[tuple[str, bytes]] = []

    def look() -> bool:
        taken.extend(link.transport.notifications())
        return len(taken) >= 20

    until(look)
    assert taken == [("D", b"%d" % number) for number in range(20)]
    assert link.transport.notifications() == []


@pytest.mark.parametrize("round_", range(5))
def test_a_notification_after_landing_arrives_after_the_bytes(link: Link, round_: int) -> None:
    """D copies its memory at the moment of arrival, so the copy lacks bytes that land later."""
    draw = np.random.default_rng(round_)
    order, places = draw.permutation(COUNT).astype(np.int32), draw.permutation(COUNT).astype(np.int32)
    payload = b"done %d" % round_
    link.snapshot_at(payload)
    halves = [slice(0, COUNT // 2), slice(COUNT // 2, COUNT)]
    land(link.transport, *[link.transport.post_write(link.route, order[half], places[half]) for half in halves])
    link.transport.notify(link.route.agent, payload)

    snapshots: list[Pieces] = []

    def look() -> bool:
        link.transport.notifications()
        snapshot = link.snapshot()
        if snapshot is not None:
            snapshots.append(snapshot)
        return bool(snapshots)

    until(look)
    wanted = np.empty_like(link.source)
    wanted[places] = source_pieces()[order]
    np.testing.assert_array_equal(snapshots[0], wanted)


def test_an_unknown_agent_is_an_error_but_no_lost_peer(link: Link) -> None:
    with pytest.raises(TransportError) as refusal:
        link.transport.notify("nobody", b"x")
    assert not isinstance(refusal.value, PeerLostError)


def test_a_contact_is_enough_to_notify(link: Link) -> None:
    """No handshake and no memory is necessary. After a handshake, ``meet`` does no harm: WRITEs go on."""
    assert len(link.peer_contact()) < 4096
    agent = link.transport.meet(link.peer_contact())
    link.transport.notify(agent, b"met")
    assert arrived(link, 1) == [("P", b"met")]
    ids = np.arange(COUNT, dtype=np.int32)
    land(link.transport, link.transport.post_write(link.route, ids, ids))
    np.testing.assert_array_equal(link.memory(), source_pieces())


def test_a_stranger_needs_the_contact_only(link: Link) -> None:
    """The stranger is a third agent without a description of D's memory."""
    stranger = link.stranger()
    stranger.notify(stranger.meet(link.peer_contact()), b"hello")
    assert [payload for _, payload in arrived_from(stranger, link)] == [b"hello"]


def arrived_from(stranger: Transport, link: Link) -> list[tuple[str, bytes]]:
    taken: list[tuple[str, bytes]] = []

    def look() -> bool:
        stranger.notifications()
        taken.extend(link.inbox())
        return bool(taken)

    until(look)
    return taken
