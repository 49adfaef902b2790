"""Steps an environment beside the library that it comes from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from polyak.dynamics.foreign import own_promotion, raw_key
from polyak.policies.scripted import Uniform


def steps_beside(env, their_step, num_steps, seed=0):
    """Check each step of random actions against the library's own, over whole episodes; returns the time steps `[T, B]`.

    Args:
        their_step: `(key, state, action) -> (state, obs, reward, terminated, truncated)` of one environment.
    """
    step, theirs, policy = jax.jit(env.step), jax.jit(jax.vmap(their_step)), Uniform(env.spec)
    state, time_step = env.init(jax.random.key(seed))
    their_state, time_steps = state.dynamics.state, []
    for t in range(num_steps):
        key = jax.random.fold_in(jax.random.key(seed + 1), t)
        action = policy.action(time_step, (), key).action
        state, after = step(state, action, key)
        keys = jax.vmap(raw_key)(jax.random.split(jax.random.fold_in(key, 1), env.num_envs))
        with own_promotion(env.spec.id):
            their_state, *expected = theirs(keys, their_state, action)
        first, got = time_step.last, (after.obs, after.reward, after.terminated, after.truncated)
        assert bool((after.first == first).all())
        for mine, their in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            live = ~np.asarray(first)
            np.testing.assert_allclose(np.asarray(mine)[live], np.asarray(their)[live], rtol=1e-5, atol=1e-6)
        assert not (after.reward[first]).any() and not (after.terminated & after.truncated).any()
        # A new episode begins in the state that the pool or the reset gave.
        their_state = jax.tree.map(partial(select, first), state.dynamics.state, their_state)
        time_step = after
        time_steps.append(after)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *time_steps)


def select(first, ours, theirs):
    return jnp.where(first.reshape(first.shape + (1,) * (ours.ndim - 1)), ours, theirs.astype(ours.dtype))
