"""Networks with a memory: an LSTM or a GRU between the dense layers and the heads, and their way through time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from polyak.core.types import Network, PyTree, RecurrentNetwork, Variables


def reset_carry(network: Network, carry: PyTree, first: Bool[Array, " B"]) -> PyTree:
    """The carry, its rows replaced by the initial ones where an episode begins; `()` for a network without memory.

    What a row remembered before, NaN included, leaves no trace.
    """
    if not isinstance(network, RecurrentNetwork):
        return carry
    initial = network.initial_carry(len(first))
    carry = initial if _is_empty(carry) else carry
    return jax.tree.map(lambda new, old: jnp.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old), initial, carry)


def unroll(
    network: RecurrentNetwork, variables: Variables, obs: PyTree, first: Bool[Array, "T B"], carry: PyTree
) -> tuple[PyTree, PyTree]:
    """The network along T time steps of B environments, `(out, carry)`; gradients flow back through time.

        carry_t = initial where first_t else carry_{t-1};    out_t, carry_t = apply(variables, obs_t, carry_t)

    Args:
        network: the same arithmetic as `apply` step by step, up to rounding.
        variables: its arrays.
        obs: leaves `[T, B, ...]`.
        first: the row begins an episode: its carry is replaced before the step.
        carry: leaves `[B, ...]`, the memory before the first row.

    Returns:
        out leaves `[T, B, ...]`, and the carry after the last row.
    """

    def step(carry: PyTree, row: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        obs, first = row
        out, carry, _ = network.apply(variables, obs, reset_carry(network, carry, first))
        return carry, out

    carry, out = jax.lax.scan(step, carry, (obs, first))
    return out, carry


def _is_empty(carry: PyTree) -> bool:
    return isinstance(carry, tuple) and not carry
