"""Munchausen targets of DQN and IQN, and the action gaps of advantage learning, against slow NumPy and closed forms."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.munchausen import soft_value
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.ops.losses import best_action, of_action
from polyak.replay.replay import Transition

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(3))
ROWS = 6
ACTIONS = np.array([0, 1, 2, 1, 0, 2])
DISCOUNTS = np.array([0.9, 0.9, 0.0, 0.9, 0.81, 0.9])
MASK = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
NEXT_MASK = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 1]], bool)


def agent_with(make, **settings):
    return make(SPEC, polyak.MLP((5,)), replay=polyak.UniformReplay(64), reward_scale=2.0, **settings)


def make_batch(*, masked):
    rng = np.random.default_rng(0)
    obs, next_obs, reward = rng.normal(size=(ROWS, 2)), rng.normal(size=(ROWS, 2)), rng.normal(size=ROWS)
    return Transition(
        obs=jnp.asarray(4 * obs, jnp.float32),
        action=jnp.asarray(ACTIONS, jnp.int32),
        action_mask=jnp.asarray(MASK) if masked else None,
        reward=jnp.asarray(reward, jnp.float32),
        discount=jnp.asarray(DISCOUNTS, jnp.float32),
        next_obs=jnp.asarray(4 * next_obs, jnp.float32),
        next_action_mask=jnp.asarray(NEXT_MASK) if masked else None,
        weight=jnp.full(ROWS, 1 / ROWS),
        index=jnp.arange(ROWS, dtype=jnp.int32),
    )


def networks_of(agent):
    """Different online and target networks."""
    online = agent.init(KEY).copies.online
    return {"online": online, "target": agent.init(jax.random.key(1)).copies.online}


def log_policy(q, mask, temperature):
    """The softmax policy's log-probabilities of allowed actions, by the definition; of all where none is allowed."""
    allowed = [b for b in range(len(q)) if mask is None or mask[b] or not any(mask)]
    total = math.log(sum(math.exp((q[b] - max(q)) / temperature) for b in allowed))
    return {b: (q[b] - max(q)) / temperature - total for b in allowed}


def munchausen_target(batch, q, next_q, quantiles, weight, temperature, clip):
    """The targets of each row, and each quantile, one by one."""
    rows = []
    for i in range(ROWS):
        now = log_policy(q[i], None if batch.action_mask is None else MASK[i], temperature)
        then = log_policy(next_q[i], None if batch.action_mask is None else NEXT_MASK[i], temperature)
        bonus = weight * min(max(temperature * now[ACTIONS[i]], clip), 0.0)
        value = sum(math.exp(p) * (quantiles[i][b] - temperature * p) for b, p in then.items())
        rows.append(2.0 * float(batch.reward[i]) + bonus + DISCOUNTS[i] * value)
    return np.array(rows)


@pytest.mark.parametrize("masked", [False, True])
def test_the_target_of_dqn_is_that_of_slow_numpy(masked):
    agent, batch = (
        agent_with(polyak.DQN, munchausen=0.9, munchausen_temperature=0.3, munchausen_clip=-0.5),
        make_batch(masked=masked),
    )
    networks = networks_of(agent)
    values = [agent.action_values(networks["target"], obs, None)[0] for obs in (batch.obs, batch.next_obs)]
    q, next_q = (np.asarray(x, np.float64) for x in values)
    target = agent.td_target(batch, **networks)
    wanted = munchausen_target(batch, q, next_q, next_q, 0.9, 0.3, -0.5)
    np.testing.assert_allclose(target, wanted, rtol=1e-5, atol=1e-6)
    bonus = agent.munchausen_bonus(jnp.asarray(q, jnp.float32), batch.action, batch.action_mask)
    assert np.isclose(bonus, -0.45).any() and (bonus > -0.44).any()  # clipped, and not


@pytest.mark.parametrize("masked", [False, True])
def test_the_targets_of_iqn_are_those_of_slow_numpy(masked):
    settings = {"num_target_tau": 4, "num_policy_tau": 5, "munchausen": 0.7, "munchausen_temperature": 0.2}
    agent, batch = agent_with(polyak.IQN, **settings), make_batch(masked=masked)
    networks = networks_of(agent)
    keys = [jax.random.fold_in(KEY, number) for number in (1, 2, 3)]

    def quantiles_of(obs, count, key):
        return np.asarray(agent._quantiles(networks["target"], obs, count, key)[1], np.float64)

    q, next_q = (quantiles_of(*inputs).mean(2) for inputs in ((batch.obs, 5, keys[2]), (batch.next_obs, 5, keys[0])))
    wanted = munchausen_target(batch, q, next_q, quantiles_of(batch.next_obs, 4, keys[1]), 0.7, 0.2, -1.0)
    np.testing.assert_allclose(agent.td_target(batch, **networks, key=KEY), wanted, rtol=1e-5, atol=1e-6)


