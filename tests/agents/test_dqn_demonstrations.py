"""DQN with demonstrations: the margin of DQfD, and what it learns from data with few good actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.replay.replay import Transition

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(3))


def agent_with(**settings):
    return polyak.DQN(SPEC, polyak.MLP((5,)), replay=polyak.UniformReplay(64), **settings)


def make_batch(mask=None):
    rng = np.random.default_rng(0)
    return Transition(
        obs=jnp.asarray(rng.normal(size=(4, 2)), jnp.float32),
        action=jnp.array([0, 1, 2, 1]),
        action_mask=mask,
        reward=jnp.asarray(rng.normal(size=4), jnp.float32),
        discount=jnp.full(4, 0.9),
        next_obs=jnp.asarray(rng.normal(size=(4, 2)), jnp.float32),
        next_action_mask=None,
        weight=jnp.full(4, 0.25),
        index=jnp.arange(4, dtype=jnp.int32),
        from_data=jnp.array([True, False, True, False]),
    )


def test_the_margin_by_hand():
    values = jnp.array([[1.0, 2.0, 0.0], [3.0, 1.0, 3.5], [0.0, 1.0, 2.0], [0.0, 0.5, 0.0]])
    agent, batch = agent_with(margin=0.8), make_batch()
    # max(1, 2.8, 0.8) - 1; max(3.8, 1, 4.3) - 1; max(0.8, 1.8, 2) - 2; max(0.8, 0.5, 0.8) - 0.5
    np.testing.assert_allclose(agent.margin_loss(values, batch), [1.8, 3.3, 0.0, 0.3], atol=1e-6)
    mask = jnp.array([[True, False, True]] + [[True] * 3] * 3)
    np.testing.assert_allclose(agent.margin_loss(values, make_batch(mask)), [0.0, 3.3, 0.0, 0.3], atol=1e-6)


def test_the_loss_has_the_margin_of_transitions_from_data_alone():
    plain, agent, batch = agent_with(), agent_with(margin=0.8, margin_weight=2.0), make_batch()
    copies = agent.init(KEY).copies
    variables = {"online": copies.online, "target": copies.variables("target")}
    values = agent.action_values(copies.online, batch.obs, None)[0]
    lead = np.asarray(agent.margin_loss(values, batch))[[0, 2]].sum() / 4
    losses = [one.loss(copies.online.params, batch, **variables) for one in (plain, agent)]
    np.testing.assert_allclose(losses[1][0], losses[0][0] + 2 * lead, rtol=1e-6)
    np.testing.assert_allclose(losses[1][1].terms["margin_loss"], lead, rtol=1e-6)
    assert lead > 0.1 and "margin_loss" not in losses[0][1].terms


def test_without_data_a_margin_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"DQN: margin needs demonstrations: polyak\.train\.run\(\.\.\., data=\)"):
        polyak.train.run("dqn", "jax/CartPole-v1", env_steps=10, settings={"margin": 0.8}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_demonstrator_who_is_never_rewarded_is_followed():
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(500, 2)).astype(np.float32)
    action = (obs[:, 0] > 0).astype(int) + (obs[:, 1] > 0)
    ends = np.arange(500) % 10 == 9
    arrays = {
        "observations": obs,
        "actions": action,
        "rewards": np.zeros(500),
        "terminations": ends,
        "truncations": ~ends & False,
    }
    data = polyak.data.load(arrays, spec=SPEC)
    settings = {"batch_size": 64, "learning_rate": 1e-2, "network": polyak.MLP((32,))}
    shares = []
    for margin in (0.8, None):
        chosen = settings | {"margin": margin}
        result = polyak.train.offline("dqn", data, gradient_steps=300, settings=chosen, progress=False)
        shares.append(np.mean(result.policy.predict(obs)[0] == action))
    assert shares[0] > 0.9 and shares[1] < 0.7, shares
