"""An engine's estimate of a link, from WRITEs that landed."""

from __future__ import annotations

import math

import pytest

from layerpush.transport.link_speed import FIRST_TRIAL, GROWTH, KEPT, REMEMBERED_S, TRIAL_EVERY, LinkSpeed, Terms

WRITE_S, BYTE_S = 2e-4, 1e-9
TERMS = Terms(WRITE_S, BYTE_S, 3e-6)


def seconds(size: int) -> float:
    return WRITE_S + size * BYTE_S


def learned() -> LinkSpeed:
    """An estimate from six WRITEs, one behind the other; the last landed at time 1."""
    speed, at = LinkSpeed(), 1.0 - sum(map(seconds, range(1 << 20, 7 << 20, 1 << 20)))
    for size in range(1 << 20, 7 << 20, 1 << 20):
        speed.write_posted(size, size, at)
        at += seconds(size)
        speed.write_ended(size, at, landed=True)
    return speed


def test_the_estimate_is_a_line_through_the_writes() -> None:
    assert not LinkSpeed().is_known
    assert learned().line == pytest.approx((WRITE_S, BYTE_S), rel=1e-6)
    assert learned().slowdown(1.0) == pytest.approx(1.0)


def test_writes_of_one_size_give_a_mean() -> None:
    speed = LinkSpeed()
    for at in (1.0, 2.0, 3.0):
        speed.write_posted(at, 100, at)
        speed.write_ended(at, at + 0.5, landed=True)
    assert speed.line == pytest.approx((0.0, 0.005))


def test_writes_of_one_size_do_not_change_the_estimate_for_other_sizes() -> None:
    speed, size = learned(), 1 << 20
    for number in range(1000):
        speed.write_posted(number, size, number)
        speed.write_ended(number, number + seconds(size), landed=True)
    assert speed.line == pytest.approx((WRITE_S, BYTE_S), rel=1e-3)


@pytest.mark.parametrize("real_s", [0.01, 0.1, 0.6, 0.9])
def test_scheduled_looks_reveal_a_fast_link(real_s: float) -> None:
    """The writer looks at ``next_poll``, and when the next layer is ready."""
    speed, layer_s = LinkSpeed(), 1.0
    assert speed.next_poll(0.0) == math.inf
    for at in range(0, 300, 3):
        speed.write_posted(at, 100, at)
        seen = look = float(at)
        while look < at + real_s:
            seen, look = look, min(speed.next_poll(look), at + layer_s)
        speed.write_ended(at, look, landed=True, seen=seen)
    assert 0.75 * real_s <= speed.line[1] * 100 <= 1.5 * real_s
    assert speed.slowdown(at) <= 2


def test_a_write_that_overtakes_another_does_not_change_the_estimate() -> None:
    speed = LinkSpeed()
    speed.write_posted("large", 100_000_000, 0.0)
    speed.write_posted("small", 1_000_000, 45e-3)
    speed.write_ended("small", 46e-3, landed=True)
    assert not speed.is_known
    speed.write_ended("large", 50e-3, landed=True)
    assert speed.line == pytest.approx((0.0, 50e-3 / 100_000_000))


@pytest.mark.timeout(10)
def test_next_poll_terminates_for_a_tiny_write() -> None:
    """At a late clock time, rounding loses half of the WRITE's time."""
    speed = LinkSpeed()
    speed.write_posted("tiny", 1, 0.0)
    speed.write_ended("tiny", 1e-12, landed=True)
    speed.write_posted("later", 1, 1e9)
    assert speed.next_poll(2e9) == 1e9


def test_writes_queue_for_the_link() -> None:
    speed = learned()
    for key in range(3):
        speed.write_posted(key, 1 << 20, 1.0)
    assert speed.next_poll(1.0, halfway=True) == pytest.approx(1.0 + 0.5 * seconds(1 << 20))
    assert speed.busy_s(1.0, times=2.0) == pytest.approx(6 * seconds(1 << 20))
    assert speed.busy_s(1.0 + seconds(1 << 20), times=2.0) == pytest.approx(5 * seconds(1 << 20))


def ran(speed: LinkSpeed, begin: float, spacing_s: float, slow: list[float]) -> float:
    """WRITEs of one size, ``spacing_s`` apart, each so many times slower than the estimate; the last landed at the time
    returned.
    """
    size, at = 1 << 20, begin
    for number, times in enumerate(slow):
        speed.write_posted((begin, number), size, at)
        at += times * seconds(size)
        speed.write_ended((begin, number), at, landed=True)
        at += spacing_s
    return at


