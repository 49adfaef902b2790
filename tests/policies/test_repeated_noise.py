"""Repeated noise: what is the same for how many steps, and how often the steps are so many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyAndValue
from polyak.policies.repeated_noise import NoiseCarry, RepeatedNoise
from tests.agents.test_actor_critics import SPEC
from tests.policies.test_network_policy import policy_for, time_step

KEY = jax.random.key(3)
OBS = Box([-1.0, -1.0], [1.0, 1.0])
NUM_ENVS, STEPS = 64, 400


def acted(policy, obs):
    """The actions of all steps."""

    def step(carry, row):
        obs, key = row
        made = policy.action(time_step(obs), carry, key)
        return made.carry, made.action

    carry = policy.initial_state(obs.shape[1])
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, carry, (obs, jax.random.split(KEY, len(obs)))))()[1])


def test_noise_is_held_for_k_steps_with_the_probabilities_of_the_paper():
    network = MLP((5,), head=PolicyAndValue(std="state"))
    inner = policy_for(EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2)), 0.3, network, squash=True)
    obs = jax.random.uniform(KEY, (STEPS, NUM_ENVS, 2), minval=-1.0)
    actions = acted(RepeatedNoise(inner, 4), obs)
    flat = time_step(obs.reshape(-1, 2))
    distribution, _ = jax.jit(lambda: inner.distribution(flat))()
    noise = (np.arctanh(actions.astype(float).reshape(-1, 2)) - distribution.loc) / distribution.scale
    noise = noise.reshape(STEPS, NUM_ENVS, 2)
    is_held = np.all(np.abs(noise[1:] - noise[:-1]) < 1e-2, axis=2)
    starts = np.flatnonzero(np.r_[True, ~is_held[:, 0]])
    assert np.unique(actions[:, 0, 0]).size > STEPS / 2, "the actions follow the states"
    assert not np.allclose(noise[0, 0], noise[0, 1]), "environments have noise of their own"
    # All environments: lengths between two draws.
    lengths = np.concatenate([np.diff(np.flatnonzero(np.r_[True, ~is_held[:, i]])) for i in range(NUM_ENVS)])
    assert set(lengths) == {1, 2, 3, 4} and starts[0] == 0
    wanted = np.arange(1, 5) ** -2.0
    np.testing.assert_allclose(np.bincount(lengths)[1:] / len(lengths), wanted / wanted.sum(), atol=0.015)
    fresh = noise[np.r_[np.ones((1, NUM_ENVS), bool), ~is_held]]
    np.testing.assert_allclose([fresh.mean(), fresh.std()], [0, 1], atol=0.02)
    assert not np.any(acted(RepeatedNoise(inner, 1), obs[:1].repeat(8, 0))[1:] == actions[:1]), "drawn anew in each step"


def test_noise_is_held_with_another_random_number_generator():
    inner = policy_for(EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2)), network=MLP((5,), head=PolicyAndValue(std="state")))
    policy, now = RepeatedNoise(inner, 4), time_step(jnp.ones((8, 2)))
    carry = NoiseCarry(jnp.arange(8, dtype=jnp.uint32), jnp.arange(8, dtype=jnp.int32))
    with jax.default_prng_impl("rbg"):
        held = policy.action(now, carry, jax.random.key(0))
        again = policy.action(now, held.carry, jax.random.key(1))
    np.testing.assert_array_equal(held.action[2:], again.action[2:])
    assert not np.any(held.action[1] == again.action[1])


def test_the_distribution_is_that_of_the_network_and_discrete_actions_are_repeated_too():
    inner = policy_for(EnvSpec(OBS, Discrete(3)), network=MLP((5,), head=PolicyAndValue()))
    policy, now = RepeatedNoise(inner, 50), time_step(jnp.ones((8, 2)))
    carry = policy.initial_state(8)
    np.testing.assert_array_equal(policy.distribution(now, carry)[0].logits, inner.distribution(now)[0].logits)
    actions = acted(policy, jnp.ones((300, 8, 2)))
    assert np.mean(actions[1:] == actions[:-1]) > np.mean(acted(inner, jnp.ones((300, 8, 2)))[1:] == actions[:-1]) + 0.2


def test_wrong_settings_are_rejected():
    with pytest.raises(ValueError, match="RepeatedNoise: max_repeats must be"):
        RepeatedNoise(policy_for(SPEC), 0)
    with pytest.raises(ValueError, match="SAC: max_noise_repeats has no effect with sde_sample_freq; leave it out"):
        polyak.SAC(SPEC, sde_sample_freq=4, max_noise_repeats=4, replay=polyak.UniformReplay(64))
