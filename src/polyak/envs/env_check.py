"""Test an environment before training on it: reproducible from its seed, constant in its types."""

from typing import Any

import jax
import numpy as np

from polyak.core.checks import check_same_types
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiDiscrete, map_space
from polyak.core.types import Env, HostEnv, PyTree, TimeStep


def check_env(env: Env | HostEnv, *, num_steps: int = 100, seed: int = 0) -> None:
    """Play random actions and check the environment.

    A `HostEnv` must repeat its time steps from the same seed (its observations, rewards and flags are checked at every step).
    An `Env` in JAX must return a state and time steps of the same types from `step` as from `init`; else `scan` raises and
    every step compiles again.

    Raises:
        ValueError: two plays from the same seed differ, with leaf, environment and step.
        TypeError: a step changes a type.
    """
    if isinstance(env, HostEnv):
        first, second = (_play(env, num_steps, seed) for _ in range(2))
        for step, (a, b) in enumerate(zip(first, second, strict=True)):
            _check_equal(env.spec.id, step, a, b)
    else:
        state, time_step = jax.eval_shape(env.init, jax.random.key(seed))
        action = _random_action(env.spec, env.num_envs, np.random.default_rng(seed), None)
        after = jax.eval_shape(env.step, state, jax.tree.map(jax.numpy.asarray, action), jax.random.key(seed))
        for what, old, new in zip(("the state", "the time step"), (state, time_step), after, strict=True):
            check_same_types(env.spec.id, what, old, new, weak=True)


def _play(env: HostEnv, num_steps: int, seed: int) -> list[TimeStep]:
    rng = np.random.default_rng(seed)
    steps = [env.reset(seed)]
    for _ in range(num_steps):
        steps.append(env.step(_random_action(env.spec, env.num_envs, rng, steps[-1].action_mask)))
    return steps


def _random_action(spec: EnvSpec, num_envs: int, rng: np.random.Generator, mask: PyTree) -> PyTree:
    def draw(leaf: Leaf, flags: Any) -> Any:
        shape = (num_envs, *leaf.shape)
        if flags is not None:
            choices = np.split(flags, np.cumsum(leaf.nvec)[:-1], axis=1) if isinstance(leaf, MultiDiscrete) else [flags]
            drawn = [[rng.choice(np.flatnonzero(row)) for row in choice] for choice in choices]
            return np.array(drawn, np.int32).T.reshape(shape)
        if isinstance(leaf, Discrete):
            return rng.integers(0, leaf.n, shape, np.int32)
        if isinstance(leaf, MultiDiscrete):
            return rng.integers(0, leaf.nvec, shape, np.int32)
        return rng.uniform(-1, 1, shape).astype(np.float32) if isinstance(leaf, Box) else rng.integers(0, 2, shape, np.int8)

    return map_space(draw, spec.action, map_space(lambda leaf: None, spec.action) if mask is None else mask)


def _check_equal(name: str, step: int, first: TimeStep, second: TimeStep) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True):
        same = (a == b) | ((a != a) & (b != b))
        if not same.all():
            index = int(np.argwhere(~same)[0][0])
            raise ValueError(
                f"{name}: env {index}, step {step}: {jax.tree_util.keystr(path)} must be the same for equal seeds and actions, "
                f"got {a[index]}, then {b[index]}; draw all random numbers from self.np_random"
            )
