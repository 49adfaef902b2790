"""The estimators on many episodes of an MDP whose values are known: biased or not, as theory says; and extreme weights."""

import tracemalloc

import numpy as np
import pytest

from polyak.off_policy_evaluation.estimate import student_interval
from polyak.off_policy_evaluation.importance import (
    ImportanceRatios,
    doubly_robust,
    effective_sample_size,
    importance_sampling,
    warn_of_poor_overlap,
    weighted_importance_sampling,
)
from tests.off_policy_evaluation.mdp import BEHAVIOR, GAMMA, STATES, TARGET, play, solve

EPISODES = 20_000
Q, VALUE = solve(TARGET)


@pytest.fixture(scope="module")
def arrays():
    return play(BEHAVIOR, EPISODES, np.random.default_rng(0))


def ratios_of(arrays, policy=TARGET, behavior=BEHAVIOR):
    state, action = arrays["observations"], arrays["actions"]
    last = np.flatnonzero(arrays["terminations"] | arrays["truncations"])
    log_ratio = np.log(policy[state, action]) - np.log(behavior[state, action])
    return ImportanceRatios(arrays["rewards"], log_ratio, np.diff(last, prepend=-1), GAMMA)


def robust(arrays, q, ratios):
    value = np.append((TARGET * q).sum(axis=1), 0.0)
    state, after = arrays["observations"], np.where(arrays["terminations"], STATES, arrays["next_observations"])
    return doubly_robust(ratios, value[state], q[state, arrays["actions"]], value[after])


def estimate(estimator):
    return estimator.resample(np.ones((1, len(estimator.x))))[0]


def per_episode(estimator):
    """The values of the episodes of an estimator that is their mean."""
    assert (estimator.weight == 1).all()
    return estimator.x[:, 0]


def is_mean(values, truth):
    return abs(values.mean() - truth) < 3 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("per_decision", [True, False])
def test_importance_sampling_is_unbiased_and_the_data_alone_are_not(arrays, per_decision):
    values = per_episode(importance_sampling(ratios_of(arrays), per_decision=per_decision))
    assert is_mean(values, VALUE)
    returns = per_episode(importance_sampling(ratios_of(arrays, policy=BEHAVIOR), per_decision=per_decision))
    assert is_mean(returns, solve(BEHAVIOR)[1]) and not is_mean(returns, VALUE)


def test_ratios_up_to_each_reward_vary_less_than_those_of_whole_episodes(arrays):
    by_step, whole = (per_episode(importance_sampling(ratios_of(arrays), per_decision=x)) for x in (True, False))
    assert by_step.var() < 0.8 * whole.var()


@pytest.mark.parametrize("per_decision", [True, False])
def test_weighted_importance_sampling_is_biased_consistent_and_varies_less(arrays, per_decision):
    weighted = weighted_importance_sampling(ratios_of(arrays), per_decision=per_decision)
    values = per_episode(importance_sampling(ratios_of(arrays), per_decision=per_decision))
    # Data sets of two episodes: the estimate is pulled to the behavior's value.
    pairs = np.zeros((2_000, EPISODES))
    pairs[np.repeat(np.arange(2_000), 2), np.arange(4_000)] = 1
    small = weighted.resample(pairs)
    assert not is_mean(small, VALUE) and small.mean() < VALUE
    assert small.var() < 0.8 * values[:4_000].reshape(2_000, 2).mean(axis=1).var()
    assert abs(estimate(weighted) - VALUE) < 0.02 * VALUE


def test_doubly_robust_is_unbiased_if_the_ratios_or_q_are_right(arrays):
    wrong_q = np.random.default_rng(1).uniform(0, 10, Q.shape)
    right, wrong = ratios_of(arrays), ratios_of(arrays, behavior=TARGET)
    assert is_mean(per_episode(robust(arrays, wrong_q, right)), VALUE)
    assert is_mean(per_episode(robust(arrays, Q, wrong)), VALUE)
    assert not is_mean(per_episode(robust(arrays, wrong_q, wrong)), VALUE)
    sampled = importance_sampling(right, per_decision=True)
    assert per_episode(robust(arrays, Q, right)).var() < 0.5 * per_episode(sampled).var()


def test_episodes_that_were_cut_short_are_continued_by_the_values_of_q_alone():
    arrays = play(BEHAVIOR, EPISODES, np.random.default_rng(2), horizon=3)
    ratios, cut = ratios_of(arrays), solve(TARGET, horizon=3)[1]
    assert arrays["truncations"].sum() > EPISODES / 4 and cut < 0.7 * VALUE
    for per_decision in (True, False):
        assert is_mean(per_episode(importance_sampling(ratios, per_decision=per_decision)), cut)
    assert is_mean(per_episode(robust(arrays, Q, ratios)), VALUE)
    assert not is_mean(per_episode(robust(arrays, 0.5 * Q, ratios)), VALUE)


@pytest.mark.parametrize("method", ["is", "wis", "dr"])
def test_intervals_have_the_truth_in_them_as_often_as_they_say(method):
    size, hits, count = 60, 0, 200
    rng = np.random.default_rng(3)
    for seed in range(count):
        arrays = play(BEHAVIOR, size, rng)
        ratios = ratios_of(arrays)
        if method == "dr":
            estimator = robust(arrays, 0.8 * Q, ratios)
        else:
            sampling = importance_sampling if method == "is" else weighted_importance_sampling
            estimator = sampling(ratios, per_decision=True)
        _, low, high, error = estimator.bootstrap(resamples=300, seed=seed, confidence=0.9)
        assert 0.2 < (high - low) / (2 * 1.645 * error) < 1.8
        hits += low <= VALUE <= high
    # 0.9, of which three standard errors are 0.064; percentile intervals of skewed numbers are a little too short.
    assert 0.80 < hits / count < 0.97


