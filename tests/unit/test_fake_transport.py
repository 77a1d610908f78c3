"""Abilities of the fake alone: its faults, and facts of the wire that a fast loopback hides."""

from __future__ import annotations

import numpy as np
import pytest

from layerpush.transport.base import PeerLostError, TransportError, WriteHandle, WriteState
from tests.support.fake_pair import ALL, COUNT, ROUTE, SIZE, Pair
from tests.support.fake_transport import FakeFabric, FakeTransport, Faults


def polls_until_landed(endpoint: FakeTransport, handle: WriteHandle, limit: int = 100) -> int:
    for polls in range(1, limit + 1):
        if endpoint.poll(handle) is WriteState.LANDED:
            return polls
    raise AssertionError(f"pending after {limit} polls")


def test_no_bytes_land_without_a_poll() -> None:
    pair = Pair()
    handle = pair.post()
    for _ in range(10):
        pair.d.notifications()
        pair.p.notifications()
    assert pair.landed() == set()

    polls_until_landed(pair.p, handle)
    assert pair.landed() == set(range(COUNT))


def test_a_held_write_lands_piece_by_piece_in_random_order() -> None:
    pair = Pair(Faults(hold_writes={0: 7}))
    handle = pair.post()
    seen: list[set[int]] = []
    for _ in range(7):
        assert pair.p.poll(handle) is WriteState.PENDING
        seen.append(pair.landed())

    assert [len(landed) for landed in seen] == [2, 4, 6, 8, 10, 12, 14]
    assert seen[3] != set(range(8))
    assert pair.p.poll(handle) is WriteState.LANDED
    np.testing.assert_array_equal(pair.target, pair.source)


def test_a_later_write_may_land_first() -> None:
    pair = Pair(Faults(hold_writes={0: 3, 1: 0}))
    first, second = pair.post(ALL[:8], ALL[:8]), pair.post(ALL[8:], ALL[8:])

    states = pair.p.poll(first), pair.p.poll(second)

    assert states == (WriteState.PENDING, WriteState.LANDED)


def test_unscripted_writes_take_one_to_three_polls() -> None:
    pair = Pair()
    assert {polls_until_landed(pair.p, pair.post()) for _ in range(50)} == {1, 2, 3}


def test_a_notification_sent_early_overtakes_the_bytes() -> None:
    pair = Pair(Faults(hold_writes={0: 2}))
    pair.post()
    pair.p.notify("D", b"done")
    assert pair.d.notifications() == [("P", b"done")]
    assert pair.landed() == set()


def test_a_released_write_still_lands_with_the_sources_current_bytes() -> None:
    pair = Pair(Faults(hold_writes={0: 1}))
    handle = pair.post()
    assert pair.p.poll(handle) is WriteState.PENDING
    assert len(pair.landed()) == 8
    pair.p.release(handle)
    with pytest.raises(TransportError, match="released"):
        pair.p.poll(handle)

    pair.source[:] = 1  # the source's owner reuses it
    early = sorted(pair.landed())
    pair.p.notifications()

    late = sorted(set(range(COUNT)) - set(early))
    assert (pair.target[late] == 1).all()
    assert not (pair.target[early] == 1).all()


def test_a_released_write_from_or_to_a_dead_endpoint_never_lands() -> None:
    for victim in ("P", "D"):
        pair = Pair(Faults(hold_writes={0: 50}))
        pair.p.release(pair.post())
        pair.fabric.kill(victim)
        pair.fabric.settle()
        assert pair.landed() == set(), victim


def test_a_failing_post_sends_nothing() -> None:
    pair = Pair(Faults(fail_posts={1}))
    polls_until_landed(pair.p, pair.post(ALL[:2], ALL[:2]))
    with pytest.raises(TransportError, match="scripted") as failure:
        pair.post()
    assert not isinstance(failure.value, PeerLostError)
    polls_until_landed(pair.p, pair.post(ALL[2:4], ALL[2:4]))
    assert pair.landed() == {0, 1, 2, 3}


def test_a_failing_write_lands_in_part_and_stays_failed() -> None:
    pair = Pair(Faults(fail_writes={0}, hold_writes={0: 3}))
    handle = pair.post()
    assert [pair.p.poll(handle) for _ in range(3)] == [WriteState.PENDING] * 3
    for _ in range(2):
        with pytest.raises(TransportError, match="ended in an error"):
            pair.p.poll(handle)
    assert 0 < len(pair.landed()) < COUNT
    pair.p.release(handle)
    pair.fabric.settle()
    assert len(pair.landed()) < COUNT