def test_an_overdue_write_raises_the_slowdown_before_it_lands() -> None:
    speed, size = learned(), 1 << 20
    speed.write_posted("slow", size, 1.0)
    assert speed.slowdown(1.0 + 3 * seconds(size)) == pytest.approx(3.0)


def test_one_slow_write_among_many_is_no_slow_link() -> None:
    speed = learned()
    at = ran(speed, 1.0, 0.01, [1.0] * 100 + [30.0])
    assert speed.slowdown(at) < 1.2


def test_a_link_that_others_share_is_slow_for_seconds() -> None:
    speed = learned()
    at = ran(speed, 1.0, 0.01, [1.0, 4.0] * 20)
    shared = speed.slowdown(at)
    assert shared > 1.2
    at = ran(speed, at, 0.1 * REMEMBERED_S, [1.0] * 5)
    assert 1 + 0.4 * (shared - 1) < speed.slowdown(at) < shared
    at = ran(speed, at, 0.1 * REMEMBERED_S, [1.0] * 50)
    assert speed.slowdown(at) < 1.1


def test_a_link_that_stood_still_is_soon_as_fast_as_before() -> None:
    speed, size = learned(), 1 << 20
    speed.write_posted("held", size, 1.0)
    speed.write_ended("held", 1.0 + 1000 * seconds(size), landed=True)
    for number in range(1, 101):
        later = 1.0 + 1000 * seconds(size) + number * REMEMBERED_S / 50
        speed.write_posted(number, size, later - seconds(size))
        speed.write_ended(number, later, landed=True)
    assert speed.slowdown(later) < 1.5


def test_a_late_poll_is_no_slow_link() -> None:
    speed, size = learned(), 1 << 20
    speed.write_posted("polled late", size, 1.0)
    speed.write_ended("polled late", 2.0, landed=True, seen=1.0 + 0.9 * seconds(size))
    assert speed.slowdown(2.0) == pytest.approx(1.0)


def test_a_lost_write_changes_neither_the_estimate_nor_the_next_writes_time() -> None:
    speed = learned()
    line = speed.line
    speed.write_posted("lost", 1 << 30, 1.0)
    speed.write_posted("next", 1 << 20, 1.0)
    speed.write_ended("lost", 6.0, landed=False)
    assert speed.line == line
    assert speed.last_landed == 1.0
    speed.write_ended("next", 6.0 + seconds(1 << 20), landed=True)
    assert speed.slowdown(7.0) == pytest.approx(1.0)


def test_a_clock_that_does_not_advance_causes_no_division_by_zero() -> None:
    speed = LinkSpeed()
    for key in range(3):
        speed.write_posted(key, 100, 1.0)
        speed.write_ended(key, 1.0, landed=True)
    assert speed.slowdown(2.0) == 1.0


def test_a_write_counts_as_landed_halfway_between_two_looks() -> None:
    speed = LinkSpeed()
    speed.write_posted("first", 100, 1.0)
    speed.write_posted("second", 100, 2.0)
    speed.write_ended("first", 4.0, landed=True, seen=2.0)
    assert speed.line == pytest.approx((0.0, 2.0 / 100)), "halfway between the looks: at 3"
    speed.write_ended("second", 5.0, landed=True, seen=4.0)
    assert speed.line == pytest.approx((0.0, (0.9 * 2.0 + 1.5) / 190)), "the second WRITE was alone from 3 to 4.5"


def test_the_size_limit_is_a_multiple_of_the_largest_recent_write() -> None:
    speed = LinkSpeed()
    assert speed.proven_bytes == 0
    for number, size in enumerate((100, 1000, 100, 100)):
        speed.write_posted(number, size, number)
        speed.write_ended(number, number + 0.5, landed=True)
    assert speed.proven_bytes == pytest.approx(GROWTH * KEPT**2 * 1000)
    speed.write_posted("lost", 10_000, 9.0)
    speed.write_ended("lost", 9.5, landed=False)
    assert speed.proven_bytes == pytest.approx(GROWTH * KEPT**2 * 1000)


