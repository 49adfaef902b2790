"""Environments that hand out NaN, in JAX and outside."""

import dataclasses

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from polyak.loops.loop import env_reset_key, run_env_key


class Sick:
    """An environment in JAX whose rewards are NaN in trainings with one of these keys."""

    def __init__(self, env, *keys):
        self.env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self.ill = jnp.stack([jax.random.key_data(env_reset_key(run_env_key(key))) for key in keys])

    def init(self, key):
        state, time_step = self.env.init(key)
        return (state, jnp.any(jnp.all(self.ill == jax.random.key_data(key)[None], axis=1))), time_step

    def step(self, state, action, key):
        inner, ill = state
        inner, time_step = self.env.step(inner, action, key)
        return (inner, ill), dataclasses.replace(time_step, reward=jnp.where(ill, jnp.nan, time_step.reward))


class SickOutside(gymnasium.Env):
    """Its observations and rewards are NaN from the second step of an episode on."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.count += 1
        value = np.float32(np.nan if self.count > 1 else 1.0)
        return np.full(4, value), value, self.count == 9, False, {}

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]