def test_without_bonus_and_temperature_the_target_is_that_of_plain_dqn():
    cold = agent_with(polyak.DQN, munchausen=0.0, munchausen_temperature=1e-5)
    plain, batch = agent_with(polyak.DQN, double=False), make_batch(masked=True)
    networks = networks_of(plain)
    np.testing.assert_allclose(cold.td_target(batch, **networks), plain.td_target(batch, **networks), atol=1e-4)


def test_the_soft_value_of_large_values_is_finite_and_has_a_gradient():
    q = jnp.array([[1e4, 1e4 - 0.01, -1e4]])
    value, gradient = jax.value_and_grad(lambda q: soft_value(q, 0.01, None)[0])(q)
    np.testing.assert_allclose(value, 1e4 + 0.01 * np.log(1 + np.exp(-1)), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1)), 0]], atol=0.02)


@pytest.mark.parametrize("masked", [False, True])
def test_action_gaps_by_hand(masked):
    agent, batch = agent_with(polyak.DQN, gap_weight=0.5), make_batch(masked=masked)
    plain, networks = agent_with(polyak.DQN), networks_of(agent)
    q = np.array([[0, 1, 3], [5, 1, 2], [0, 1, 3], [2, 1, 7], [4, 9, 9], [0, 1, 0]], np.float32)
    next_q = np.array([[0, 1, 2], [2, 0, 1], [5, 5, 0], [0, 0, 0], [1, 2, 3], [1, 0, 0.5]], np.float32)
    # Terminal in row 2; with masks action 1 in row 1 and 0 in row 4 are not allowed at s'.
    gaps = [2, 1, 0, 0, 0, 0.5] if masked else [2, 2, 0, 0, 2, 0.5]
    np.testing.assert_allclose(agent.action_gap(jnp.asarray(q), jnp.asarray(next_q), batch), gaps)
    values = [agent.action_values(networks["target"], obs, None)[0] for obs in (batch.obs, batch.next_obs)]
    difference = plain.td_target(batch, **networks) - agent.td_target(batch, **networks)
    np.testing.assert_allclose(difference, 0.5 * agent.action_gap(*values, batch), atol=1e-5)


def test_the_gap_of_an_action_that_was_not_allowed_is_finite():
    agent, batch = agent_with(polyak.DQN, gap_weight=0.0), make_batch(masked=True)
    batch = dataclasses.replace(batch, action=jnp.asarray(np.argmin(MASK & NEXT_MASK, axis=1), jnp.int32))
    assert np.isfinite(agent.td_target(batch, **networks_of(agent))).all()


def test_advantage_learning_widens_the_gap_as_theory_says():
    """In one state that leads to itself, r = (1, 0.8, 0): the gap of an action grows by the factor 1 / (1 - α)."""
    agent, batch = agent_with(polyak.DQN, gap_weight=0.75), make_batch(masked=False)
    rows = dataclasses.replace(batch, action=jnp.array([0, 1, 2]), discount=jnp.full(3, 0.5))
    reward = jnp.array([1.0, 0.8, 0.0])

    def step(q, _):
        table = jnp.broadcast_to(q, (3, 3))
        next_value = of_action(table, best_action(table, None))
        return reward + 0.5 * next_value - 0.75 * agent.action_gap(table, table, rows), None

    q = jax.lax.scan(step, jnp.zeros(3), None, 200)[0]
    np.testing.assert_allclose(q, [2.0, 2.0 - 0.2 * 4, 2.0 - 1.0 * 4], rtol=1e-4)


def test_two_ways_to_increase_the_gap_together_are_an_error():
    with pytest.raises(ValueError, match="DQN: munchausen and gap_weight are two ways to increase the action gap"):
        agent_with(polyak.DQN, munchausen=0.9, gap_weight=0.9)


@pytest.mark.parametrize("kind", [polyak.DQN, polyak.IQN])
def test_double_without_effect_warns(kind):
    with pytest.warns(UserWarning, match="double=False has no effect with munchausen=0.5, only with munchausen=None"):
        agent_with(kind, munchausen=0.5, double=False)
