"""A weighted sum of the action values of one network with two sets of weights, for policies."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.networks.q_network import is_noisy


@dataclass(frozen=True)
class SumOfValues:
    """Returns `(q, value)` with q = Q_1 + c Q_2 of a network with the variables of `join_values`.

    Attributes:
        network: a network that returns `(q, value)`, and is not recurrent.
    """

    network: Network

    @property
    def noisy(self) -> bool:
        """True if the wrapped network draws noise."""
        return is_noisy(self.network)

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create two sets of weights, with c = 1."""
        first, second = (self.network.init(key, spec) for key in jax.random.split(key))
        return join_values(first, second, 1.0)

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((q, value), carry, stats)` for obs leaves `[B, ...]`; both sets of weights have the same noise."""
        first, second, coefficient = variables.params
        (q, _), _, _ = self.network.apply(first, obs, train=train, key=key)
        (more, _), _, _ = self.network.apply(second, obs, train=train, key=key)
        q = q + coefficient * more
        return (q, jnp.max(q, axis=-1)), carry, variables.stats


def join_values(first: Variables, second: Variables, coefficient: Scalar) -> Variables:
    """The variables of a `SumOfValues`.

    Args:
        first: of Q_1.
        second: of Q_2.
        coefficient: c.
    """
    weights: Any = (first, second, jnp.asarray(coefficient, jnp.float32))
    return Variables(weights)
