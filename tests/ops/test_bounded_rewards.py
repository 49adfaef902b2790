"""Reward scaling with a bound of returns, against sums by hand, and in the update of an agent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.types import Rollout
from polyak.learning.replay_batch import normalize
from polyak.ops.bounded_rewards import BoundedRewardScaler
from polyak.ops.normalize import RunningStats
from tests.agents.test_actor_critics import SPEC, batch, random_rollout
from tests.agents.test_xqc import make

GAMMA, BOUND = 0.9, 2.0


def scaler():
    stats = RunningStats.init(())
    return BoundedRewardScaler(stats=stats, of="return", largest=jnp.zeros(()), bound=BOUND)


def rollout_of(rewards, first):
    """A rollout of 2 environments; its first row ends the time before."""
    rewards, first = np.asarray(rewards, np.float32), np.asarray(first, bool)
    rollout = random_rollout(make(num_steps=len(rewards) - 1))
    steps = dataclasses.replace(rollout.time_steps, reward=jnp.asarray(rewards), first=jnp.asarray(first))
    return Rollout(steps, rollout.actions, carry=((), jnp.array([3.0, -1.0])))


def test_the_divisor_is_the_largest_return_by_the_bound_or_the_standard_deviation():
    rewards = np.array([[1.0, 0.5], [-2.0, 1.0], [0.5, 50.0], [np.nan, 1.0]])
    first = np.zeros((4, 2), bool)
    first[2, 0] = first[3, 1] = True
    weight = jnp.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    returns, rows = np.array([3.0, -1.0]), []
    for reward, begins in zip(np.nan_to_num(rewards), first, strict=True):
        returns = np.where(begins, 0.0, reward + GAMMA * returns)
        rows.append(returns)
    found = scaler().update(rollout_of(rewards, first), weight, GAMMA)
    counted = np.asarray(rows)[1:][np.asarray(weight) > 0]
    np.testing.assert_allclose(found.largest, np.abs(counted).max(), rtol=1e-6)
    np.testing.assert_allclose(found.divisor(), max(counted.std(), np.abs(counted).max() / BOUND), rtol=1e-6)
    # A second rollout without returns as large keeps the largest; and a wide bound leaves the standard deviation.
    again = found.update(rollout_of(0 * rewards, first | True), weight, GAMMA)
    assert again.largest == found.largest
    wide = dataclasses.replace(found, bound=100.0)
    np.testing.assert_allclose(wide.divisor(), counted.std(), rtol=1e-5)


def test_a_return_whose_square_is_not_finite_is_no_bound():
    for rewards in ([1.0, 1e20], [1.0, -3e38], [1.0, 3e38, 3e38]):
        rows, weight = np.array([[0.0, *rewards], np.zeros(len(rewards) + 1)]).T, jnp.ones((len(rewards), 2))
        found = scaler().update(rollout_of(rows, np.zeros(rows.shape, bool)), weight, GAMMA)
        np.testing.assert_allclose(found.largest, 1.0 + GAMMA * GAMMA * 3.0, rtol=1e-6)


def test_an_agent_bounds_the_returns_that_its_critics_learn():
    agent = make(normalize_reward="return", max_return=BOUND, learning_starts=1_000)
    state = agent.init(jax.random.key(0))
    rollout = random_rollout(agent, reward=lambda x: x + 100.0)
    rollout = Rollout(rollout.time_steps, rollout.actions, carry=((), jnp.zeros(2)))
    after = state.normalizers.update(rollout, agent.gamma)
    assert after.reward.largest > 300
    rows = batch()
    np.testing.assert_allclose(normalize(rows, after).reward, rows.reward / (after.reward.largest / BOUND), rtol=1e-5)
    with pytest.raises(ValueError, match=r"this state was created with max_return=2\.0 but the agent sets max_return=None"):
        make(normalize_reward="return", learning_starts=1_000).update(state, rollout, jax.random.key(1))
    with pytest.warns(UserWarning, match=r"XQC: max_return=2\.0 times reward_scale=1\.5 lies beyond the atoms, v_min=-2\.0"):
        make(normalize_reward="return", max_return=BOUND, reward_scale=1.5)
    with pytest.warns(UserWarning, match=r"max_return=2\.0 has no effect with normalize_reward=None"):
        polyak.SAC(SPEC, max_return=2.0, replay=polyak.UniformReplay(64))
