"""Statistics against closed numbers and slow loops; `benchmarks/rliable_check.py` compares them with those of rliable."""

import itertools

import numpy as np
import pytest

from polyak.reports.statistics import (
    bootstrap_interval,
    iqm,
    iqm_intervals,
    mean,
    median,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    resample_runs,
)

SCORES = np.array([[0.0, 10.0], [1.0, 30.0], [5.0, 20.0]])


def slow_iqm(scores):
    values = sorted(np.ravel(scores))
    cut = len(values) // 4
    return sum(values[cut : len(values) - cut]) / (len(values) - 2 * cut)


def test_aggregates_by_hand():
    assert iqm(SCORES) == pytest.approx((1 + 5 + 10 + 20) / 4)
    assert mean(SCORES) == pytest.approx(66 / 6)
    assert median(SCORES) == pytest.approx((2 + 20) / 2)
    assert optimality_gap(SCORES, target=10.0) == pytest.approx(10 - (0 + 1 + 5 + 3 * 10) / 6)


def test_the_profile_is_the_fraction_of_scores_above_each_threshold():
    np.testing.assert_allclose(performance_profile(SCORES, [-1, 0, 1, 9, 10, 30]), np.array([6, 5, 4, 3, 2, 0]) / 6)


def test_the_probability_of_improvement_counts_pairs_and_half_of_equal_ones():
    others = np.array([[1.0, 5.0], [1.0, 40.0]])
    # Task 1: 0 < 1, 1 = 1, 5 > 1, twice each; task 2: all above 5, none above 40.
    assert probability_of_improvement(SCORES, others) == pytest.approx((0.5 + 0.5) / 2)
    assert probability_of_improvement(others, SCORES) == pytest.approx(0.5)
    assert probability_of_improvement(SCORES, SCORES) == 0.5
    assert probability_of_improvement(SCORES + 100, SCORES) == 1.0


def test_leading_axes_are_resamples():
    scores = np.random.default_rng(0).normal(size=(4, 7, 3))
    for statistic in (iqm, mean, median, optimality_gap):
        np.testing.assert_allclose(statistic(scores), [statistic(one) for one in scores])
    np.testing.assert_allclose(iqm(scores), [slow_iqm(one) for one in scores])
    profile = performance_profile(scores, [0.0, 1.0])
    np.testing.assert_allclose(profile, [[(one > t).mean() for t in (0.0, 1.0)] for one in scores])
    np.testing.assert_allclose(
        probability_of_improvement(scores, scores[::-1]),
        [probability_of_improvement(a, b) for a, b in zip(scores, scores[::-1], strict=True)],
    )


def test_the_interval_is_that_of_a_loop_over_the_same_resamples():
    scores, others = np.random.default_rng(1).normal(size=(2, 6, 3))
    indices = [resample_runs(6, 3, resamples=300, seed=seed) for seed in (5, 6)]
    drawn = [
        np.array([[array[n, task] for task, n in enumerate(row)] for row in one])
        for array, index in ((scores, indices[0]), (others, indices[1]))
        for one in index
    ]
    expected = np.percentile([slow_iqm(one) for one in drawn[:300]], [2.5, 97.5])
    np.testing.assert_allclose(bootstrap_interval(iqm, scores, indices=indices[:1]), expected)
    pairs = [probability_of_improvement(a, b) for a, b in zip(drawn[:300], drawn[300:], strict=True)]
    both = bootstrap_interval(probability_of_improvement, scores, others, indices=indices)
    np.testing.assert_allclose(both, np.percentile(pairs, [2.5, 97.5]))


def test_each_task_is_resampled_on_its_own_and_equally_each_time():
    indices = resample_runs(5, 2, resamples=4000)
    assert indices.shape == (4000, 5, 2) and not np.array_equal(indices[..., 0], indices[..., 1])
    assert abs(np.corrcoef(indices[..., 0].mean(axis=1), indices[..., 1].mean(axis=1))[0, 1]) < 0.06
    assert bootstrap_interval(mean, SCORES) == bootstrap_interval(mean, SCORES)


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 10])
def test_intervals_of_a_curve_are_those_of_each_point(runs):
    scores = np.random.default_rng(runs).normal(size=(runs, 5)).round(1)
    y, low, high = iqm_intervals(scores, resamples=400, seed=3)
    ranks = resample_runs(runs, 1, resamples=400, seed=3)[..., 0]
    for point, ordered in enumerate(np.sort(scores, axis=0).T):
        expected = np.quantile([slow_iqm(ordered[rank]) for rank in ranks], [0.025, 0.975])
        np.testing.assert_allclose((low[point], high[point]), expected)
        assert y[point] == pytest.approx(slow_iqm(ordered))


@pytest.mark.parametrize(
    "statistic",
    [
        iqm,
        mean,
        median,
        optimality_gap,
        lambda x: performance_profile(x, [0.0]),
        lambda x: probability_of_improvement([[0.0]], x),
    ],
)
def test_nan_is_an_error_as_sorting_would_count_it_as_the_highest_score(statistic):
    with pytest.raises(ValueError, match="scores must not be NaN"):
        statistic([[np.nan], [1.0]])


def test_intervals_of_two_runs_are_exact():
    """Resamples are (a, a), (a, b), (b, a) and (b, b)."""
    means = sorted(np.mean(pair) for pair in itertools.product([1.0, 3.0], repeat=2))
    assert (means[0], means[-1]) == tuple(float(end[0]) for end in iqm_intervals([[1.0], [3.0]])[1:])
