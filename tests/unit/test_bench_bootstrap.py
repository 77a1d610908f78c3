"""Ratios of medians and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from bench.bootstrap import ratio_of_medians


def test_equal_series_have_ratio_one_and_an_empty_interval():
    noisy = np.random.default_rng(1).lognormal(size=40)
    result = ratio_of_medians(noisy, noisy)
    assert (result.value, result.low, result.high) == (1, 1, 1)


def test_noise_shared_by_a_round_cancels():
    """A factor of up to 10 disturbs both modes of a round alike: the ratio is still 0.5."""
    disturbed = 10 ** np.random.default_rng(2).uniform(size=40)
    result = ratio_of_medians(0.5 * disturbed, disturbed)
    assert result.low == pytest.approx(0.5)
    assert result.high == pytest.approx(0.5)


def test_the_interval_contains_the_true_ratio_about_95_times_in_100():
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        above, below = generator.normal(10, 1, 40), generator.normal(10, 1, 40)
        result = ratio_of_medians(above, below)
        hits += result.low <= 1 <= result.high
    assert 180 <= hits <= 200


@pytest.mark.parametrize(("above", "below"), [([], []), ([1, 2], [1])])
def test_unpaired_series_are_refused(above: list[float], below: list[float]):
    with pytest.raises(ValueError, match="same number of rounds"):
        ratio_of_medians(above, below)
