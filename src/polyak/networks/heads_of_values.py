"""Networks of K heads of action values `[B, n, K]`, for policies: upper confidence bounds, and votes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from polyak.core.spaces import MultiDiscrete, Space
from polyak.networks.q_network import ValueConverter
from polyak.ops.distributions import Distribution
from polyak.ops.distributions.combinations import combine_mask, for_values
from polyak.ops.losses import best_action


@dataclass(frozen=True)
class AllHeads(ValueConverter):
    """Converts a network of K heads to one that returns `(values, value)`: all heads' values, and the largest mean."""

    def convert(self, values: Float[Array, "B n K"]) -> tuple[Float[Array, "B n *K"], Float[Array, " B"]]:
        """The output, and the largest mean over the heads."""
        return self.output(values), jnp.max(jnp.mean(values, axis=2), axis=1)

    def output(self, values: Float[Array, "B n K"]) -> Float[Array, "B n *K"]:
        """The values themselves."""
        return values


@dataclass(frozen=True)
class UpperBound(AllHeads):
    """Converts the network to one that returns `(q, value)`, q the mean over the heads plus `scale` standard deviations."""

    scale: float = 0.0

    def output(self, values: Float[Array, "B n K"]) -> Float[Array, "B n"]:
        """The upper confidence bounds."""
        return jnp.mean(values, axis=2) + self.scale * jnp.std(values, axis=2)


def best_actions(values: Float[Array, "B n K"], mask: Bool[Array, "B n"] | None) -> Int32[Array, "B K"]:
    """The best allowed action of each head."""
    return jax.vmap(best_action, in_axes=(2, None), out_axes=1)(values, mask)


def for_votes(space: Space, values: Any, mask: Any = None, *, squash: bool = False) -> Distribution:
    """The distribution whose mode is the action that most heads choose, of equal ones the first; logits are the votes."""
    allowed = combine_mask(space.nvec, mask) if isinstance(space, MultiDiscrete) and mask is not None else mask
    votes = jax.nn.one_hot(best_actions(values, allowed), values.shape[1], dtype=jnp.float32)
    return for_values(space, jnp.sum(votes, axis=1), mask, squash=squash)
