"""Wraps batched dynamics with next-step autoreset, as an `Env`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer, check_same_types
from polyak.core.space_check import (
    action_specs,
    check_dtype,
    check_no_others,
    check_shape,
    describe,
    obs_specs,
    read_leaves,
)
from polyak.core.spaces import Discrete, EnvSpec, MultiDiscrete, leaf_spaces
from polyak.core.struct import static, struct
from polyak.core.tags import SUCCESS
from polyak.core.types import PyTree, TimeStep
from polyak.envs.images import read_image
from polyak.envs.jax_goals import goals_of_dynamics
from polyak.envs.reset_pool import ResetPool

DEFAULT_FPS = 10.0
"""Frames per second of dynamics without an attribute `render_fps`, such as grid worlds, which have no time."""

# Rewards may be integers or bools too.
REAL = (jnp.floating, jnp.integer, jnp.bool_)


@runtime_checkable
class Dynamics(Protocol):
    """Batched dynamics without autoreset: pure functions over a state with leaves `[B, ...]`.

    They may also have `has_costly_reset = True` (`polyak.envs.make` then uses a pool of initial states), `render(state)` and
    `render_fps`.
    """

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...

    def reset(self, key: PRNGKeyArray, num_envs: int) -> PyTree:
        """Initial states."""
        ...

    def step(self, state: PyTree, action: PyTree, key: PRNGKeyArray) -> tuple[PyTree, Any, Any, Any]:
        """Return `(state, reward, terminated, truncated)` after one step; the action is in the environment's own units."""
        ...

    def observe(self, state: PyTree) -> PyTree:
        """The observation of the state, in the environment's own units: integers from the `start` of their space."""
        ...


@runtime_checkable
class MaskedDynamics(Dynamics, Protocol):
    """Dynamics whose `spec` sets `has_action_mask`."""

    def action_mask(self, state: PyTree) -> PyTree:
        """Return the action mask of the state, as a tree like the action space; allows an action in a final state too."""
        ...


@runtime_checkable
class GoalDynamics(Dynamics, Protocol):
    """Dynamics whose observations have goals; see `polyak.core.goals`.

    They may also have `compute_terminated` and `compute_truncated` with the same arguments, which return bools `[B]`.
    """

    def compute_reward(self, achieved_goal: PyTree, desired_goal: PyTree) -> Any:
        """Return the rewards `[B]` of steps that achieved these goals, where those were desired."""
        ...


@runtime_checkable
class ReportingDynamics(Dynamics, Protocol):
    """Dynamics that report numbers, which become metrics."""

    def info(self, state: PyTree) -> Mapping[str, Any]:
        """Return real numbers `[B]` of the state by name, NaN for environments without a number.

        `env/NAME` is the mean over transitions since the last report; `is_success` counts at the ends of episodes.
        """
        ...


@struct
class AutoResetState:
    """The dynamics' state, flags of environments that reset on the next step because their episode ended, and a pool."""

    dynamics: PyTree
    last: Any
    pool: ResetPool | None = None


