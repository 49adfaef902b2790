"""Gymnax's environments, where gymnax is installed: its dynamics, our resets, terminal states told from time limits."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs
from polyak.core.spaces import Box, Discrete

if importlib.util.find_spec("gymnax") is None:
    pytest.skip("gymnax is not installed", allow_module_level=True)

# It asks for int64 in places, and has JAX cast where JAX would rather not.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def rollout(env, num_steps, key, act):
    def body(carry, k):
        state, time_step = carry
        state, time_step = env.step(state, act(time_step, k), k)
        return (state, time_step), time_step

    state, first = env.init(key)
    _, rest = jax.jit(lambda s, t, k: jax.lax.scan(body, (s, t), k))(state, first, jax.random.split(key, num_steps))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def test_cartpole_terminates_where_gymnaxs_own_state_says_so():
    env = envs.make("gymnax/CartPole-v1", num_envs=8)
    steps = rollout(env, 200, jax.random.key(0), lambda t, k: jax.random.randint(k, (8,), 0, 2))
    assert isinstance(env.spec.action, Discrete) and env.spec.id == "gymnax/CartPole-v1"
    assert steps.terminated.any() and not steps.truncated.any()
    fallen = (np.abs(steps.obs[..., 0]) > 2.4) | (np.abs(steps.obs[..., 2]) > 12 * 2 * np.pi / 360)
    np.testing.assert_array_equal(steps.terminated, fallen)
    np.testing.assert_array_equal(steps.first[1:], steps.last[:-1])
    assert np.all(steps.reward[steps.first] == 0) and np.all(steps.reward[~steps.first] == 1)
    assert np.all(np.abs(steps.obs[np.asarray(steps.first)]) <= 0.05)


def test_a_time_limit_truncates_and_never_terminates():
    env = envs.make("gymnax/Pendulum-v1", num_envs=3, env_kwargs={"max_steps_in_episode": 7})
    steps = rollout(env, 20, jax.random.key(0), lambda t, k: jax.random.uniform(k, (3, 1), minval=-2.0, maxval=2.0))
    assert not steps.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated[:, 0]), [7, 15])


def test_both_at_once_is_terminated():
    """A fall on the very step of the limit is a fall: gymnax's `done` alone could not tell."""
    free = envs.make("gymnax/CartPole-v1", num_envs=1)
    steps = rollout(free, 30, jax.random.key(0), lambda t, k: jnp.zeros(1, jnp.int32))
    length = int(np.flatnonzero(steps.terminated[:, 0])[0])
    for limit, flags in ((length, (True, False)), (length - 1, (False, True))):
        env = envs.make("gymnax/CartPole-v1", num_envs=1, env_kwargs={"max_steps_in_episode": limit})
        limited = rollout(env, 30, jax.random.key(0), lambda t, k: jnp.zeros(1, jnp.int32))
        end = int(np.flatnonzero(limited.last[:, 0])[0])
        assert end == limit
        assert (bool(limited.terminated[end, 0]), bool(limited.truncated[end, 0])) == flags


@pytest.mark.parametrize("name", ["FourRooms-misc", "Catch-bsuite", "UmbrellaChain-bsuite", "DiscountingChain-bsuite"])
def test_types_stay_what_the_spec_says_whatever_gymnax_returns(name):
    env = envs.make(f"gymnax/{name}", num_envs=2)
    state, first = env.init(jax.random.key(0))
    after, time_step = jax.eval_shape(env.step, state, jnp.zeros(2, jnp.int32), jax.random.key(0))

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert types(after) == types(jax.eval_shape(lambda: state))
    assert types(time_step) == types(jax.eval_shape(lambda: first))
    assert first.obs.dtype == env.spec.obs.dtype == np.float32 and isinstance(env.spec.obs, Box)


def test_actions_are_rescaled_for_gymnax_too():
    env = envs.make("gymnax/Pendulum-v1", num_envs=1, action_scaling="rescale")
    plain = envs.make("gymnax/Pendulum-v1", num_envs=1)
    state, _ = env.init(jax.random.key(0))
    ours, expected = (e.step(state, jnp.full((1, 1), a), jax.random.key(1))[1] for e, a in ((env, 0.5), (plain, 1.0)))
    np.testing.assert_allclose(ours.obs, expected.obs, rtol=1e-6)


def test_a_wrong_name_or_setting_is_rejected():
    with pytest.raises(ValueError, match="unknown environment 'gymnax/CartPole-v9'; did you mean 'gymnax/CartPole-v1'"):
        envs.make("gymnax/CartPole-v9")
    with pytest.raises(TypeError, match="no_such_setting"):
        envs.make("gymnax/CartPole-v1", env_kwargs={"no_such_setting": 1})


def test_all_names_are_listed():
    assert "gymnax/Breakout-MinAtar" in envs.names()["gymnax"]


def test_dynamics_are_settings():
    env = envs.make("gymnax/CartPole-v1", num_envs=2)
    assert hash(env) == hash(dataclasses.replace(env))