def sent(faults: Faults, looks: int = 1) -> list[list[bytes]]:
    """The notifications of each look at D after P notified a, b, c."""
    pair = Pair(faults)
    for payload in (b"a", b"b", b"c"):
        pair.p.notify("D", payload)
    return [[payload for _, payload in pair.d.notifications()] for _ in range(looks)]


def test_notifications_are_dropped_duplicated_reordered_and_delayed() -> None:
    assert sent(Faults(), looks=2) == [[b"a", b"b", b"c"], []]
    assert sent(Faults(drop_notifications={1})) == [[b"a", b"c"]]
    assert sent(Faults(duplicate_notifications={1})) == [[b"a", b"b", b"b", b"c"]]
    assert sent(Faults(reorder_notifications={2})) == [[b"c", b"a", b"b"]]
    assert sent(Faults(delay_notifications={0: 2}), looks=3) == [[b"b", b"c"], [], [b"a"]]


def test_endless_faults_keep_their_rates() -> None:
    """They keep their rates far beyond the limit of a thousand that seeded faults have."""
    faults = Faults.endless(5, drop=0.2, duplicate=0.3, reorder=0.4, delay=0.5, most=4, hold_writes=0.1, fail_posts=0.6)
    for numbers in (range(2000), range(10**9, 10**9 + 2000)):
        counts = [faults.delay_notifications.get(number, 0) for number in numbers]
        rates = [
            sum(number in faults.drop_notifications for number in numbers) / 2000,
            sum(number in faults.duplicate_notifications for number in numbers) / 2000,
            sum(number in faults.reorder_notifications for number in numbers) / 2000,
            sum(count > 0 for count in counts) / 2000,
            sum(faults.hold_writes.get(number, 0) > 0 for number in numbers) / 2000,
            sum(number in faults.fail_posts for number in numbers) / 2000,
            sum(number in faults.fail_writes for number in numbers) / 2000,
        ]
        assert rates == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.1, 0.6, 0.0], abs=0.05)
        assert set(counts) == {0, 1, 2, 3, 4}


def test_faults_and_landings_depend_on_the_seed_only() -> None:
    def course(seed: int) -> tuple[list[list[bytes]], list[set[int]]]:
        pair = Pair(Faults.endless(seed, drop=0.2, duplicate=0.2, reorder=0.2, delay=0.2, hold_writes=1.0), seed)
        looks, landed, handle = [], [], pair.post()
        for number in range(100):
            pair.p.notify("D", b"%d" % number)
            looks.append([payload for _, payload in pair.d.notifications()])
            pair.p.poll(handle)
            landed.append(pair.landed())
        return looks, landed

    assert course(1) == course(1)
    assert all(one != other for one, other in zip(course(1), course(2), strict=True))
    flat = [payload for look in course(1)[0] for payload in look]
    assert 60 < len(set(flat)) < 100
    assert len(set(flat)) < len(flat)
    assert flat != sorted(flat, key=int)


def test_a_dead_endpoint_makes_no_calls() -> None:
    pair = Pair()
    handle = pair.post()
    pair.fabric.kill("P")
    calls = (lambda: pair.p.poll(handle), pair.post, lambda: pair.p.notify("D", b"x"), pair.p.notifications)
    for call in calls:
        with pytest.raises(RuntimeError, match="'P' is dead"):
            call()
    assert pair.landed() == set()


def test_bytes_of_a_dead_endpoint_may_land_from_its_socket() -> None:
    pair = Pair(Faults(hold_writes={0: 7}))
    pair.post()
    pair.fabric.kill("P", lingers=3)
    seen = []
    for _ in range(5):
        pair.d.notifications()
        seen.append(len(pair.landed()))
    assert seen == [2, 4, 6, 6, 6]


def test_only_bytes_of_a_dead_endpoint_land_when_their_target_polls() -> None:
    pair = Pair(Faults(hold_writes={0: 7, 1: 7}))
    other = pair.fabric.endpoint("E")
    other.describe("kv", pair.source.reshape(-1), range(0, COUNT * SIZE, SIZE), SIZE)
    pair.post(ALL[:8], ALL[:8])
    other.post_write(ROUTE, ALL[8:], ALL[8:])
    pair.fabric.kill("P", lingers=20)
    for _ in range(20):
        other.notifications()
    assert pair.landed() == set()
    for _ in range(20):
        pair.d.notifications()
    assert pair.landed() == set(range(8))


def test_pieces_must_be_views_of_flat_bytes() -> None:
    endpoint = FakeFabric().endpoint("P")
    with pytest.raises(ValueError, match="flat"):
        endpoint.describe("kv", np.zeros((2, 2), np.uint8), [0], 1)
