"""Tests an environment before training: reproducible from its seed, pure functions in JAX, constant types."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.checks import check_integer, check_same_types
from polyak.core.space_check import FLOAT32_MAX, check_range, obs_specs, range_error, read_leaves
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, leaf_spaces, map_space
from polyak.core.types import Env, HostEnv, PyTree, TimeStep
from polyak.core.warn import warn
from polyak.envs.autoreset import check_masks, check_obs


def check_env(env: Env | HostEnv, *, num_steps: int = 100, seed: int = 0) -> None:
    """Play random actions, and check observations, rewards and masks at every step, reproducibility and purity.

    A `HostEnv` must repeat its time steps from the same seed. An `Env` in JAX must return a state and time steps of equal types
    from `step` and `init`; otherwise `scan` raises and every step compiles again. Functions of an `Env` must be pure: Python
    runs only during compilation, so a counter of the object or a number of NumPy's generator would keep its value. Functions
    that are already jitted are traced once, and not compared.

    Floats outside the bounds of their Box give one warning.

    Raises:
        ValueError: two plays from the same seed differ (the message names leaf, environment and step); two traces of `init` or
            `step` in JAX differ; or a value is NaN, infinite, an integer out of its space, or a mask that allows no action, or
            has another shape.
        TypeError: `env` is no environment of `polyak.envs.make`; a step changes a type; or a dtype differs from the space's.
    """
    if not isinstance(env, Env | HostEnv):
        raise TypeError(f"check_env: env must be created with polyak.envs.make(...), got {type(env).__name__}")
    check_integer("check_env", "num_steps", num_steps)
    if isinstance(env, HostEnv):
        first, second = (_play(env, num_steps, seed) for _ in range(2))
        for step, (a, b) in enumerate(zip(first, second, strict=True)):
            _check_equal(env.spec.id, step, a, b)
    else:
        key = jax.random.key(seed)
        state, time_step = jax.eval_shape(env.init, key)
        check_obs(env.spec, time_step.obs, env.num_envs)
        if env.spec.has_action_mask:
            check_masks(env.spec, time_step.action_mask, env.num_envs)
        action = _random_action(env.spec, env.num_envs, np.random.default_rng(seed), None, env.spec.id)
        action = jax.tree.map(jax.numpy.asarray, action)
        after = jax.eval_shape(env.step, state, action, key)
        for what, old, new in zip(("the state", "the time step"), (state, time_step), after, strict=True):
            check_same_types(env.spec.id, what, old, new, weak=True)
        _check_pure(env.spec.id, "init", env.init, key)
        _check_pure(env.spec.id, "step", env.step, state, action, key)
        _play_in_jax(env, num_steps, seed)


def _play_in_jax(env: Env, num_steps: int, seed: int) -> None:
    """Step the environment and check its numbers, which a compiled program cannot.

    Raises:
        ValueError: a number is not finite or out of its space; the message names environment and step.
    """
    rng, key, compiled_step = np.random.default_rng(seed), jax.random.key(seed), jax.jit(env.step)
    state, time_step = jax.jit(env.init)(key)
    warned: set[str] = set()
    for step in range(num_steps + 1):
        where, (obs, reward, mask) = f"{env.spec.id}: step {step}", (time_step.obs, time_step.reward, time_step.action_mask)
        _check_obs_values(env.spec, f"{where}: the observation", jax.tree.map(np.asarray, obs), warned)
        check_range(f"{where}: the reward", np.asarray(reward), -FLOAT32_MAX, FLOAT32_MAX, batched=True)
        action = _random_action(env.spec, env.num_envs, rng, jax.tree.map(np.asarray, mask), where)
        state, time_step = compiled_step(state, jax.tree.map(jax.numpy.asarray, action), jax.random.fold_in(key, step))


def _check_obs_values(spec: EnvSpec, name: str, obs: PyTree, warned: set[str]) -> None:
    """Check the values of a batch of observations, with integers from the environment's `start`.

    Args:
        warned: paths of leaves for which the warning of floats out of bounds was shown; extended in place.

    Raises:
        ValueError: a value is not finite, or is an integer out of its space.
    """
    arrays = obs_specs(spec.obs)
    leaves = read_leaves(name, arrays, spec.native_obs(obs))
    for array, (path, space), leaf in zip(arrays, leaf_spaces(spec.obs), leaves, strict=True):
        if array.low is not None:
            check_range(array.name(name), leaf, array.low, array.high, batched=True)
        low, high = (space.low, space.high) if isinstance(space, Box) else (0, 1)
        if isinstance(space, Box | MultiBinary) and (message := range_error(array.name(name), leaf, low, high, batched=True)):
            if space.dtype.kind != "f":
                raise ValueError(message)
            if path not in warned:
                warned.add(path)
                warn(f"{message} (this warning is shown once)")


def _play(env: HostEnv, num_steps: int, seed: int) -> list[TimeStep]:
    rng = np.random.default_rng(seed)
    steps = [env.reset(seed)]
    for _ in range(num_steps):
        steps.append(env.step(_random_action(env.spec, env.num_envs, rng, steps[-1].action_mask, env.spec.id)))
    return steps


def _random_action(spec: EnvSpec, num_envs: int, rng: np.random.Generator, mask: PyTree, where: str) -> PyTree:
    def draw(leaf: Leaf, flags: Any) -> Any:
        shape = (num_envs, *leaf.shape)
        if flags is not None:
            choices = np.split(flags, np.cumsum(leaf.nvec)[:-1], axis=1) if isinstance(leaf, MultiDiscrete) else [flags]
            for env, *rows in zip(range(num_envs), *choices, strict=True):
                if not all(map(np.any, rows)):
                    raise ValueError(f"{where}: the action mask must allow an action, got none in environment {env}")
            drawn = [[rng.choice(np.flatnonzero(row)) for row in choice] for choice in choices]
            return np.array(drawn, np.int32).T.reshape(shape)
        if isinstance(leaf, Discrete):
            return rng.integers(0, leaf.n, shape, np.int32)
        if isinstance(leaf, MultiDiscrete):
            return rng.integers(0, leaf.nvec, shape, np.int32)
        return _draw_box(spec, leaf, rng, shape) if isinstance(leaf, Box) else rng.integers(0, 2, shape, np.int8)

    return map_space(draw, spec.action, map_space(lambda leaf: None, spec.action) if mask is None else mask)


def _draw_box(spec: EnvSpec, space: Box, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Draw agent actions of a Box: uniform between finite bounds, exponential from one finite bound, else normal."""
    low, high = (bound.astype(np.float64) for bound in spec.action_bounds(space))
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    start, end = np.where(has_low, low, 0.0), np.where(has_high, high, 0.0)
    beyond, width = rng.exponential(size=shape), np.where(has_low & has_high, end - start, 0.0)
    drawn = np.where(has_high, start + width * rng.uniform(size=shape), start + beyond)
    drawn = np.where(has_low, drawn, np.where(has_high, end - beyond, rng.normal(size=shape)))
    return drawn.astype(np.float32)


def _check_pure(env_id: str, name: str, function: Callable[..., Any], *arguments: PyTree) -> None:
    """Check that a function of an environment in JAX gives the same program each time it is traced.

    Raises:
        ValueError: two traces differ, so the result depends on changing data that are no argument.
    """

    def trace() -> tuple[str, list[bytes]]:
        # A new lambda each time, as JAX caches the program of a traced function.
        program = jax.make_jaxpr(lambda *arguments: function(*arguments))(*arguments)
        return re.sub("0x[0-9a-f]+", "", str(program)), [_bits(x) for x in program.consts]

    if trace() != trace():
        raise ValueError(
            f"{env_id}: {name}() must be a pure function, but two traces gave two programs; keep changing data in the "
            "state, and draw random numbers from the key"
        )


def _bits(array: Any) -> bytes:
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


def _check_equal(name: str, step: int, first: TimeStep, second: TimeStep) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True):
        same = (a == b) | ((a != a) & (b != b))
        if not same.all():
            index = int(np.argwhere(~same)[0][0])
            raise ValueError(
                f"{name}: env {index}, step {step}: {jax.tree_util.keystr(path)} must be the same for equal seeds and actions, "
                f"got {a[index]}, then {b[index]}; draw all random numbers from self.np_random"
            )
