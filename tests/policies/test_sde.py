"""State-dependent exploration: the same state has the same action until the noise is drawn anew, and the density is closed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import train
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import TimeStep
from polyak.ops.distributions import Normal
from polyak.policies import NetworkPolicy, StateDependentExploration
from tests.agents.test_actor_critics import random_rollout

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0] * 2, [1.0] * 2))
NETWORK = polyak.Actor((6,), std="sde", log_std=-0.5)
RNG = np.random.default_rng(0)


def variables():
    """σ differs from number to number."""
    found = NETWORK.init(KEY, SPEC)
    return dataclasses.replace(found, params=found.params | {"log_std": jnp.asarray(RNG.normal(size=(6, 2)), jnp.float32)})


VARIABLES = variables()


def policy(sample_freq=None, squash=False):
    return StateDependentExploration(NetworkPolicy(VARIABLES, None, NETWORK, SPEC, squash=squash), sample_freq)


def steps(obs, first=False):
    flags = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs, jnp.float32), jnp.zeros(len(obs)), flags, flags, flags | first)


def features_and_mean(obs):
    params = jax.tree.map(np.asarray, VARIABLES.params)
    layer, head = params["actor"]["dense"]["layers"][0], params["policy"]["linear"]
    z = np.maximum(obs @ layer["kernel"] + layer["bias"], 0.0)
    return z, z @ head["kernel"] + head["bias"], np.exp(params["log_std"])


def test_the_deviation_is_that_of_features_times_sigma():
    obs = RNG.normal(size=(5, 3)).astype(np.float32)
    z, mean, sigma = features_and_mean(obs)
    found, _ = policy().distribution(steps(obs))
    assert isinstance(found, Normal)
    np.testing.assert_allclose(found.loc, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.scale, np.sqrt(z**2 @ sigma**2 + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("squash", [False, True])
def test_actions_are_the_mean_and_the_noise_of_the_state(squash):
    obs = RNG.normal(size=(4, 3)).astype(np.float32)
    z, mean, sigma = features_and_mean(obs)
    acting = policy(squash=squash)
    step = acting.action(steps(obs, first=True), acting.initial_state(4), KEY)
    noise = np.asarray(step.carry.noise)
    wanted = np.array([mean[b] + z[b] @ (sigma * noise[b]) for b in range(4)])
    np.testing.assert_allclose(step.action, np.tanh(wanted) if squash else wanted, rtol=1e-4, atol=1e-5)


def test_actions_have_the_distribution_over_all_draws():
    count, obs = 20_000, np.array([[0.5, -1.0, 2.0]], np.float32)
    acting, many = policy(), np.repeat(obs, 20_000, axis=0)
    actions = np.asarray(acting.action(steps(many, first=True), acting.initial_state(count), KEY).action)
    found, _ = acting.distribution(steps(obs))
    np.testing.assert_allclose(actions.mean(0), found.loc[0], atol=4 * float(found.scale.max()) / count**0.5)
    np.testing.assert_allclose(actions.std(0), found.scale[0], rtol=0.03)


@pytest.mark.parametrize(("sample_freq", "changes"), [(None, []), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_the_same_state_has_the_same_action_until_the_noise_is_drawn_anew(sample_freq, changes):
    acting = policy(sample_freq)
    carry, actions = acting.initial_state(1), []
    for number in range(7):
        step = acting.action(steps([[1.0, 2.0, -1.0]]), carry, jax.random.fold_in(KEY, number))
        carry = step.carry
        actions.append(np.asarray(step.action))
    assert [i for i in range(1, 7) if not np.array_equal(actions[i], actions[i - 1])] == changes


def test_an_episode_that_begins_draws_its_own_noise():
    acting = policy()
    carry = acting.action(steps(np.ones((2, 3)), first=True), acting.initial_state(2), KEY).carry
    begins = dataclasses.replace(steps(np.ones((2, 3))), first=jnp.array([False, True]))
    after = acting.action(begins, carry, jax.random.key(1)).carry
    assert np.array_equal(after.noise[0], carry.noise[0]) and not np.array_equal(after.noise[1], carry.noise[1])
    assert after.steps.tolist() == [1, 0]


def make(spec=SPEC, **settings):
    small = {"actor": NETWORK, "critics": polyak.Critics((8,)), "capacity": 512, "batch_size": 16, "learning_starts": 0}
    return polyak.SAC(spec, **{**small, "sde_sample_freq": 4, "num_steps": 4, "updates_per_step": 0.5, **settings})


def test_sac_learns_sigma():
    agent = make()
    state, metrics = jax.jit(agent.update)(agent.init(KEY), random_rollout(agent), KEY)
    before, after = (s.copies.actor.online.params["log_std"] for s in (agent.init(KEY), state))
    assert int(metrics["train/skipped_steps"]) == 0 and not np.array_equal(before, after)
    assert isinstance(agent.collect_policy(state).policy, StateDependentExploration)


def test_sac_with_state_dependent_exploration_trains_in_both_loops():
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=4, action_scaling="rescale")
    agent = make(env.spec, learning_starts=32, updates_per_step=0.25)
    results = [loop(agent, env, env_steps=128, key=KEY) for loop in (train.compiled, train.host)]
    assert int(results[0].state.updates) > 0
    for a, b in zip(*(jax.tree.leaves(r.state.copies) for r in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_the_default_actor_of_sac_follows_the_setting():
    assert polyak.SAC(SPEC, sde_sample_freq=8).actor == polyak.Actor(std="sde", log_std=-3.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(sde_sample_freq=None), "sde_sample_freq must be set with Actor"),
        (lambda: make(actor=polyak.Actor((8,))), "sde_sample_freq must be set with Actor"),
        (lambda: make(sde_sample_freq=0), "sde_sample_freq"),
        (lambda: make(EnvSpec(SPEC.obs, Discrete(2))).init(KEY), "std='sde' needs an action that is one Box"),
        (lambda: polyak.mlp(std="sde"), "std must be"),
        (
            lambda: StateDependentExploration(NetworkPolicy(VARIABLES, None, polyak.Actor((6,)), SPEC)),
            r"network must be an Actor\(std='sde'\)",
        ),
    ],
)
def test_settings_are_checked(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
