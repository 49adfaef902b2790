"""Statistics over several seeds."""

import re

import numpy as np
import pytest

from polyak.train.statistics import seed_statistics


def test_mean_and_interquartile_mean_by_hand():
    statistics = seed_statistics([100.0, 0.0, 2.0, 3.0, -50.0, 4.0, 5.0, 7.0, 9.0])
    assert statistics.mean == pytest.approx(80 / 9)
    # A quarter of nine is two seeds; without one or three of them on each side, the mean would be another.
    assert statistics.iqm == pytest.approx((2 + 3 + 4 + 5 + 7) / 5)


def test_the_interval_holds_the_iqm_of_the_population_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    intervals = [seed_statistics(rng.normal(size=20).tolist()) for _ in range(60)]
    assert 0.8 <= np.mean([s.low <= 0 <= s.high for s in intervals]) <= 1.0


def test_equal_returns_have_an_interval_of_no_width():
    statistics = seed_statistics([7.0, 7.0, 7.0])
    assert (statistics.low, statistics.high, str(statistics)) == (
        7.0,
        7.0,
        "return over 3 seeds: mean 7.0, IQM 7.0, 95 % interval of the IQM [7.0, 7.0]",
    )


@pytest.mark.parametrize(("returns", "shape"), [([], "(0,)"), ([[1.0, 2.0], [3.0, 4.0]], "(2, 2)")])
def test_returns_that_are_not_one_for_each_seed_are_an_error(returns, shape):
    with pytest.raises(ValueError, match=f"one number for each of 1 or more seeds, got shape {re.escape(shape)}"):
        seed_statistics(returns)


def test_large_returns_are_short():
    assert "mean 6.173e+07, IQM 6.173e+07" in str(seed_statistics([61_728_384.0, 61_728_384.0]))
