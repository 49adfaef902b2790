"""From a NumPy observation to the environment's action: what a policy's `predict` does."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.carries import check_carry
from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, Space, leaf_spaces, map_space
from polyak.core.types import Policy, PyTree, TimeStep


class SpecifiedPolicy(Policy, Protocol):
    """A policy that knows the spaces it acts in."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's."""
        ...


@jax.jit
def _sample(policy: Policy, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    step = policy.action(time_step, carry, key)
    return step.action, step.carry


@jax.jit
def _mode(policy: Policy, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
    distribution, carry = policy.distribution(time_step, carry)
    return distribution.mode(), carry


def predict(
    policy: SpecifiedPolicy,
    obs: Any,
    carry: PyTree = None,
    *,
    deterministic: bool = True,
    action_mask: Any = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Any, PyTree]:
    """NumPy in, NumPy out: the environment's own action (clipped or rescaled, counted from its `start`) for an observation.

    Args:
        obs: one observation, or a batch of them along a first axis.
        carry: what the call before returned; None at the start of an episode.
        deterministic: the mode of the distribution; else a sample, for which a `key` is needed.
        action_mask: which actions are allowed, as the observation single or batched, and in the tree of the action space.

    Raises:
        TypeError: an observation of the wrong kind of number.
        ValueError: the observation does not fit the space (leaf, shape got, shape wanted) or holds what is not finite; a
            mask that does not fit the action space or allows nothing; a carry of another batch; a sample without a key.
    """
    spec = policy.spec
    batch = _batch_size(spec, obs)
    rows = _mapped(partial(_obs_rows, batch or 1), spec.obs, obs, "obs")
    mask = None if action_mask is None else _mapped(partial(_mask_rows, batch), spec.action, action_mask, "action_mask")
    flags = np.zeros(batch or 1, bool)
    first = np.full(batch or 1, carry is None)
    time_step = TimeStep(rows, np.zeros(batch or 1, np.float32), flags, flags, first, mask)
    carry = policy.initial_state(batch or 1) if carry is None else carry
    for leaf in jax.tree.leaves(carry):
        if np.shape(leaf)[:1] != (batch or 1,):
            raise ValueError(f"predict: carry must have {batch or 1} rows as obs, got an array of shape {np.shape(leaf)}")
    if deterministic:
        action, carry = _mode(policy, time_step, carry)
    elif key is None:
        raise ValueError("predict: deterministic=False draws a sample and needs a key, e.g. key=jax.random.key(0)")
    else:
        action, carry = _sample(policy, time_step, carry, key)
    check_carry(carry)
    # Copies, for what JAX hands out is read-only.
    native = spec.native_action(jax.tree.map(np.array, action))
    return (native if batch else jax.tree.map(lambda a: a[0], native)), carry


def _batch_size(spec: EnvSpec, obs: Any) -> int | None:
    """The length of the first axis, or None for a single observation."""
    sizes: set[int | None] = set()

    def check(what: str, space: Leaf, x: Any) -> None:
        shape = np.shape(x)
        if shape == space.shape:
            sizes.add(None)
        elif shape[1:] == space.shape and shape[0] > 0:
            sizes.add(shape[0])
        else:
            raise ValueError(f"predict: {what} has shape {shape}, wanted {space.shape} or a batch (N, *{space.shape})")

    _mapped(check, spec.obs, obs, "obs")
    if len(sizes) > 1:
        raise ValueError(f"predict: the parts of obs disagree about the batch size: {sorted(sizes, key=str)}")
    return sizes.pop()


def _mapped(function: Callable[[str, Leaf, Any], Any], space: Space, tree: Any, what: str) -> Any:
    """`function(name, leaf_space, leaf)` over what a person gave, whose tree is compared with the space's first."""
    leaves: list[Any] = []
    try:
        map_space(lambda _, x: leaves.append(x), space, tree)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"predict: {what} does not have the tree of {space}: {error!r}") from error
    named = iter(zip(leaf_spaces(space), leaves, strict=True))

    def leaf(space: Leaf) -> Any:
        (path, _), x = next(named)
        return function(f"{what} at {path!r}" if path else what, space, x)

    return map_space(leaf, space)


def _obs_rows(batch: int, what: str, space: Leaf, x: Any) -> npt.NDArray[Any]:
    """As agents see it: in the space's dtype, integers from 0."""
    array = np.asarray(x)
    kinds, wanted = ("fiub", "numbers") if space.dtype.kind == "f" else ("iub", "integers")
    if array.dtype.kind not in kinds:
        raise TypeError(f"predict: {what} must hold {wanted}, got {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"predict: {what} must be finite, got {x}")
    if isinstance(space, Discrete | MultiDiscrete):
        array = array.astype(np.int64) - np.asarray(space.start)
        if (array < 0).any() or (array >= (space.n if isinstance(space, Discrete) else space.nvec)).any():
            raise ValueError(f"predict: {what} must lie in {space}, got {x}")
    return array.astype(space.dtype).reshape(batch, *space.shape)


def _mask_rows(batch: int | None, what: str, space: Leaf, x: Any) -> npt.NDArray[np.bool_] | None:
    if x is None:
        return None
    if isinstance(space, Box | MultiBinary):
        raise ValueError(f"predict: {what} must be None, for {space} has no mask")
    sizes = (space.n,) if isinstance(space, Discrete) else space.nvec
    mask = np.asarray(x, bool)
    wanted = (sum(sizes),) if batch is None else (batch, sum(sizes))
    if mask.shape != wanted:
        raise ValueError(f"predict: {what} has shape {mask.shape}, wanted {wanted}")
    rows = mask.reshape(-1, sum(sizes))
    if not all(part.any(axis=1).all() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)):
        raise ValueError(f"predict: {what} allows no action in some row; got {x}")
    return rows
