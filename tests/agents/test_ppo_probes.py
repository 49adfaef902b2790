"""PPO on probe environments: values and actions against what they must be."""

import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.ppo import PPO
from polyak.networks.feedforward import MLP
from tests.probe_envs import OBS, probe, settings, train_in

pytestmark = pytest.mark.slow

GAMMA, NUM_ENVS = 0.9, 32
PROBES = {
    "one step": settings(),
    "value of the obs": settings(sees="sign", pays="sign"),
    "two steps": settings(sees="step", pays="at the end", length=2),
    "action": settings(pays="action"),
    "action of the obs": settings(sees="sign", pays="agreement"),
    "time limit": settings(length=4, terminates=False),
    "terminal state": settings(sees="step", length=4),
}
AGENT = PPO(
    probe(1).spec,
    network=MLP((32,)),
    num_steps=16,
    num_epochs=4,
    num_minibatches=4,
    learning_rate=1e-2,
    gamma=GAMMA,
    ent_coef=0.01,
)


@pytest.fixture(scope="module")
def trained():
    """Trains in all probes as one program; answers `(value, policy)` by the probe's name."""
    states = dict(zip(PROBES, train_in(AGENT, list(PROBES.values()), NUM_ENVS, 400), strict=True))

    def answers(name):
        state = states[name]

        def value(obs):
            (_, value), _, _ = AGENT.network.apply(state.copies.online, jnp.array([[obs]], jnp.float32))
            return float(value[0])

        return value, lambda obs: int(AGENT.policy(state).predict(np.full(OBS.shape, obs, np.float32))[0])

    return answers


def test_one_step_reward_is_the_value(trained):
    value, _ = trained("one step")
    assert value(0.0) == pytest.approx(1.0, abs=0.02)


def test_the_value_depends_on_the_observation(trained):
    value, _ = trained("value of the obs")
    assert value(1.0) == pytest.approx(1.0, abs=0.05) and value(-1.0) == pytest.approx(-1.0, abs=0.05)


def test_the_value_is_bootstrapped_over_two_steps(trained):
    value, _ = trained("two steps")
    assert value(1.0) == pytest.approx(1.0, abs=0.02) and value(0.0) == pytest.approx(GAMMA, abs=0.02)


def test_policy_learns_the_rewarded_action(trained):
    value, policy = trained("action")
    assert policy(0.0) == 1 and value(0.0) == pytest.approx(1.0, abs=0.05)


def test_the_action_follows_the_observation(trained):
    value, policy = trained("action of the obs")
    assert policy(1.0) == 1 and policy(-1.0) == 0
    assert value(1.0) == pytest.approx(1.0, abs=0.05) and value(-1.0) == pytest.approx(1.0, abs=0.05)


def test_truncation_does_not_lower_the_value(trained):
    value, _ = trained("time limit")
    assert value(0.0) == pytest.approx(1 / (1 - GAMMA), rel=0.02)


def test_termination_lowers_the_value(trained):
    value, _ = trained("terminal state")
    for step in range(4):
        assert value(float(step)) == pytest.approx(sum(GAMMA**k for k in range(4 - step)), abs=0.05)
