"""A JAX environment stepped from outside."""

import jax
import numpy as np
import pytest

from polyak.core.types import HostEnv
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import Pendulum
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import env_reset_key, env_step_key
from tests.agents.rollouts import same_bits
from tests.loops.setting import ENV, NUM_ENVS

ENV_KEY = jax.random.key(5)
ACTION = np.zeros(NUM_ENVS, np.int32)


def test_steps_match_the_environment_with_keys_derived_from_the_step_number():
    hosted = JaxEnvOnHost(ENV, ENV_KEY)
    assert isinstance(hosted, HostEnv) and hosted.spec == ENV.spec and hosted.num_envs == NUM_ENVS
    state, expected = jax.jit(ENV.init)(env_reset_key(ENV_KEY))
    assert same_bits(jax.tree.map(np.asarray, expected), hosted.reset(0))
    step = jax.jit(ENV.step)
    for number in range(40):
        state, expected = step(state, ACTION, env_step_key(ENV_KEY, number))
        got = hosted.step(ACTION)
        assert same_bits(jax.tree.map(np.asarray, expected), got)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(got))


def test_a_seed_gives_other_episodes_and_a_second_reset_the_same():
    hosted = JaxEnvOnHost(ENV, ENV_KEY)
    a, b = hosted.reset(0), hosted.reset(7)
    assert not np.array_equal(a.obs, b.obs)
    again = JaxEnvOnHost(ENV, ENV_KEY).reset(7)
    assert np.array_equal(again.obs, b.obs)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_environment_continues_from_a_snapshot(impl):
    key = jax.random.key(5, impl=impl)
    hosted = JaxEnvOnHost(ENV, key)
    hosted.reset(3)
    for _ in range(10):
        hosted.step(ACTION)
    snapshot = hosted.snapshot()
    rest = [hosted.step(ACTION) for _ in range(30)]
    assert any(x.first.any() for x in rest)
    other = JaxEnvOnHost(ENV, jax.random.key(0, impl=impl))
    other.restore(snapshot)
    assert same_bits([other.step(ACTION) for _ in range(30)], rest)


def test_resetting_twice_with_a_seed_is_reproducible():
    hosted = JaxEnvOnHost(ENV, ENV_KEY)
    assert np.array_equal(hosted.reset(7).obs, hosted.reset(7).obs)
    assert np.array_equal(hosted.reset(0).obs, JaxEnvOnHost(ENV, ENV_KEY).reset(0).obs)


def test_snapshot_of_another_environment_is_rejected():
    other = JaxEnvOnHost(AutoReset(Pendulum(), NUM_ENVS), ENV_KEY)
    other.reset(0)
    for snapshot in (other.snapshot(), {"id": "CartPole-v1"}):
        with pytest.raises(ValueError, match="jax/CartPole-v1: snapshot arrays must be"):
            JaxEnvOnHost(ENV, ENV_KEY).restore(snapshot)
    JaxEnvOnHost(ENV, ENV_KEY).close()
