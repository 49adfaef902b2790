"""PPO's update split over eight devices, against the same update on one; the tests of the loops do it with two."""

import dataclasses

import jax
import numpy as np
import pytest

from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.loops.loop import mesh_over, update_on
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import fresh, on_device, rollout, same_bits

SPEC = EnvSpec(Box(-np.ones(3), np.ones(3)), Discrete(3))
NUM_ENVS = 8
AGENT = PPO(
    SPEC,
    network=MLP((4,)),
    num_steps=8,
    num_epochs=2,
    num_minibatches=4,
    learning_rate=1e-2,
    normalize_obs=True,
    normalize_reward="return",
    target_kl=1e6,
)
KEY = jax.random.key(1)


@pytest.fixture(scope="module")
def split():
    return jax.jit(update_on(mesh_over(8, NUM_ENVS)))


@pytest.fixture(scope="module")
def whole():
    return jax.jit(update_on(None))


def data(seed=0):
    return rollout(SPEC, seed, num_steps=8, num_envs=NUM_ENVS, carry=((), np.zeros(NUM_ENVS, np.float32)))


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_update_on_several_devices_equals_update_on_one(split, whole):
    one = many = fresh(AGENT)
    for i in range(3):
        key = jax.random.fold_in(KEY, i)
        one, metrics = whole(AGENT, one, on_device(data(i)), key)
        many, metrics_of_many = split(AGENT, many, on_device(data(i)), key)
    close(one, many)
    close(metrics, metrics_of_many)
    assert one.env_steps == many.env_steps == sum(int((~data(i).time_steps.last[:-1]).sum()) for i in range(3))


def test_nan_on_one_device_skips_the_step_on_all(split):
    state = fresh(AGENT)
    bad = data()
    t, env = np.argwhere(~bad.time_steps.last[:-1] & ~bad.time_steps.last[1:])[0]
    bad.time_steps.reward[t + 1, env] = np.nan
    after, metrics = split(AGENT, state, on_device(bad), KEY)
    assert metrics["train/skipped_steps"] == 8 and metrics["train/nonfinite_source"] == 2
    untouched = (state.copies.online, state.copies.optimizer_state, state.obs_normalizer, state.reward_scaler)
    assert same_bits((after.copies.online, after.copies.optimizer_state, after.obs_normalizer, after.reward_scaler), untouched)


def test_num_minibatches_must_divide_the_samples_of_each_device():
    agent = dataclasses.replace(AGENT, num_minibatches=16)
    state = jax.eval_shape(agent.init, KEY)
    with pytest.raises(ValueError, match=r"num_minibatches=16.* 8 \* 1 = 8"):
        jax.eval_shape(update_on(mesh_over(8, NUM_ENVS)), agent, state, on_device(data()), KEY)
