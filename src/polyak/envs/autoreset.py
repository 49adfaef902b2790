"""Next-step autoreset around batched dynamics: what makes an `Env` of them."""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer, check_same_types
from polyak.core.space_check import action_specs, check_dtype, check_shape, obs_specs, read_leaves
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import PyTree, TimeStep

# A reward may be counted too, or be 1 where something is so.
REAL = (jnp.floating, jnp.integer, jnp.bool_)


class Dynamics(Protocol):
    """Batched dynamics that know nothing of resets: pure functions over a state with leaves `[B, ...]`."""

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        ...

    def reset(self, key: PRNGKeyArray, num_envs: int) -> PyTree:
        """States in which episodes begin."""
        ...

    def step(self, state: PyTree, action: PyTree, key: PRNGKeyArray) -> tuple[PyTree, Any, Any, Any]:
        """`(state, reward, terminated, truncated)` after one step; the action is in the environment's own units."""
        ...

    def observe(self, state: PyTree) -> PyTree:
        """What an agent sees of the state."""
        ...


@struct
class AutoResetState:
    """The dynamics' state, and which rows ended an episode and reset on the next step."""

    dynamics: PyTree
    last: Any


@struct
class AutoReset:
    """An `Env` of batched dynamics: a row whose episode ended starts a fresh one on the next step, whatever the action.

    Every step computes fresh starts for all rows and picks with `where`: on an accelerator, and in a compiled loop on a CPU,
    that is cheaper than a branch.

    Raises:
        TypeError: `num_envs` is no integer; in `init` and `step`, an action, or what the dynamics hand out, of the wrong kind.
        ValueError: `num_envs` is not positive; `action_scaling` is unknown; in `init` and `step`, arrays of the wrong shape.
    """

    dynamics: Dynamics = static()
    num_envs: int = static(default=1)
    action_scaling: Literal["clip", "rescale"] = static(default="clip")

    def __post_init__(self) -> None:
        check_integer("AutoReset", "num_envs", self.num_envs)
        _ = self.spec

    @property
    def spec(self) -> EnvSpec:
        """The spaces of one environment."""
        return dataclasses.replace(self.dynamics.spec, action_scaling=self.action_scaling)

    def init(self, key: PRNGKeyArray) -> tuple[AutoResetState, TimeStep]:
        """Fresh episodes everywhere: the state, and `first` time steps."""
        state = self.dynamics.reset(key, self.num_envs)
        _check_rows(self.spec, state, self.num_envs)
        obs = self.dynamics.observe(state)
        _check_obs(self.spec, obs, self.num_envs)
        no = jnp.zeros(self.num_envs, bool)
        time_step = TimeStep(obs, jnp.zeros(self.num_envs, jnp.float32), no, no, ~no)
        return AutoResetState(state, no), time_step

    def step(self, state: AutoResetState, action: PyTree, key: PRNGKeyArray) -> tuple[AutoResetState, TimeStep]:
        """One step of every environment; rows whose last time step was `last` reset instead."""
        spec = self.spec
        check_actions(spec, action, self.num_envs)
        # Dynamics without noise never use their key, so that deriving it costs nothing once compiled.
        moved = self.dynamics.step(state.dynamics, spec.native_action(action), jax.random.fold_in(key, 1))
        _check_step(spec, state.dynamics, moved, self.num_envs)
        after, reward, terminated, truncated = moved
        fresh = self.dynamics.reset(key, self.num_envs)
        first = state.last
        after = jax.tree.map(lambda new, old: jnp.where(_rows(first, old), new, old), fresh, after)
        terminated, truncated = terminated & ~first, truncated & ~first
        reward = jnp.where(first, 0.0, jnp.asarray(reward, jnp.float32))
        time_step = TimeStep(self.dynamics.observe(after), reward, terminated, truncated, first)
        return AutoResetState(after, terminated | truncated), time_step


def _rows(mask: Any, like: Any) -> Any:
    """The mask `[B]` with as many trailing ones as `like` `[B, ...]` has dimensions."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))


def _check_rows(spec: EnvSpec, state: PyTree, num_envs: int) -> None:
    """Every leaf of the dynamics' state is `[num_envs, ...]`.

    Raises:
        ValueError: one is not.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (num_envs,):
            wanted = f"the state{jax.tree_util.keystr(path)} with a row for each of {num_envs} environments"
            raise ValueError(f"{spec.id}: reset() must hand out {wanted}, got shape {jnp.shape(leaf)}")


def _check_step(spec: EnvSpec, before: PyTree, answer: Any, num_envs: int) -> None:
    """What the dynamics' `step` handed out is `(state, reward, terminated, truncated)`, and the state as it was before.

    Raises:
        TypeError: it is something else, or of another kind of number.
        ValueError: a reward or flag for each environment was wanted, and its shape is another.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 4:
        got = f"{len(answer)} things" if isinstance(answer, tuple | list) else type(answer).__name__
        raise TypeError(f"{spec.id}: step() must hand out (state, reward, terminated, truncated), got {got}")
    after, *rest = answer
    for name, value in zip(("reward", "terminated", "truncated"), rest, strict=True):
        kinds, wanted = (REAL, "real numbers") if name == "reward" else ((jnp.bool_,), "bool")
        if not any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds):
            raise TypeError(f"{spec.id}: step() must hand out {name} as {wanted}, got {jnp.result_type(value)}")
        if jnp.shape(value) not in ((), (num_envs,)):
            raise ValueError(f"{spec.id}: step() must hand out {name} of shape {(num_envs,)}, got {jnp.shape(value)}")
    check_same_types(spec.id, "the state", before, after)


def _check_obs(spec: EnvSpec, obs: PyTree, num_envs: int) -> None:
    """Check tree and shapes of a batch of observations.

    Raises:
        ValueError: a leaf is missing, or its shape is not `[num_envs, ...]`.
    """
    what, arrays = f"{spec.id}: observation", obs_specs(spec.obs)
    for array, leaf in zip(arrays, read_leaves(what, arrays, obs), strict=True):
        check_shape(array.name(what), leaf, (num_envs, *array.shape))


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