def test_weights_and_sums_are_those_of_a_loop_over_episodes():
    rng = np.random.default_rng(4)
    lengths = np.array([3, 1, 4])
    reward, log_ratio = rng.normal(size=8), rng.normal(size=8)
    log_ratio[5] = -np.inf  # within the third episode, which has weight 0 from there on
    ratios = ImportanceRatios(reward, log_ratio, lengths, 0.9)
    parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
    products = [np.exp(np.cumsum(log_ratio[part])) for part in parts]
    discounts = [0.9 ** np.arange(n) for n in lengths]
    np.testing.assert_allclose(np.exp(ratios.log_weight), np.concatenate(products))
    whole = [w[-1] * (g * reward[part]).sum() for w, g, part in zip(products, discounts, parts, strict=True)]
    each = [(w * g * reward[part]).sum() for w, g, part in zip(products, discounts, parts, strict=True)]
    np.testing.assert_allclose(per_episode(importance_sampling(ratios, per_decision=False)), whole)
    np.testing.assert_allclose(per_episode(importance_sampling(ratios, per_decision=True)), each)
    counts = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0], [0.0, 0.0, 3.0]])
    weighted = weighted_importance_sampling(ratios, per_decision=False).resample(counts)
    np.testing.assert_allclose(weighted[0], sum(whole) / sum(w[-1] for w in products))
    assert np.isnan(weighted[2])  # all of its weights are 0
    expected = np.zeros(2)
    for t in range(4):
        now = np.array([w[min(t, len(w) - 1)] for w in products])
        gain = np.array([reward[part][t] if t < n else 0.0 for part, n in zip(parts, lengths, strict=True)])
        expected += 0.9**t * (counts[:2] @ (now * gain)) / (counts[:2] @ now)
    np.testing.assert_allclose(weighted_importance_sampling(ratios, per_decision=True).resample(counts)[:2], expected)
    assert effective_sample_size(ratios.log_episode_weight) == pytest.approx(
        sum(w[-1] for w in products) ** 2 / sum(w[-1] ** 2 for w in products)
    )
    assert effective_sample_size(np.full(3, -np.inf)) == 0.0


def test_weighted_importance_sampling_keeps_two_numbers_for_each_episode_and_step():
    lengths = np.array([2_000, *[1] * 499])
    ratios = ImportanceRatios(np.ones(lengths.sum()), np.full(lengths.sum(), -0.1), lengths, 0.99)
    tracemalloc.start()
    estimator = weighted_importance_sampling(ratios, per_decision=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * (estimator.x.nbytes + estimator.weight.nbytes)


@pytest.mark.parametrize("per_decision", [True, False])
@pytest.mark.parametrize("log_ratio", [-12.0, 12.0])
def test_weights_beyond_the_range_of_floats_keep_their_proportions(per_decision, log_ratio):
    lengths = np.full(12, 100)
    reward = np.repeat(np.arange(12) % 2, 100) * 2.0
    ratios = ImportanceRatios(reward, np.full(1_200, log_ratio), lengths, 1.0)
    assert estimate(weighted_importance_sampling(ratios, per_decision=per_decision)) == pytest.approx(100)
    assert effective_sample_size(ratios.log_episode_weight) == pytest.approx(12)
    twice = ImportanceRatios(reward, np.full(1_200, log_ratio) + np.log(2) * (np.arange(1_200) % 200 == 100), lengths, 1.0)
    assert estimate(weighted_importance_sampling(twice, per_decision=per_decision)) == pytest.approx(200 * 2 / 3)


def test_weights_that_are_clipped_are_a_warning_and_the_estimate_stays_finite():
    ratios = ImportanceRatios(np.ones(1_200), np.full(1_200, 12.0), np.full(12, 100), 1.0)
    for estimator in (importance_sampling, lambda ratios, **_: doubly_robust(ratios, *np.zeros((3, 1_200)))):
        with pytest.warns(UserWarning, match=r"1008 importance weights above e\^200 are clipped"):
            values = estimator(ratios, per_decision=True).bootstrap(resamples=5, seed=0, confidence=0.9)
        assert np.isfinite(values).all()
    with pytest.warns(UserWarning, match="have mean .* instead of 1"):
        warn_of_poor_overlap("is", ratios.log_episode_weight)


def test_resamples_without_weight_are_counted():
    log_ratio = np.where(np.arange(20) == 3, 0.0, -np.inf)
    estimator = weighted_importance_sampling(ImportanceRatios(np.ones(20), log_ratio, np.ones(20, int), 1.0), per_decision=True)
    with pytest.warns(UserWarning, match=r"\d+ of 200 resamples have no episode with a weight above 0"):
        assert estimator.bootstrap(resamples=200, seed=0, confidence=0.9) == (1.0, 1.0, 1.0, 0.0)
    estimator.x[:], estimator.weight[:] = 0, 0
    with pytest.raises(ValueError, match="200 of 200 resamples have no episode with a weight above 0"):
        estimator.bootstrap(resamples=200, seed=0, confidence=0.9)


def test_the_interval_of_few_estimates_is_that_of_students_t():
    # The quantiles of 4 and of 9 degrees of freedom.
    for count, quantile in ((5, 2.776445), (10, 2.262157)):
        estimates = np.random.default_rng(6).normal(size=count)
        low, high, error = student_interval(1.0, estimates, 0.95)
        assert (high - low) / 2 == pytest.approx(quantile * error, rel=5e-3) and (high + low) / 2 == pytest.approx(1.0)
        assert error == pytest.approx(estimates.std(ddof=1))