@struct
class AutoReset:
    """An `Env` of batched dynamics; the step after the end of an episode ignores the action and resets.

    Every episode begins in an initial state of its own, drawn by `Dynamics.reset`.

    Attributes:
        dynamics: the dynamics.
        num_envs: number of environments.
        action_scaling: see `EnvSpec`.
        reset_pool: None computes initial states of all environments in every step and selects with `where`, which costs least
            where a reset is as cheap as a step. A number N keeps `num_envs + N` initial states ready, and draws N new ones
            whenever N have been taken, so that a step costs no reset where no episode ends.

    Raises:
        TypeError: `num_envs` or `reset_pool` is not an integer; `dynamics` has no `EnvSpec`; in `init` and `step`, an action or
            an output has the wrong dtype.
        ValueError: `num_envs` or `reset_pool` is not positive; `action_scaling` is unknown; in `init` and `step`, an array has
            the wrong shape.
    """

    dynamics: Dynamics | MaskedDynamics | GoalDynamics | ReportingDynamics = static()
    num_envs: int = static(default=1)
    action_scaling: Literal["clip", "rescale"] = static(default="clip")
    reset_pool: int | None = static(default=None)

    def __post_init__(self) -> None:
        check_integer("AutoReset", "num_envs", self.num_envs)
        check_integer("AutoReset", "reset_pool", self.reset_pool, optional=True)
        if not isinstance(self.dynamics.spec, EnvSpec):
            raise TypeError(f"AutoReset: dynamics must be an object whose spec is an EnvSpec, got {describe(self.dynamics)}")
        _ = self.spec

    @property
    def spec(self) -> EnvSpec:
        """Spec of one environment; the default name is the name of the dynamics' class."""
        spec = self.dynamics.spec
        name, goals = spec.id or type(self.dynamics).__name__, spec.goals or goals_of_dynamics(self.dynamics)
        return dataclasses.replace(spec, id=name, action_scaling=self.action_scaling, goals=goals)

    def init(self, key: PRNGKeyArray) -> tuple[AutoResetState, TimeStep]:
        """Start a new episode in every environment: the state, and `first` time steps."""
        pool_size = 0 if self.reset_pool is None else self.num_envs + self.reset_pool
        states = self.dynamics.reset(key, self.num_envs + pool_size)
        _check_batched(self.spec, states, self.num_envs + pool_size)
        state = jax.tree.map(lambda leaf: leaf[: self.num_envs], states)
        rest = jax.tree.map(lambda leaf: leaf[self.num_envs :], states)
        pool = ResetPool.full(rest, pool_size) if pool_size else None
        obs = self._observe(state)
        last, terminated, truncated = (jnp.zeros(self.num_envs, bool) for _ in range(3))  # donated together
        reward, mask, info = jnp.zeros(self.num_envs, jnp.float32), self._action_mask(state), self._info(state)
        return AutoResetState(state, last, pool), TimeStep(obs, reward, terminated, truncated, ~last, mask, info=info)

    def step(self, state: AutoResetState, action: PyTree, key: PRNGKeyArray) -> tuple[AutoResetState, TimeStep]:
        """Step every environment; environments whose last time step was `last` reset instead."""
        spec = self.spec
        check_actions(spec, action, self.num_envs)
        # XLA removes the derivation of the key if the dynamics do not use it.
        result = self.dynamics.step(state.dynamics, spec.native_action(action), jax.random.fold_in(key, 1))
        _check_step(spec, state.dynamics, result, self.num_envs)
        after, reward, terminated, truncated = result
        first = state.last
        after, pool = self._reset(after, state.pool, first, key)
        terminated, truncated = terminated & ~first, truncated & ~first
        reward = jnp.where(first, 0.0, jnp.asarray(reward, jnp.float32))
        obs, mask, info = self._observe(after), self._action_mask(after), self._info(after)
        time_step = TimeStep(obs, reward, terminated, truncated, first, mask, info=info)
        return AutoResetState(after, terminated | truncated, pool), time_step

    def render(self, state: AutoResetState) -> tuple[Any, float]:
        """Return the image of the first environment, `[H, W, 3]`, and its frames per second; not for compiled programs.

        Raises:
            ValueError: the dynamics have no function `render`, or it returns no image.
        """
        dynamics: Any = self.dynamics
        draw = getattr(dynamics, "render", None)
        if draw is None:
            raise ValueError(f"{self.spec.id} draws no images; its dynamics must have a function render(state)")
        image = read_image(str(self.spec.id), draw(_first_copy(state.dynamics)))
        return image, float(getattr(dynamics, "render_fps", DEFAULT_FPS))

    def _reset(self, state: PyTree, pool: ResetPool | None, first: Any, key: PRNGKeyArray) -> tuple[PyTree, ResetPool | None]:
        """Return the states, with initial states where `first` is set, and the pool without the states that were taken."""

        def select(fresh: PyTree, state: PyTree, first: Any) -> PyTree:
            return jax.tree.map(lambda new, old: jnp.where(_expand(first, old), new, old), fresh, state)

        if pool is None or self.reset_pool is None:
            return select(self.dynamics.reset(key, self.num_envs), state, first), None
        # The dynamics' step uses `fold_in(key, 1)`.
        count, draw_key = self.reset_pool, jax.random.fold_in(key, 2)

        def start(loop: PyTree) -> PyTree:
            state, pool, first = loop
            fresh, pool = pool.take(first)
            return select(fresh, state, first), pool.refill(self.dynamics.reset, draw_key, count), jnp.zeros_like(first)

        # A loop of one turn or none: under `vmap`, over seeds, `cond` would compute both branches in every step.
        state, pool, _ = jax.lax.while_loop(lambda loop: loop[2].any(), start, (state, pool, first))
        return state, pool

    def _observe(self, state: PyTree) -> PyTree:
        obs = self.dynamics.observe(state)
        check_obs(self.spec, obs, self.num_envs)
        return self.spec.agent_obs(obs)

    def _action_mask(self, state: PyTree) -> PyTree:
        dynamics: Any = self.dynamics
        if not self.spec.has_action_mask:
            return None
        mask = dynamics.action_mask(state)
        check_masks(self.spec, mask, self.num_envs)
        return mask

    def _info(self, state: PyTree) -> dict[str, Any] | None:
        if not isinstance(self.dynamics, ReportingDynamics):
            return None
        info: Any = self.dynamics.info
        info = info(state) if callable(info) else info
        if not callable(self.dynamics.info) or not isinstance(info, Mapping):
            raise TypeError(f"{self.spec.id}: info must be a method that returns numbers [B] by name, got {info!r:.80}")
        for name, value in info.items():
            _check_numbers(f"{self.spec.id}: info() must return {name!r}", value, ((self.num_envs,),))
        return {SUCCESS if name == "is_success" else f"env/{name}": jnp.float32(x) for name, x in info.items()} or None


