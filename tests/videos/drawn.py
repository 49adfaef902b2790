"""An environment in JAX that draws its state as one grey, for tests of videos."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset

GREY = 40
"""Grey of each count."""


@dataclass(frozen=True)
class Drawn:
    """Counts to 5 where the action is 1, and draws the count; action 0 is masked."""

    spec = EnvSpec(Box(0.0, 5.0, (1,)), Discrete(2), "Drawn", has_action_mask=True)
    render_fps = 12.0

    def reset(self, key, num_envs):
        return jnp.zeros((num_envs, 1))

    def step(self, state, action, key):
        state = state + jnp.float32(action)[:, None]
        return state, 2.0, state[:, 0] == 5, False

    def observe(self, state):
        return state

    def action_mask(self, state):
        return jnp.tile(jnp.array([False, True]), (len(state), 1))

    def render(self, state):
        return np.full((4, 6, 3), GREY * int(state[0]), np.uint8)


ENV = AutoReset(Drawn(), num_envs=8)
AGENT = polyak.PPO(spec=ENV.spec, network=polyak.MLP((4,)))
