"""PPO on probe environments: values and actions against what they must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import train
from polyak.agents.ppo import PPO
from polyak.parts.networks import mlp
from tests.probe_envs import probe

GAMMA = 0.9


def trained(env, iterations=150):
    agent = PPO(
        env.spec, network=mlp((32,)), num_steps=16, num_epochs=4, num_minibatches=4, learning_rate=1e-2, gamma=GAMMA, ent_coef=0.01
    )
    rows = env.num_envs * agent.num_steps * iterations
    result = train.compiled(agent, env, env_steps=rows // 3, key=jax.random.key(0))

    def value(obs):
        variables = result.state.variables
        (_, value), _, _ = agent.network.apply(variables, jnp.array([[obs]], jnp.float32))
        return float(value[0])

    return value, agent.policy(result.state)


def test_one_step_reward_is_the_value():
    value, _ = trained(probe(32))
    assert value(0.0) == pytest.approx(1.0, abs=0.05)


def test_the_value_depends_on_the_observation():
    value, _ = trained(probe(32, sees="sign", pays="sign"))
    assert value(1.0) == pytest.approx(1.0, abs=0.1) and value(-1.0) == pytest.approx(-1.0, abs=0.1)


def test_the_value_is_bootstrapped_over_two_steps():
    value, _ = trained(probe(32, sees="step", pays="at the end", length=2))
    assert value(1.0) == pytest.approx(1.0, abs=0.05) and value(0.0) == pytest.approx(GAMMA, abs=0.05)


def test_the_rewarded_action_is_taken():
    _, policy = trained(probe(32, pays="action"))
    assert policy.predict(np.array([0.0], np.float32))[0] == 1


def test_the_action_follows_the_observation():
    value, policy = trained(probe(32, sees="sign", pays="agreement"))
    assert policy.predict(np.array([1.0], np.float32))[0] == 1
    assert policy.predict(np.array([-1.0], np.float32))[0] == 0
    assert value(1.0) == pytest.approx(1.0, abs=0.1)


def test_a_time_limit_does_not_lower_a_value():
    value, _ = trained(probe(32, length=4, ends="truncated"), iterations=600)
    assert value(0.0) == pytest.approx(1 / (1 - GAMMA), rel=0.05)


def test_a_terminal_state_does():
    value, _ = trained(probe(32, sees="step", length=4, ends="terminated"), iterations=300)
    assert value(0.0) == pytest.approx(1 + GAMMA + GAMMA**2 + GAMMA**3, rel=0.05)
    assert value(3.0) == pytest.approx(1.0, abs=0.1)
