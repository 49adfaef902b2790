"""Deep sea (Osband et al. 2019, arXiv:1908.03568): a reward that undirected exploration does not find."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct


@struct
class DeepSea:
    """A square of cells, from the top left to the bottom right, one row down each step and one column left or right.

    Which action goes right is drawn once for each cell. Going right costs 0.01 / size, and the bottom right cell pays 1, so
    that one path of 2^size has a return above 0: of 0.99.

    Attributes:
        size: rows, columns and steps of an episode.
    """

    size: int = static()

    @property
    def spec(self) -> EnvSpec:
        cells = self.size**2
        return EnvSpec(Box(np.zeros(cells, np.float32), np.ones(cells, np.float32)), Discrete(2), "DeepSea")

    def reset(self, key: Any, num_envs: int) -> Any:
        return jnp.zeros((num_envs, 2), jnp.int32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        row, column = state.T
        flips = np.random.default_rng(0).integers(0, 2, (self.size, self.size)).astype(np.int32)
        right = action == jnp.asarray(flips)[row, column]
        # A wall on the right: from the last column there is no way on.
        at_goal = right & (row == self.size - 1) & (column == self.size - 1)
        column = jnp.clip(column + jnp.where(right, 1, -1), 0, self.size - 1)
        over = row == self.size - 1
        reward = jnp.where(right, -0.01 / self.size, 0.0) + at_goal
        return jnp.stack([jnp.minimum(row + 1, self.size - 1), column], axis=1), reward, over, jnp.zeros_like(over)

    def observe(self, state: Any) -> Any:
        row, column = state.T
        return jax.nn.one_hot(row * self.size + column, self.size**2)
