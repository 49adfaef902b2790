"""A maze in which no recorded episode from the start reaches the goal, but parts of two episodes together do.

        (2, 2) dead end
    (0, 1) start  (1, 1)  (2, 1)  (3, 1)  (4, 1) goal
        (2, 0) another start

Episodes from the start turn into the dead end at the crossing (2, 1); one in five begins below it and goes on to the goal.
"""

import jax
import jax.numpy as jnp
import numpy as np

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct

MOVES = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.int32)  # right, up, left, down
RIGHT, UP = 0, 1
GOAL, DEAD_END = (4, 1), (2, 2)
CELLS = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (2, 0), (2, 2)]
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(4), id="Maze")
BOX_SPEC = EnvSpec(SPEC.obs, Box([-1.0] * 2, [1.0] * 2), id="BoxMaze", action_scaling="rescale")
MAX_STEPS = 12


@struct
class Cell:
    at: jax.Array
    steps: jax.Array


@struct
class Maze:
    """The dynamics; an episode ends in the goal, with reward 1, or after `MAX_STEPS`."""

    spec = SPEC

    def reset(self, key, num_envs):
        return Cell(jnp.tile(jnp.array([[0, 1]], jnp.int32), (num_envs, 1)), jnp.zeros(num_envs, jnp.int32))

    def observe(self, state):
        return state.at.astype(jnp.float32) - 1.0

    def step(self, state, action, key):
        moved = state.at + jnp.asarray(MOVES)[action]
        is_cell = jnp.any(jnp.all(moved[:, None] == jnp.array(CELLS, jnp.int32)[None], axis=-1), axis=1)
        at = jnp.where(is_cell[:, None], moved, state.at)
        steps = state.steps + 1
        is_goal = jnp.all(at == jnp.array([GOAL], jnp.int32), axis=1)
        return Cell(at, steps), is_goal.astype(jnp.float32), is_goal, (steps >= MAX_STEPS) & ~is_goal


@struct
class BoxMaze(Maze):
    """The maze with a Box action, which moves along its longer component."""

    spec = BOX_SPEC

    def step(self, state, action, key):
        is_vertical = jnp.abs(action[:, 1]) > jnp.abs(action[:, 0])
        is_negative = jnp.where(is_vertical, action[:, 1], action[:, 0]) < 0
        return super().step(state, is_vertical.astype(jnp.int32) + 2 * is_negative.astype(jnp.int32), key)


def recorded(spec=SPEC):
    """The data set: four episodes into the dead end for each to the goal.

    With `BOX_SPEC`, actions are 0.8 of a move, with noise.
    """
    into_dead_end = [(0, 1), (1, 1), (2, 1), (2, 2), (2, 2), (2, 2)], [RIGHT, RIGHT, UP, UP, UP], 0.0
    to_goal = [(2, 0), (2, 1), (3, 1), (4, 1)], [UP, RIGHT, RIGHT], 1.0
    episodes = [*[into_dead_end] * 4, to_goal] * 8
    obs = np.concatenate([np.float32(cells[:-1]) for cells, _, _ in episodes]) - 1
    last = np.concatenate([np.arange(len(actions)) == len(actions) - 1 for _, actions, _ in episodes])
    rewards = last * np.concatenate([np.full(len(actions), reward) for _, actions, reward in episodes])
    actions = np.concatenate([actions for _, actions, _ in episodes])
    if spec is BOX_SPEC:
        actions = 0.8 * MOVES[actions] + np.random.default_rng(0).uniform(-0.1, 0.1, size=(len(actions), 2))
    return polyak.data.load(
        {
            "observations": obs,
            "actions": actions,
            "rewards": rewards,
            "terminations": rewards == 1,
            "truncations": last & (rewards == 0),
            "final_observations": np.stack([np.float32(cells[-1]) for cells, _, _ in episodes]) - 1,
        },
        spec=spec,
    )