def run(speed: LinkSpeed, *writes: tuple[int, int]) -> None:
    """WRITEs of ``(size, descriptors)``, one behind the other, each exactly as long as ``TERMS`` say."""
    at = max(speed.last_landed, 0.0)
    for number, (size, descriptors) in enumerate(writes):
        speed.write_posted(number, size, at, descriptors)
        at += seconds(size) + descriptors * TERMS.descriptor_s
        speed.write_ended(number, at, landed=True)


def test_the_estimate_has_a_term_for_descriptors() -> None:
    speed = LinkSpeed()
    run(speed, (1 << 20, 128), (2 << 20, 256), (5 << 20, 640), (1 << 20, 2), (3 << 20, 6))
    assert speed.terms == pytest.approx(TERMS, rel=1e-6)
    assert speed.estimate(8 << 20, 16) == pytest.approx(seconds(8 << 20) + 16 * 3e-6)


def test_the_line_has_the_recent_number_of_descriptors_per_byte() -> None:
    """The schedule knows the bytes of layers that are still to come, and not their descriptors."""
    speed = LinkSpeed()
    run(speed, (2 << 20, 4), *[(size << 20, 128 * size) for size in (1, 2, 5)] * 20)
    write_s, byte_s = speed.line
    assert speed.terms.descriptor_s > 0
    assert write_s + (3 << 20) * byte_s == pytest.approx(seconds(3 << 20) + 3 * 128 * 3e-6, rel=1e-3)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 5)], ids=["one size", "several sizes"])
def test_one_write_with_few_descriptors_shows_their_time_for_long(sizes: tuple[int, ...]) -> None:
    """WRITEs with as many descriptors per byte as ever determine no term of their own."""
    speed = LinkSpeed()
    many = [(size << 20, 128 * size) for size in sizes] * 4
    run(speed, *many)
    assert speed.terms.descriptor_s == 0
    run(speed, (1 << 20, 2))
    assert speed.terms.descriptor_s == pytest.approx(3e-6)
    run(speed, *many * 20)
    assert speed.terms.descriptor_s == pytest.approx(3e-6)
    assert speed.estimate(1 << 20, 2) == pytest.approx(seconds(1 << 20) + 2 * 3e-6, rel=0.01)


def test_a_change_of_the_plan_is_no_slow_link() -> None:
    speed = LinkSpeed()
    run(speed, *[(1 << 20, 128), (2 << 20, 4)] * 20)
    run(speed, *[(1 << 20, 2)] * 20)
    speed.write_posted("many", 1 << 20, 100.0, 128)
    due = seconds(1 << 20) + 128 * 3e-6
    assert speed.busy_s(100.0, 1.0) == pytest.approx(due, rel=0.01)
    assert speed.next_poll(100.0) == pytest.approx(100.0 + due / 2, rel=1e-6)
    speed.write_ended("many", 100.0 + due, landed=True)
    assert speed.slowdown(101.0) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    "writes",
    [[(100, 1, 5.0), (100, 50, 1.0), (10, 1, 9.0), (1000, 2, 0.1)], [(100, 10, 1.0), (100, 20, 4.0)]],
    ids=["few descriptors and small WRITEs took longer", "twice the descriptors took four times as long"],
)
def test_no_term_is_negative(writes: list[tuple[int, int, float]]) -> None:
    speed = LinkSpeed()
    for number, (size, descriptors, took) in enumerate(writes):
        speed.write_posted(number, size, 10.0 * number, descriptors)
        speed.write_ended(number, 10.0 * number + took, landed=True)
        assert min(speed.terms) >= 0
        assert speed.estimate(100, 10) > 0


def test_a_write_whose_blocks_are_copied_first_is_timed_from_the_wire_on() -> None:
    speed = learned()
    speed.write_posted("expected", 1 << 20, 1.5)
    assert speed.busy_s(1.0, 1.0) == pytest.approx(0.5 + seconds(1 << 20))
    assert speed.slowdown(1.4) == pytest.approx(1.0), "it is still copied"
    speed.write_posted_at("expected", 7.0)
    speed.write_ended("expected", 7.0 + seconds(1 << 20), landed=True)
    assert speed.slowdown(8.0) == pytest.approx(1.0)
    speed.write_posted_at("unknown", 9.0)
    assert speed.busy_s(8.0, 1.0) == 0


def test_one_in_64_writes_is_a_trial() -> None:
    speed = LinkSpeed()
    trials = [number for number in range(1, 300) if speed.is_trial()]
    assert trials == list(range(FIRST_TRIAL, 300, TRIAL_EVERY))
