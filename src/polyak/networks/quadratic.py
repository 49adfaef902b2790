"""Action values that are quadratic in a Box action, Q(s, a) = V(s) - ½ |L(s)ᵀ (a - μ(s))|², of a network of `(params, value)`.

The network is one of an actor and a critic, for a Tuple of two actions: the `loc` of the first is the best action before tanh,
its `log_scale` the logarithm of L's diagonal; the `loc` of the second is the rest of L, row by row, and is left out where the
action is one number. The value is V.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.spaces import PROBE_ROWS, Box, EnvSpec, Tuple, leaf_spaces, map_space, zeros
from polyak.core.types import Network, PyTree, Variables
from polyak.ops.distributions import broadcast_params, for_space


def quadratic_spec(spec: EnvSpec) -> EnvSpec:
    """The spec of the network: the action, and a Box for the numbers of L below the diagonal, if there are any."""
    size = sum(int(np.prod(leaf.shape)) for _, leaf in leaf_spaces(spec.action))
    below = size * (size - 1) // 2
    action = Tuple((spec.action, *([Box(-np.inf, np.inf, (below,))] if below else [])))
    return dataclasses.replace(spec, action=action, action_scaling="clip")  # Numbers without bounds are not rescaled.


def check_value(network: Network, variables: Variables, spec: EnvSpec) -> None:
    """Check that the network has a value of each observation.

    Raises:
        ValueError: it has none, or one of another shape.
    """
    obs = jax.tree.map(jnp.asarray, zeros(spec.obs, (PROBE_ROWS,)))
    _, value = jax.eval_shape(lambda v, x: network.apply(v, x)[0], variables, obs)
    if jax.tree.map(jnp.shape, value) != (PROBE_ROWS,):
        raise ValueError(f"network: the value of {PROBE_ROWS} observations must have shape {(PROBE_ROWS,)}, got {value}")


def quadratic_q(
    spec: EnvSpec, params: PyTree, value: Float[Array, " B"], action: PyTree
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Q(s, a), and the advantage Q - V, of the network's output for `quadratic_spec(spec)` and actions in [-1, 1]."""
    first = broadcast_params(spec.action, params[0])
    best = for_space(spec.action, first, squash=True).mode()
    distance = _flat(jax.tree.map(lambda a, b: a - b, action, best))
    diagonal = jnp.exp(_flat(map_space(lambda _, params: params["log_scale"], spec.action, first)))
    lower = jax.vmap(jnp.diag)(diagonal)
    if len(params) > 1:
        rows, columns = np.tril_indices(diagonal.shape[1], -1)
        lower = lower.at[:, rows, columns].set(params[1]["loc"])
    advantage = -0.5 * jnp.sum(jnp.square(jnp.einsum("bij,bi->bj", lower, distance)), axis=1)
    return value + advantage, advantage


@dataclass(frozen=True)
class BestAction:
    """Converts the network to an actor for the spec itself, whose `loc` is the best action before tanh, for policies.

    Attributes:
        network: a network for `quadratic_spec(spec)`.
    """

    network: Network

    def init(self, key: PRNGKeyArray, spec: EnvSpec) -> Variables:
        """Create variables of the wrapped network."""
        return self.network.init(key, quadratic_spec(spec))

    def apply(
        self, variables: Variables, obs: PyTree, carry: PyTree = (), *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> tuple[PyTree, PyTree, PyTree]:
        """`((action_params, value), carry, stats)` for obs leaves `[B, ...]`."""
        out: Any
        out, carry, stats = self.network.apply(variables, obs, carry, train=train, key=key)
        params, value = out
        return (params[0], value), carry, stats


def _flat(tree: PyTree) -> Float[Array, "B D"]:
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(tree)], axis=1)
