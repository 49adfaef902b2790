"""MultiDiscrete actions as one choice among all combinations of their parts, for networks with one value per combination."""

import dataclasses
import math
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray

from polyak.core.spaces import Box, Discrete, EnvSpec, MultiDiscrete, Space
from polyak.core.struct import static, struct
from polyak.ops.distributions import Distribution, for_space
from polyak.ops.distributions.discrete import Categorical
from polyak.ops.distributions.events import check_same_kind, sample_and_log_prob

T = TypeVar("T")

MAX_COMBINATIONS = 4096
"""Largest number of combinations of a MultiDiscrete space that counts as one choice: a network has an output for each."""


def as_discrete(owner: str, spec: EnvSpec) -> EnvSpec:
    """The spec with one Discrete action, the number of the combination for a MultiDiscrete action.

    Raises:
        ValueError: actions are neither Discrete nor MultiDiscrete, or have more than `MAX_COMBINATIONS` combinations.
    """
    space = spec.action
    if isinstance(space, Discrete):
        return spec
    if not isinstance(space, MultiDiscrete):
        instead = "PPO, SAC and TD3 take Boxes" if isinstance(space, Box) else "PPO takes every space"
        raise ValueError(f"{owner}: actions must be Discrete or MultiDiscrete, got {space}; {instead}")
    if math.prod(space.nvec) > MAX_COMBINATIONS:
        raise ValueError(
            f"{owner}: actions must have at most {MAX_COMBINATIONS} combinations, got {math.prod(space.nvec)} of {space}; PPO "
            "takes any number"
        )
    return dataclasses.replace(spec, action=Discrete(math.prod(space.nvec)))


def ravel_action(nvec: tuple[int, ...], action: Int[Array, "*B parts"]) -> Int32[Array, "*B"]:
    """The number of a combination, the last part counting fastest.

    >>> ravel_action((2, 3), jnp.array([[1, 0], [1, 2]]))
    Array([3, 5], dtype=int32)
    """
    strides = np.cumprod((1, *nvec[:0:-1]))[::-1].astype(np.int32)
    return jnp.sum(action.astype(jnp.int32) * strides.reshape((1,) * (action.ndim - 1) + (-1,)), axis=-1)


def unravel_action(nvec: tuple[int, ...], number: Int32[Array, "*B"]) -> Int32[Array, "*B parts"]:
    """The parts of a combination.

    >>> unravel_action((2, 3), jnp.array([3, 5]))
    Array([[1, 0],
           [1, 2]], dtype=int32)
    """
    return jnp.stack(jnp.unravel_index(number, nvec), axis=-1).astype(jnp.int32)


def combine_mask(nvec: tuple[int, ...], mask: Bool[Array, "*B sum"]) -> Bool[Array, "*B product"]:
    """True for allowed combinations, in which each part is allowed.

    >>> combine_mask((2, 2), jnp.array([True, False, True, True])).tolist()
    [True, True, False, False]
    """
    ends = np.cumsum(nvec)[:-1]
    first, *rest = jnp.split(mask, ends, axis=-1)
    for part in rest:
        first = (first[..., :, None] & part[..., None, :]).reshape(*first.shape[:-1], -1)
    return first


def combine_actions(space: Space, batch: T) -> T:
    """A batch of transitions, with MultiDiscrete actions and their masks replaced by combinations."""
    if not isinstance(space, MultiDiscrete):
        return batch
    transitions: Any = batch
    masks = {name: getattr(transitions, name) for name in ("action_mask", "next_action_mask")}
    masks = {name: combine_mask(space.nvec, mask) for name, mask in masks.items() if mask is not None}
    return dataclasses.replace(transitions, action=ravel_action(space.nvec, transitions.action), **masks)


@struct
class Combinations:
    """A Categorical over all combinations of a MultiDiscrete action.

    Attributes:
        logits: one for each combination.
        nvec: the number of choices of each part.
        mask: the allowed choices of each part, as in `MultiCategorical`.
    """

    logits: Float[Array, "*B product"]
    nvec: tuple[int, ...] = static()
    mask: Bool[Array, "*B sum"] | None = None

    def sample(self, *, seed: PRNGKeyArray) -> Int32[Array, "*B parts"]:
        """Sample allowed combinations."""
        return unravel_action(self.nvec, self.numbers.sample(seed=seed))

    def log_prob(self, value: Int[Array, "*B parts"]) -> Float[Array, "*B"]:
        """Log P(value)."""
        return self.numbers.log_prob(ravel_action(self.nvec, value))

    sample_and_log_prob = sample_and_log_prob

    def entropy(self) -> Float[Array, "*B"]:
        """-Σ P log P over the allowed combinations."""
        return self.numbers.entropy()

    def mode(self) -> Int32[Array, "*B parts"]:
        """The most probable combination."""
        return unravel_action(self.nvec, self.numbers.mode())

    def kl_divergence(self, other: "Combinations") -> Float[Array, "*B"]:
        """KL divergence of the distributions over combinations."""
        check_same_kind(self, other)
        return self.numbers.kl_divergence(other.numbers)

    @property
    def numbers(self) -> Categorical:
        """The distribution over the combinations' numbers."""
        return Categorical(self.logits, None if self.mask is None else combine_mask(self.nvec, self.mask))


def for_values(space: Space, params: Any, mask: Any = None, *, squash: bool = False) -> Distribution:
    """`for_space`, but with a choice among combinations for a MultiDiscrete action; for networks of action values."""
    if isinstance(space, MultiDiscrete):
        return Combinations(params, space.nvec, mask)
    return for_space(space, params, mask, squash=squash)
