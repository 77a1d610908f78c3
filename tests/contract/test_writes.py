"""WRITEs: the bytes, all of them, nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from layerpush.transport.base import PeerLostError, TransportError, WriteState
from tests.contract.link import COUNT, SIZE, Link, Pieces, source_pieces
from tests.contract.waiting import land
from tests.support.fake_pair import POISON
from tests.support.waiting import until

Ids = NDArray[np.int32]


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def run(start: int, stop: int) -> Ids:
    return np.arange(start, stop, dtype=np.int32)


def scattered(count: int, seed: int) -> Ids:
    return np.random.default_rng(seed).permutation(COUNT)[:count].astype(np.int32)


def expected(*writes: tuple[Ids, Ids]) -> Pieces:
    """D's memory after these WRITEs, computed from the first content of P's memory, not from its present one."""
    source, memory = source_pieces(), np.full((COUNT, SIZE), POISON, np.uint8)
    for local, remote in writes:
        memory[remote] = source[local]
    return memory


PATTERNS = {
    "one": (ids(5), ids(9)),
    "first and last": (ids(0, COUNT - 1), ids(COUNT - 1, 0)),
    "run to run": (run(10, 50), run(100, 140)),
    "run to scattered": (run(10, 110), scattered(100, seed=1)),
    "scattered to run": (scattered(100, seed=2), run(300, 400)),
    "scattered to scattered": (scattered(300, seed=3), scattered(300, seed=4)),
    "backwards": (run(0, 64)[::-1].copy(), run(64, 128)),
    "one to many": (ids(7, 7, 7, 7), ids(3, 1, 2, 1000)),
    "a view with a stride": (run(0, 64)[::2], run(64, 128)[::2]),
    "all, shuffled": (scattered(COUNT, seed=5), scattered(COUNT, seed=6)),
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_bytes_land_at_their_ids_and_nowhere_else(link: Link, pattern: tuple[Ids, Ids]) -> None:
    land(link.transport, link.transport.post_write(link.route, *pattern))

    np.testing.assert_array_equal(link.memory(), expected(pattern))
    np.testing.assert_array_equal(link.source, source_pieces())


def test_many_writes_in_flight_at_once(link: Link) -> None:
    order, places = scattered(COUNT, seed=11).reshape(64, -1), scattered(COUNT, seed=12).reshape(64, -1)
    writes = [(order[i], places[i]) for i in range(63)]  # the last row stays out

    land(link.transport, *[link.transport.post_write(link.route, *write) for write in writes])

    np.testing.assert_array_equal(link.memory(), expected(*writes))


def test_the_source_may_change_once_a_write_has_landed(link: Link) -> None:
    write = run(0, 2048), scattered(2048, seed=13)
    before = expected(write)
    handle = link.transport.post_write(link.route, *write)
    until(lambda: link.transport.poll(handle) is WriteState.LANDED)

    link.source[:] = 0
    try:
        np.testing.assert_array_equal(link.memory(), before)
    finally:
        link.source[:] = source_pieces()
        link.transport.release(handle)


def test_the_ids_may_change_once_a_write_is_posted(link: Link) -> None:
    local, remote = run(0, 512), scattered(512, seed=14)
    wanted = expected((local, remote))
    handle = link.transport.post_write(link.route, local, remote)
    local[:], remote[:] = 0, 0
    land(link.transport, handle)

    np.testing.assert_array_equal(link.memory(), wanted)


def test_a_landed_write_stays_landed_until_it_is_released(link: Link) -> None:
    handle = link.transport.post_write(link.route, ids(1), ids(2))
    until(lambda: link.transport.poll(handle) is WriteState.LANDED)

    assert link.transport.poll(handle) is WriteState.LANDED
    link.transport.release(handle)


def test_a_released_write_is_unknown(link: Link) -> None:
    handle = link.transport.post_write(link.route, ids(1), ids(2))
    land(link.transport, handle)

    with pytest.raises(TransportError, match="released"):
        link.transport.poll(handle)
    with pytest.raises(TransportError, match="released"):
        link.transport.release(handle)


def test_a_release_in_flight_leaves_the_transport_in_order(own_link: Link) -> None:
    whole = run(0, COUNT), run(0, COUNT)
    early = own_link.transport.post_write(own_link.route, *whole)
    try:
        own_link.transport.release(early)
    except TransportError:
        land(own_link.transport, early)

    land(own_link.transport, own_link.transport.post_write(own_link.route, *whole))
    np.testing.assert_array_equal(own_link.memory(), expected(whole))


BAD_IDS = {
    "local too large": (ids(0, COUNT), ids(0, 1)),
    "remote too large": (ids(0, 1), ids(0, COUNT)),
    "local negative": (ids(-1), ids(0)),
    "remote negative": (ids(0), ids(-1)),
    "different counts": (ids(0, 1), ids(0)),
    "none": (ids(), ids()),
}


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS.keys())
def test_bad_ids_are_refused_and_nothing_is_sent(link: Link, bad: tuple[Ids, Ids]) -> None:
    with pytest.raises(TransportError) as refusal:
        link.transport.post_write(link.route, *bad)
    assert not isinstance(refusal.value, PeerLostError)

    good = ids(1), ids(2)
    land(link.transport, link.transport.post_write(link.route, *good))
    np.testing.assert_array_equal(link.memory(), expected(good))
