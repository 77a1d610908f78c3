"""The time of a gather, learned from gathers."""

from __future__ import annotations

import pytest

from layerpush.transport.gather.cost import CopyCost


def test_copies_are_as_expensive_as_measured_at_start() -> None:
    assert CopyCost(1e-4, 1e-9).seconds(1 << 20) == pytest.approx(1e-4 + (1 << 20) * 1e-9)


def test_the_cost_of_copies_is_learned() -> None:
    copies = CopyCost(1e-4, 1e-9)
    for size in (1 << 10, 1 << 20) * 20:
        copies.copied(size, 3 * copies.at_start(size))
    assert copies.seconds(1 << 16) == pytest.approx(3 * copies.at_start(1 << 16), rel=0.01)


def test_one_slow_copy_does_not_make_copies_expensive() -> None:
    copies = CopyCost(1e-4, 0.0)
    copies.copied(1, 60.0)
    assert copies.seconds(1) < 2e-4


def test_fast_copies_do_not_make_copies_free_for_ever() -> None:
    copies = CopyCost(1e-4, 0.0)
    for _ in range(100):
        copies.copied(1, 0.0)
    for _ in range(20):
        copies.copied(1, 1e-4)
    assert copies.seconds(1) == pytest.approx(1e-4, rel=0.01)


def test_copies_without_a_cost_stay_without_one() -> None:
    copies = CopyCost(0.0, 0.0)
    copies.copied(100, 1.0)
    assert copies.seconds(100) == 0
