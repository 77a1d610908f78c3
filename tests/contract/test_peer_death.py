"""Calls wait for a stopped peer. Every call reports a dead peer within a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from layerpush.transport.base import PeerLostError, TransportError, WriteState
from tests.contract.link import COUNT, Link, source_pieces
from tests.contract.waiting import land
from tests.support.waiting import until

SECONDS = 5.0
REPORTED = ["fake", "nixl-4-threads"]
"""Links that report a peer's death. LIBFABRIC does not."""

EVERYTHING = np.arange(COUNT, dtype=np.int32), np.arange(COUNT, dtype=np.int32)[::-1].copy()


def lost(call: Callable[[], object]) -> bool:
    try:
        call()
    except PeerLostError:
        return True
    return False


def test_a_stopped_peer_leaves_a_write_pending_and_gets_it_later(link: Link) -> None:
    link.freeze()
    try:
        handle = link.transport.post_write(link.route, *EVERYTHING)
        looks = {link.transport.poll(handle) for _ in range(500)}
    finally:
        link.thaw()
    land(link.transport, handle)
    assert looks == {WriteState.PENDING}
    np.testing.assert_array_equal(link.memory(), source_pieces()[::-1])


@pytest.mark.parametrize("own_link", REPORTED, indirect=True)
def test_peer_death_during_a_write(own_link: Link) -> None:
    transport = own_link.transport
    own_link.freeze()
    handle = transport.post_write(own_link.route, *EVERYTHING)
    assert transport.poll(handle) is WriteState.PENDING

    own_link.kill()

    until(lambda: lost(lambda: transport.poll(handle)), seconds=SECONDS)
    with pytest.raises(PeerLostError):
        transport.poll(handle)
    transport.release(handle)
    with pytest.raises(PeerLostError):
        transport.post_write(own_link.route, *EVERYTHING)
    with pytest.raises(PeerLostError):
        transport.notify(own_link.route.agent, b"anyone there?")
    assert transport.notifications() == []


@pytest.mark.parametrize("own_link", REPORTED, indirect=True)
def test_a_write_before_death_has_landed_and_one_after_it_is_lost(own_link: Link) -> None:
    transport = own_link.transport
    handle = transport.post_write(own_link.route, *EVERYTHING)
    until(lambda: transport.poll(handle) is WriteState.LANDED)

    own_link.kill()

    assert transport.poll(handle) is WriteState.LANDED
    transport.release(handle)

    def post_and_poll() -> None:
        handle = transport.post_write(own_link.route, *EVERYTHING)
        until(lambda: transport.poll(handle) is not WriteState.PENDING, seconds=SECONDS)

    with pytest.raises(PeerLostError):
        post_and_poll()


@pytest.mark.exhaustive
@pytest.mark.parametrize("own_link", ["libfabric"], indirect=True)
def test_without_the_report_of_a_death_a_write_never_lands(own_link: Link) -> None:
    """Over LIBFABRIC. A WRITE that has left P for a stopped peer is not taken for one that has landed."""
    own_link.freeze()
    handle = own_link.transport.post_write(own_link.route, EVERYTHING[0][:64], EVERYTHING[1][:64])
    own_link.kill()
    with contextlib.suppress(TransportError):
        assert {own_link.transport.poll(handle) for _ in range(500)} == {WriteState.PENDING}


@pytest.mark.parametrize("own_link", REPORTED, indirect=True)
def test_a_notification_to_a_dead_peer(own_link: Link) -> None:
    transport = own_link.transport
    transport.notify(own_link.route.agent, b"hello")
    until(lambda: transport.notifications() or own_link.inbox())
    own_link.kill()

    def notify() -> None:
        transport.notifications()
        transport.notify(own_link.route.agent, b"anyone there?")

    until(lambda: lost(notify), seconds=SECONDS)
