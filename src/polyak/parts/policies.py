"""Policies: pytrees that act. A network's own, and wrappers around any policy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, PRNGKeyArray

from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, Space, leaf_spaces, map_space
from polyak.core.struct import static, struct
from polyak.core.types import Network, Policy, PolicyStep, PyTree, RecurrentNetwork, Scalar, TimeStep, Variables
from polyak.ops.distributions import Deterministic, Distribution, for_space
from polyak.ops.returns import discounted_on
from polyak.parts import numpy_acting
from polyak.parts.normalizer import ObsNormalizer
from polyak.parts.recurrent import reset_carry
from polyak.parts.rows import for_each_row


@struct
class NetworkPolicy:
    """Acts by sampling from the distribution of an actor-critic network.

    Attributes:
        variables: the network's arrays.
        normalizer: statistics that observations are normalised with, or None.
        network: what turns variables and an observation into `(action_params, value)`.
        spec: the spaces.
        keeps: `info` of a step is `{"value": [B], "params": the action's parameters}`, for a learner that wants what the
            network said when it acted.
        squash: Box actions are drawn from a TanhNormal; see `for_space`.
    """

    variables: Variables
    normalizer: ObsNormalizer | None
    network: Network = static()
    spec: EnvSpec = static()
    keeps: bool = static(default=False)
    squash: bool = static(default=False)

    def initial_state(self, batch_size: int) -> PyTree:
        """The network's initial carry; `()` where it has no memory."""
        return self.network.initial_carry(batch_size) if isinstance(self.network, RecurrentNetwork) else ()

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The distribution over actions, and the carry."""
        distribution, carry, _ = self._step(time_step, carry)
        return distribution, carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """A sample for each row."""
        distribution, carry, info = self._step(time_step, carry)
        return PolicyStep(distribution.sample(seed=key), carry, info)

    def _step(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree, PyTree]:
        obs = time_step.obs if self.normalizer is None else self.normalizer.normalize(time_step.obs)
        carry = reset_carry(self.network, carry, time_step.first)
        (params, value), carry, _ = self.network.apply(self.variables, obs, carry)
        distribution = for_space(self.spec.action, params, time_step.action_mask, squash=self.squash)
        return distribution, carry, {"value": value, "params": for_each_row(self.spec.action, params)} if self.keeps else ()

    def suits_numpy(self, num_envs: int) -> bool:
        """A small built-in network does, where nothing but a plain sample is asked for."""
        # What a class derived from this one does otherwise, NumPy would not do.
        plain = type(self) is NetworkPolicy and not (self.keeps or self.squash)
        return plain and numpy_acting.suits_numpy(self.network, self.spec, num_envs)

    def noise(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """What a sample draws."""
        return numpy_acting.action_noise(self.spec, key, num_envs)

    def in_numpy(self) -> Callable[[TimeStep, PyTree, Any], PolicyStep]:
        """`action` with its noise given."""
        act = numpy_acting.numpy_actor(self.variables, self.normalizer, self.network, self.spec)
        return lambda time_step, carry, noise: PolicyStep(act(time_step.obs, noise), carry)

    def predict(
        self,
        obs: Any,
        carry: PyTree = None,
        *,
        deterministic: bool = True,
        action_mask: Any = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, PyTree]:
        """The environment's action for a NumPy observation; see `predict`."""
        return predict(self, self.spec, obs, carry, deterministic=deterministic, action_mask=action_mask, key=key)


@struct
class Greedy:
    """The most probable action of another policy (the mode of its distribution).

    Attributes:
        policy: what is followed; its carry is kept.
    """

    policy: NetworkPolicy

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner policy's."""
        return self.policy.initial_state(batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """All probability on the mode."""
        distribution, carry = self.policy.distribution(time_step, carry)
        return Deterministic(distribution.mode()), carry

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The mode for each row; the key is not used."""
        distribution, carry = self.policy.distribution(time_step, carry)
        return PolicyStep(distribution.mode(), carry)

    def predict(
        self,
        obs: Any,
        carry: PyTree = None,
        *,
        deterministic: bool = True,
        action_mask: Any = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, PyTree]:
        """The environment's action for a NumPy observation; with `deterministic=False` the inner policy's sample."""
        return self.policy.predict(obs, carry, deterministic=deterministic, action_mask=action_mask, key=key)


@struct
class DiscountedReturn:
    """A policy that keeps, in its carry, the discounted return so far of each environment; its actions are the inner policy's.

        R_t = r_t + γ R_{t-1},    R = 0 where an episode begins

    Agents that scale rewards by the deviation of R need it at the first row of a rollout; the carry is where what belongs
    to an environment lives, so it is sharded, saved and reset with it.
    """

    policy: NetworkPolicy
    gamma: Scalar

    def initial_state(self, batch_size: int) -> PyTree:
        """The inner carry, and zeros."""
        return self.policy.initial_state(batch_size), jnp.zeros(batch_size)

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[Distribution, PyTree]:
        """The inner distribution; the return moves on by the time step's reward."""
        inner, discounted = carry
        distribution, inner = self.policy.distribution(time_step, inner)
        return distribution, (inner, discounted_on(time_step.reward, time_step.first, discounted, gamma=self.gamma))

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """The inner policy's step; the return moves on."""
        inner, discounted = carry
        step = self.policy.action(time_step, inner, key)
        discounted = discounted_on(time_step.reward, time_step.first, discounted, gamma=self.gamma)
        return PolicyStep(step.action, (step.carry, discounted), step.info)

    def suits_numpy(self, num_envs: int) -> bool:
        """As the inner policy."""
        return type(self) is DiscountedReturn and self.policy.suits_numpy(num_envs)

    def noise(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """The inner policy's."""
        return self.policy.noise(key, num_envs)

    def in_numpy(self) -> Callable[[TimeStep, PyTree, Any], PolicyStep]:
        """The inner policy's, and the return moved on."""
        act, gamma = self.policy.in_numpy(), np.float32(self.gamma)

        def step(time_step: TimeStep, carry: PyTree, noise: Any) -> PolicyStep:
            inner, discounted = carry
            acted = act(time_step, inner, noise)
            reward = np.where(np.isfinite(time_step.reward), time_step.reward, np.float32(0.0))
            return PolicyStep(
                acted.action, (acted.carry, np.where(time_step.first, np.float32(0.0), reward + gamma * discounted))
            )

        return step

    def predict(
        self,
        obs: Any,
        carry: PyTree = None,
        *,
        deterministic: bool = True,
        action_mask: Any = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Any, PyTree]:
        """The inner policy's, with the inner carry: rewards, which the return needs, are not known here."""
        return self.policy.predict(obs, carry, deterministic=deterministic, action_mask=action_mask, key=key)


@jax.jit
def _sample(policy: Policy, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    step = policy.action(time_step, carry, key)
    return step.action, step.carry


@jax.jit
def _mode(policy: Policy, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
    distribution, carry = policy.distribution(time_step, carry)
    return distribution.mode(), carry


def predict(
    policy: Policy,
    spec: EnvSpec,
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