@jax.jit
def _first_copy(state: PyTree) -> PyTree:
    """The state of the first environment; in one call, as physics has a hundred arrays."""
    return jax.tree.map(lambda leaf: leaf[0], state)


def _expand(mask: Any, like: Any) -> Any:
    """The mask `[B]` with trailing axes of length 1, so that it broadcasts with `like` `[B, ...]`."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))


def _check_batched(spec: EnvSpec, state: PyTree, num_envs: int) -> None:
    """Check that every leaf of the dynamics' state is `[num_envs, ...]`.

    Raises:
        ValueError: a leaf has another shape.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (num_envs,):
            name = f"{spec.id}: the state{jax.tree_util.keystr(path)} of reset()"
            raise ValueError(f"{name} must have shape ({num_envs}, ...), got {jnp.shape(leaf)}")


def _check_step(spec: EnvSpec, before: PyTree, result: Any, num_envs: int) -> None:
    """Check that `step` of the dynamics returned `(state, reward, terminated, truncated)` and kept the state's types.

    Raises:
        TypeError: `step` returned other values, or a value of another dtype.
        ValueError: a reward or flag does not have the shape `[num_envs]`.
    """
    if not isinstance(result, tuple | list) or len(result) != 4:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        raise TypeError(f"{spec.id}: step() must return (state, reward, terminated, truncated), got {got}")
    after, *rest = result
    for name, value in zip(("reward", "terminated", "truncated"), rest, strict=True):
        is_flag = name != "reward"
        _check_numbers(f"{spec.id}: step() must return {name}", value, ((num_envs,), ()), is_flag=is_flag)
    check_same_types(spec.id, "the state", before, after)


def _check_numbers(what: str, value: Any, shapes: tuple[tuple[int, ...], ...], *, is_flag: bool = False) -> None:
    """Check that a value has real numbers, or bools, and one of the shapes.

    Raises:
        TypeError, ValueError: it has another dtype or shape; the message begins with `what`.
    """
    kinds, expected = ((jnp.bool_,), "bool") if is_flag else (REAL, "real numbers")
    if not any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds):
        raise TypeError(f"{what} as {expected}, got {jnp.result_type(value)}")
    if jnp.shape(value) not in shapes:
        raise ValueError(f"{what} of shape {shapes[0]}, got {jnp.shape(value)}")


def check_obs(spec: EnvSpec, obs: PyTree, num_envs: int) -> None:
    """Check tree, dtypes and shapes of a batch of observations; integers and bools may have another width than the space.

    Raises:
        TypeError: a float for an integer space or the other way round, or no array.
        ValueError: a leaf is missing or not in the space, or its shape is not `[num_envs, ...]`.
    """
    what, arrays = f"{spec.id}: observation", obs_specs(spec.obs)
    leaves = read_leaves(what, arrays, obs)
    check_no_others(what, arrays, obs)
    for array, leaf in zip(arrays, leaves, strict=True):
        check_dtype(array.name(what), leaf, array.dtype, exact=True)
        check_shape(array.name(what), leaf, (num_envs, *array.shape))


def check_masks(spec: EnvSpec, mask: PyTree, num_envs: int) -> None:
    """Check tree, dtypes and shapes of a batch of action masks; None, for a part of the action, allows everything.

    Raises:
        TypeError: a mask is not bool.
        ValueError: a mask is missing, belongs to a part without masks, or is not `[num_envs, n]`, one flag per choice.
    """
    what, arrays = f"{spec.id}: action_mask", action_specs(spec)
    if not jax.tree.leaves(mask):
        raise ValueError(f"{what} must be given with has_action_mask=True, got {describe(mask)}")
    masks = read_leaves(what, arrays, mask)
    check_no_others(what, arrays, mask)
    for array, (_, space), leaf in zip(arrays, leaf_spaces(spec.action), masks, strict=True):
        if leaf is None:
            continue
        if not isinstance(space, Discrete | MultiDiscrete):
            raise ValueError(f"{array.name(what)} must be None, as {space} has no mask")
        check_dtype(array.name(what), leaf, np.dtype(bool))
        check_shape(array.name(what), leaf, (num_envs, space.n if isinstance(space, Discrete) else sum(space.nvec)))


def check_actions(spec: EnvSpec, action: PyTree, num_envs: int) -> None:
    """Check dtypes and shapes of a batch of actions; both are static, so a compiled loop checks once.

    Raises:
        TypeError: a float for an integer space or the other way round.
        ValueError: a leaf is missing, or its shape is not `[num_envs, ...]`.
    """
    what, arrays = f"{spec.id}: action", action_specs(spec)
    for array, leaf in zip(arrays, read_leaves(what, arrays, action), strict=True):
        check_dtype(array.name(what), leaf, array.dtype, exact=True)
        check_shape(array.name(what), leaf, (num_envs, *array.shape))
